"""NeMo-RL's recipes with images, written from the facts in `tests/recipes/nemo_rl/image_recipes.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from support.yaml_files import read_yaml

RECIPES = Path(__file__).parents[1] / "recipes" / "nemo_rl"
IMAGE_RECIPES: dict[str, dict[str, Any]] = read_yaml(RECIPES / "image_recipes.yaml")


def write_image_recipe(folder: Path, name: str) -> Path:
    """Write a recipe on top of base.yaml; sections of null in the facts are left out of the base."""
    asked = IMAGE_RECIPES[name]
    base = read_yaml(RECIPES / "base.yaml")
    kept = {key: value for key, value in base.items() if asked.get(key, value) is not None}
    kept["data"] = {key: value for key, value in kept["data"].items() if key != "dataset_name"}
    (folder / "base.yaml").write_text(yaml.safe_dump(kept))
    (folder / "prompts").mkdir(exist_ok=True)
    (folder / "prompts" / "think.txt").write_text("Think.\n{}\nNow answer.\n")
    own = {key: value for key, value in asked.items() if value is not None and key != "refused"}
    own["data"] = {key: value for key, value in own["data"].items() if key != "dataset_name" or value is not None}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"defaults": "base.yaml"} | own))
    return path
