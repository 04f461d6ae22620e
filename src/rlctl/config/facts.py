"""Facts about a key, as marks in the annotation of its field: `steps: Annotated[Positive, FREE, Flag("steps", ...)]`.

A mark on a field that holds a section applies to every key of the section. `Schema` reads the marks, and every list of
keys is derived from them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Fact(enum.Flag):
    """Facts that need no further value; `A | B` states both."""

    PLANNED = enum.auto()
    """The planner sets the key where it is unset."""
    EVERY_PLAN = enum.auto()
    """Every plan with the section's model sets the key."""
    LAYOUT = enum.auto()
    """The key changes results only within rounding. After a change, the planner sets unset keys anew."""
    FOR_A_MACHINE = enum.auto()
    """A recipe chose the value for another machine: rlctl drops it if no plan fits."""
    FREE = enum.auto()
    """A resume may change the key: it affects length, place or monitoring of a run, and no number of it."""
    REHEARSAL_DETAIL = enum.auto()
    """A rehearsal changes the key without reporting it."""


PLANNED, LAYOUT, FOR_A_MACHINE = Fact.PLANNED, Fact.LAYOUT, Fact.FOR_A_MACHINE
FREE, REHEARSAL_DETAIL = Fact.FREE, Fact.REHEARSAL_DETAIL
CHOSEN = PLANNED | LAYOUT | FOR_A_MACHINE
SIZE = CHOSEN | Fact.EVERY_PLAN


UNDECIDED = (None, "auto")
"""Values that leave a key to the planner, whoever has set them."""


@dataclass(frozen=True)
class Decided:
    """A plug-in's key that the planner decides: its value from the plan (`planner.result.Plan`), None to leave it."""

    value: Callable[[Any], Any]


@dataclass(frozen=True)
class Unloadable:
    """No checkpoint of the run can be loaded after a change of the key: it holds other parameters."""

    to: tuple[Any, ...] | None = None
    """Only a change to one of these values; None: any change."""


@dataclass(frozen=True)
class Named:
    """The key takes a name that rooms above and installed packages bring: one of `Schema.names`."""

    group: str
    """The entry-point group of packages that bring one."""
    also: tuple[str, ...] = ()
    """Other values that it takes."""


@dataclass(frozen=True)
class Flag:
    """The flag of the command line that sets a key."""

    parameter: str
    """Name of the command's parameter, and of the flag unless `names` has others."""
    help: str
    metavar: str | None = None
    names: str | None = None
    kind: Any = None
    """Type of the value on the command line; None: the field's."""
