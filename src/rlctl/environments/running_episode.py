"""One running episode, in its own process: calls the user's class and its tools, whatever form their results have."""

from __future__ import annotations

import inspect
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlctl.data.image_rows import shown_prompt
from rlctl.data.image_sources import IMAGES, image_source
from rlctl.data.prompt_records import checked_messages
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import REWARD_PART
from rlctl.environments.environment_plan import LoadedEnvironment
from rlctl.environments.interface import Ask, Message, Step, is_cut
from rlctl.environments.tool_results import Content, content_of, joined
from rlctl.environments.tools import Call, read_calls, refusal, typed
from rlctl.errors import InputError, first_line
from rlctl.isolation.user_function import LARGEST_REWARD


@dataclass(frozen=True)
class Reply(Step):
    """The answer of an environment's process to one message: a `Step` as plain data, with what became of calls."""

    messages: tuple[Message, ...] = ()
    stop: tuple[str, ...] = ()
    calls: int = 0
    """Calls of tools that were made."""
    broken: int = 0
    """Calls that could not be read or were refused."""


class RunningEpisode:
    """One episode. Raises the errors of the user's code unchanged."""

    def __init__(self, loaded: LoadedEnvironment) -> None:
        self._loaded = loaded
        self._schemas = {name: one["function"] for name, one in loaded.plan.schemas.items()}
        self._asked: Ask | None = None
        self._made: Any = None

    def _begin(self) -> None:
        if self._made is not None:
            return
        self._made = self._loaded.kind(**self._loaded.plan.params)
        self._tools = {name: getattr(self._made, name) for name in self._loaded.methods} | self._loaded.functions
        self._stop = _stops(getattr(self._made, "stop", ()))

    async def reset(self, row: PromptRow, seed: int) -> Reply:
        """Begin, and return the messages after the row's prompt."""
        random.seed(seed)
        self._begin()
        columns = {**row.fields, "prompt": shown_prompt(row.prompt), "answer": row.answer}
        if row.images:
            columns[IMAGES] = [image.rgb() for image in row.images]
        parameters = inspect.signature(self._made.reset).parameters
        if {"seed", "options"} <= parameters.keys():  # as Gymnasium calls it
            found = await _called(self._made.reset, seed=seed, options=columns)
        elif any(one.kind is one.VAR_KEYWORD for one in parameters.values()):  # as TRL calls it
            found = await _called(self._made.reset, **columns)
        else:
            found = await _called(self._made.reset, columns, *([seed] if len(parameters) > 1 else []))
        return self._reply(_begun(found))

    async def step(self, message: Message) -> Reply:
        text: str = message["content"]
        cut = is_cut(message)
        written = read_calls(text, self._loaded.plan.form, cut=cut) if self._tools else []
        if calls := [typed(call, self._schemas) for call in written]:
            answers, broken = list[Content](), 0
            for call in calls:
                if why := refusal(call, self._schemas):
                    broken += 1
                    answers.append(f"Error: {why}.")
                    continue
                try:
                    answers.append(content_of(await _called(self._tools[call.name], **call.arguments)))
                except Exception as error:  # noqa: BLE001 - the model may read what it has done wrong
                    answers.append(f"Error: {type(error).__name__}: {first_line(error)}")
            return self._told(answers, len(calls) - broken, broken, [call.name or "tool" for call in calls])
        if not self._loaded.steps:
            return Reply(done=True)
        if next(iter(inspect.signature(self._made.step).parameters), "") != "message":
            return self._reply(_step(await _called(self._made.step, text)))
        if self._asked is not None and self._asked.tools:
            calls = [
                {
                    "id": f"call{number:05}",
                    "type": "function",
                    "function": {"name": one.name, "arguments": json.dumps(one.arguments)},
                }
                for number, one in enumerate(readable_calls(text, self._loaded.plan.form, self._asked.tools, cut=cut))
            ]
            message = {**message, "tool_calls": calls}
        return self._reply(_step(await _called(self._made.step, message)))

    async def schemas(self) -> tuple[dict[str, dict[str, Any]], str]:
        """Return the JSON schema of each tool by its name, and a line that a run shows about the environment."""
        return self._loaded.schemas(), self._loaded.note

    async def close(self) -> Reply:
        reward = 0.0
        if hasattr(self._made, "get_reward"):
            reward = _number(await _called(self._made.get_reward), "what get_reward returned")
        parts = {f"{REWARD_PART}{name}": part for name, part in getattr(self._made, "reward_parts", {}).items()}
        if hasattr(self._made, "close"):
            await _called(self._made.close)
        return Reply(reward=reward, done=True, metrics=_numbers(parts))

    def _told(self, answers: Sequence[Content], made: int, broken: int, names: Sequence[str] = ()) -> Reply:
        role = self._loaded.plan.tool_role
        if role == "user":  # as one message: templates may want questions and answers to alternate
            answers, names = [joined(answers)], ()
        messages = [{"role": role, "content": content} for content in answers]
        named = [{**one, "name": name} for one, name in zip(messages, names, strict=True)] if names else messages
        return Reply(_with_images(named), stop=self._stop, calls=made, broken=broken)

    def _reply(self, step: Step) -> Reply:
        stop = self._stop if step.stop is None else _stops(step.stop)
        self._asked = step.ask and _checked(step.ask)
        reward = 0.0 if step.reward is None else _number(step.reward, "the reward")  # SkyRL-gym's steps without one
        numbers = _numbers(step.metrics)
        return Reply(_messages(step.messages), reward, bool(step.done), stop, numbers, self._asked)


