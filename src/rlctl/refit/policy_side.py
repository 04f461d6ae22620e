"""The policy's side of a refit, on one rank: which boxes this rank sends, sending them, and their fingerprints.

Every rank makes the plan of each channel and sends its own part. A box that several ranks hold is sent by the nearest
one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from rlctl.checkpoints.plan_execution import transformed
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.cluster.placement import node_address
from rlctl.config.schema import Rounding
from rlctl.errors import WorkerError
from rlctl.refit.exchange import Exchange, Incoming, Outgoing, agent, needs_exchange
from rlctl.refit.records import Made, SenderPlace, SenderSetup, Sent, TableRow
from rlctl.transport import disk
from rlctl.transport.changes import ChangePacker
from rlctl.transport.collective import CollectiveSender, ServedStore
from rlctl.transport.cuda_ipc import device_name
from rlctl.transport.movers import Sender, make_staging, open_sender, sends_messages
from rlctl.transport.round_buffers import Packer, source_view
from rlctl.transport.rounds import Changes, Channel, Lengths, chunk_world, cut_rounds, whole_tensors
from rlctl.transport.shared_memory import Staging, this_node
from rlctl.weights.readings import combine
from rlctl.weights.transfer_plan import (
    Copy,
    Place,
    RememberingWorld,
    SingleWorld,
    Topology,
    TransferPlan,
    World,
    many_objects,
    receive_plan,
    shares_of_rank,
)


@dataclass
class SenderState:
    """Everything that a rank keeps between refits."""

    setup: SenderSetup
    world: World
    rows: dict[str, TableRow]
    senders: dict[int, Sender] = field(default_factory=dict)
    """By channel, where this rank reaches the staging memory."""
    exchange: Exchange | None = None
    """Takes boxes of ranks that do not reach it to those that do; None: all ranks reach it."""
    changes: dict[int, ChangePacker] = field(default_factory=dict)
    """By channel, what was sent last, where only changed elements may be sent."""
    rounds: int = 0
    """Most rounds of a channel."""
    _copies: tuple[Copy, ...] | None = None

    def whole_copies(self, rank: int) -> tuple[Copy, ...]:
        """This rank's share of each published tensor, which it compares with the engines'."""
        if self._copies is None:
            with many_objects():
                self._copies = shares_of_rank(self.world, SingleWorld(whole_tensors(self.setup.table)), rank)
        return self._copies


class RefitSender(ABC):
    """Mixed into a policy worker, which has `rank`, `parameters()` and `layouts()`."""

    rank: int
    stored_alone: frozenset[str] = frozenset()
    """Names in `parameters()` of tensors that no training changes."""
    rounding: Rounding = "unbiased"
    """How weights become narrower ones of an engine."""
    _refit: SenderState | None = None
    _refit_made: dict[int, Staging] | None = None
    """Staging memory that this rank made, by channel."""
    _refit_store: ServedStore | None = None
    _refit_plans: dict[int, TransferPlan]
    """With the collective mover: the plan of each channel, from `refit_make` to `refit_connect`."""
    _refit_device: torch.device | None = None

    @abstractmethod
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """This rank's parameters by name; views of the live weights."""

    @abstractmethod
    def layouts(self) -> World:
        """The layouts of all ranks of the policy."""

    def refit_place(self) -> SenderPlace:
        return SenderPlace(f"policy rank {self.rank}", this_node(), device_name(self._device()), _address())

    def _device(self) -> torch.device:
        """The device of the weights. All ranks look it up once, in `refit_place`: `parameters` may be collective, and
        later calls of this method do not come equally often on all ranks."""
        if self._refit_device is None:
            self._refit_device = next(iter(self.parameters().values())).device
        return self._refit_device

    def refit_make(self, channels: tuple[Channel, ...], places: tuple[SenderPlace, ...], host: str) -> Made:
        self.refit_close()
        self._refit_made, self._refit_plans = {}, {}
        for channel in channels:
            if channel.senders[0] == self.rank and (made := make_staging(channel, self._device())):
                self._refit_made[channel.index] = made
        link = channels[0].connection
        if link.mover == "collective":
            world = RememberingWorld(self.layouts())
            with many_objects():
                self._refit_plans = {channel.index: _plan(world, channel, places) for channel in channels}
            if self.rank == 0:
                self._refit_store = ServedStore(host, link.timeout_s)
        sends = frozenset(index for index, plan in self._refit_plans.items() if plan.from_rank(self.rank))
        port = self._refit_store.port if self._refit_store is not None else None
        addresses = {index: made.segment.address for index, made in self._refit_made.items()}
        handles = {index: made.handles for index, made in self._refit_made.items()}
        return Made(addresses, handles, port, sends)

    def refit_connect(self, setup: SenderSetup) -> tuple[str, ...]:
        world = RememberingWorld(self.layouts())
        state = SenderState(setup, world, {row.name: row for row in setup.table})
        self._refit, problems = state, []
        link = setup.channels[0].connection
        if needs_exchange(setup):
            names = tuple(place.name for place in setup.places)
            state.exchange = Exchange(names, self.rank, self._device(), link.timeout_s)
        with many_objects():
            for channel in setup.channels:
                problems += self._open_channel(state, channel)
        for sender in state.senders.values():
            if isinstance(sender, CollectiveSender):
                sender.introduce()
        return tuple(problems[:8])

    def _open_channel(self, state: SenderState, channel: Channel) -> list[str]:
        """Open this rank's ends of one channel; return the problems of its plan."""
        setup, link = state.setup, channel.connection
        rounds = cut_rounds(channel.layout, link.capacity)
        plan = self._refit_plans.pop(channel.index, None) or _plan(state.world, channel, setup.places)
        own, inside = plan.from_rank(self.rank), self.rank in channel.senders
        if not own and not inside:
            return plan.problems()
        message = not inside or sends_messages(link.mover)
        packer = Packer(rounds, own, message=message, who=f"policy rank {self.rank}", rounding=self.rounding)
        state.rounds = max(state.rounds, len(rounds))
        if inside:
            made = (self._refit_made or {}).get(channel.index)
            state.senders[channel.index] = open_sender(channel, self.rank, packer, made=made, device=self._device())
            if setup.sparse:
                state.changes[channel.index] = ChangePacker(
                    packer, channel.layout, link.capacity, len(channel.senders), channel.index
                )
            away = [rank for rank in plan.sources if agent(channel.senders, rank) == self.rank]
            if state.exchange and (away := [rank for rank in away if rank not in channel.senders]):
                state.exchange.incoming[channel.index] = Incoming(plan, rounds, away, self._device())
        elif state.exchange:
            to = agent(channel.senders, self.rank)
            state.exchange.outgoing[channel.index] = Outgoing(packer, to, self._device())
        return plan.problems()

    def refit_unlink(self) -> None:
        for made in (self._refit_made or {}).values():
            made.segment.unlink()
        if self._refit_store is not None:
            self._refit_store.stop_listening()

    def refit_send(self, version: int, attempt: int) -> Sent:
        state, parameters = self._state(), self.parameters()
        packing = exchanging = 0.0
        count = 0
        incoming = state.exchange.incoming if state.exchange else {}
        with contextlib.ExitStack() as stack, torch.no_grad():
            for sender in state.senders.values():
                stack.enter_context(sender.begin(version, attempt))
                sender.packer.look(parameters)
            if state.exchange:
                state.exchange.start(attempt, parameters)
            for index in range(state.rounds):
                # Every rank goes through rounds and channels in this order, so that none waits for one that waits.
                if state.exchange:
                    waiting = time.perf_counter()
                    state.exchange.round(index)
                    exchanging += time.perf_counter() - waiting
                for channel, sender in sorted(state.senders.items()):
                    if index < len(sender.packer.rounds):
                        packing += self._send_round(sender, index, incoming.get(channel))
                        count += sender.packer.bytes[index]
            for packer in state.changes.values():
                packer.remember()
        exchanged = state.exchange.bytes if state.exchange else 0
        return Sent(packing, count + exchanged, exchanging)

    def _send_round(self, sender: Sender, index: int, incoming: Incoming | None) -> float:
        """Send one round of a channel; return the seconds of copying."""
        buffer = sender.wait(index)
        begun = time.perf_counter()
        sender.packer.pack(index, buffer)
        seconds = time.perf_counter() - begun
        if incoming is not None:
            incoming.put(index, buffer)
        sender.done(index)
        return seconds

    def refit_find_changes(self) -> list[Changes]:
        state, parameters = self._state(), self.parameters()
        with torch.no_grad():
            for packer in state.changes.values():
                packer.packer.look(parameters)
            return [packer.compare() for packer in state.changes.values()]

    def refit_send_changes(self, version: int, attempt: int, lengths: tuple[Lengths, ...]) -> Sent:
        state, packing = self._state(), 0.0
        with contextlib.ExitStack() as stack:
            for sender in state.senders.values():
                stack.enter_context(sender.begin(version, attempt))
            for index in range(max(map(len, lengths), default=0)):
                for channel, sender in state.senders.items():
                    if index < len(lengths[channel]):
                        packing += self._send_changes(channel, sender, index, lengths[channel][index])
        count = sum(packer.size for packer in state.changes.values())
        for packer in state.changes.values():
            packer.forget()
        return Sent(packing, count)

    def _send_changes(self, channel: int, sender: Sender, index: int, lengths: tuple[int, ...]) -> float:
        memory = sender.wait_changes(index)
        begun = time.perf_counter()
        self._state().changes[channel].pack(index, memory)
        seconds = time.perf_counter() - begun
        sender.done_changes(index, lengths[self._state().setup.channels[channel].senders.index(self.rank)])
        return seconds

    def refit_publish(self, version: int) -> None:
        if self.rank == 0:
            disk.publish(self._state().setup.channels[0].connection.directory, version)

    def refit_retire(self, version: int | None) -> None:
        if self.rank == 0:
            disk.remove_others(self._state().setup.channels[0].connection.directory, version)

    def refit_fingerprints(self, tensors: list[str] | None = None) -> dict[str, int]:
        state, wanted = self._state(), None if tensors is None else set(tensors)
        sums: dict[str, int] = {}
        for copy, values in self._boxes(wanted):
            row = state.rows[copy.tensor]
            starts, steps = [s.start for s in copy.tensor_box], [s.step for s in copy.tensor_box]
            values = transformed(values, copy, rounding=self.rounding).to(getattr(torch, row.dtype))
            value = fingerprint(values, row.shape, starts, steps)
            sums[copy.tensor] = combine([sums.get(copy.tensor, 0), value])
        return sums

    def refit_perturb(self, seed: int, scale: float, share: float = 1.0) -> None:
        self._perturb(self._state().world, seed, scale, share)

    def _perturb(self, world: World, seed: int, scale: float, share: float) -> None:
        held = {p.param: f"{p.tensor}{p.tensor_box}" for p in world.layout(self.rank).pieces}
        for name, parameter in self.parameters().items():
            if name in self.stored_alone:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}{held.get(name, name)}".encode()))
            noise = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if share < 1:
                noise *= torch.rand(parameter.shape, generator=generator) < share
            with torch.no_grad():
                parameter.add_(noise.to(parameter))

    def refit_values(self, tensor: str) -> list[tuple[list[tuple[int, int, int]], np.ndarray]]:
        return [
            (
                [(s.start, s.count, s.step) for s in copy.tensor_box],
                transformed(values, copy, rounding=self.rounding).float().cpu().numpy(),
            )
            for copy, values in self._boxes({tensor})
        ]

    def refit_copy_gb_per_s(self, size: int) -> float | None:
        """The best of three, into pages that exist: the most that a refit on one device can reach."""
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
        for sender in self._refit.senders.values() if self._refit else ():
            sender.close()
        for made in (self._refit_made or {}).values():
            made.segment.close()
        self._refit = self._refit_made = self._refit_store = None

    def _boxes(self, tensors: set[str] | None) -> Iterator[tuple[Copy, torch.Tensor]]:
        """Yield this rank's share of published tensors (None: all), with the live memory of each box."""
        parameters, who = self.parameters(), f"policy rank {self.rank}"
        for copy in self._state().whole_copies(self.rank):
            if tensors is None or copy.tensor in tensors:
                yield copy, source_view(copy, parameters, who)

    def _state(self) -> SenderState:
        if self._refit is None:
            raise WorkerError("The policy was asked to take part in a refit before refit_connect was called.")
        return self._refit


def _plan(world: World, channel: Channel, places: tuple[SenderPlace, ...]) -> TransferPlan:
    """Return what the receivers of a channel get from which rank."""
    rounds = cut_rounds(channel.layout, channel.connection.capacity)
    senders = tuple(Place(node=place.node, device=place.device) for place in places)
    topology = Topology(senders, (Place(node=channel.node, device=channel.device),))
    return receive_plan(world, chunk_world(channel.layout, rounds), 0, topology)


def _finish_copies(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _address() -> str:
    """An address of this node that others can reach: the user's, Ray's, or that of the route out of this network."""
    if name := os.environ.get("RLCTL_ADDRESS") or node_address():
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:  # there is no route out of this network, and its members know the name
            return socket.gethostname()
