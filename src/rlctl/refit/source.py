"""The policy's side of a refit, on one rank: which boxes this rank sends, sending them, and their fingerprints.

Every rank works out its own part of the transfer plan; of several ranks that hold the same box, the plan lets one
send it, the nearest first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlctl.backends.vllm import weight_files
from rlctl.backends.vllm.channel import Lengths, chunk_world, cut_rounds, whole_tensors
from rlctl.backends.vllm.cuda_buffers import device_name
from rlctl.backends.vllm.group import Group, serve_store
from rlctl.backends.vllm.segment import Segment, this_node
from rlctl.checkpoints.fingerprints import fingerprint
from rlctl.checkpoints.tensors import transformed
from rlctl.cluster.placement import node_address
from rlctl.errors import WorkerError
from rlctl.refit import cuda_ipc, shared_memory
from rlctl.refit.collective import CollectiveOutlet
from rlctl.refit.exchange import Exchange, Incoming, Outgoing, agent, needs_exchange
from rlctl.refit.mover import Outlet, open_outlet, sends_messages
from rlctl.refit.packing import Packer, source_view
from rlctl.refit.records import Changes, Channel, Made, Opened, Sent, SourcePlace, SourceSetup, TableRow
from rlctl.refit.sparse import SparsePacker
from rlctl.weights.fingerprints import combine
from rlctl.weights.plan import (
    Copy,
    Place,
    RememberingWorld,
    SingleWorld,
    Topology,
    World,
    many_objects,
    receive_plan,
    send_plan,
)


@dataclass
class SourceState:
    """What a rank keeps between refits."""

    setup: SourceSetup
    world: World
    rows: dict[str, TableRow]
    outlets: dict[int, Outlet] = field(default_factory=dict)
    """By channel, where this rank is beside the staging memory."""
    exchange: Exchange | None = None
    """Where some rank is not: what those send to the others."""
    sparse: dict[int, SparsePacker] = field(default_factory=dict)
    """By channel, what was sent last, where changed elements alone may be sent."""
    rounds: int = 0
    """Most rounds of a channel."""
    group: Group | None = None
    """With the collective mover: the group of policy ranks and engine workers."""
    sent: Sent | None = None
    _copies: tuple[Copy, ...] | None = None

    def whole_copies(self, rank: int) -> tuple[Copy, ...]:
        """This rank's share of each published tensor: what it answers for in a comparison."""
        if self._copies is None:
            rows = [(row.name, row.dtype, row.shape) for row in self.setup.table]
            with many_objects():
                self._copies = send_plan(self.world, SingleWorld(whole_tensors(rows)), rank)
        return self._copies


