"""Recipes of NeMo-RL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config.recipes import Import

MARKS = ("policy", "defaults", "grpo", "ppo", "loss_fn", "checkpointing", "eval", "sft", "dpo", "rm")
"""Top-level keys that a NeMo-RL file has and an rlctl file never does (which has a section `distillation` too)."""


class NemoRl:
    """The importer of NeMo-RL's recipes. Its tables are imported when one is read."""

    trainer = "NeMo-RL"

    def recognizes(self, path: Path, values: Mapping[str, Any]) -> bool:
        """Return whether a YAML file has a recipe's top level."""
        return any(mark in values for mark in MARKS)

    def sections(self) -> Collection[str]:
        from rlctl.recipes.nemo_rl.mapping_table import RULES

        return {key.partition(".")[0] for key in RULES}

    def has(self, key: str) -> bool:
        from rlctl.recipes.nemo_rl.recipe import knows

        return knows(key)

    def read(self, path: Path | None, overrides: Sequence[str], method: str | None) -> Import:
        from rlctl.recipes.hydra import Override, require_packages

        require_packages(self.trainer)
        from rlctl.recipes.nemo_rl.recipe import import_recipe

        return import_recipe(path, [Override.parse(text) for text in overrides])
