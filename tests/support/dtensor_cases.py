"""What runs in the pool's processes: a policy of transformers' modules under FSDP2 on the reference's weights."""

from __future__ import annotations

import ctypes
import gc
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlctl.backends.batch import MinibatchResult
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.data.rollouts import RolloutColumns
from rlctl.models.facts import ModelFacts
from support.parallel_cases import BrokenLoss, Case, Loss, column_by_rollout, plan_of, spec_of
from support.parallel_cases import make_worker as make_megatron
from support.reference import Optim

Batch = dict[int, RolloutColumns]


@dataclass
class Outcome:
    """One rank's results of two steps; whole tensors by transformers' names on rank 0."""

    results: list[MinibatchResult | None]
    logprobs: dict[tuple[int, int], Tensor]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    held: int
    """Elements of parameters on this rank."""


def make_worker(
    rank: int, case: Case, directory: Path, *, load: bool = True, facts: ModelFacts | None = None
) -> DTensorWorker:
    """A worker in the pool's process group, on the weights in `directory`; `facts`: where they are no case's."""
    spec = replace(spec_of(case), model_dir=directory)
    spec = replace(spec, facts=facts) if facts else spec
    worker = DTensorWorker(rank, case.parallel.world_size, "127.0.0.1", spec)
    worker.prepare()
    worker.build()
    if load:
        worker.load_model(directory)
    return worker


def whole(tensor: Tensor) -> Tensor:
    """In transformers' shape: gate and up of experts are apart in the worker."""
    found = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return found.flatten(1, 2) if found.dim() == 4 else found


def wholes(worker: DTensorWorker, what: str) -> dict[str, Tensor]:
    """Parameters (`data`, with stored buffers) or gradients (`grad`), whole. Collective."""
    worker.parameters()
    inner = worker.model.inner
    named = dict(inner.named_parameters())
    if what == "grad":
        return {name: whole(value.grad) for name, value in named.items() if value.grad is not None}
    buffers = {name: inner.get_buffer(name) for name in worker._buffers}
    return {name: whole(value) for name, value in (named | buffers).items()}


def run_case(rank: int, case: Case, directory: Path, batch: Batch, facts: ModelFacts | None = None) -> Outcome:
    worker = make_worker(rank, case, directory, facts=facts)
    shard = plan_of(case, batch).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    results: list[Any] = []
    grads: dict[str, Tensor] = {}
    for step in range(2):
        results.append(worker.train_minibatch(0, Loss(), Optim().lr))
        if step == 0:
            grads = wholes(worker, "grad")
    params = wholes(worker, "data")
    held = sum(value.numel() for value in worker.parameters().values())
    return Outcome(results, logprobs, grads if rank == 0 else {}, params if rank == 0 else {}, held)


