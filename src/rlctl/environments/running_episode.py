"""One running episode: calls the user's environment and tools, and converts their results to Replies."""

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
from rlctl.environments.interface import Agent, Ask, Failure, Message, ModelAddress, Step, is_cut
from rlctl.environments.tool_results import Content, content_of, joined
from rlctl.environments.tools import Call, read_calls, refusal, typed
from rlctl.errors import InputError, first_line
from rlctl.rewards.user_function import LARGEST_REWARD


@dataclass(frozen=True)
class Reply(Step):
    """The answer of an episode's process to one message: a `Step` as plain data, with counts of tool calls."""

    messages: tuple[Message, ...] = ()
    stop: tuple[str, ...] = ()
    calls: int = 0
    """Tool calls that were made."""
    broken: int = 0
    """Tool calls that were unreadable or refused."""
    runs: bool = False
    """Whether the environment asks the model itself, in `RunningEpisode.run`."""


class RunningEpisode:
    """One episode. Raises the errors of the user's code unchanged."""

    def __init__(self, loaded: LoadedEnvironment, folder: Path) -> None:
        """`folder`: of the episode alone, and removed with it; the sandbox makes it."""
        self._loaded, self._folder = loaded, folder
        self._schemas = {name: schema["function"] for name, schema in loaded.plan.schemas.items()}
        self._ask: Ask | None = None
        self._environment: Any = None

    def _begin(self) -> None:
        if self._environment is not None:
            return
        self._environment = self._loaded.kind(**self._loaded.plan.params)
        self._tools = {name: getattr(self._environment, name) for name in self._loaded.methods} | self._loaded.functions
        self._stop = _stops(getattr(self._environment, "stop", ()))

    async def reset(self, row: PromptRow, seed: int) -> Reply:
        """Begin the episode; return the messages after the row's prompt."""
        random.seed(seed)
        self._begin()
        columns = {**row.fields, "prompt": shown_prompt(row.prompt), "answer": row.answer}
        if row.images:
            columns[IMAGES] = [image.rgb() for image in row.images]
        if isinstance(self._environment, Agent):
            self._row, self._seed = columns, seed
            return Reply(runs=True)
        parameters = inspect.signature(self._environment.reset).parameters
        if {"seed", "options"} <= parameters.keys():  # as Gymnasium calls it
            result = await _called(self._environment.reset, seed=seed, options=columns)
        elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):  # as TRL calls it
            result = await _called(self._environment.reset, **columns)
        else:
            result = await _called(self._environment.reset, columns, *([seed] if len(parameters) > 1 else []))
        return self._reply(_first_step(result))

    async def run(self, model: ModelAddress) -> Reply:
        """Have an `Agent` ask the model until it ends."""
        async with self._loaded.plan.sandbox.opened(self._folder) as sandbox:
            self._environment.sandbox = sandbox
            result = await self._environment.run(self._row, self._seed, model)
        parts = {f"{REWARD_PART}{name}": part for name, part in (result.get("reward_components") or {}).items()}
        numbers = {name: value for name, value in result.items() if isinstance(value, int | float) and name != "reward"}
        return Reply(reward=_number(result["reward"], "the reward"), done=True, metrics=_numbers({**numbers, **parts}))

    async def step(self, message: Message) -> Reply:
        text: str = message["content"]
        cut = is_cut(message)
        written = read_calls(text, self._loaded.plan.form, cut=cut) if self._tools else []
        if calls := [typed(call, self._schemas) for call in written]:
            answers, broken = list[Content](), 0
            for call in calls:
                if reason := refusal(call, self._schemas):
                    broken += 1
                    answers.append(f"Error: {reason}.")
                    continue
                try:
                    answers.append(content_of(await _called(self._tools[call.name], **call.arguments)))
                except Failure:
                    raise
                except Exception as error:  # noqa: BLE001 - the model reads the error
                    answers.append(f"Error: {type(error).__name__}: {first_line(error)}")
            return self._tool_reply(answers, len(calls) - broken, broken, [call.name or "tool" for call in calls])
        if not self._loaded.steps:
            return Reply(done=True)
        if next(iter(inspect.signature(self._environment.step).parameters), "") != "message":
            return self._reply(_step(await _called(self._environment.step, text)))
        if self._ask is not None and self._ask.tools:
            calls = [
                {
                    "id": f"call{number:05}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for number, call in enumerate(readable_calls(text, self._loaded.plan.form, self._ask.tools, cut=cut))
            ]
            message = {**message, "tool_calls": calls}
        return self._reply(_step(await _called(self._environment.step, message)))

    async def schemas(self) -> tuple[dict[str, dict[str, Any]], str]:
        """Return the JSON schemas of tools by name, and the environment's note for the user."""
        return self._loaded.schemas(), self._loaded.note

    async def close(self) -> Reply:
        reward = 0.0
        if hasattr(self._environment, "get_reward"):
            reward = _number(await _called(self._environment.get_reward), "the result of get_reward")
        parts = {f"{REWARD_PART}{name}": part for name, part in getattr(self._environment, "reward_parts", {}).items()}
        if hasattr(self._environment, "close"):
            await _called(self._environment.close)
        return Reply(reward=reward, done=True, metrics=_numbers(parts))

    def _tool_reply(self, answers: Sequence[Content], made: int, broken: int, names: Sequence[str] = ()) -> Reply:
        role = self._loaded.plan.tool_role
        if role == "user":  # in one message, since some templates require alternating roles
            answers, names = [joined(answers)], ()
        messages = [{"role": role, "content": content} for content in answers]
        named_messages = (
            [{**message, "name": name} for message, name in zip(messages, names, strict=True)] if names else messages
        )
        return Reply(_with_images(named_messages), stop=self._stop, calls=made, broken=broken)

    def _reply(self, step: Step) -> Reply:
        stop = self._stop if step.stop is None else _stops(step.stop)
        self._ask = step.ask and checked_ask(step.ask)
        reward = 0.0 if step.reward is None else _number(step.reward, "the reward")  # SkyRL-gym's steps without one
        numbers = _numbers(step.metrics)
        return Reply(_messages(step.messages), reward, bool(step.done), stop, numbers, self._ask)


def readable_calls(text: str, form: str, tools: Sequence[Mapping[str, Any]], *, cut: bool = False) -> list[Call]:
    """Return the tool calls in a text, or none if one is unreadable, as model servers do. `cut`: a limit ended it."""
    calls = read_calls(text, form, cut=cut)
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    return [] if any(call.broken for call in calls) else [typed(call, schemas) for call in calls]


async def _called(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    result = function(*arguments, **keywords)
    return await result if inspect.isawaitable(result) else result


OBSERVED = ("observations", "observation", "obs")
"""Further names of the field `messages`: in SkyRL-gym, in Gymnasium, and Gymnasium's short form."""
ENDED = ("terminated", "truncated")
UNREAD = ("info", "metadata")


def _step(result: Any, method: str = "step") -> Step:
    """Convert a method's result to a Step: a Step, a mapping with its fields, Gymnasium's tuple of five or four, or
    messages. Raises TypeError otherwise."""
    if isinstance(result, Step):
        return result
    if isinstance(result, tuple) and len(result) in (4, 5) and not _is_message(result[-1]):
        observation, reward, *ended, _ = result
        return Step(observation, reward, any(map(bool, ended)))
    if isinstance(result, str | list) or _is_message(result):
        return Step(result)
    names = [field.name for field in fields(Step)]
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{method} returned {result!r:.80}, and has to return a Step, a mapping with its fields "
            f"({', '.join(names)}), messages, or Gymnasium's (observation, reward, terminated, truncated, info)"
        )
    if odd := [str(name) for name in result if name not in (*names, *OBSERVED, *ENDED, *UNREAD)]:
        raise TypeError(
            f"{method} returned a mapping with the field {odd[0]!r}. Its fields are {', '.join(names)}; for messages "
            f"also {', '.join(OBSERVED)}, for done also {' and '.join(ENDED)}; {' and '.join(UNREAD)} are not read"
        )
    if len(aliases := [name for name in ("messages", *OBSERVED) if name in result]) > 1:
        raise TypeError(
            f"{method} returned a mapping with both {aliases[0]!r} and {aliases[1]!r}, which are the same field"
        )
    values = {name: value for name, value in result.items() if name in names}
    if aliases:
        values["messages"] = result[aliases[0]]
    if ended := [result[name] for name in ENDED if name in result]:
        values["done"] = any(map(bool, (*ended, result.get("done", False))))
    return Step(**values)


def _first_step(result: Any) -> Step:
    """Convert a `reset` result like `_step`, including Gymnasium's (observation, information). Raises TypeError
    otherwise."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping) and not _is_message(result[1]):
        result = result[0]
    return _step(result, "reset") if isinstance(result, Step | Mapping) else Step(result)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _messages(value: Any) -> tuple[Message, ...]:
    """Convert a text, a message or a list of messages. Raises TypeError otherwise."""
    if not value:
        return ()
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    messages = [value] if _is_message(value) else value
    if not isinstance(messages, Iterable) or isinstance(messages, Mapping | bytes):
        raise TypeError(f"{value!r:.80} is neither a text nor messages")
    messages = list(messages)
    for message in messages:
        has_role = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not has_role or not isinstance(message.get("content"), str | list):
            raise TypeError(f"{message!r:.80} is not a message: it needs `role` and `content`")
    return _with_images(messages)


def _with_images(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    try:
        checked = [
            message
            if isinstance(message["content"], str)
            else {**message, **checked_messages([message], "messages", "A message")[0]}
            for message in messages
        ]
        images = [[image_source(value, "An image", Path()) for value in message.get(IMAGES, ())] for message in checked]
    except InputError as error:
        raise TypeError(str(error)) from error
    plain = _plain([{key: value for key, value in message.items() if key != IMAGES} for message in checked])
    return tuple(
        {**message, IMAGES: sources} if sources else message for message, sources in zip(plain, images, strict=True)
    )


def _plain(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return messages as plain data, without user types and lone surrogates, which models write in JSON."""
    text = json.dumps([dict(message) for message in messages], ensure_ascii=False, default=str)
    return tuple(json.loads(text.encode(errors="replace")))


def checked_ask(ask: Ask) -> Ask:
    """Return a conversation as plain data. Raises ValueError, TypeError or InputError for one that no engine takes."""
    numbers = {"max_tokens": [ask.max_tokens or 1], "stop_token_ids": ask.stop_token_ids, "tokens": ask.tokens or [0]}
    for name, values in numbers.items():
        if not all(isinstance(value, int) and value >= (name == "max_tokens") for value in values):
            raise ValueError(f"{name} is {getattr(ask, name)!r:.80}, and no engine takes that")
    messages = () if ask.tokens else checked_messages(list(ask.messages), "messages", "The conversation")
    return replace(ask, messages=_with_images(messages), tools=_plain(ask.tools), stop=_stops(ask.stop))


def _number(value: Any, description: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{description} is {value!r:.80}, and has to be a number between ±{LARGEST_REWARD:g}")
    return number


def _numbers(values: Any) -> dict[str, float]:
    return {str(name): _number(value, f"the metric {name!r}") for name, value in dict(values or {}).items()}


def _stops(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError(f"`stop` is {stop!r:.80}, and has to hold texts that are not empty")
    return tuple(map(str, texts))
