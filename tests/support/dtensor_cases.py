"""What runs in the pool's processes: the memory of FSDP2's ranks, and runs that change their backend."""

from __future__ import annotations

import ctypes
import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlctl.models.facts import ModelFacts
from support.parallel_cases import Batch, Case, Loss, make_worker, plan_of
from support.reference_policy import Optim


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
    worker = make_worker(rank, case, directory, own_facts=facts)
    done.set()
    watcher.join()
    assert all(value.isfinite().all() for value in worker.parameters().values())
    return 1024 * (most[0] - before)


def _kilobytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def run_changed(
    rank: int, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch, places: list[Path]
) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """The second step of Megatron's, of FSDP2 that goes on after its first, and of Megatron that goes on with what it
    saved before a step; and what Megatron held when it saved and when it went on."""
    load, adapted = plan_of(case, batch).shards[case.parallel.data_rank(rank)], bool(case.lora.rank)
    workers: list[Any] = [make_worker(rank, case, weights)]
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
            workers.append(
                make_worker(rank, case, weights, load=adapted)
                if back
                else make_worker(rank, replace(case, backend="dtensor"), directory, load=adapted)
            )
            workers[-1].load_saved(place)
    return results, held
