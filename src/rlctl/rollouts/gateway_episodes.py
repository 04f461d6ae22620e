"""Episodes whose program asks the model through the gateway (`environments/gateway/`).

Each request continues the longest known conversation with its sampled tokens, or begins a branch. An episode is
therefore a tree of turns. It trains as one sequence per branch; each sampled token has a loss in one of them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from rlctl.backends.messages import SampleResult
from rlctl.data.chat import EncodedPrompt
from rlctl.data.image_rows import IN_TEXT
from rlctl.data.image_sources import MARK
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import LENGTH, MediaPart, ModelRequest, Turn
from rlctl.data.turns import TurnEncoder
from rlctl.environments.environment_plan import EnvironmentPlan
from rlctl.environments.gateway.exchange import (
    UNENFORCED,
    Answer,
    Question,
    RefusedError,
    ToolCall,
    episode_over,
    too_long,
)
from rlctl.environments.gateway.matching import Answers, conversation_digests
from rlctl.environments.interface import MODEL, Ask, Message
from rlctl.environments.running_episode import Reply, checked_ask, readable_calls
from rlctl.environments.tools import without_call
from rlctl.errors import InputError
from rlctl.rollouts.episodes import Episode
from rlctl.rollouts.turn_faults import BITS, THOUGHT, JudgedTurn, parts_of
from rlctl.settings.rewards import EnvironmentConfig

ENDS_EPISODE = ("abort", "timeout")
"""Stop reasons of a turn that end the episode."""


class Play(Protocol):
    """What an episode's turns need of its environment and limits (`EnvironmentEpisodes`)."""

    @property
    def limits(self) -> EnvironmentConfig: ...
    @property
    def max_length(self) -> int: ...
    @property
    def plan(self) -> EnvironmentPlan: ...
    @property
    def turns(self) -> TurnEncoder: ...

    def in_known_roles(self, messages: Sequence[Message]) -> list[Message]: ...

    def beginning(
        self, prompt: Sequence[Message], reply: Reply, row: PromptRow
    ) -> tuple[EncodedPrompt, Sequence[Message]]: ...

    def judged(self, text: str, read: Sequence[int], *, called: bool, broken: bool) -> JudgedTurn: ...


@dataclass(frozen=True, eq=False)
class Prompt:
    """What the model reads before a turn."""

    parent: SampledTurn | None
    """The turn that it continues; None: it begins a conversation."""
    tokens: tuple[int, ...]
    """Tokens after the parent's, or all of them."""
    media: tuple[MediaPart, ...]
    """Media among `tokens`, with positions from the first of them."""
    read: tuple[Turn, ...]

    @cached_property
    def length(self) -> int:
        """The number of tokens in `context`."""
        return len(self.tokens) + (self.parent.length if self.parent else 0)

    def context(self) -> tuple[list[int], list[MediaPart]]:
        """Return all tokens before the turn, and their media."""
        tokens, media = list[int](), list[MediaPart]()
        for turn in reversed([*self.parent.ancestry()] if self.parent else []):
            media += shifted(turn.prompt.media, len(tokens))
            tokens += turn.prompt.tokens
            tokens += turn.result.tokens_R.tolist()
        media += shifted(self.media, len(tokens))
        return [*tokens, *self.tokens], media


@dataclass(frozen=True, eq=False)
class SampledTurn:
    """A turn of the model. Its parents are the turns before it in the conversation."""

    prompt: Prompt
    result: SampleResult
    question: Question
    judged: JudgedTurn
    began_s: float = 0.0
    ended_s: float = 0.0
    """Seconds since the program began."""
    calls: tuple[ToolCall, ...] = ()

    @property
    def length(self) -> int:
        """The number of tokens in `context`."""
        return self.prompt.length + len(self.result.tokens_R)

    def context(self) -> tuple[list[int], list[MediaPart]]:
        """Return the tokens up to its last, and their media."""
        tokens, media = self.prompt.context()
        return tokens + self.result.tokens_R.tolist(), media

    def ancestry(self) -> Iterable[SampledTurn]:
        """Yield the turn and its parents."""
        turn: SampledTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.prompt.parent


