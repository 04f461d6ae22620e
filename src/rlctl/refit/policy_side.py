"""The policy's side of a refit on one rank: its boxes, sending, and fingerprints. Every rank plans each channel; the
nearest holder sends a box."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from rlctl.backends.adapter_source import AdaptedPolicy, AdapterSource
from rlctl.backends.base import WeightSource
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.cluster.placement import node_address
from rlctl.garbage import many_objects
from rlctl.refit.exchange import Exchange, needs_exchange, relay
from rlctl.refit.records import Made, SenderPlace, SenderSetup, Sent
from rlctl.transport.changed_elements import ChangePacker
from rlctl.transport.device_memory import device_name, why_not_shared
from rlctl.transport.movers import Sender, Transport, transport
from rlctl.transport.process_group import ServedStore
from rlctl.transport.round_buffers import Packer, source_view
from rlctl.transport.rounds import ChangeSizes, Channel, Lengths, chunk_layout, cut_rounds, whole_tensors
from rlctl.transport.staging import Staging, this_node
from rlctl.weights.adapters import AdapterRow
from rlctl.weights.plan_execution import transformed
from rlctl.weights.readings import combine
from rlctl.weights.transfer_plan import Copy, RememberingWorld, TransferPlan, World, receive_plan


@dataclass
class ChannelEnd:
    """This rank's end of a channel that it writes to."""

    channel: Channel
    packer: Packer
    sender: Sender
    changes: ChangePacker | None
    """The values that were sent last, where only changed elements may be sent."""


@dataclass
class SenderState:
    """Everything that a rank keeps between refits."""

    world: World
    transport: Transport
    staging: dict[int, Staging]
    """Memory that this rank made, by channel."""
    store: ServedStore | None
    plans: dict[int, TransferPlan] = field(default_factory=dict)
    """By channel, until it is opened."""
    setup: SenderSetup = field(default_factory=lambda: SenderSetup(()))
    ends: dict[int, ChannelEnd] = field(default_factory=dict)
    """By channel."""
    exchange: Exchange | None = None
    """Relays boxes of ranks without staging memory to ranks with it; None: all ranks have it."""
    rounds: int = 0
    """Most rounds of a channel."""
    whole_copies: tuple[Copy, ...] | None = None
    """This rank's share of each published tensor, for the comparison with the engines'."""


