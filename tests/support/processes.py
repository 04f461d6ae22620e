"""Which processes of a run are alive, and what they have open."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable

import psutil


def family_of(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs still; one that nobody has buried does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def listening(processes: Iterable[psutil.Process]) -> dict[str, set[str]]:
    """The addresses at which each process listens, by its name; those that are gone are passed over."""
    found: dict[str, set[str]] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            sockets = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            found.setdefault(process.name(), set()).update(one.laddr.ip for one in sockets)
    return found


def beyond_loopback(processes: Iterable[psutil.Process]) -> list[str]:
    """Processes that others on the network could reach, with the address."""
    return [
        f"{name} at {address}"
        for name, addresses in listening(processes).items()
        for address in addresses
        if not is_loopback(address)
    ]


def is_loopback(address: str) -> bool:
    one = ipaddress.ip_address(address)
    return (getattr(one, "ipv4_mapped", None) or one).is_loopback
