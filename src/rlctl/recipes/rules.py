"""Rules that map the keys of a recipe, for the tables of importers.

A rule sees the whole recipe, so that a key can depend on another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.config.recipes import Entry, Import, Status, short


@dataclass(frozen=True)
class Found:
    """A key of the recipe that is being mapped, with all leaves of the recipe and what has been imported so far."""

    result: Import
    name: str
    value: Any
    leaves: Mapping[str, Any]

    def get(self, name: str, *places: str) -> Any:
        """Return the value of another key of the recipe, in the first of `places` that has it."""
        values = (self.leaves.get(f"{place}{name}") for place in places or ("",))
        return next((value for value in values if value is not None), None)

    def set(self, key: str, value: Any) -> None:
        """Give rlctl's `key` a value that this key is the source of."""
        self.result.set(key, value, self.name)

    def say(self, status: Status, note: str, settled_by: str | None = None) -> None:
        """Record the outcome of this key."""
        self.result.entries.append(Entry(self.name, self.value, status, note, settled_by))

    def skip(self, reason: str) -> None:
        """Record why this key becomes nothing."""
        self.say("not applicable", reason)

    def map(self, key: str, value: Any) -> None:
        """Give rlctl's `key` the value and record it; None leaves the key at its default."""
        if value is None:
            self.skip(f"{key} stays at its default")
        else:
            self.set(key, value)
            self.say("mapped", f"{key}: {short(value)}")

    def map_all(self, values: Mapping[str, Any], but: str | None = None) -> None:
        """Give keys of rlctl their values and record them; `but` says in which way they differ from the recipe."""
        for key, value in values.items():
            self.set(key, value)
        note = ", ".join(f"{key}: {short(value)}" for key, value in values.items())
        self.say("changed" if but else "mapped", f"{note}; {but}" if but else note)


Rule = Callable[[Found], None]


def to(key: str, convert: Mapping[Any, Any] | None = None, *, null: Any = None) -> Rule:
    """Return the rule that gives `key` the value, or `null` for None; with `convert`, what that has for the value."""

    def rule(found: Found) -> None:
        if convert is None:
            found.map(key, null if found.value is None else found.value)
        elif found.value in convert:
            found.map(key, convert[found.value])
        else:
            found.say("not yet", f"rlctl knows {', '.join(map(str, convert))}", key)

    return rule


def logs(reason: str) -> Rule:
    """Return the rule of a key that concerns logs or validation alone, which rlctl does otherwise for `reason`."""
    return lambda found: found.say("logging", reason)


def only(*accepted: Any, why: str, settled_by: str | None = None, otherwise: Status = "not yet") -> Rule:
    """Return the rule of a key that runs with one of `accepted` and cannot run otherwise yet."""

    def rule(found: Found) -> None:
        if found.value in accepted or (None in accepted and found.value in ({}, [])):
            found.skip("what rlctl does")
        else:
            found.say(otherwise, why, settled_by)

    return rule


def differs(*same: Any, why: str) -> Rule:
    """Return the rule of a key that runs in any case, but exactly as written only with one of `same`."""
    return only(*same, why=why, otherwise="changed")


def when(on: str | Callable[[Found], object], rule: Rule, otherwise: str | Rule) -> Rule:
    """Return a rule that applies `rule` to recipes in which the key `on` is on, or for which `on` returns true, and
    `otherwise`, or skips the key for that reason, to others."""

    def applied(found: Found) -> None:
        if found.get(on) if isinstance(on, str) else on(found):
            rule(found)
        elif isinstance(otherwise, str):
            found.skip(otherwise)
        else:
            otherwise(found)

    return applied


def if_on(rule: Rule) -> Rule:
    """Return the rule of a switch that does something where it is on."""
    return when(lambda found: found.value, rule, "it is off")
