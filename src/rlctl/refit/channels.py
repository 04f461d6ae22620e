"""The driver's plan of a session: each channel's readers, writers and mover."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.config.facts import UNDECIDED
from rlctl.refit.records import SenderPlace, Share, TableRow
from rlctl.transport.available import choose, transport_facts
from rlctl.transport.facts import Places
from rlctl.transport.rounds import Channel, Connection, Need, buffer_bytes, cut_rounds

MIB = 1 << 20
CPU_STAGING = 16 * MIB
"""Two buffers that stay in a processor's cache (benchmarks/RESULTS.md)."""
GPU_STAGING = 256 * MIB
"""On a GPU a round costs tens of microseconds and little per byte. The planner uses this unmeasured size."""


def staging_bytes(staging_mb: int | None, needs: Sequence[Need]) -> int:
    """Bytes of the two buffers of an engine worker, or of all kinds: as asked, or by where the engines compute."""
    if staging_mb is not None:
        return staging_mb * MIB
    return GPU_STAGING if any(need.device.startswith("cuda") for need in needs) else CPU_STAGING


def where(needs: Sequence[Need], places: Sequence[SenderPlace]) -> Places:
    """Return where the engines' workers compute, beside the policy's ranks."""
    nodes, devices = {place.node for place in places}, {place.device for place in places}
    away = next((need for need in needs if need.node not in nodes), None)
    elsewhere = next((need for need in needs if need.device not in devices), None)
    return Places(
        on_cpu=not any(need.device.startswith("cuda") for need in needs),
        elsewhere=f"{elsewhere.name} has a separate device" if elsewhere else "",
        away=f"no policy rank is on the node of {away.name} ({away.node})" if away else "",
        barred=why_not_shared(places),
    )


def choose_mover(name: str, places: Places, directory: str | None) -> str:
    """Return the mover asked for, or with `auto` one that fits the places. Raises ConfigError if it cannot work."""
    if name in UNDECIDED:
        return choose(places)
    transport_facts(name).require_place(places)
    transport_facts(name).require_directory(directory)
    return name


def why_not_shared(places: Sequence[SenderPlace]) -> str:
    """Return the first policy rank whose GPU memory cannot be shared, with the reason; empty: all can."""
    barred = next((place for place in places if place.not_shared), None)
    return f"{barred.name} cannot share GPU memory by CUDA IPC ({barred.not_shared})" if barred else ""


def plan_channels(
    mover: str,
    needs: Sequence[Need],
    places: Sequence[SenderPlace],
    *,
    staging_bytes: int,
    timeout_s: float,
    sparse: bool = False,
    directory: str | None = None,
) -> tuple[Channel, ...]:
    """Plan one channel for all workers that need the same bytes from the same memory, ordered by node so that chained
    rounds rarely cross nodes."""
    groups: dict[tuple, list[Need]] = {}
    for need in needs:
        place = shared_place(mover, need)
        groups.setdefault((place, tuple(need.layout.params.items()), need.layout.pieces), []).append(need)
    channels = []
    near = {place.node for place in places}
    # Where messages are sent, a rank may have buffers for channels of every kind, which share the room of one. There
    # are no more rounds for it: each worker of an engine has a part of the model.
    alone = (
        transport_facts(mover).shares != ""
        and len({shared_place(mover, receiver) for receiver in (*needs, *places)}) == 1
    )
    kinds = 1 if alone else len({key[1:] for key in groups})
    for index, group in enumerate(groups.values()):
        first, *more = sorted(group, key=lambda need: (need.node not in near, need.node))
        senders = tuple(
            rank for rank, place in enumerate(places) if shared_place(mover, place) == shared_place(mover, first)
        )
        connection = Connection(
            mover=mover,
            # no more than there is to send, in whole pages
            capacity=-(-buffer_bytes(cut_rounds(first.layout, max(1, staging_bytes // kinds // 2))) // 4096) * 4096,
            senders=tuple(places[rank].name for rank in senders),
            receivers=tuple(need.name for need in (first, *more)),
            timeout_s=timeout_s,
            directory=directory,
            channel=index,
            sparse=sparse,
        )
        channels.append(Channel(index, first.layout, first.node, first.device, senders, connection))
    return tuple(channels)


def shared_place(mover: str, party: Need | SenderPlace) -> str | None:
    """Return the place that two parties must share for staging memory; None: none."""
    return {"": None, "node": party.node, "device": party.device}[transport_facts(mover).shares]


def meeting_host(needs: Sequence[Need], places: Sequence[SenderPlace]) -> str:
    """Return the rendezvous address of a collective group: policy rank 0's."""
    return "127.0.0.1" if len({receiver.node for receiver in (*needs, *places)}) == 1 else places[0].address


def paths_of(table: Sequence[TableRow], needs: Sequence[Need]) -> dict[str, tuple[tuple[str, str], ...]]:
    """How each tensor comes into the engines' workers, as (path, reason), in the order of `table`."""
    routes: dict[str, dict[tuple[str, str], None]] = {row.name: {} for row in table}
    for route in {route for need in needs for route in need.routes}:
        for tensor in route.tensors:
            routes[tensor][route.path, route.reason] = None
    return {tensor: tuple(sorted(paths)) for tensor, paths in routes.items()}


def shares_of(table: Sequence[TableRow], paths: dict[str, tuple[tuple[str, str], ...]]) -> tuple[Share, ...]:
    rows: dict[tuple[str, str], list[TableRow]] = {}
    for row in table:
        for path in paths[row.name]:
            rows.setdefault(path, []).append(row)
    return tuple(
        Share(*path, len(rows_of_path), sum(row.bytes for row in rows_of_path))
        for path, rows_of_path in sorted(rows.items())
    )
