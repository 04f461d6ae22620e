"""Token ids between two turns, from the chat template.

Sampled tokens are never re-encoded. After a turn's end token comes the difference between two renderings of an example
history, with and without the new messages. `TurnEncoder.build` checks that this difference exists, is the same for any
history, and contains the messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from os.path import commonprefix
from typing import Any, Literal

from rlctl.data.chat import PLAIN_STOP, PromptEncoder
from rlctl.data.image_sources import MARK
from rlctl.errors import InputError

Message = dict[str, Any]
ANSWER = "rlctl-answer-ends"
HISTORIES = ("Hello.", "What is 2 + 2?\nSay it in one word.")
"""User messages in the made-up histories. The result must not depend on them."""
THOUGHT = "</think>"
"""The end of a thought, which delimits text that a template may remove."""
ToolRole = Literal["tool", "user"]


@dataclass(frozen=True)
class TurnEncoder:
    """Renders text between a run's turns. Create it with `build`."""

    encoder: PromptEncoder
    raw: bool = False
    """The texts of messages are appended as they are, without a template."""
    tool_role: ToolRole = "user"
    """The role of tool results."""
    note: str | None = None
    """Note about the template for the user, if there is one."""
    closes: bool = False
    """Whether the template ends an answer with a token; otherwise the next message ends it."""
    drops: tuple[str, ...] = ()
    """Roles whose messages remove earlier thoughts (`environment.thinking=template`)."""
    opening: tuple[int, ...] = ()
    """Ids that the template writes only at the start of the current answer, such as `<think>`."""
    _cache: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)

    @classmethod
    def build(
        cls, encoder: PromptEncoder, *, raw: bool = False, tools: bool = False, drops_thoughts: bool = False
    ) -> TurnEncoder:
        """Return the encoder of a run's turns, with `tools`; `drops_thoughts` as in the template. Raises InputError if
        no message can follow an answer."""
        if raw:
            return cls(encoder, raw)
        made = cls(encoder, closes=encoder.closing_token() is not None)
        if reason := made._trouble("user"):
            raise InputError(
                f"The chat template cannot continue after an answer: {reason}.",
                "Give another with --chat-template, or append texts as they are with --set environment.append=raw.",
            )
        notes = []
        if tools and (reason := made._trouble("tool")):
            notes.append(f"The results of tools go to the model as messages of the user: {reason}.")
        elif tools:  # the token that ends a turn with calls also ends it if the model's configuration omits it
            ends = {*encoder.stop_token_ids, *made._cached([{"role": "tool", "content": "?"}])[:1]}
            made = replace(made, tool_role="tool", encoder=encoder.with_ends(ends))
        if drops_thoughts:
            drops = tuple(role for role in sorted({"user", made.tool_role}) if made._drops_thoughts(role))
            made = replace(made, drops=drops, opening=made._opening())
            if not drops:
                notes.append(f"The chat template keeps thoughts (what ends with {THOUGHT}), and so does the context.")
        return replace(made, note=" ".join(notes) or None)

    def between(self, last: int | None, messages: Sequence[Message]) -> list[int]:
        """Return ids from a turn's last token `last` to the next turn; a cut turn first gets its end token."""
        ids = self._cached(messages)
        # A call may have end tokens before the end of the turn.
        ends = list(takewhile(self.encoder.special.__contains__, ids))
        if last in ends:
            return list(ids[ends.index(last) + 1 :])
        return list(ids[1:] if last in self.encoder.stop_token_ids and self.closes else ids)

    def without_thoughts(self, prompt: list[int], turns: Sequence[tuple[list[int], list[int]]]) -> list[int]:
        """Return a conversation's ids without thoughts of earlier answers, as the template renders it. `turns`: ids of
        each answer and of what follows."""
        context = self._begun(prompt)
        for number, (answer, given_thought) in enumerate(turns, 1):
            context += self._without_thought(answer)
            context += given_thought if number == len(turns) else self._begun(given_thought)
        return context

    def _begun(self, ids: list[int]) -> list[int]:
        opens = self.opening and tuple(ids[-len(self.opening) :]) == self.opening
        return ids[: -len(self.opening)] if opens else list(ids)

    def _without_thought(self, answer: list[int]) -> list[int]:
        decode = self.encoder.tokenizer.decode
        if not (thoughts := str(decode(answer)).count(THOUGHT)):
            return answer
        lengths = range(1, len(answer) + 1)
        end = lengths[bisect_left(lengths, thoughts, key=lambda length: str(decode(answer[:length])).count(THOUGHT))]
        while end < len(answer) and str(decode(answer[end : end + 1])).isspace():
            end += 1
        return answer[end:]

    def text_of(self, tokens: Sequence[int]) -> str:
        kept = tokens[:-1] if tokens and tokens[-1] in self.encoder.stop_token_ids else tokens
        return str(self.encoder.tokenizer.decode(list(kept), skip_special_tokens=False))

    def require_roles(self, messages: Sequence[Message], tried: Collection[str]) -> None:
        """Raise InputError for an untested role whose messages the template does not write."""
        for role in {message["role"] for message in messages}.difference(tried) if not self.raw else ():
            if problem := self._trouble(role):
                raise InputError(
                    f"The chat template cannot write a message of the role {role!r} behind an answer: {problem}."
                )

    def _cached(self, messages: Sequence[Message]) -> tuple[int, ...]:
        key = repr(messages)
        if key not in self._cache:
            self.require_roles(messages, ("user", self.tool_role))
            hidden = self.encoder.hidden(messages)
            text = self._raw(hidden) if self.raw else self._delta(HISTORIES[0], hidden)
            ids = tuple(self.encoder.encode_text(text, "a message of the environment", begins=False, continues=True))
            self.encoder.require_known(ids, "a message of the environment")
            if len(self._cache) > 4096:
                self._cache.clear()
            self._cache[key] = ids
        return self._cache[key]

    def _raw(self, messages: Sequence[Message]) -> str:
        text = "".join(message["content"] for message in messages)
        return text.replace(MARK, self.encoder.image_text) if MARK in text else text

    def _delta(self, history: str, messages: Sequence[Message]) -> str:
        """Return the template's text from an answer's end token on. Raises InputError if it cannot render `messages`
        there."""
        calls = any(message["role"] == "tool" for message in messages)
        question = [{"role": "user", "content": history}]
        for answer in (*([_calling(messages)] if calls else []), {"role": "assistant", "content": ANSWER}):
            try:
                _, marker, tail = self.encoder.render([*question, answer, *_named(messages)]).rpartition(ANSWER)
                over = self.encoder.render([*question, answer], answered=True).rpartition(ANSWER)[2] if calls else ""
            except InputError:
                if answer["content"] == ANSWER:
                    raise
                continue
            if self.encoder.template is None:  # the model has written the beginning of the next question itself
                return tail.removeprefix(PLAIN_STOP) if marker else ""
            shared = commonprefix([tail, over])  # noqa: RUF071 - of texts, not of paths
            ends = [at for token in self.encoder.special_texts if (at := shared.rfind(token)) >= 0]
            begins = [at for token in self.encoder.special_texts if (at := tail.find(token)) >= 0]
            if marker and begins:  # a call may have end tokens before the end of the turn
                return tail[max(ends, default=min(begins)) :]
        raise InputError("The chat template has no end-of-turn token.")

    def _drops_thoughts(self, role: str) -> bool:
        sentence = [{"role": role, "content": "rlctl-message-says"}]
        answer = _calling(sentence) if role == "tool" else {"role": "assistant"}
        answer |= {"content": f"<think>\nrlctl-thought\n{THOUGHT}\n\n{ANSWER}"}
        try:
            written = self.encoder.render([{"role": "user", "content": HISTORIES[0]}, answer, *_named(sentence)])
        except InputError:
            return False
        return ANSWER in written and "rlctl-thought" not in written

    def _opening(self) -> tuple[int, ...]:
        user = {"role": "user", "content": HISTORIES[0]}
        begun = self.encoder.encode_messages([user], "a message")
        answered = self.encoder.render([user, {"role": "assistant", "content": ANSWER}, user])
        before = self.encoder.tokenizer.encode(answered.rpartition(ANSWER)[0], add_special_tokens=False)
        return tuple(begun[len(before) :]) if list(begun[: len(before)]) == before else ()

    def _trouble(self, role: str) -> str | None:
        """Return why messages of a role cannot be appended; None: they can."""
        sentence = "rlctl-message-says"
        try:
            deltas = {self._delta(history, [{"role": role, "content": sentence}]) for history in HISTORIES}
        except InputError as error:
            return error.message.rstrip(".")
        if len(deltas) > 1:
            return "its text there depends on earlier messages"
        if sentence not in deltas.pop():
            return f"it leaves out what a message of the role {role} says"
        return None


def _calling(messages: Sequence[Message]) -> Message:
    arguments = {"mark": ANSWER}
    calls = [
        {
            "id": message["tool_call_id"],
            "type": "function",
            "function": {"name": message["name"], "arguments": arguments},
        }
        for message in _named(messages)
        if message["role"] == "tool"
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _named(messages: Sequence[Message]) -> list[Message]:
    return [
        {"name": "tool", "tool_call_id": f"call{number:05}", **message} if message["role"] == "tool" else message
        for number, message in enumerate(messages)
    ]


def with_tools(
    encoder: PromptEncoder, schemas: Sequence[dict[str, Any]], instructions: str
) -> tuple[PromptEncoder, bool]:
    """Return the prompt encoder with tools, and whether the template shows them; otherwise `instructions` end each
    system prompt."""
    if not schemas:
        return encoder, True
    telling = encoder.telling_tools(schemas)
    user: list[Message] = [{"role": "user", "content": "?"}]
    name = schemas[0]["function"]["name"]
    if encoder.template is not None and name in telling.render(user) and name not in encoder.render(user):
        return telling, True
    return replace(encoder, instructions=instructions), False
