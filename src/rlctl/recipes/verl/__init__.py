"""Command lines, scripts and configuration files of verl."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config.recipes import Import

SECTIONS = (
    "actor_rollout_ref", "algorithm", "trainer", "custom_reward_function", "model_engine", "global_profiler",
    "ray_kwargs", "ray_init", "transfer_queue",
)  # fmt: skip
"""Top-level keys of verl's that rlctl does not have."""
SHARED = ("data", "critic", "reward_model", "reward", "distillation")
"""Those that rlctl has too, with other keys."""


class Verl:
    """The importer of verl's scripts and YAML files. Its tables are imported when one is read."""

    trainer = "verl"

    def recognizes(self, path: Path, values: Mapping[str, Any]) -> bool:
        """Return whether a file is a script that starts verl's trainer, or a YAML file with its sections."""
        if path.suffix == ".sh":
            from rlctl.config.files import read_text
            from rlctl.recipes.verl.script import names_trainer

            return names_trainer(read_text(path, "script"))
        return "actor_rollout_ref" in values

    def sections(self) -> Collection[str]:
        return (*SECTIONS, *SHARED)

    def has(self, key: str) -> bool:
        from rlctl.recipes.rules import rule_of
        from rlctl.recipes.verl.mapping import RULES

        return key.partition(".")[0] in (*SECTIONS, *SHARED) and rule_of(key, RULES) is not None

    def read(self, path: Path | None, overrides: Sequence[str], method: str | None) -> Import:
        from rlctl.recipes.hydra import Override, require_packages

        require_packages(self.trainer)
        from rlctl.recipes.verl.recipe import import_recipe, require_known

        for text in overrides:
            require_known(Override.parse(text).key)
        return import_recipe(path, overrides)
