"""User functions as scorers. A reward function scores one completion, or with a parameter `completions` all of a step,
in TRL's form."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlctl.config.plugins import find_plugin, load_plugin
from rlctl.config.user_code import UserCode, is_reference
from rlctl.data.image_rows import shown_prompt
from rlctl.data.image_sources import IMAGES
from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import InputError, RlctlError

T = TypeVar("T")
TURNS = "turns"
"""Argument of a reward function that takes all turns of an episode."""
LARGEST_REWARD = 1e30
"""Sums of squares of rewards up to this fit into a float64. Nobody means a larger one."""
SIGNATURE = "(completion: str, answer, prompt: str, **row) -> float"
SOLUTION = "solution_str"
"""Argument of a reward function in the form (data_source, solution_str, ground_truth, extra_info)."""
SCORE = "score"
"""Key of the score in a result with several numbers."""
BATCHED_SIGNATURE = "(prompts: list, completions: list, **columns) -> list[float | None]"
ONLY_TRL = ("completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer gives to reward functions and that rlctl does not have."""


def turns_of(row: PromptRow, completion: str) -> list[dict[str, Any]]:
    """Return the turns of an episode, each with `role`, `text`, `tokens` and `reward`; without an environment one."""
    return row.fields.get(TURNS) or [{"role": "assistant", "text": completion, "tokens": None, "reward": None}]


class NoListError(InputError):
    """A batch function did not return a value for each completion."""


