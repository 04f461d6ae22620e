"""The facts about a transport that the planner and a refit read: its needs, its cost, and when `auto` takes it.

Torch-free. `movers.Transport` adds the two ends; each technology has one file with a class of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from rlctl.errors import ConfigError


@dataclass(frozen=True)
class Places:
    """Where policy and engines compute: by a plan, or as their processes report it. Texts complete `but ...`."""

    on_cpu: bool
    elsewhere: str = ""
    """Which engines have a device that no policy rank computes on; empty: none."""
    away: str = ""
    """Which engines are on a node without a policy rank; empty: none."""
    barred: str = ""
    """Why processes cannot share the memory of a GPU; empty: they can."""


class Refusal(NamedTuple):
    """Why a transport cannot work, and what to do instead."""

    why: str
    hint: str


@dataclass(frozen=True)
class Rates:
    """Bytes per second of media beside the devices' memory."""

    disk: float
    host: float = math.inf
    """Copies between a device and pageable host memory; infinite if the devices are processors."""


class TransportFacts:
    """The facts about one transport. A subclass sets the ones that differ."""

    name: ClassVar[str]
    """Its value of `refit.mover`, and of the entry point of a package's transport."""
    way: ClassVar[str]
    """The reason that a plan gives for it."""
    shares: ClassVar[Literal["", "node", "device"]] = ""
    """Where both ends share staging memory, into which policy ranks write the receiver's image; empty: nowhere, and
    ranks send messages."""
    stored: ClassVar[bool] = False
    """A version is stored under `refit.directory`, and read once it is complete."""
    joins: ClassVar[bool] = False
    """The ends join a process group at a store that policy rank 0 serves; a failed transfer leaves it unusable."""
    whole_only: ClassVar[str] = ""
    """Why it cannot send only changed elements (`refit.sparse`); empty: it can."""

    def suits(self, places: Places) -> bool:
        """Return whether `refit.mover=auto` takes it. Only rlctl's transports are candidates."""
        return False

    def refusal(self, places: Places) -> Refusal | None:
        """Return why it cannot work there; None: it can."""
        return None

    def remark(self, places: Places) -> str:
        """Return a remark for a user who left the choice to `auto`; empty: none."""
        return ""

    def detour_s(self, size: float, rates: Rates) -> float:
        """Return the seconds to take `size` bytes through a medium beside the devices' memory."""
        return 0.0

    def check_directory(self, directory: str) -> None:
        """Raise InputError if `refit.directory` cannot store files. Called before any process starts."""

    def session_directory(self, directory: str | None, session: str) -> str:
        """Return where a session, whose name is unique, stores its versions."""
        return str(Path(directory or ".").absolute() / session)

    def publish(self, directory: str, version: int) -> None:
        """Make a version visible once every sender has stored its part. Called on policy rank 0."""

    def retire(self, directory: str, version: int | None) -> None:
        """Remove all versions except `version` (None: all, and the directory). Called on policy rank 0."""

    def require_place(self, places: Places) -> None:
        """Raise ConfigError if it cannot work there."""
        if refusal := self.refusal(places):
            raise ConfigError(f"refit.mover = {self.name}, but {refusal.why}.", refusal.hint)

    def require_directory(self, directory: str | None) -> None:
        """Raise ConfigError if it stores versions and `refit.directory` is unset."""
        if self.stored and directory is None:
            raise ConfigError(
                f"refit.mover = {self.name} needs refit.directory.",
                "Name a directory that every node can see: --set refit.directory=DIR.",
            )
