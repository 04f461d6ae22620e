"""Rules that map a recipe's keys, for importers. A rule sees the whole recipe, so keys can depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.config.passthrough import TARGETS, canonical, checked, installed_field, target_of
from rlctl.config.recipes import Entry, Import, Status, short
from rlctl.errors import InputError


@dataclass(frozen=True)
class Leaf:
    """A key of the recipe that is being mapped, with all leaves of the recipe and what has been imported so far."""

    result: Import
    name: str
    value: Any
    leaves: Mapping[str, Any]

    def get(self, name: str, *places: str) -> Any:
        """Return the value of another key of the recipe, from the first of `places` that has it."""
        values = (self.leaves.get(f"{place}{name}") for place in places or ("",))
        return next((value for value in values if value is not None), None)

    def set(self, key: str, value: Any) -> None:
        self.result.set(key, value, self.name)

    def say(self, status: Status, note: str, settled_by: str | None = None) -> None:
        self.result.entries.append(Entry(self.name, self.value, status, note, settled_by))

    def skip(self, reason: str) -> None:
        """Record why this key has no effect."""
        self.say("not applicable", reason)

    def map(self, key: str, value: Any) -> None:
        """Give rlctl's `key` the value and record it; None leaves the key at its default."""
        if value is None:
            self.skip(f"{key} stays at its default")
        else:
            self.set(key, value)
            self.say("mapped", f"{key}: {short(value)}")

    def map_all(self, values: Mapping[str, Any], but: str | None = None) -> None:
        """Set keys of rlctl and record them; `but` describes a difference from the recipe."""
        for key, value in values.items():
            self.set(key, value)
        note = ", ".join(f"{key}: {short(value)}" for key, value in values.items())
        self.say("changed" if but else "mapped", f"{note}; {but}" if but else note)


Rule = Callable[[Leaf], None]


def to(key: str, convert: Mapping[Any, Any] | None = None, *, null: Any = None) -> Rule:
    """Return the rule that gives `key` the value, or `null` for None; with `convert`, what that has for the value."""

    def rule(leaf: Leaf) -> None:
        if convert is None:
            leaf.map(key, null if leaf.value is None else leaf.value)
        elif leaf.value in convert:
            leaf.map(key, convert[leaf.value])
        else:
            leaf.say("not yet", f"rlctl knows {', '.join(map(str, convert))}", key)

    return rule


def logs(reason: str) -> Rule:
    """Return the rule of a log or validation key that rlctl replaces, for `reason`."""
    return lambda leaf: leaf.say("logging", reason)


def only(*accepted: Any, reason: str, settled_by: str | None = None, otherwise: Status = "not yet") -> Rule:
    """Return the rule of a key that runs with one of `accepted` and cannot run otherwise yet."""

    def rule(leaf: Leaf) -> None:
        if leaf.value in accepted or (None in accepted and leaf.value in ({}, [])):
            leaf.skip("what rlctl does")
        else:
            leaf.say(otherwise, reason, settled_by)

    return rule


def differs(*same: Any, reason: str) -> Rule:
    """Return the rule of a key that runs in any case, but exactly as written only with one of `same`."""
    return only(*same, reason=reason, otherwise="changed")


def when(on: str | Callable[[Leaf], object], rule: Rule, otherwise: str | Rule) -> Rule:
    """Return a rule that applies `rule` if the key `on` is on (or `on` returns true), else `otherwise`, or skips with
    that reason."""

    def applied(leaf: Leaf) -> None:
        if leaf.get(on) if isinstance(on, str) else on(leaf):
            rule(leaf)
        elif isinstance(otherwise, str):
            leaf.skip(otherwise)
        else:
            otherwise(leaf)

    return applied


def if_on(rule: Rule) -> Rule:
    return when(lambda leaf: leaf.value, rule, "it is off")


def hand_on(leaf: Leaf, key: str, otherwise: Rule | None = None) -> None:
    """Set the field `key` of Megatron-Core or vLLM; `otherwise` if the installed version lacks it (None: unknown
    key)."""
    target = TARGETS[key.partition(".")[0]]
    if leaf.value is None or leaf.value == {}:
        leaf.skip("unset")
    elif target_of(key) is None or installed_field(key) is not None or target.fields() is None:
        ours, translated = canonical(key, leaf.value)
        reason = checked(key, leaf.value)[1] if ours == key else None
        if reason:
            leaf.say("not yet", f"{key}: {reason}")
        else:
            leaf.map(ours, translated)
    elif otherwise is not None:
        otherwise(leaf)
    else:
        leaf.say("not known", f"rlctl does not know this key, nor is it a field of {target.words()}")


def rule_of(key: str, table: Mapping[str, Rule]) -> Rule | None:
    """Return a key's rule, else the nearest section's (`.*`)."""
    parts = key.split(".")
    sections = (".".join(parts[:count]) + ".*" for count in range(len(parts) - 1, 0, -1))
    return next((table[name] for name in (key, *sections) if name in table), None)


def apply_rule(rule: Rule, leaf: Leaf) -> None:
    """Map a key. If its rule fails, for example on another type, no part of its result stays and the report says so."""
    result = leaf.result
    values, source, before = dict(result.values), dict(result.source), len(result.entries)
    try:
        rule(leaf)
    except InputError:  # including ValueError, with a separate sentence
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        result.values, result.source = values, source
        del result.entries[before:]
        leaf.say("not yet", "rlctl cannot read such a value, or not with the values of the keys next to it")
