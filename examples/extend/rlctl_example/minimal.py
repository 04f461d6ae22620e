"""An importer: YAML files of a made-up trainer with the sections `minimal_model` and `minimal_train`."""

from pathlib import Path

from rlctl.config.recipes import Entry, Import
from rlctl.config.yaml_values import read_mapping
from rlctl.errors import ConfigError

KEYS = {
    "minimal_model.path": "model.name",
    "minimal_train.data": "data.name",
    "minimal_train.learning_rate": "optimizer.lr",
    "minimal_train.steps": "run.steps",
}


class Minimal:
    """Reads the recipes of the trainer Minimal."""

    trainer = "Minimal"

    def recognizes(self, path: Path, values) -> bool:
        return "minimal_model" in values

    def sections(self) -> tuple[str, ...]:
        return ("minimal_model", "minimal_train")

    def has(self, key: str) -> bool:
        return key in KEYS

    def read(self, path: Path | None, overrides, method: str | None) -> Import:
        if path is None or overrides:
            raise ConfigError("Recipes of Minimal take no overrides.", "Use --set with rlctl's keys.")
        recipe = Import(path, files=[path], trainer=self.trainer)
        for section, fields in read_mapping(path, "recipe").items():
            for name, value in fields.items():
                key = f"{section}.{name}"
                if ours := KEYS.get(key):
                    recipe.set(ours, value, key)
                    recipe.entries.append(Entry(key, value, "mapped", ours))
                else:
                    recipe.entries.append(Entry(key, value, "not known", "no counterpart"))
        return recipe
