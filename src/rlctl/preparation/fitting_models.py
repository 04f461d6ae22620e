"""Suggestions for a user who names no model: presets, and catalog models that train on this machine."""

from __future__ import annotations

from rlctl.config.presets import preset_names, read_preset
from rlctl.errors import RlctlError
from rlctl.methods.available import method_from_config
from rlctl.models.catalog import CatalogEntry, entries
from rlctl.models.facts import ModelFacts
from rlctl.models.families import FAMILIES
from rlctl.planner.costs.parameters import count
from rlctl.planner.from_config import plan_from_config
from rlctl.settings.config import RlctlConfig

SHOWN = 5


def what_there_is(config: RlctlConfig) -> str:
    """Return help text with an example, the presets, and the largest models that `config` can train on this machine."""
    width = max(map(len, preset_names()))
    presets = [f"    {name:<{width}}  {read_preset(name).description}" for name in preset_names()]
    lines = ["Begin with `rlctl train grpo --preset laptop`, or name a --model and a --preset. Presets:", *presets]
    if fitting := models_that_fit(config):
        names = ", ".join(entry.names[0] for entry in fitting)
        lines += ["  The largest models of the catalog that train on this machine:", f"    {names}"]
    else:
        lines.append("  No model of the catalog trains on this machine with these settings.")
    return "\n".join([*lines, "  `rlctl plan --model NAME` shows how a model would train, here or with --gpu TYPE."])


def models_that_fit(config: RlctlConfig, most: int = SHOWN) -> list[CatalogEntry]:
    """Return the `most` largest catalog models with a runnable plan for `config`. A binary search finds the largest; it
    assumes that smaller models than a fitting one fit too."""
    listed = [(entry, entry.facts) for entry in entries() if entry.facts and entry.facts.family in FAMILIES]
    listed.sort(key=lambda known_entry: count(known_entry[1]).total)
    low, high = 0, len(listed)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _fits(config, listed[middle][1]) else (low, middle)
    return [entry for entry, facts in listed[max(0, low - 2 * most) : low] if _fits(config, facts)][::-1][:most]


def _fits(config: RlctlConfig, facts: ModelFacts) -> bool:
    try:
        workload = method_from_config(config, tries_loss=False).workload(facts)
        return plan_from_config(config, facts, workload).runnable
    except RlctlError:
        return False
