"""The page on models is that of its list, the catalog, the planner and the recorded comparisons."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlctl.models.catalog import lookup_entry
from rlctl.models.families import has_file
from support.yaml_files import read_yaml

DOCS = Path(__file__).parents[1] / "docs"
PLANNED, EQUAL = 95, 85
"""Of the 100 models, how many have a plan at least, and how many train and generate like transformers."""


@pytest.fixture(scope="module")
def models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", DOCS / "models.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed() -> list[str]:
    return [name for names in read_yaml(DOCS / "models.yaml").values() for name in names]


def lines() -> dict[str, str]:
    """The line of each model in the page."""
    found = re.findall(r"^\| `([^`]+)` \|.*$", page := (DOCS / "models.md").read_text(), re.MULTILINE)
    return {name: next(line for line in page.splitlines() if line.startswith(f"| `{name}` |")) for name in found}


def test_the_page_has_a_line_for_each_model_of_the_list_and_the_catalog_knows_it() -> None:
    names = listed()
    assert len(names) == len(set(names)) == 100
    assert list(lines()) == names
    assert [name for name in names if lookup_entry(name) is None] == []


def test_most_models_are_planned_and_most_are_equal_to_transformers(models: ModuleType) -> None:
    compared = read_yaml(DOCS / "models_compared.yaml")
    planned, equal = [], []
    for name, line in lines().items():
        _, _, kind, backend, where, trainer, engine, refused = [cell.strip() for cell in line.split("|")[1:-1]]
        if not backend:
            assert refused, name
            continue
        planned.append(name)
        assert where, name
        parts = compared[kind.replace(" with experts", ":experts")]
        assert (trainer, engine) == tuple(models.difference(parts.get(part, {})) for part in ("trainer", "engine"))
        if all(part.get("logprobs", 1.0) <= models.FAR for part in (parts["trainer"], parts.get("engine", {}))):
            equal.append(name)
        else:
            assert "engines on CPUs: " in refused, name
    assert len(planned) >= PLANNED
    assert len(equal) >= EQUAL
    assert (
        f"Of 100 models {len(planned)} have a plan, and {len(equal)} train and generate"
        in (DOCS / "models.md").read_text()
    )


def test_lines_of_the_page_are_those_of_the_planner(models: ModuleType) -> None:
    """Of each model of a large family, the smallest, which is planned at once."""
    compared = read_yaml(DOCS / "models_compared.yaml")
    names = ["Qwen/Qwen3-0.6B", "zai-org/GLM-4.5-Air", "allenai/OLMoE-1B-7B-0125-Instruct", "XiaomiMiMo/MiMo-7B-RL"]
    for name in names:
        entry = lookup_entry(name)
        assert entry is not None
        assert entry.facts is not None
        assert lines()[name] == models.line_of(models.row_of(name, compared))
    assert [has_file(lookup_entry(name).facts.family) for name in names] == [True, True, True, False]  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_page_is_what_its_command_writes(models: ModuleType) -> None:
    assert models.page(list(models.rows())) == (DOCS / "models.md").read_text()