class ModelTurns:
    """Answers the requests of one episode: a `ModelEpisode`. `close` writes its turns to the episode."""

    def __init__(self, play: Play, episode: Episode) -> None:
        self._play, self._episode = play, episode
        self._turns: list[SampledTurn] = []
        self._known = Answers[SampledTurn]()
        self._requests: dict[bytes, asyncio.Task[Sequence[Answer]]] = {}
        self._questions: list[Question] = []
        """What was asked, without retries, including turns in progress."""
        self._calls = 0
        """Tool calls of the answers."""
        self._examples: int | None = None
        """Answers in the first request, which nobody has sampled; None: there was no request."""
        self._began = self._idle_since = time.monotonic()
        self.refusal: str | None = None
        """The limit that refused the last request."""
        self._counts = dict.fromkeys(("requests", "retries", "matched_tokens", "rewritten_answers", "token_counts"), 0)

    # A ModelEpisode

    def asked(self, question: Question) -> asyncio.Task[Sequence[Answer]]:
        digests = conversation_digests(question.messages, question.tools)
        key = repr((digests[-1], replace(question, messages=(), tools=()))).encode()
        if (task := self._requests.get(key)) is not None and not _failed(task):
            self._counts["retries"] += 1
            return task
        prompt, continued = self._prompt(question, digests)
        if continued is None and not question.calls:  # else the tools stand in the tokens that it continues
            digests = conversation_digests(question.messages, ())
            prompt, continued = self._prompt(replace(question, tools=()), digests)
        self._require_room(question, prompt)
        self._counts["requests"] += 1
        self._episode.count({f"{UNENFORCED}{name}": 1.0 for name in question.unenforced})
        if continued is not None:
            self._counts["matched_tokens"] += sum(len(turn.result.tokens_R) for turn in continued.ancestry())
        kept_answers = sum(turn.prompt.parent is not None for turn in continued.ancestry()) + 1 if continued else 0
        said = sum(message["role"] == "assistant" for message in question.messages)
        if self._examples is None:
            self._examples = said
        self._counts["rewritten_answers"] += max(0, said - self._examples - kept_answers)
        first = sum(question.samples for question in self._questions)
        self._questions.append(question)
        task = asyncio.ensure_future(self._answered(question, prompt, digests[-1], first))
        task.add_done_callback(self._became_idle)
        self._requests[key] = task
        return task

    def tokens_of(self, question: Question) -> int:
        self._counts["token_counts"] += 1
        digests = conversation_digests(question.messages, question.tools)
        return self._prompt(question, digests)[0].length

    # For the player

    def idle_s(self) -> float:
        """Return the seconds since the last request in progress."""
        waits = any(not task.done() for task in self._requests.values())
        return 0.0 if waits else time.monotonic() - self._idle_since

    async def close(self) -> None:
        """Drop requests in progress, and write the turns to the episode."""
        tasks = list(self._requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.write()

    def write(self) -> None:
        """Write the turns to the episode: a context per branch, its beginning without a loss. Auxiliary turns are part
        of its transcript alone."""
        trained = [turn for turn in self._turns if not self._auxiliary(turn.question)] or self._turns
        contexts = branches_of(trained)
        for number, context in enumerate(contexts):
            for place, turn in enumerate(context):
                self._write(turn, begins=place == 0, anew=number > 0 and place == 0)
        trained_ids = set(map(id, trained))
        dropped = [turn for turn in self._turns if id(turn) not in trained_ids]
        for turn in dropped:
            said = (*turn.prompt.read, self._said(turn))
            reason = self._auxiliary(turn.question)
            self._episode.transcript += [replace(message, auxiliary=reason) for message in said]
        self._episode.count({
            **{f"gateway/{name}": float(number) for name, number in self._counts.items()},
            "gateway/branches": float(max(0, len(contexts) - 1)),
            "gateway/branched_tokens": float(sum(context[0].prompt.length for context in contexts[1:])),
            "gateway/auxiliary": float(len(dropped)),
            "gateway/dropped_tokens": float(sum(len(turn.result.tokens_R) for turn in dropped)),
        })  # fmt: skip

    def _write(self, turn: SampledTurn, *, begins: bool, anew: bool) -> None:
        episode, prompt = self._episode, turn.prompt
        tokens, media = prompt.context() if begins else (list(prompt.tokens), list(prompt.media))
        episode.transcript += prompt.read
        episode.read(tokens, media, anew=anew)
        answer = turn.result.tokens_R.tolist()
        episode.transcript.append(self._said(turn))
        if turn.judged.faults:
            episode.faults[len(episode.answers)] = sum(BITS[name] for name in turn.judged.faults)
            episode.count(dict.fromkeys(turn.judged.faults, 1.0))
        episode.said.append(turn.judged)
        episode.answers.append((len(episode.tokens), turn.result))
        episode.tokens += answer

    def _said(self, turn: SampledTurn) -> Turn:
        numbers = {id(known): number for number, known in enumerate(self._turns, start=1)}
        request = ModelRequest(
            numbers[id(turn)],
            numbers[id(turn.prompt.parent)] if turn.prompt.parent else None,
            round(turn.began_s, 3),
            round(turn.ended_s, 3),
            turn.prompt.length,
            [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in turn.calls],
        )
        return Turn("assistant", turn.result.text, len(turn.result.tokens_R), 0.0, request)

    # Prompts

    def _prompt(self, question: Question, digests: Sequence[bytes]) -> tuple[Prompt, SampledTurn | None]:
        """Return the prompt of a question, and the turn that it continues."""
        try:
            return self._matched(question, digests)
        except (InputError, TypeError, ValueError) as error:
            raise RefusedError(f"The request cannot be read: {error}") from error

    def _matched(self, question: Question, digests: Sequence[bytes]) -> tuple[Prompt, SampledTurn | None]:
        where, turns = self._episode.row.where, self._play.turns
        if question.text is not None:
            question = replace(question, tokens=turns.encoder.encode_text(question.text, where), text=None)
        ask = checked_ask(Ask(question.messages, tokens=question.tokens, tools=question.tools))
        count, parent = self._known.continued(question.messages, digests)
        if parent is not None:
            messages = self._play.in_known_roles(ask.messages[count:])
            try:
                last = int(parent.result.tokens_R[-1]) if len(parent.result.tokens_R) else None
                given = turns.encoder.with_images(turns.between(last, messages), messages, where)
            except InputError:  # the template cannot write these messages behind an answer: all are written anew
                pass
            else:
                read = turns_of(messages, len(given.tokens))
                return Prompt(parent, tuple(given.tokens), tuple(given.media), read), parent
        if question.tokens:
            ask = replace(ask, tokens=list(question.tokens))
        prompt, messages = self._play.beginning((), Reply(ask=ask), self._episode.row)
        if question.tokens:  # the request needs the images of its placeholder tokens
            prompt = replace(prompt, media=self._images_in(prompt.tokens))
            turns.encoder.require_no_image(prompt.text_tokens, where)
        tokens, parent = list(prompt.tokens), self._longest_in(prompt.tokens)
        begin = parent.length if parent else 0
        media = shifted((part for part in prompt.media if part.start >= begin), -begin)
        read = turns_of(messages, len(tokens) - begin)
        return Prompt(parent, tuple(tokens[begin:]), tuple(media), read), parent

    def _longest_in(self, tokens: Sequence[int]) -> SampledTurn | None:
        """Return the turn with most tokens that a prompt begins with."""
        longest = sorted(self._turns, key=lambda turn: turn.length, reverse=True)
        shorter = (turn for turn in longest if turn.length < len(tokens))
        return next((turn for turn in shorter if turn.context()[0] == list(tokens[: turn.length])), None)

    def _images_in(self, tokens: Sequence[int]) -> tuple[MediaPart, ...]:
        """Return the media of the turn that shares most of its context with `tokens`, within that part."""
        best: tuple[MediaPart, ...] = ()
        for turn in self._turns:
            context, media = turn.context()
            pairs = enumerate(zip(context, tokens, strict=False))
            alike = next((place for place, pair in pairs if len({*pair}) > 1), min(len(context), len(tokens)))
            parts = tuple(part for part in media if part.start + part.tokens <= alike)
            best = max(best, parts, key=len)
        return best

    # Limits

    def _auxiliary(self, question: Question) -> str:
        """Return why a request is no part of the task; empty: it is. It is a probe, a title where others have tools, or
        for another model where others are for this one."""
        if question.probes:
            return "probe"
        if self._play.limits.train_auxiliary:
            return ""
        if question.model != MODEL and any(asked.model == MODEL for asked in self._questions):
            return f"model {question.model}"
        return "title" if question.is_title and any(asked.tools for asked in self._questions) else ""

    def _require_room(self, question: Question, prompt: Prompt) -> None:
        limits, episode = self._play.limits, self._episode
        self.refusal = None
        aside = bool(self._auxiliary(question))
        begun = sum(asked.samples for asked in self._questions if bool(self._auxiliary(asked)) == aside)
        if episode.stop_reason is not None:
            self.refusal = episode.stop_reason
        elif begun + question.samples > limits.turns:
            self.refusal = "turns"
        elif limits.sampled_tokens is not None and self._sampled >= limits.sampled_tokens:
            self.refusal = "sampled_tokens"
        elif limits.tool_calls is not None and self._calls >= limits.tool_calls:
            self.refusal = "tool_calls"
        elif (length := prompt.length) >= self._play.max_length:
            self.refusal = "context"
            raise too_long(length, self._play.max_length)
        if self.refusal is not None:
            raise episode_over()

    @property
    def _sampled(self) -> int:
        return sum(len(turn.result.tokens_R) for turn in self._turns)

    # Sampling

    async def _answered(self, question: Question, prompt: Prompt, digest: bytes, first: int) -> list[Answer]:
        numbers, began_s = range(first, first + question.samples), time.monotonic() - self._began
        context, media = prompt.context()
        results = await asyncio.gather(*(self._sample(question, context, media, number) for number in numbers))
        answers = []
        for result in results:
            if result.stop_reason in ENDS_EPISODE:
                self._episode.stop_reason = self.refusal = result.stop_reason
                raise episode_over()
            answer, judged = self._judged(question, context, result)
            ended_s = time.monotonic() - self._began
            turn = SampledTurn(prompt, result, question, judged, began_s, ended_s, answer.calls)
            self._turns.append(turn)
            if question.tokens is None and question.text is None:
                self._known.add(digest, answer.message(), turn)
            answers.append(answer)
        return answers

    async def _sample(
        self, question: Question, tokens: Sequence[int], media: Sequence[MediaPart], number: int
    ) -> SampleResult:
        usual = self._episode.sampling
        limits = [usual.max_new_tokens, self._play.max_length - len(tokens), question.max_tokens]
        if (most := self._play.limits.sampled_tokens) is not None:
            limits.append(most - self._sampled)
        ends = self._play.turns.encoder.stop_token_ids
        return await self._episode.sample(
            number,
            tokens,
            media,
            stop=tuple(dict.fromkeys((*usual.stop, *question.stop))),
            stop_token_ids=tuple(dict.fromkeys((*usual.stop_token_ids, *ends, *question.stop_token_ids))),
            turn_ends=(*usual.turn_ends, *ends),
            max_new_tokens=min(limit for limit in limits if limit is not None),
        )

    def _judged(self, question: Question, context: Sequence[int], result: SampleResult) -> tuple[Answer, JudgedTurn]:
        cut, form = result.stop_reason == LENGTH, self._play.plan.form
        asks = question.tools and question.calls
        readable = readable_calls(result.text, form, question.tools, cut=cut) if asks else []
        calls = []
        for call in readable:
            calls.append(ToolCall(f"call{self._calls:05}", call.name, json.dumps(call.arguments)))
            self._calls += 1
        text = without_call(result.text, form).strip() if calls else result.text
        judged = self._play.judged(result.text, context, called=bool(calls), broken=False)
        thought = ""
        if question.messages and self._play.limits.thoughts == "apart":
            thought, answer = parts_of(text, opened=judged.opened)
            text = answer if thought or THOUGHT in text else text
        ends = [(at, stop) for stop in question.stop if (at := text.find(stop)) >= 0]
        end, stop = min(ends, default=(None, None))
        tokens, logprobs = result.tokens_R.tolist(), result.logprobs_R.tolist()
        return Answer(text[:end], tuple(calls), context, tokens, logprobs, cut, stop, thought), judged

    def _became_idle(self, task: asyncio.Task[Any]) -> None:
        self._idle_since = time.monotonic()
        _failed(task)  # so that asyncio does not log an error that only a lost client would have read


def branches_of(turns: Sequence[SampledTurn]) -> list[list[SampledTurn]]:
    """Return paths that hold each turn once. A turn goes behind its parent if that ends a path, else it begins one."""
    paths: list[list[SampledTurn]] = []
    for turn in turns:
        path = next((path for path in paths if path[-1] is turn.prompt.parent), None)
        if path is None:
            paths.append(path := [])
        path.append(turn)
    return paths


def turns_of(messages: Sequence[Message], tokens: int) -> tuple[Turn, ...]:
    """Return messages for the transcript; the first has all `tokens`."""
    return tuple(
        Turn(message["role"], message["content"].replace(MARK, IN_TEXT), 0 if i else tokens, None)
        for i, message in enumerate(messages)
    )


def shifted(media: Iterable[MediaPart], tokens: int) -> list[MediaPart]:
    return [replace(part, start=part.start + tokens) for part in media]


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class FirstQuestion:
    """A `ModelEpisode` of a trial before a run: keeps the first question and answers none."""

    def __init__(self) -> None:
        self.question: asyncio.Future[Question] = asyncio.get_running_loop().create_future()

    def asked(self, question: Question) -> asyncio.Future[Sequence[Answer]]:
        if not self.question.done() and not question.probes:
            self.question.set_result(question)
        return asyncio.get_running_loop().create_future()

    def tokens_of(self, question: Question) -> int:
        return 1
