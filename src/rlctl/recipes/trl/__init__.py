"""Configuration files of TRL's command line (`trl grpo --config FILE`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config.recipes import Import

MARKS = (
    "model_name_or_path", "dataset_name", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "num_generations", "num_train_epochs", "reward_funcs",
)  # fmt: skip
"""Keys of TRL's files; each file has at least one."""


class Trl:
    """The importer of TRL's YAML files. Its tables are imported when one is read."""

    trainer = "TRL"

    def recognizes(self, path: Path, values: Mapping[str, Any]) -> bool:
        """Return whether a YAML file has TRL's keys, which are in no sections."""
        return any(mark in values for mark in MARKS)

    def sections(self) -> Collection[str]:
        return MARKS

    def has(self, key: str) -> bool:
        from rlctl.recipes.trl.mapping import TABLES

        return any(key in table for table in TABLES.values())

    def read(self, path: Path | None, overrides: Sequence[str], method: str | None) -> Import:
        from rlctl.recipes.trl.recipe import import_recipe

        return import_recipe(path, overrides, method)
