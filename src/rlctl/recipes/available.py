"""The importers of recipes: built in, and of installed packages by the entry-point group `rlctl.recipes`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from rlctl.config.plugins import load_named, plugin_names
from rlctl.config.recipes import Importer
from rlctl.errors import InputError

GROUP = "rlctl.recipes"
BUILT_IN = {
    "verl": "rlctl.recipes.verl:Verl",
    "NeMo-RL": "rlctl.recipes.nemo_rl:NemoRl",
    "TRL": "rlctl.recipes.trl:Trl",
}
"""`module:Class` of each, by the name of the trainer."""


def names() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*BUILT_IN, *plugin_names(GROUP))))


def importers() -> Iterator[Importer]:
    """Yield an importer per trainer, built-in first. Raises InputError for a broken package."""
    return map(importer, names())


@functools.cache
def importer(name: str) -> Importer:
    importer_ = load_named(GROUP, name, BUILT_IN)
    made = importer_() if isinstance(importer_, type) else importer_
    if missing := [
        method for method in ("recognizes", "sections", "has", "read") if not callable(getattr(made, method, None))
    ]:
        raise InputError(
            f"The importer of recipes {name!r} has no method {missing[0]!r}.",
            "Update or uninstall its package; docs/coming_from.md has the form of an importer.",
        )
    return made
