"""The transports by name: built in, and of installed packages by the entry-point group `rlctl.transports`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress

from rlctl.config.plugins import EntryPointGroup, load_named, plugin_names
from rlctl.errors import InputError
from rlctl.transport.facts import Places, TransportFacts

GROUP: EntryPointGroup = "rlctl.transports"
PLACE = "rlctl.transport"
BUILT_IN = {
    "shared-memory": f"{PLACE}.shared_memory:SharedMemory",
    "cuda-ipc": f"{PLACE}.cuda_ipc:CudaIpc",
    "collective": f"{PLACE}.collective:Collective",
    "disk": f"{PLACE}.disk:Disk",
}
"""`module:Class` of each, in the order in which `auto` asks them."""


def names() -> tuple[str, ...]:
    """Return the names of all transports without importing them."""
    return tuple(dict.fromkeys((*BUILT_IN, *plugin_names(GROUP))))


@functools.cache
def transport_facts(name: str) -> TransportFacts:
    """Return a transport's facts. Raises InputError for an unknown name or a broken package."""
    made = load_named(GROUP, name, BUILT_IN)
    if not (isinstance(made, type) and issubclass(made, TransportFacts)):
        raise InputError(
            f"The transport {name!r} is not a class of a transport.", "Derive it from rlctl.transport.movers.Transport."
        )
    if getattr(made, "name", None) != name:
        raise InputError(
            f"The transport {name!r} has the name {getattr(made, 'name', None)!r} in its class.",
            "Give the entry point and the class the same name.",
        )
    return made()


def choose(places: Places) -> str:
    """Return the transport that `refit.mover=auto` takes."""
    return next(name for name in BUILT_IN if transport_facts(name).suits(places))


def storing() -> Iterator[str]:
    """Yield the names of the transports that store versions under `refit.directory`."""
    for name in names():
        with suppress(InputError):  # a broken package stores no file
            if transport_facts(name).stored:
                yield name