class RefitSender:
    """Sends the weights of one policy rank; methods as in `WeightSender`."""

    def __init__(self, source: WeightSource) -> None:
        self.source, self.rank = source, source.rank
        self._refit: SenderState | None = None
        self._refit_device: torch.device | None = None

    def refit_place(self) -> SenderPlace:
        address = os.environ.get("RLCTL_ADDRESS") or node_address() or socket.gethostname()
        device = self._device()
        name = f"policy rank {self.rank}"
        return SenderPlace(name, this_node(), device_name(device), address, why_not_shared(device))

    def _device(self) -> torch.device:
        """The weights' device, looked up once in `refit_place` on all ranks, because `parameters` may be collective."""
        if self._refit_device is None:
            self._refit_device = next(iter(self.source.parameters().values())).device
        return self._refit_device

    def refit_make(self, channels: tuple[Channel, ...], places: tuple[SenderPlace, ...], host: str) -> Made:
        self.refit_close()
        link = channels[0].connection
        mover = transport(link.mover)
        own_channels = (channel for channel in channels if mover.shares and channel.senders[0] == self.rank)
        made = {channel.index: mover.make_staging(channel, self._device()) for channel in own_channels}
        store = ServedStore(host, link.timeout_s) if mover.joins and self.rank == 0 else None
        state = self._refit = SenderState(RememberingWorld(self.source.layouts()), mover, made, store)
        with many_objects():
            state.plans = {channel.index: _plan(state.world, channel, channels, places) for channel in channels}
        addresses = {index: buffers.segment.address for index, buffers in made.items()}
        handles = {index: buffers.handles for index, buffers in made.items()}
        sends = frozenset(index for index, plan in state.plans.items() if plan.from_rank(self.rank))
        return Made(addresses, handles, store.port if store else None, sends)

    def refit_connect(self, setup: SenderSetup) -> tuple[str, ...]:
        state, problems, link = self._state(), list[str](), setup.channels[0].connection
        state.setup = setup
        if needs_exchange(setup):
            state.exchange = Exchange(tuple(place.name for place in setup.places), self._device(), link.timeout_s)
        with many_objects():
            for channel in setup.channels:
                problems += self._open_channel(state, channel)
        for end in state.ends.values():
            end.sender.introduce()
        return tuple(problems[:8])

    def _open_channel(self, state: SenderState, channel: Channel) -> list[str]:
        """Open this rank's ends of one channel; return the problems of its plan."""
        link = channel.connection
        rounds = cut_rounds(channel.layout, link.capacity)
        plan = state.plans.pop(channel.index)
        copies, inside = plan.from_rank(self.rank), self.rank in channel.senders
        if not copies and not inside:
            return plan.problems()
        messages = not state.transport.shares
        packer = Packer(rounds, copies, message=messages or not inside, rounding=self.source.rounding)
        state.rounds = max(state.rounds, len(rounds))
        if inside:
            staging = state.staging.get(channel.index)
            sender = state.transport.sender(channel, self.rank, packer, staging=staging, device=self._device())
            place = 0 if messages else channel.senders.index(self.rank)
            changes = ChangePacker(packer, channel, place) if link.sparse else None
            state.ends[channel.index] = ChannelEnd(channel, packer, sender, changes)
            away = [rank for rank in plan.sources if rank not in channel.senders]
            away = [rank for rank in away if relay(channel.senders, rank) == self.rank]
            if state.exchange and away:
                state.exchange.send_for(channel.index, plan, rounds, away)
        elif state.exchange:
            state.exchange.send_through(channel.index, packer, relay(channel.senders, self.rank))
        return plan.problems()

    def refit_unlink(self) -> None:
        state = self._state()
        for made in state.staging.values():
            made.segment.unlink()
        if state.store is not None:
            state.store.stop_listening()

    def refit_send(self, version: int, attempt: int) -> Sent:
        state, parameters = self._state(), self.source.sent_parameters()
        packing = exchanging = 0.0
        count = 0
        with contextlib.ExitStack() as stack, torch.no_grad():
            for end in state.ends.values():
                stack.enter_context(end.sender.begin(version, attempt))
                end.packer.look(parameters)
            if state.exchange:
                state.exchange.start(attempt, parameters)
            for index in range(state.rounds):
                # Every rank goes through rounds and channels in this order, so that none waits for one that waits.
                if state.exchange:
                    waiting = time.perf_counter()
                    state.exchange.round(index)
                    exchanging += time.perf_counter() - waiting
                for end in state.ends.values():
                    if index < len(end.packer.rounds):
                        packing += self._send_round(end, index)
                        count += end.packer.bytes[index]
            for end in state.ends.values():
                if end.changes:
                    end.changes.remember()
                self._forget(end)
        exchanged = 0
        if state.exchange:
            exchanged = state.exchange.bytes
            state.exchange.finish(forget=self.source.sends_copies)
        return Sent(packing, count + exchanged, exchanging)

    def _send_round(self, end: ChannelEnd, index: int) -> float:
        buffer = end.sender.wait(index)
        begun = time.perf_counter()
        end.packer.pack(index, buffer)
        seconds = time.perf_counter() - begun
        if exchange := self._state().exchange:
            exchange.put(end.channel.index, index, buffer)
        end.sender.done(index, end.packer.lengths[index])
        return seconds

    def refit_find_changes(self) -> list[ChangeSizes]:
        parameters, changes_found = self.source.sent_parameters(), []
        with torch.no_grad():
            for end in self._state().ends.values():
                end.packer.look(parameters)
                if end.changes:
                    changes_found.append(end.changes.compare())
        return changes_found

    def refit_send_changes(self, version: int, attempt: int, lengths: tuple[Lengths, ...]) -> Sent:
        ends, packing, count = self._state().ends, 0.0, 0
        with contextlib.ExitStack() as stack:
            for end in ends.values():
                stack.enter_context(end.sender.begin(version, attempt))
            for index in range(max(map(len, lengths), default=0)):
                for channel, end in ends.items():
                    if index < len(lengths[channel]) and end.changes:
                        memory = end.sender.wait(index)
                        begun = time.perf_counter()
                        end.changes.pack(index, memory)
                        packing += time.perf_counter() - begun
                        end.sender.done(index, lengths[channel][index][end.channel.senders.index(self.rank)])
        for end in ends.values():
            if end.changes:
                count += end.changes.size
                end.changes.forget()
            self._forget(end)
        return Sent(packing, count)

    def _forget(self, end: ChannelEnd) -> None:
        if self.source.sends_copies:
            end.packer.look({})

    def refit_publish(self, version: int) -> None:
        if self.rank == 0:
            self._state().transport.publish(self._directory(), version)

    def refit_retire(self, version: int | None) -> None:
        if self.rank == 0:
            self._state().transport.retire(self._directory(), version)

    def refit_fingerprints(self, tensors: list[str] | None = None, merged: bool = False) -> dict[str, int]:
        names = None if tensors is None else set(tensors)
        rows = {row.name: row for row in self._state().setup.table}
        sums: dict[str, int] = {}
        parameters = self.source.parameters() if merged else self.source.sent_parameters()
        for copy, values in self._boxes(names, parameters):
            row = rows[copy.tensor]
            starts, steps = [s.start for s in copy.tensor_box], [s.step for s in copy.tensor_box]
            values = transformed(values, copy, rounding=self.source.rounding).to(getattr(torch, row.dtype))
            value = fingerprint(values, row.shape, starts, steps)
            sums[copy.tensor] = combine([sums.get(copy.tensor, 0), value])
        return sums

    def refit_perturb(self, seed: int, scale: float, share: float = 1.0) -> None:
        boxes = {p.param: f"{p.tensor}{p.tensor_box}" for p in self.source.layouts().layout(self.rank).pieces}
        for name, parameter in self.source.parameters().items():
            if name in self.source.stored_alone:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}{boxes.get(name, name)}".encode()))
            noise = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if share < 1:
                noise *= torch.rand(parameter.shape, generator=generator) < share
            with torch.no_grad():
                parameter.add_(noise.to(parameter))

    def refit_values(self, tensor: str) -> list[tuple[list[tuple[int, int, int]], np.ndarray]]:
        return [
            (
                [(s.start, s.count, s.step) for s in copy.tensor_box],
                transformed(values, copy, rounding=self.source.rounding).float().cpu().numpy(),
            )
            for copy, values in self._boxes({tensor}, self.source.sent_parameters())
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
        if state := self._refit:
            for end in state.ends.values():
                end.sender.close()
            for made in state.staging.values():
                made.segment.close()
        self._refit = None

    def _boxes(
        self, tensors: set[str] | None, parameters: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[Copy, torch.Tensor]]:
        """Yield this rank's share of published tensors (None: all), with the memory of each box in `parameters`."""
        state = self._state()
        if state.whole_copies is None:
            with many_objects():
                layout = whole_tensors(state.setup.table)
                state.whole_copies = receive_plan(state.world, layout, only=self.rank).copies
        for copy in state.whole_copies:
            if tensors is None or copy.tensor in tensors:
                yield copy, source_view(copy, parameters)

    def _directory(self) -> str:
        directory = self._state().setup.channels[0].connection.directory
        assert directory is not None  # every session has one
        return directory

    def _state(self) -> SenderState:
        assert self._refit is not None  # `refit_make` came before
        return self._refit


class SenderOfAdapters(RefitSender):
    """Sends the adapters of one policy rank; methods as in `AdapterSender`."""

    def __init__(self, policy: AdaptedPolicy) -> None:
        self._adapters = AdapterSource(policy)
        super().__init__(self._adapters)

    def refit_adapters(self) -> tuple[AdapterRow, ...]:
        return self._adapters.rows()


def _plan(world: World, channel: Channel, channels: Sequence[Channel], places: tuple[SenderPlace, ...]) -> TransferPlan:
    rounds = cut_rounds(channel.layout, channel.connection.capacity)
    distances = [2 if place.node != channel.node else int(place.device != channel.device) for place in places]

    @cache
    def among(ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Choose a relayed rank per channel among holders of the same boxes, because each channel costs it buffers."""
        if not set(channel.senders).isdisjoint(ranks):
            return ranks
        others = [other_channel.index for other_channel in channels if set(other_channel.senders).isdisjoint(ranks)]
        return (ranks[others.index(channel.index) % len(ranks)],)

    return receive_plan(world, chunk_layout(channel.layout, rounds), distances, among=among)


def _finish_copies(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