class UserFunction:
    """A reward function that is loaded, and what its signature takes."""

    form = SIGNATURE

    def __init__(self, name: str, code: UserCode, function: Callable[..., Any]) -> None:
        self.name, self._code, self._function = name, code, function
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes = {parameter.name for parameter in keywords}
        self._required = {parameter.name for parameter in keywords if parameter.default is parameter.empty}
        self._runner: asyncio.Runner | None = None

    def _call(self, arguments: dict[str, Any], rows: str) -> Any:
        taken = self._taken(arguments, rows)
        with self._naming(rows):
            value = self._function(**taken)
            return self._run(_awaited(value)) if inspect.isawaitable(value) else value

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. There is one event loop, so that clients which the function keeps can go on."""
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(work)

    def _taken(self, arguments: dict[str, Any], rows: str) -> dict[str, Any]:
        missing = sorted(self._required - arguments.keys())
        if missing:
            absent = [name for name in missing if name in ONLY_TRL]
            raise InputError(
                f"Reward function {self.name} needs {', '.join(missing)}, which "
                + (f"rlctl does not give ({rows})." if absent == missing else f"{rows} does not have."),
                f"It can have {', '.join(arguments)}; its form is {self.form}.",
            )
        return (
            arguments if self._takes_all else {name: value for name, value in arguments.items() if name in self._takes}
        )

    @contextlib.contextmanager
    def _naming(self, rows: str) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            raise self._code.error(error, f"scoring {rows}") from error

    def _number(self, returned: Any, row: PromptRow) -> float:
        number = math.nan
        value: Any = returned[SCORE] if isinstance(returned, Mapping) and SCORE in returned else returned
        if hasattr(value, "__float__"):  # also Decimal, and numbers of numpy and torch
            with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
                number = float(value)
        if not -LARGEST_REWARD <= number <= LARGEST_REWARD:
            raise InputError(
                f"Reward function {self.name} returned {repr(value)[:80]} for {row.where}.",
                f"It must return a finite number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}.",
            )
        return number


async def _awaited(value: Awaitable[T]) -> T:
    return await value


class UserScorer(UserFunction):
    """Scores one completion. Raises InputError, naming row and line, where that fails."""

    def __call__(self, completion: str, row: PromptRow) -> float:
        return self._number(self._call(self._given(completion, row), row.where), row)

    def _given(self, completion: str, row: PromptRow) -> dict[str, Any]:
        arguments = {**row.fields, "completion": completion, "answer": row.answer, "prompt": row.question}
        if IMAGES in self._takes:
            arguments |= {IMAGES: [image.rgb() for image in row.images]}
        if SOLUTION in self._takes:
            aliases = {SOLUTION: completion, "ground_truth": row.answer}
            arguments = {"data_source": row.source, "extra_info": {}} | arguments | aliases
        return arguments | {TURNS: turns_of(row, completion)} if TURNS in self._takes else arguments


class UserAsyncScorer(UserScorer):
    """Scores completions one by one with an `async def` function, all of a step at the same time."""

    limit_s: float | None = None
    """Seconds that a call may take; None: as long as the step."""

    def score_all(self, completions: Sequence[str], rows: Sequence[PromptRow]) -> list[float | RlctlError]:
        """Return the score of each completion, or the error that names its row and line."""

        async def scored(completion: str, row: PromptRow) -> float | RlctlError:
            try:
                taken = self._taken(self._given(completion, row), row.where)
                with self._naming(row.where):
                    value = await self._in_time(self._function(**taken), row.where)
                return self._number(value, row)
            except InputError as error:
                return error

        async def all_scored() -> list[float | RlctlError]:
            return await asyncio.gather(*(scored(*pair) for pair in zip(completions, rows, strict=True)))

        return self._run(all_scored())

    async def _in_time(self, call: Awaitable[Any], where: str) -> Any:
        timer = asyncio.timeout(self.limit_s)
        try:
            async with timer:
                return await call
        except TimeoutError:
            if not timer.expired():  # it is the function's
                raise
            raise InputError(
                f"Reward function {self.name} took longer than {self.limit_s:g} s to score {where}.",
                "Raise reward.timeout_s, or make it faster.",
            ) from None


class UserBatchScorer(UserFunction):
    """Scores the completions of a step in one call, in TRL's form. Raises InputError where that fails."""

    form = BATCHED_SIGNATURE

    def score_all(self, completions: Sequence[str], rows: Sequence[PromptRow]) -> list[float | None]:
        """Return the score of each completion; None where the function does not apply to it."""
        scored = f"{len(rows)} completions from {rows[0].where} on" if len(rows) > 1 else rows[0].where
        names = dict.fromkeys(name for row in rows for name in row.fields)
        columns: dict[str, list[Any]] = {
            **{name: [row.fields.get(name) for row in rows] for name in names},
            "answer": [row.answer for row in rows],
            "prompts": [shown_prompt(row.prompt) for row in rows],
            "completions": [  # chats where prompts are chats, as TRL has them
                text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
                for text, row in zip(completions, rows, strict=True)
            ],
        }
        if IMAGES in self._takes:
            columns[IMAGES] = [[image.rgb() for image in row.images] for row in rows]
        if TURNS in self._takes:
            columns[TURNS] = [turns_of(row, text) for row, text in zip(rows, completions, strict=True)]
        values = self._call(columns, scored)
        if hasattr(values, "tolist"):  # an array or a tensor
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(rows):
            description = f"a list of {len(values)}" if isinstance(values, list | tuple) else repr(values)[:80]
            raise NoListError(
                f"Reward function {self.name} returned {description} for {scored}.",
                f"It takes `completions`, so it must return a list with one number (or None) for each of them: "
                f"{self.form}.",
            )
        return [None if value is None else self._number(value, row) for value, row in zip(values, rows, strict=True)]


def user_scorer(name: str, limit_s: float | None = None) -> UserScorer | UserBatchScorer:
    """Import a file or package and return the scorer for its signature. `limit_s`: per call of an `async def` function
    of one completion."""
    entry = None if is_reference(name) else find_plugin("rlctl.rewards", name)
    if entry is None:
        code = UserCode.read(name, "Reward")
        function = code.load()
    else:
        function = load_plugin(entry)
        code = UserCode(Path(sys.modules[entry.module].__file__ or ""), "", entry.attr, "Reward")
    if "completions" in inspect.signature(function).parameters:
        return UserBatchScorer(name, code, function)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    scorer = (UserAsyncScorer if is_async else UserScorer)(name, code, function)
    if isinstance(scorer, UserAsyncScorer):
        scorer.limit_s = limit_s
    return scorer