def readable_calls(text: str, form: str, tools: Sequence[Mapping[str, Any]], *, cut: bool = False) -> list[Call]:
    """Return the calls of some tools in a text; none where one of them cannot be read, as a server of models. `cut`: a
    limit has ended the text."""
    calls = read_calls(text, form, cut=cut)
    schemas = {one["function"]["name"]: one["function"] for one in tools}
    return [] if any(one.broken for one in calls) else [typed(one, schemas) for one in calls]


async def _called(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    found = function(*arguments, **named)
    return await found if inspect.isawaitable(found) else found


OBSERVED = ("observations", "observation", "obs")
"""Further names of the messages that an environment returns: SkyRL-gym's, Gymnasium's and its short form."""
ENDED = ("terminated", "truncated")
UNREAD = ("info", "metadata")


def _step(found: Any, method: str = "step") -> Step:
    """Convert a method's result to a Step: a Step, a mapping with its fields, Gymnasium's tuple of five or four, or
    messages. Raises TypeError otherwise."""
    if isinstance(found, Step):
        return found
    if isinstance(found, tuple) and len(found) in (4, 5) and not _is_message(found[-1]):
        observation, reward, *ended, _ = found
        return Step(observation, reward, any(map(bool, ended)))
    if isinstance(found, str | list) or _is_message(found):
        return Step(found)
    known = [one.name for one in fields(Step)]
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{method} returned {found!r:.80}, and has to return a Step, a mapping with its fields "
            f"({', '.join(known)}), messages, or Gymnasium's (observation, reward, terminated, truncated, info)"
        )
    if odd := [str(name) for name in found if name not in (*known, *OBSERVED, *ENDED, *UNREAD)]:
        raise TypeError(
            f"{method} returned a mapping with the field {odd[0]!r}. Its fields are {', '.join(known)}; for messages "
            f"also {', '.join(OBSERVED)}, for done also {' and '.join(ENDED)}; {' and '.join(UNREAD)} are not read"
        )
    if len(said := [name for name in ("messages", *OBSERVED) if name in found]) > 1:
        raise TypeError(f"{method} returned a mapping with both {said[0]!r} and {said[1]!r}, which are the same field")
    values = {name: value for name, value in found.items() if name in known}
    if said:
        values["messages"] = found[said[0]]
    if ended := [found[name] for name in ENDED if name in found]:
        values["done"] = any(map(bool, (*ended, found.get("done", False))))
    return Step(**values)


def _begun(found: Any) -> Step:
    """Convert a `reset` result like `_step`, including Gymnasium's (observation, information). Raises TypeError
    otherwise."""
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping) and not _is_message(found[1]):
        found = found[0]
    return _step(found, "reset") if isinstance(found, Step | Mapping) else Step(found)


def _is_message(found: Any) -> bool:
    return isinstance(found, Mapping) and {"role", "content"} <= found.keys()


def _messages(found: Any) -> tuple[Message, ...]:
    if not found:
        return ()
    listed = (
        [{"role": "user", "content": found}] if isinstance(found, str) else [found] if _is_message(found) else found
    )
    if not isinstance(listed, Iterable) or isinstance(listed, Mapping | bytes):
        raise TypeError(f"{found!r:.80} is neither a text nor messages")
    listed = list(listed)
    for one in listed:
        shape = (str, str | list) if isinstance(one, Mapping) else ()
        if not shape or not all(isinstance(one.get(key), kind) for key, kind in zip(_SAYS, shape, strict=True)):
            raise TypeError(f"{one!r:.80} is not a message: it needs `role` and `content`")
    return _with_images(listed)


_SAYS = ("role", "content")


def _with_images(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    try:
        read = [
            one if isinstance(one["content"], str) else {**one, **checked_messages([one], "messages", "A message")[0]}
            for one in messages
        ]
        sources = [[image_source(value, "An image", Path()) for value in one.get(IMAGES, ())] for one in read]
    except InputError as error:
        raise TypeError(str(error)) from error
    plain = _plain([{key: value for key, value in one.items() if key != IMAGES} for one in read])
    return tuple({**one, IMAGES: held} if held else one for one, held in zip(plain, sources, strict=True))


def _plain(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return messages as plain data without lone surrogates (models write them in JSON) and user types."""
    text = json.dumps([dict(one) for one in messages], ensure_ascii=False, default=str)
    return tuple(json.loads(text.encode(errors="replace")))


def _checked(ask: Ask) -> Ask:
    numbers = {"max_tokens": [ask.max_tokens or 1], "stop_token_ids": ask.stop_token_ids, "tokens": ask.tokens or [0]}
    for name, given in numbers.items():
        if not all(isinstance(one, int) and one >= (name == "max_tokens") for one in given):
            raise ValueError(f"{name} is {getattr(ask, name)!r:.80}, and no engine takes that")
    held = () if ask.tokens else checked_messages(list(ask.messages), "messages", "The conversation")
    return replace(ask, messages=_with_images(held), tools=_plain(ask.tools), stop=_stops(ask.stop))


def _number(value: Any, what: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not abs(found) <= LARGEST_REWARD:
        raise ValueError(f"{what} is {value!r:.80}, and has to be a number between ±{LARGEST_REWARD:g}")
    return found


def _numbers(named: Any) -> dict[str, float]:
    return {str(name): _number(value, f"the metric {name!r}") for name, value in dict(named or {}).items()}


def _stops(found: Any) -> tuple[str, ...]:
    texts = (found,) if isinstance(found, str) else tuple(found)
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError(f"`stop` is {found!r:.80}, and has to hold texts that are not empty")
    return tuple(map(str, texts))
