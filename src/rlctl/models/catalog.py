"""Facts of popular published models, so that planning needs no download (`catalog.yaml`, from each `config.json`).

A local model's own configuration wins. Models without a family file have their configuration there
(`checkpoints/hf/model_facts.py`).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from rlctl.models.facts import MlaFacts, ModelFacts, MoeFacts, RopeFacts

NUMBERS = re.compile(r"\d+(?:\.\d+)?[bm]?")
PARTS = {"rope": RopeFacts, "window_rope": RopeFacts, "moe": MoeFacts, "mla": MlaFacts}


@dataclass(frozen=True)
class CatalogEntry:
    """One set of facts and the hub names that it describes (the first is the entry's name)."""

    names: tuple[str, ...]
    facts: ModelFacts | None = None
    text_part: bool = False
    """The models are multimodal; the facts describe the trained part."""
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    """Shape values of the published `config.json`, if there are no facts."""


def lookup(name: str) -> ModelFacts | None:
    """Return facts by hub name, ignoring case and organization (`unsloth/Llama-3.1-8B` is Llama 3.1). None: unknown, or
    only its configuration is known."""
    return entry.facts if (entry := lookup_entry(name)) else None


def lookup_entry(name: str) -> CatalogEntry | None:
    """The entry of a hub name; None: unknown."""
    return _index().get(_key(name))


def near(name: str, limit: int = 3) -> list[str]:
    """Return known hub names similar to `name`, best first: same size first, then names that are nearly equal or that
    `name` extends (`Qwen3-8B-Instruct`, if there is only `Qwen3-8B`)."""
    by_key, key = {_key(n): n for entry in entries() for n in entry.names}, _key(name)
    sizes, words = NUMBERS.findall(key), set(key.split("-"))
    alike = difflib.get_close_matches(key, by_key, len(by_key), 0.6)
    close = difflib.get_close_matches(key, alike, len(alike), 0.9) if alike else []
    close += [other for other in alike if words.issuperset(other.split("-"))]
    alike.sort(key=lambda other: (NUMBERS.findall(other) != sizes, other not in close))
    return [by_key[other] for other in alike[:limit]]


@cache
def entries() -> tuple[CatalogEntry, ...]:
    """The whole catalog, in the order of its file."""
    # The C parser takes a tenth of the time; some builds of PyYAML lack it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    models = yaml.load(files("rlctl.models").joinpath("catalog.yaml").read_text(encoding="utf-8"), loader)
    return tuple(
        CatalogEntry(
            tuple(entry["names"]),
            facts_of(entry["facts"]) if "facts" in entry else None,
            entry.get("text_part", False),
            entry.get("config", {}),
        )
        for entry in models
    )


def facts_of(values: dict[str, Any]) -> ModelFacts:
    """Facts from the fields of `ModelFacts` as plain data. Raises TypeError for a field that there is not."""
    return ModelFacts(**{
        key: PARTS[key](**_hashable(value)) if key in PARTS else value for key, value in _hashable(values).items()
    })  # fmt: skip


def _hashable(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _key(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower().replace("_", "-")


@cache
def _index() -> dict[str, CatalogEntry]:
    return {_key(name): entry for entry in entries() for name in entry.names}
