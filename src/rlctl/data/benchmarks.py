"""The public data sets that `rlctl eval` knows by a short name: where each is, its fields, prompt and scorer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlctl.data.prompt_rows import PromptDataset, PromptRow
from rlctl.data.prompts import open_prompts
from rlctl.errors import InputError, suggest
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import RewardConfig, RewardTerm

MATH = "{prompt}\n\nReason step by step, and put your final answer within \\boxed{}."
CHOICE = (
    "Answer the following multiple choice question. Think step by step, and end with a line of the form "
    "`Answer: LETTER`, where LETTER is that of the right option.\n\n{prompt}"
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Benchmark:
    """A public data set."""

    repository: str
    """Name on the hub, with its configuration after a colon."""
    split: str
    prompt_field: str
    answer_field: str
    prompt_template: str
    reward: RewardConfig
    form: Callable[[PromptRow], PromptRow] = lambda row: row
    """Makes the question and the reference answer of a row as it is stored."""

    def data(self, path: str | None) -> DataConfig:
        """Return how its rows are read: from `path`, a file with the same fields, or else from the hub."""
        return DataConfig(
            name=path or self.repository,
            split=self.split,
            prompt_field=self.prompt_field,
            answer_field=self.answer_field,
            prompt_template=self.prompt_template,
        )


def _shuffled_options(row: PromptRow) -> PromptRow:
    options = [str(row.answer), *(str(row.fields.get(f"Incorrect Answer {number}")) for number in (1, 2, 3))]
    draws = np.random.PCG64(np.random.SeedSequence(row.index)).random_raw(len(options))
    order = [int(place) for place in np.argsort(draws, kind="stable")]
    return _with_options(row, [options[place].strip() for place in order], order.index(0))


def _lettered_options(row: PromptRow) -> PromptRow:
    options = [str(option) for option in row.fields.get("options") or []]
    return _with_options(row, options, LETTERS.index(str(row.answer).strip()))


def _with_options(row: PromptRow, options: list[str], right: int) -> PromptRow:
    lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return replace(row, prompt="\n".join([row.question.strip(), "", *lines]), answer=LETTERS[right])


def _math(repository: str, split: str, prompt_field: str) -> Benchmark:
    reward = RewardConfig(terms=(RewardTerm(name="math-verify"),))
    return Benchmark(repository, split, prompt_field, "answer", MATH, reward)


def _choice(repository: str, split: str, fields: tuple[str, str], form: Callable[[PromptRow], PromptRow]) -> Benchmark:
    reward = RewardConfig(terms=(RewardTerm(name="exact-match"),), extract="choice")
    return Benchmark(repository, split, *fields, CHOICE, reward, form)


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": _math("openai/gsm8k:main", "test", "question"),
    "math-500": _math("HuggingFaceH4/MATH-500", "test", "problem"),
    "aime24": _math("HuggingFaceH4/aime_2024", "train", "problem"),
    "aime25": _math("math-ai/aime25", "test", "problem"),
    "gpqa-diamond": _choice("Idavidrein/gpqa:gpqa_diamond", "train", ("Question", "Correct Answer"), _shuffled_options),
    "ifeval": Benchmark(
        "google/IFEval", "train", "prompt", "answer", "{prompt}", RewardConfig(terms=(RewardTerm(name="ifeval"),))
    ),
    "mmlu-pro": _choice("TIGER-Lab/MMLU-Pro", "test", ("question", "answer"), _lettered_options),
}


def known_benchmark(name: str) -> tuple[Benchmark, str | None] | None:
    """Return the data set of a short name, and the path in `NAME:PATH`; None where it is not a short name."""
    short, _, path = name.partition(":")
    return (BENCHMARKS[short], path or None) if short in BENCHMARKS else None


def open_benchmark(name: str, benchmark: Benchmark, path: str | None, data: DataConfig) -> PromptDataset:
    """Open the rows of a short name. Raises InputError where they cannot be had, or lack a field."""
    try:
        rows = open_prompts(data)
        benchmark.form(rows[0])
    except InputError as error:
        repository, _, configuration = benchmark.repository.partition(":")
        hint = f"Give a data file with the fields of {repository}, such as `{benchmark.prompt_field}`."
        if path is None:
            hint = (
                f"Where the hub cannot be reached, fetch {repository}{f' ({configuration})' * bool(configuration)} "
                f"elsewhere and give its file: --task {name}:FILE. Gated data sets also need "
                "HF_TOKEN."
            )
        raise InputError(f"--task {name}: {error.message}", hint) from error
    return replace(rows, label=name, row_at=lambda index: benchmark.form(rows[index]))


def near_benchmark(name: str) -> str | None:
    """Return `Did you mean ...?` for the short name that was probably meant."""
    return suggest(name, BENCHMARKS)
