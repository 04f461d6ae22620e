"""The engines' side of the ways of refitting that `refit.py ablation` and `memcpy` compare: a process a rank.

An order names a way: the function `receive_<way>` here takes part in it.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from rlctl.backends.vllm.channel import cut_rounds, rows_of
from rlctl.backends.vllm.receiver import DirectReceiver, Timed, chunk_view
from rlctl.backends.vllm.ring import Ring
from rlctl.backends.vllm.segment import Segment
from rlctl.checkpoints.tensors import dtype_of
from rlctl.models.facts import ModelFacts
from rlctl.refit.synthetic import SyntheticEngine
from rlctl.weights.vllm import VllmParallel


class RingInlet:
    """The receiving end of a ring, as the shared memory mover has it."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def wait(self, index: int) -> torch.Tensor:
        return self.ring.wait_filled(index)

    def done(self, index: int) -> None:
        self.ring.read(index)


class Executor:
    """An engine rank: parameters in vLLM's layout, and the boxes of each published tensor that they hold."""

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
        self.direct = DirectReceiver(self.engine._targets)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """What a loader does with a whole tensor: find the parameter, take the rank's part."""
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
    """A handle for each tensor, opened, read and let go."""
    for _ in range(count):
        name, dtype, shape, address = pipe.recv()
        segment = Segment(address)
        me.load(name, segment.view(0, shape, dtype_of(dtype)))
        segment.close()
        pipe.send(None)


def receive_packed(me: Executor, pipe: Connection, held: dict, address: Any, tables: Any) -> None:
    """One buffer; where each tensor lies in it is told in every refit, for all executors or for this one."""
    if address not in held:
        held[address] = Segment(address)
    if tables is not None:
        held["table"] = tables if isinstance(tables, list) else tables[me.engine.index]
    for name, dtype, shape, offset in held["table"]:
        me.load(name, held[address].view(offset, shape, dtype_of(dtype)))


def receive_layout(me: Executor, pipe: Connection, held: dict, address: Any, capacity: int, layout: Any,
                   receivers: int) -> None:  # fmt: skip
    """What the rounds of whole tensors will be."""
    rounds = cut_rounds(layout, capacity)
    held["rounds", address] = rounds, ring_of(address, capacity, rounds, 1 + me.engine.index, receivers)


def receive_rounds(me: Executor, pipe: Connection, held: dict, address: Any, epoch: int) -> None:
    """Rounds of whole tensors, handed over by counters."""
    rounds, ring = held["rounds", address]
    with ring.refit(epoch, epoch):
        for index, chunks in enumerate(rounds):
            buffer = ring.wait_filled(index)
            for chunk in chunks:
                me.load(chunk.param, chunk_view(buffer, chunk))
            ring.read(index)


def receive_direct(me: Executor, pipe: Connection, held: dict, address: Any, capacity: int, epoch: int) -> None:
    """Rounds of this executor's own boxes, written into parameters by views that are kept."""
    if ("direct", address) not in held:
        rounds = cut_rounds(me.layout, capacity)
        held["direct", address] = rounds, ring_of(address, capacity, rounds, 1, 1)
    rounds, ring = held["direct", address]
    with ring.refit(epoch, epoch):
        me.direct.receive(rounds, Timed(RingInlet(ring)))  # type: ignore[arg-type]


def receive_check(me: Executor, pipe: Connection, held: dict) -> float:
    """A number that all elements enter, and NaN for the next way to overwrite."""
    total = sum(float(value.double().abs().sum()) for value in me.engine.params.values())
    me.engine.poison()
    for name, value in me.engine.params.items():
        value[me.layout.params[name].shape[0] :].zero_()  # padding is nobody's to write
    return total


def ring_of(address: Any, capacity: int, rounds: Any, me: int, receivers: int, segment: Segment | None = None) -> Ring:
    names = tuple(f"executor {index}" for index in range(receivers))
    return Ring(segment or Segment(address), ("trainer",), names, me, capacity=capacity, buffers=min(2, len(rounds)),
                timeout_s=300)  # fmt: skip
