"""The engines' side of the refits that `refit.py ablation` and `memcpy` compare, with one process for each rank.

An order names a way of refitting, and the function `receive_<way>` carries it out.
"""

from __future__ import annotations

from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch

from rlctl.backends.vllm.weights.write import DirectWriter
from rlctl.models.facts import ModelFacts
from rlctl.refit.synthetic import SyntheticEngine
from rlctl.transport.movers import TimedReceiver
from rlctl.transport.round_buffers import chunk_view
from rlctl.transport.rounds import cut_rounds, rows_of
from rlctl.transport.staging import Ring, Segment
from rlctl.weights.plan_execution import dtype_of
from rlctl.weights.vllm import VllmParallel


class RingReceiver:
    """The receiving end of a ring, as in the shared memory mover."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def wait(self, index: int) -> torch.Tensor:
        return self.ring.wait_filled(index)

    def done(self, index: int) -> None:
        self.ring.read(index)


class Executor:
    """An engine rank with parameters in vLLM's layout, and the boxes of each published tensor that they hold."""

    def __init__(self, rank: int, facts: ModelFacts, executors: int) -> None:
        self.engine = SyntheticEngine(rank, facts, VllmParallel(tp=executors), "bfloat16", 1)
        self.layout = self.engine.layout
        self.places: dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]] = {}
        for piece in self.layout.pieces:
            target = self.engine.params[piece.param][rows_of(piece.param_box)]
            box = rows_of(piece.tensor_box)
            shape = tuple(span.count for span in piece.tensor_box)
            self.places.setdefault(piece.tensor, []).append((box, target.view(shape) if target.dim() == len(shape)
                                                            else target[0]))  # fmt: skip
        self.direct = DirectWriter(self.engine.targets)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load a whole tensor as a loader does: find the parameter and take the rank's part."""
        for box, target in self.places[name]:
            target.copy_(tensor[box])


def executor_main(rank: int, facts: ModelFacts, executors: int, pipe: Connection) -> None:
    """Serve stages until told to stop."""
    torch.set_num_threads(1)
    me = Executor(rank, facts, executors)
    pipe.send(me.layout)
    held: dict[str, Any] = {}
    while (order := pipe.recv())[0] != "stop":
        with torch.no_grad():
            pipe.send(globals()[f"receive_{order[0]}"](me, pipe, held, *order[1:]))


def receive_handles(me: Executor, pipe: Connection, held: dict, count: int) -> None:
    """Open, read and close one handle for each tensor."""
    for _ in range(count):
        name, dtype, shape, address = pipe.recv()
        segment = Segment(address)
        me.load(name, tensor_at(segment, 0, shape, dtype_of(dtype)))
        segment.close()
        pipe.send(None)


def receive_packed(me: Executor, pipe: Connection, held: dict, address: Any, tables: Any) -> None:
    """Read all tensors from one buffer, whose table comes with each refit for all executors or for this one."""
    if address not in held:
        held[address] = Segment(address)
    if tables is not None:
        held["table"] = tables if isinstance(tables, list) else tables[me.engine.index]
    for name, dtype, shape, offset in held["table"]:
        me.load(name, tensor_at(held[address], offset, shape, dtype_of(dtype)))


def receive_layout(me: Executor, pipe: Connection, held: dict, address: Any, capacity: int, layout: Any,
                   receivers: int) -> None:  # fmt: skip
    """Prepare for the rounds of whole tensors that later refits send."""
    rounds = cut_rounds(layout, capacity)
    held["rounds", address] = rounds, ring_of(address, capacity, rounds, 1 + me.engine.index, receivers)


def receive_rounds(me: Executor, pipe: Connection, held: dict, address: Any, attempt: int) -> None:
    """Read rounds of whole tensors that counters hand over."""
    rounds, ring = held["rounds", address]
    with ring.refit(attempt, attempt):
        for index, chunks in enumerate(rounds):
            buffer = ring.wait_filled(index)
            for chunk in chunks:
                me.load(chunk.param, chunk_view(buffer, chunk))
            ring.read(index)


def receive_direct(me: Executor, pipe: Connection, held: dict, address: Any, capacity: int, attempt: int) -> None:
    """Write rounds of this executor's own boxes into parameters by views that are kept."""
    if ("direct", address) not in held:
        rounds = cut_rounds(me.layout, capacity)
        held["direct", address] = rounds, ring_of(address, capacity, rounds, 1, 1)
    rounds, ring = held["direct", address]
    with ring.refit(attempt, attempt):
        me.direct.write_rounds(rounds, TimedReceiver(RingReceiver(ring)))  # type: ignore[arg-type]


def receive_check(me: Executor, pipe: Connection, held: dict) -> float:
    """Sum up all elements, then fill them with NaN for the next way to overwrite."""
    total = sum(float(value.double().abs().sum()) for value in me.engine.params.values())
    me.engine.poison()
    for name, value in me.engine.params.items():
        value[me.layout.params[name].shape[0] :].zero_()  # nobody writes the padding
    return total


def tensor_at(segment: Segment, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at byte `offset` of a segment."""
    return segment.buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def ring_of(address: Any, capacity: int, rounds: Any, me: int, receivers: int, segment: Segment | None = None) -> Ring:
    names = tuple(f"executor {index}" for index in range(receivers))
    return Ring(segment or Segment(address), ("trainer",), names, me, capacity=capacity, buffers=min(2, len(rounds)),
                timeout_s=300)  # fmt: skip
