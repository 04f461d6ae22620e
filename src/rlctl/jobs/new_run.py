"""`rlctl init`: a configuration with comments, and example data and reward if the user names none."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.data.prompt_records import USUAL_NAMES, prompt_field_in
from rlctl.data.prompt_rows import GYM_PREFIX
from rlctl.data.prompts import open_prompts
from rlctl.data.records import columns_of, is_file_name
from rlctl.data.templates import ANSWER, PROMPT
from rlctl.errors import InputError
from rlctl.methods.configuration import resolve
from rlctl.planner.from_config import local_gpus
from rlctl.settings.config import RolloutConfig
from rlctl.settings.data import DataConfig

CONFIG, DATA, REWARD = "run.yaml", "questions.jsonl", "rewards.py"
OWN_REWARD = f"{REWARD}:reward"
QUESTIONS = 96
HELD_OUT = 16
EXAMPLE_TOKENS = 128
"""Minimum of `generation.max_new_tokens` for the example data: a small model answers in several sentences."""

TEXTS = Path(__file__).with_name("init")
"""Templates of the written files: the configuration, with placeholders in braces, and the reward."""


@dataclass(frozen=True)
class NewRun:
    """The user's choices. Data and reward that are None become examples."""

    directory: Path
    preset: str
    model: str | None
    data: str | None = None
    reward: str | None = None
    prompt_field: str | None = None
    answer_field: str | None = None

    def write(self) -> list[Path]:
        """Write the files and return their paths. Raises InputError for an existing file and for unreadable data."""
        config = resolve(self.preset, environment={}).config
        if self.model is None:
            raise InputError(f"The preset {self.preset} names no model.", "Give --model NAME or DIR.")
        texts = {CONFIG: self._config(config, self.model)}
        if self.data is None:
            texts[DATA] = "".join(json.dumps(row) + "\n" for row in example_rows())
        if self._reward() == OWN_REWARD:
            texts[REWARD] = (TEXTS / f"{REWARD}.txt").read_text(encoding="utf-8")
        for name in texts:
            if (self.directory / name).exists():
                raise InputError(f"{self.directory / name} exists already.", "Name another directory, or remove it.")
        if file := next((place for place in (self.directory, *self.directory.parents) if place.is_file()), None):
            raise InputError(f"{file} is a file.", "Name a directory to create or fill.")
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (self.directory / name).open("x", encoding="utf-8") as file:
                file.write(text)
        return [self.directory / name for name in texts]

    def _config(self, config: RolloutConfig, model: str) -> str:
        fields = self._fields()
        names = {"prompt_field": fields[0], "answer_field": fields[1]} if fields else {}
        text = (TEXTS / CONFIG).read_text(encoding="utf-8")
        return text.format(
            preset=_written(self.preset),
            model=_written(model),
            data=_written(DATA if self.data is None else self.data),
            fields="".join(f"  {key}: {_written(value)}\n" for key, value in names.items()),
            reward=_written(self._reward()),
            prompts=config.batch.prompts,
            generations=config.batch.generations,
            max_new_tokens=max(config.generation.max_new_tokens, EXAMPLE_TOKENS if self.data is None else 0),
            temperature=config.generation.temperature,
            lr=config.optimizer.lr,
            holdout=HELD_OUT if self.data is None else 0,
            validates="true" if self.data is None else "false",
            steps=config.run.steps,
        )

    def _reward(self) -> str:
        if self.reward is not None:
            path, _, function = self.reward.rpartition(":")
            return f"{Path(path).resolve()}:{function}" if Path(path).is_file() else self.reward
        return "task" if (self.data or "").startswith(GYM_PREFIX) else OWN_REWARD

    def _fields(self) -> tuple[str, str] | None:
        """Return the columns of prompt and answer; None if the data is not a file. Raises InputError for a file without
        a prompt column."""
        if self.data is None:
            return "question", "answer"
        if self.data.startswith(GYM_PREFIX) or not is_file_name(self.data):
            return None
        columns = columns_of(Path(self.data))
        usual = prompt_field_in(columns, PROMPT)
        prompt = self.prompt_field or _first((usual, *USUAL_NAMES["--prompt-field"]), columns) or PROMPT
        answer = self.answer_field or _first((ANSWER, *USUAL_NAMES["--answer-field"]), columns) or ANSWER
        open_prompts(DataConfig(name=self.data, prompt_field=prompt, answer_field=answer))
        return prompt, answer


def usual_preset() -> str:
    """Return the preset for this machine."""
    return "laptop" if not local_gpus() else "1gpu" if len(local_gpus()) == 1 else "1node"


def usual_model(preset: str) -> str:
    """Return the model in a preset; empty: the preset has none."""
    return resolve(preset, environment={}).config.model.name or ""


def _first(names: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _written(text: str) -> str:
    return json.dumps(str(Path(text).resolve()) if Path(text).exists() else text, ensure_ascii=False)


def example_rows() -> list[dict[str, str]]:
    """Return distinct questions that a small model sometimes answers correctly."""
    digits = range(1, 10)
    every = list(itertools.product(digits, digits, ("Mia", "Tom", "Ada", "Ben"), ("apples", "coins", "books")))
    return [
        {
            "question": f"{who} has {a} {question} and gets {b} more. How many {question} does {who} have now?",
            "answer": str(a + b),
        }
        for a, b, who, question in random.Random(0).sample(every, QUESTIONS)  # no duplicates, since some are held out
    ]
