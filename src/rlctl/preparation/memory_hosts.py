"""Memory checkpoints on a policy's hosts: a small process per host owns the files, which survive the policy's ranks."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rlctl.cluster.memory_files import SHARED_MEMORY, MemoryFiles
from rlctl.cluster.placement import Bundle
from rlctl.cluster.workers import WorkerGroup
from rlctl.errors import WaitTimeoutError, WorkerError

Starts = Callable[[Bundle, str], WorkerGroup[MemoryFiles]]
"""(bundle on the host, folder) -> the process that owns the folder."""


class MemoryHosts:
    """Implements `Hosts` (training/memory_checkpoints.py) with one process per Ray node."""

    def __init__(self, bundles: Callable[[], Sequence[Bundle]], start: Starts, shared: Path) -> None:
        """`bundles` returns the policy's current bundles. `shared`: a folder on a file system that all hosts share."""
        self._bundles, self._start, self._shared = bundles, start, shared
        self.folder = SHARED_MEMORY / f"rlctl-{secrets.token_hex(8)}"
        self._hosts: dict[str, WorkerGroup[MemoryFiles]] = {}
        """Owner processes by Ray node ID, including nodes that the policy no longer uses."""
        self._files: dict[str, int] = {}
        """Sizes of all files of the newest step, by name."""
        self.renew()

    def place(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def make(self, step: int) -> Path:
        for node in self._first():
            self._hosts[node].call(MemoryFiles.make, step)
        return self.place(step)

    def renew(self) -> None:
        """Drop lost hosts, and start an owner process on each new host of the policy."""
        self._hosts = {node: host for node, host in self._hosts.items() if _answers(host)}
        for node, bundle in self._first().items():
            if node not in self._hosts:
                self._hosts[node] = self._start(bundle, str(self.folder))

    def _first(self) -> dict[str, Bundle]:
        """Return the first bundle on each current node, by node ID."""
        return {bundle.node_id: bundle for bundle in reversed(self._bundles())}

    def spread(self, step: int) -> str | None:
        hosts = [self._hosts[node] for node in self._first()]
        files = [host.call(MemoryFiles.files, step)[0] for host in hosts]
        self._files = {name: size for of_host in files for name, size in of_host.items()}
        if len(hosts) > 1:
            following = [*hosts[1:], hosts[0]]
            pairs = zip(hosts, following, files, strict=True)
            for call in [to.submit(MemoryFiles.copy_from, host.hosts[0], step, of) for host, to, of in pairs]:
                call.results()
        for host in hosts:
            used, [free] = sum(host.call(MemoryFiles.files, step)[0].values()), host.call(MemoryFiles.free)
            if free < used:
                node = host.specs[0].bundles[0].node
                left = f"{node}, which has {free / 1e9:.3g} GB left"
                return f"a checkpoint takes {used / 1e9:.3g} GB of {SHARED_MEMORY} on {left}"
        return None

    def gather(self, step: int) -> Path | None:
        holders: dict[str, WorkerGroup[MemoryFiles]] = {}
        there: dict[str, dict[str, int]] = {}
        for node, host in self._hosts.items():
            [there[node]] = host.call(MemoryFiles.files, step)
            holders |= dict.fromkeys(there[node], host)
        if self._files.keys() - holders.keys():
            return None
        missing = {node: self._files.keys() - there[node].keys() for node in self._first()}
        for node, names in missing.items():
            if sum(self._files[name] for name in names) > self._hosts[node].call(MemoryFiles.free)[0]:
                return self._written_out(step, holders)
        for holder in {
            id(source): source for source in holders.values()
        }.values():  # a host copies from one other at a time
            names_by_node = {
                node: [name for name in names if holders[name] is holder] for node, names in missing.items()
            }
            calls = [
                self._hosts[node].submit(
                    MemoryFiles.copy_from, holder.hosts[0], step, {name: self._files[name] for name in names}
                )
                for node, names in names_by_node.items()
                if names
            ]
            for call in calls:
                call.results()
        return self.place(step)

    def _written_out(self, step: int, holders: dict[str, WorkerGroup[MemoryFiles]]) -> Path:
        """Write all files to the shared folder, because a host lacks the memory for them, and return the folder."""
        calls = [
            holder.submit(MemoryFiles.write_out, step, [name], str(self._shared)) for name, holder in holders.items()
        ]
        for call in calls:
            call.results()
        return self._shared

    def keep(self, step: int | None) -> None:
        shutil.rmtree(self._shared, ignore_errors=True)
        for host in self._hosts.values():
            with contextlib.suppress(WorkerError, WaitTimeoutError):  # a lost host has no files
                host.call(MemoryFiles.keep, [] if step is None else [step])


def _answers(host: WorkerGroup[MemoryFiles]) -> bool:
    try:
        host.within(10.0).call(MemoryFiles.free)
    except (WorkerError, WaitTimeoutError):
        return False
    return True