class RefitSource(ABC):
    """Mixed into a policy worker, which has `rank` and `parameters()`."""

    rank: int
    _refit: SourceState | None = None
    _refit_made: dict[int, Segment] | None = None
    """Staging memory that this rank made, by channel."""
    _refit_buffers: dict[int, list[torch.Tensor]] | None = None
    _refit_store: Any = None
    _refit_device: torch.device | None = None

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's parameters by name; views of the live weights."""

    @abstractmethod
    def refit_world(self, setup: SourceSetup) -> World:
        """The layouts of all ranks of the policy."""

    def refit_place(self) -> SourcePlace:
        """Where this rank runs."""
        return SourcePlace(f"policy rank {self.rank}", this_node(), device_name(self._device()), _address())

    def _device(self) -> torch.device:
        """Of the weights. Looked up once, by all ranks in `refit_place`: for `parameters` they may have to gather them
        together, and not every rank comes by here equally often."""
        if self._refit_device is None:
            self._refit_device = next(iter(self.parameters().values())).device
        return self._refit_device

    def refit_make(self, channels: tuple[Channel, ...], host: str) -> Made:
        """Make what others connect to: staging memory (the first sender of a channel), a store at `host` (rank 0)."""
        self.refit_close()
        self._refit_made, self._refit_buffers = {}, {}
        for channel in channels:
            rounds = len(cut_rounds(channel.layout, channel.connection.capacity))
            if channel.connection.mover == "shared-memory" and channel.senders[0] == self.rank:
                self._refit_made[channel.index] = shared_memory.make(channel, rounds)
            if channel.connection.mover == "cuda-ipc" and channel.senders[0] == self.rank:
                made, buffers = cuda_ipc.make(channel, rounds, self._device())
                self._refit_made[channel.index], self._refit_buffers[channel.index] = made, buffers
        link = channels[0].connection
        if link.mover == "collective" and self.rank == 0:
            self._refit_store = serve_store(host, link.timeout_s)
        port = self._refit_store.port if self._refit_store is not None else None
        handles = {index: cuda_ipc.handles(buffers) for index, buffers in self._refit_buffers.items()}
        return Made({index: segment.address for index, segment in self._refit_made.items()}, handles, port)

    def refit_open(self, setup: SourceSetup) -> Opened:
        """Work out what this rank sends, and open its ends of the channels."""
        world = RememberingWorld(self.refit_world(setup))
        state = SourceState(setup, world, {row.name: row for row in setup.table})
        self._refit, problems, copies = state, [], 0
        link = setup.channels[0].connection
        if link.group is not None:
            state.group = Group(link.group, self.rank, self._device(), link.timeout_s)
        if needs_exchange(setup):
            names = tuple(place.name for place in setup.places)
            state.exchange = Exchange(names, self.rank, self._device(), link.timeout_s)
        with many_objects():
            for channel in setup.channels:
                copies += self._open_channel(state, channel, problems)
        for outlet in state.outlets.values():
            if isinstance(outlet, CollectiveOutlet):
                outlet.introduce()
        return Opened(self.rank, copies, tuple(problems[:8]))

    def _open_channel(self, state: SourceState, channel: Channel, problems: list[str]) -> int:
        """This rank's ends of one channel; returns the number of its copies."""
        setup, link = state.setup, channel.connection
        rounds = cut_rounds(channel.layout, link.capacity)
        places = tuple(Place(node=place.node, device=place.device) for place in setup.places)
        topology = Topology(places, (Place(node=channel.node, device=channel.device),))
        plan = receive_plan(state.world, chunk_world(channel.layout, rounds), 0, topology)
        problems += plan.problems()
        own, inside = plan.from_rank(self.rank), self.rank in channel.senders
        if not own and not inside:
            return 0
        message = not inside or sends_messages(link.mover)
        packer = Packer(rounds, own, message=message, who=f"policy rank {self.rank}")
        state.rounds = max(state.rounds, len(rounds))
        if inside:
            state.outlets[channel.index] = open_outlet(
                channel,
                self.rank,
                packer,
                made=(self._refit_made or {}).get(channel.index),
                buffers=(self._refit_buffers or {}).get(channel.index, []),
                group=state.group,
            )
            if setup.sparse:
                state.sparse[channel.index] = SparsePacker(
                    packer, channel.layout, link.capacity, len(channel.senders), channel.index
                )
            away = [rank for rank in plan.sources if agent(channel.senders, rank) == self.rank]
            if state.exchange and (away := [rank for rank in away if rank not in channel.senders]):
                state.exchange.incoming[channel.index] = Incoming(plan, rounds, away, self._device())
        elif state.exchange:
            to = agent(channel.senders, self.rank)
            state.exchange.outgoing[channel.index] = Outgoing(packer, to, self._device())
        return len(own)

    def refit_unlink(self) -> None:
        """All sides have the staging memory mapped: take its name away, so that nothing outlives the processes."""
        for segment in (self._refit_made or {}).values():
            segment.unlink()

    def refit_send(self, version: int, epoch: int) -> Sent:
        """Send this rank's boxes as `version`, from the live parameters; `epoch` numbers the session's attempts."""
        begun, state, parameters = time.perf_counter(), self._state(), self.parameters()
        packing = exchanging = count = 0
        incoming = state.exchange.incoming if state.exchange else {}
        with contextlib.ExitStack() as stack, torch.no_grad():
            for outlet in state.outlets.values():
                stack.enter_context(outlet.begin(version, epoch))
                outlet.packer.look(parameters)
            if state.exchange:
                state.exchange.start(epoch, parameters)
            for index in range(state.rounds):
                # Every rank goes through rounds and channels in this order, so that none waits for one that waits.
                if state.exchange:
                    waiting = time.perf_counter()
                    state.exchange.round(index)
                    exchanging += time.perf_counter() - waiting
                for channel, outlet in sorted(state.outlets.items()):
                    if index < len(outlet.packer.rounds):
                        packing += self._send_round(outlet, index, incoming.get(channel))
                        count += outlet.packer.bytes[index]
            for packer in state.sparse.values():
                packer.remember()
        exchanged = state.exchange.bytes if state.exchange else 0
        state.sent = Sent(self.rank, time.perf_counter() - begun, packing, count + exchanged, exchanged, exchanging)
        return state.sent

    def _send_round(self, outlet: Outlet, index: int, incoming: Incoming | None) -> float:
        """Seconds of copying."""
        buffer = outlet.wait(index)
        begun = time.perf_counter()
        outlet.packer.pack(index, buffer)
        seconds = time.perf_counter() - begun
        if incoming is not None:
            incoming.put(index, buffer)
        outlet.done(index)
        return seconds

    def refit_compare(self) -> list[Changes]:
        """What has changed since the last refit, by channel; kept for `refit_send_changes`."""
        state, parameters = self._state(), self.parameters()
        with torch.no_grad():
            for packer in state.sparse.values():
                packer.packer.look(parameters)
            return [packer.compare() for packer in state.sparse.values()]

    def refit_send_changes(self, version: int, epoch: int, lengths: tuple[Lengths, ...]) -> Sent:
        """Send what `refit_compare` found: by channel, what each sender sends in each round."""
        begun, state, packing = time.perf_counter(), self._state(), 0.0
        with contextlib.ExitStack() as stack:
            for outlet in state.outlets.values():
                stack.enter_context(outlet.begin(version, epoch))
            for index in range(max(map(len, lengths), default=0)):
                for channel, outlet in state.outlets.items():
                    if index < len(lengths[channel]):
                        packing += self._send_changes(channel, outlet, index, lengths[channel][index])
        count = sum(packer.size for packer in state.sparse.values())
        for packer in state.sparse.values():
            packer.forget()
        state.sent = Sent(self.rank, time.perf_counter() - begun, packing, count)
        return state.sent

    def _send_changes(self, channel: int, outlet: Outlet, index: int, lengths: tuple[int, ...]) -> float:
        """Seconds of copying."""
        memory = outlet.wait_changes(index)
        begun = time.perf_counter()
        self._state().sparse[channel].pack(index, memory)
        seconds = time.perf_counter() - begun
        outlet.done_changes(index, lengths[self._state().setup.channels[channel].senders.index(self.rank)])
        return seconds

    def refit_sent(self) -> Sent | None:
        """What the last refit was on this rank."""
        return self._state().sent

    def refit_publish(self, version: int) -> None:
        """With the disk mover, once every rank has sent: make the version visible (rank 0)."""
        if self.rank == 0:
            weight_files.publish(self._state().setup.channels[0].connection.directory, version)

    def refit_retire(self, version: int | None) -> None:
        """With the disk mover, once every engine has loaded: remove the other versions (rank 0; None: all)."""
        if self.rank == 0:
            weight_files.remove_others(self._state().setup.channels[0].connection.directory, version)

    def refit_fingerprints(self, tensors: list[str] | None = None) -> dict[str, int]:
        """Fingerprints of this rank's share of each tensor (None: all), in the engine's dtype; shares add up."""
        state, wanted = self._state(), None if tensors is None else set(tensors)
        sums: dict[str, int] = {}
        for copy, values in self._boxes(wanted):
            row = state.rows[copy.tensor]
            starts, steps = [s.start for s in copy.tensor_box], [s.step for s in copy.tensor_box]
            values = transformed(values, copy).to(getattr(torch, row.dtype))
            value = fingerprint(values, row.shape, starts, steps)
            sums[copy.tensor] = combine([sums.get(copy.tensor, 0), value])
        return sums

    def refit_perturb(self, seed: int, scale: float, share: float = 1.0) -> None:
        """Change elements by noise that replicas share (`share` of them): for tests of a refit, never in a run."""
        self._perturb(self._state().world, seed, scale, share)

    def _perturb(self, world: World, seed: int, scale: float, share: float) -> None:
        held = {p.param: f"{p.tensor}{p.tensor_box}" for p in world.layout(self.rank).pieces}
        for name, parameter in self.parameters().items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}{held.get(name, name)}".encode()))
            noise = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if share < 1:
                noise *= torch.rand(parameter.shape, generator=generator) < share
            with torch.no_grad():
                parameter.add_(noise.to(parameter))

    def refit_values(self, tensor: str) -> list[tuple[list[tuple[int, int, int]], np.ndarray]]:
        """This rank's boxes of one tensor: (start, count, step) of each dimension, and the values as float32."""
        return [
            ([tuple(span) for span in copy.tensor_box], transformed(values, copy).float().cpu().numpy())
            for copy, values in self._boxes({tensor})
        ]

    def refit_copy_gb_per_s(self, size: int) -> float | None:
        """Speed of copying `size` bytes within the memory of this rank's weights: what a colocated refit can at most
        reach.

        Best of three, into pages that exist; None on ranks other than 0.
        """
        if self.rank != 0:
            return None
        device = self._device()
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target, best = torch.zeros_like(source), float("inf")
        for _ in range(3):
            _finish_copies(device)
            begun = time.perf_counter()
            target.copy_(source)
            _finish_copies(device)
            best = min(best, time.perf_counter() - begun)
        return size / 1e9 / best

    def refit_close(self) -> None:
        """Let go of the staging memory and of every connection."""
        for outlet in self._refit.outlets.values() if self._refit else ():
            outlet.close()
        for segment in (self._refit_made or {}).values():
            segment.close()
        if self._refit and self._refit.group:
            self._refit.group.close()
        self._refit = self._refit_made = self._refit_buffers = self._refit_store = None

    def _boxes(self, tensors: set[str] | None) -> Iterator[tuple[Copy, torch.Tensor]]:
        """This rank's share of published tensors (None: all), and the live memory of each box."""
        parameters, who = self.parameters(), f"policy rank {self.rank}"
        for copy in self._state().whole_copies(self.rank):
            if tensors is None or copy.tensor in tensors:
                yield copy, source_view(copy, parameters, who)

    def _state(self) -> SourceState:
        if self._refit is None:
            raise WorkerError("The policy was asked to refit before refit_open.")
        return self._refit


def _finish_copies(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _address() -> str:
    """An address of this node that other nodes can reach: as the user says, else Ray's, else that of the way out of
    this network (no packet is sent)."""
    if name := os.environ.get("RLCTL_ADDRESS") or node_address():
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:  # no route out of this network: members of it know the name
            return socket.gethostname()
