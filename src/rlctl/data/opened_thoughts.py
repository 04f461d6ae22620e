"""Answers that begin inside the thought that the generation prompt opens.

Sampled completions of such models have `</think>` and no `<think>`, because the prompt brings it. A template that
writes contents as they are leaves the tag out, and other templates put an empty thought in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from rlctl.data.chat import PromptEncoder
from rlctl.data.prompt_records import THOUGHTS
from rlctl.data.prompt_rows import Messages
from rlctl.errors import InputError

Message = dict[str, object]
_OPENS = re.compile(r"(<[A-Za-z][\w:.-]*>|<\|START_[A-Z]+\|>|\[[A-Z]+\])\s*\Z")
_TAG = re.compile(r"\s*[<\[]|</|\[/|<\|END_")
"""A text with an opening tag in front, or a closing one."""


@dataclass(frozen=True)
class OpenedThought:
    """The end of a generation prompt that opens a thought."""

    text: str
    """The opening tag and the white space behind it."""
    tag: str
    closing: str

    @classmethod
    def of(cls, prompt: str) -> OpenedThought | None:
        """Return the tag that a prompt ends with; None: no opened tag."""
        if (match := _OPENS.search(prompt)) is None:
            return None
        tag = match[1]
        closing = tag.replace("START_", "END_") if tag.startswith("<|") else f"{tag[0]}/{tag[1:]}"
        return cls(match[0], tag, closing)

    def continuation(self, content: str) -> str | None:
        """Return the text after the opening tag if the answer repeats the tag or closes a thought that it did not open;
        None: the answer has no thought from the prompt."""
        if content.lstrip().startswith(self.tag):
            rest = content.lstrip().removeprefix(self.tag)
            return rest if self.text == self.tag else rest.lstrip()
        tags = re.findall(f"{re.escape(self.tag)}|{re.escape(self.closing)}", content)
        return content if min(accumulate(1 if tag == self.tag else -1 for tag in tags), default=0) < 0 else None


def in_opened_thoughts(
    encoder: PromptEncoder,
    prompt: Messages,
    answer: Messages,
    where: str,
    *,
    all_begin: bool = False,
    strict: bool = True,
) -> Messages:
    """Return the messages of a completion so that the chat template writes its answers behind the thought that their
    prompts open, where they continue it. `all_begin`: answers without tags do, too; `strict`: raises InputError where
    the template writes them elsewhere."""
    written = list(prompt)
    for message in answer:
        tagged = message["role"] == "assistant" and (all_begin or _TAG.search(message["content"]))
        if tagged and not any(message.get(name) for name in THOUGHTS):
            message = _begun(encoder, written, message, where, all_begin=all_begin, strict=strict)
        written.append(message)
    return written[len(prompt) :]


def begins_in_thought(encoder: PromptEncoder, prompt: Messages, answer: Messages, where: str) -> bool:
    """Return whether the first message of a completion continues the thought that the prompt opens."""
    first = answer[0]
    if not (_TAG.search(first["content"]) or any(first.get(name) for name in THOUGHTS)):
        return False
    opened = OpenedThought.of(encoder.render(prompt, where))
    thinks = any(first.get(name) for name in THOUGHTS)
    return opened is not None and (thinks or opened.continuation(first["content"]) is not None)


def _begun(
    encoder: PromptEncoder, before: Messages, message: Message, where: str, *, all_begin: bool, strict: bool
) -> Message:
    prompt = encoder.render(before, where)
    if (opened := OpenedThought.of(prompt)) is None:
        return message
    content = str(message["content"])
    rest = opened.continuation(content)
    if rest is None and not all_begin:
        return message
    opening = encoder.hidden(content if rest is None else rest)

    def behind(form: Message) -> str | None:
        whole = encoder.render([*before, form], where, answered=True)
        return whole.removeprefix(prompt) if whole.startswith(prompt) else None

    thought = behind(message)
    if thought is not None and (rest is None or squeezed(thought).startswith(squeezed(opening))):
        return message
    fitting = [*_fitting(behind, opened, message, opening)]
    if not fitting and strict and rest is not None:
        raise InputError(
            f"{where}: message {len(before) + 1} continues the thought that the prompt opens with {opened.tag}, and "
            "the chat template does not write it there.",
            "Give another with --chat-template, or leave the row out.",
        )
    return min(fitting, key=lambda fit: fit[0])[1] if fitting else message


def _fitting(
    behind: Callable[[Message], str | None], opened: OpenedThought, message: Message, opening: str
) -> Iterator[tuple[bool, Message]]:
    """Yield forms of a message that the template writes behind its prompt, and whether with other white space."""
    thought, closing, answer = opening.partition(opened.closing)
    forms = [{"content": opened.text + opening}]
    for name in THOUGHTS if closing else ():
        forms += [
            {"content": answer, name: thought},
            {"content": answer.lstrip("\n"), name: thought.strip("\n")},
        ]
    for form in forms:
        candidate = {**message, **form}
        if (text := behind(candidate)) is not None and squeezed(text).startswith(squeezed(opening)):
            yield not text.startswith(opening), candidate


def squeezed(text: str) -> str:
    return "".join(text.split())
