"""What runs in the pool's processes where the optimizer's states wait in host memory between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rlctl.backends.host_memory import storages_of
from rlctl.backends.megatron import host_states
from rlctl.backends.megatron.optimizer import inner_optimizers
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.data.rollouts import RolloutColumns
from support.parallel_cases import BrokenLoss, Case, Loss, make_worker, pieces, plan_of
from support.reference_policy import Optim

Weights = dict[str, Tensor]
Batch = dict[int, RolloutColumns]


def states(worker: MegatronWorker) -> Iterator[Tensor]:
    """All that may wait in host memory: moments, and float32 weights beside those in bfloat16."""
    for inner in inner_optimizers(worker.optimizer):
        yield from (shard for group in inner.shard_fp32_from_float16_groups for shard in group)
        for state in inner.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step")


def on_device(worker: MegatronWorker) -> int:
    """Bytes of the optimizer's states that are where a kernel finds them."""
    return sum(storage.nbytes() for storage in storages_of(states(worker)).values())


def content(worker: MegatronWorker) -> list[tuple[int, dict[str, Tensor]]]:
    """By number of the parameter its state, wherever that is."""
    return [
        (
            number,
            {name: value.detach().clone() for name, value in inner._get_main_param_and_optimizer_states(param).items()},
        )
        for inner in inner_optimizers(worker.optimizer)
        for number, param in enumerate(inner.model_param_group_index_map)
    ]


def counts(worker: MegatronWorker) -> set[float]:
    """Steps that the optimizers have counted."""
    return {float(s["step"]) for inner in inner_optimizers(worker.optimizer) for s in inner.optimizer.state.values()}


class WatchedLoss(Loss):
    """Records what of the states is on the device during each forward pass."""

    def __init__(self, worker: MegatronWorker, seen: list[int]) -> None:
        self._worker, self._seen = worker, seen

    def __call__(self, batch: Any) -> Any:
        self._seen.append(on_device(self._worker))
        return super().__call__(batch)


def run_steps(
    rank: int, case: Case, weights: Weights, batch: Batch, part_bytes: int, sleeps: bool
) -> list[tuple[Any, ...]]:
    """(results, parameters, states, counts of steps) of three steps, the second one broken, on the device and with the
    states in host memory; of the latter the largest number of bytes on the device between and within steps, and the
    parts."""
    usual, found = host_states.PART_BYTES, []
    host_states.PART_BYTES = part_bytes
    try:
        for offload in (False, True):
            worker = make_worker(rank, dataclasses.replace(case, optimizer_offload=offload), weights)
            worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
            seen = [on_device(worker)]
            watch = WatchedLoss(worker, seen)
            results = [worker.train_minibatch(0, watch, Optim().lr)]
            seen.append(on_device(worker))
            before = content(worker)
            results.append(worker.train_minibatch(0, BrokenLoss(), Optim().lr))
            same = _equal(before, content(worker))
            if sleeps and offload:
                worker.sleep()
                worker.wake()
            results.append(worker.train_minibatch(0, watch, Optim().lr, 0.5))
            seen.append(on_device(worker))
            inner = inner_optimizers(worker.optimizer)
            parts = sum(len(one.host_states.parts) for one in inner) if offload else 0
            values = [(name, value) for name, value, *_ in pieces(worker, "data")]
            found.append((results[:1] + results[2:], values, content(worker), counts(worker), same, max(seen), parts))
    finally:
        host_states.PART_BYTES = usual
    return found


def _equal(one: list, other: list) -> bool:
    return all(
        number == same and a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
        for (number, a), (same, b) in zip(one, other, strict=True)
    )


def run_resumed(
    rank: int, before: Case, after: Case, weights: Weights, batch: Batch, directories: list[Path]
) -> list[tuple[Any, ...]]:
    """Saves after a step on the device and in host memory, one directory each; then for each way to go on with each of
    them: the result of the next step and the parameters."""
    for offload, directory in zip((False, True), directories, strict=True):
        worker = make_worker(rank, dataclasses.replace(before, optimizer_offload=offload), weights)
        worker.load_batch(plan_of(before, batch).shards[before.parallel.data_rank(rank)], list)
        worker.train_minibatch(0, Loss(), Optim().lr)
        worker.save_begin(directory)
        worker.save_finish()
        worker.train_minibatch(0, Loss(), Optim().lr)  # what was saved stays
    found = []
    for directory in directories:
        for offload in (False, True):
            worker = make_worker(rank, dataclasses.replace(after, optimizer_offload=offload), None)
            worker.load_saved(directory)
            left = on_device(worker)
            worker.load_batch(plan_of(after, batch).shards[after.parallel.data_rank(rank)], list)
            result = worker.train_minibatch(0, Loss(), Optim().lr)
            values = [(name, value) for name, value, *_ in pieces(worker, "data")]
            found.append((result, values, content(worker), left if offload else 0))
    return found


def run_counted(rank: int, case: Case, weights: Weights, batch: Batch) -> list[list[int | None]]:
    """How many steps each param group with parameters counted in two, where the inner optimizer counts by group as
    TransformerEngine's does (from 2.19 on groups without parameters too); and the parts of each optimizer."""
    usual, host_states.PART_BYTES = host_states.PART_BYTES, 64 * 1024
    try:
        worker = make_worker(rank, dataclasses.replace(case, optimizer_offload=True), weights)
    finally:
        host_states.PART_BYTES = usual
    worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
    optimizers = inner_optimizers(worker.optimizer)
    for inner in optimizers:
        _count_by_group(inner)
    for _ in range(2):
        worker.train_minibatch(0, Loss(), Optim().lr)
    groups = [group for inner in optimizers for group in inner.optimizer.param_groups]
    return [[group.get("step") for group in groups if group["params"]], [len(o.host_states.parts) for o in optimizers]]


def _count_by_group(inner: Any) -> None:
    step = inner.host_states._step

    def counted() -> None:
        for group in inner.optimizer.param_groups:
            group["step"] = group.get("step", 0) + 1
        step()

    inner.host_states._step = counted