def run_memory(rank: int, tiny: tuple[Case, Path], large: tuple[Case, Path, ModelFacts]) -> int:
    """The bytes by which this process's own memory has at most grown while it built and loaded the large model.

    Pages of the mapped file are the kernel's, which takes them back, and are not counted."""
    make_worker(rank, *tiny)  # imports what is imported once
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be taken again without being seen
    before, most, done = _kilobytes("RssAnon"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            most[0] = max(most[0], _kilobytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    case, directory, facts = large
    worker = make_worker(rank, case, directory, facts=facts)
    done.set()
    watcher.join()
    assert all(value.isfinite().all() for value in worker.parameters().values())
    return 1024 * (most[0] - before)


def _kilobytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def run_checkpoint(
    rank: int, before: Case, after: Case, directory: Path, batch: Batch, saved: Path, facts: ModelFacts | None = None
) -> tuple:
    """(result, parameters) of the second step: uninterrupted, and after save, rebuild as `after`, load. And what a
    worker holds that was given the checkpoint for a model."""
    worker = make_worker(rank, before, directory, facts=facts)
    worker.load_batch(plan_of(before, batch).shards[before.parallel.data_rank(rank)], list)
    worker.train_minibatch(0, Loss(), Optim().lr)
    worker.save_begin(saved)
    straight = worker.train_minibatch(0, Loss(), Optim().lr)  # while the snapshot is written
    digests = worker.save_finish()
    assert worker.damaged_files(saved, digests) == []
    kept = wholes(worker, "data")
    other = make_worker(rank, after, directory, load=False, facts=facts)
    other.load_model(saved)
    published = wholes(other, "data")
    other.load_saved(saved)
    other.load_batch(plan_of(after, batch).shards[after.parallel.data_rank(rank)], list)
    resumed = other.train_minibatch(0, Loss(), Optim().lr)
    loaded = wholes(other, "data")
    return (straight, resumed, kept, loaded, published) if rank == 0 else (straight, resumed, {}, {}, {})


def run_changed(
    rank: int, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch, places: list[Path]
) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """The second step of Megatron's, of FSDP2 that goes on after its first, and of Megatron that goes on with what it
    saved before a step; and what Megatron held when it saved and when it went on."""
    load, adapted = plan_of(case, batch).shards[case.parallel.data_rank(rank)], bool(case.lora.rank)
    workers: list[Any] = [make_megatron(rank, case, weights)]
    workers[0].load_batch(load, list)
    workers[0].train_minibatch(0, Loss(), Optim().lr)
    held, results = list[dict[str, Tensor]](), list[Any]()
    for number, place in enumerate([*places, None]):
        worker = workers[-1]
        if number != 1:
            held.append({name: value.clone() for name, value in worker.parameters().items()})
        if place is not None:
            worker.save_begin(place)
            worker.save_finish()
        worker.load_batch(load, list)
        results.append(worker.train_minibatch(0, Loss(), Optim().lr))
        if place is not None:  # a checkpoint of adapters is read onto the model that the run began with
            back = number == 1
            workers.append(make_megatron(rank, case, weights if adapted else None) if back
                           else make_worker(rank, case, directory, load=adapted))  # fmt: skip
            workers[-1].load_saved(place)
    return results, held


def run_asleep(rank: int, case: Case, directory: Path, batch: Batch) -> tuple:
    """(results and parameters of two steps without a sleep between them and with one), bytes left asleep, and whether
    weights stayed where they were."""
    found: list[Any] = []
    left, moved = 0, False
    for sleeps in (False, True):
        worker = make_worker(rank, case, directory)
        worker.hold_reference()
        worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
        places = {name: value.data_ptr() for name, value in worker.parameters().items()}
        results: list[Any] = [worker.train_minibatch(0, Loss(), Optim().lr)]
        if sleeps:
            before = {name: value.clone() for name, value in worker.parameters().items()}
            part = worker.sleep(keep_weights=True)
            assert all(torch.equal(value, before[name]) for name, value in worker.parameters().items())
            assert 0 < part < worker.sleep()
            tensors = [
                value._local_tensor if isinstance(value, DTensor) else value for value in worker._named().values()
            ]
            tensors += list((worker._reference or {}).values())
            left = sum(value.untyped_storage().nbytes() for value in tensors)
            worker.wake()
            assert not case.optimizer_offload or all(s.untyped_storage().nbytes() == 0 for s in worker._states())
        results.append(worker.train_minibatch(0, Loss(), Optim().lr))
        worker.add_logprobs("reference_logprobs")
        results.append(worker.logprob_difference("reference_logprobs"))
        if not sleeps:  # what refits read stays where it is
            moved = any(value.data_ptr() != places[name] for name, value in worker.parameters().items())
        found.append((results, {name: value.clone() for name, value in worker.parameters().items()}))
    return found, left, moved


def run_broken(rank: int, case: Case, directory: Path, batch: Batch) -> tuple:
    """The result of a step whose gradient is not finite, whether the weights stayed, and the parameters that are not
    finite before and after one of them is spoilt."""
    worker = make_worker(rank, case, directory)
    worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
    before = {name: value.clone() for name, value in worker.parameters().items()}
    result = worker.train_minibatch(0, BrokenLoss(), Optim().lr)
    same = all(torch.equal(value, before[name]) for name, value in worker.parameters().items())
    odd = [worker.parameters_not_finite()]
    next(iter(worker.parameters().values()))[-1] = torch.inf
    return result, same, [*odd, worker.parameters_not_finite()]
