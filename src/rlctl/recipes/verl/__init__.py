"""Command lines, scripts and configuration files of verl."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config.recipes import Import

SECTIONS = (
    "actor_rollout_ref", "algorithm", "trainer", "custom_reward_function", "model_engine", "global_profiler",
    "ray_kwargs", "ray_init", "transfer_queue", "optim", "engine", "async_training", "rollout",
    "skip",
)  # fmt: skip
"""Top-level keys of verl's that rlctl does not have."""
SHARED = ("data", "critic", "reward_model", "reward", "distillation", "model")
"""Sections that rlctl has under other keys."""


OF_TEXTS = ("data", "model", "optim", "trainer")
"""Sections of its files for SFT."""


class Verl:
    """The importer of verl's scripts and YAML files. Its tables are imported when one is read."""

    trainer = "verl"

    def recognizes(self, path: Path, values: Mapping[str, Any]) -> bool:
        """Return whether a file is a script that starts verl's trainer, or a YAML file with its sections."""
        if path.suffix == ".sh":
            from rlctl.config.files import read_text
            from rlctl.recipes.verl.script import names_trainer

            return names_trainer(read_text(path, "script"))
        return "actor_rollout_ref" in values or all(name in values for name in OF_TEXTS)

    def sections(self) -> Collection[str]:
        return (*SECTIONS, *SHARED)

    def has(self, key: str) -> bool:
        from rlctl.recipes.rules import rule_of
        from rlctl.recipes.verl import mapping, texts

        known_key = any(rule_of(key, rules) is not None for rules in (mapping.RULES, texts.RULES))
        return key.partition(".")[0] in (*SECTIONS, *SHARED) and known_key

    def read(self, path: Path | None, overrides: Sequence[str], method: str | None) -> Import:
        from rlctl.recipes.hydra import require_packages

        require_packages(self.trainer)
        from rlctl.recipes.verl.recipe import import_recipe

        return import_recipe(path, overrides, method)
