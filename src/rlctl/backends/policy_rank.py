"""One rank of a policy, as far as it is the same whatever backend trains: meeting the other ranks, the rows of a batch,
passes over them, saves in the background, and the way back to the device."""

from __future__ import annotations

import contextlib
import datetime
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - not in __all__

from rlctl.backends.base import PolicySpec
from rlctl.backends.batch import (
    BatchShard,
    Fetch,
    GroupLogprobs,
    LogprobColumn,
    LogprobStats,
    LossOutput,
    MicroBatchLoss,
    MinibatchResult,
)
from rlctl.backends.host_memory import HostMemory, Offloaded
from rlctl.backends.movement import Movement
from rlctl.backends.results import StepOutcome, logprob_stats, micro_batch_loss, minibatch_result
from rlctl.backends.rows import PackedRow, add_taught, fetch_rows, taught_by_group
from rlctl.checkpoints.identity import damaged_files
from rlctl.cluster.progress import report
from rlctl.config.schema import Rounding
from rlctl.errors import InputError, WorkerError
from rlctl.transport.collective import ServedStore

LossOf = Callable[[PackedRow, Tensor], tuple[Tensor, dict[str, Any]]]
"""(row, output of the model) -> (loss, what is collected of the row)."""


class Save(Protocol):
    """A save under way on one rank."""

    @property
    def written(self) -> bool:
        """Whether `finish` will not have to wait for this rank."""
        ...

    def finish(self) -> dict[str, str]:
        """Wait until the checkpoint is complete; collective. Returns the digests of this rank's files."""
        ...


class PolicyRank(ABC):
    """The base of policy workers; methods as in `PolicyWorker`."""

    def __init__(self, rank: int, world_size: int, master_addr: str, spec: PolicySpec) -> None:
        """`master_addr`: address of the node of rank 0."""
        if spec.parallel.world_size != world_size:
            raise InputError(
                f"the parallel sizes make {spec.parallel.world_size} ranks, but there are {world_size} processes."
            )
        self.rank, self.world_size, self.spec = rank, world_size, spec
        self.master_addr = master_addr
        self.rounding: Rounding = spec.optimizer.rounding
        self._store: ServedStore | None = None
        self.device = torch.device("cpu")
        self._shard = BatchShard({}, ())
        self._rows: list[list[PackedRow]] = []
        self._reference: dict[str, Tensor] | None = None
        self._save: Save | None = None
        self._offloaded: list[Offloaded] = []
        self._host_memory: HostMemory | None = None
        self.movement: Movement | None = None

    # --- what a backend does

    @abstractmethod
    def prepare(self) -> None:
        """Called once, before the ranks meet."""

    @abstractmethod
    def build(self) -> None:
        """(Re)build groups, model and optimizer from the spec in the running process group."""

    @property
    @abstractmethod
    def data_group(self) -> Any:
        """The data-parallel ranks that hold the same part of a model."""

    @abstractmethod
    def run_rows(self, rows: list[PackedRow], loss_of: LossOf, *, forward_only: bool) -> list[dict[str, Any]]:
        """Run the model over `rows`, unless `forward_only` with gradients added up; return the second values of
        `loss_of`, where this rank has the output."""

    @abstractmethod
    def under_weights_of(self, column: LogprobColumn) -> contextlib.AbstractContextManager[None]:
        """Put the weights that `column` is computed under in place for a moment."""

    @abstractmethod
    def clear_gradients(self) -> None: ...

    @abstractmethod
    def take_step(self, lr: float, weight_decay: float | None) -> StepOutcome:
        """Take one optimizer step on the gradients, or none at all where these are not finite."""

    @abstractmethod
    def begin_save(self, directory: Path) -> Save:
        """Take a snapshot for an existing empty directory and start writing it."""

    # --- life cycle

    def open_store(self) -> int:
        """Hold the port from here on: one that was looked for beforehand may be another process's by `setup`."""
        self._store = ServedStore(self.master_addr, self.spec.timeout_s)
        return self._store.port

    def setup(self, port: int) -> None:
        spec = self.spec
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.prepare()
        # What was imported stays. Megatron-Core collects garbage at every save, and would look through all of it.
        gc.collect()
        gc.freeze()
        if spec.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        limit = datetime.timedelta(seconds=spec.timeout_s)
        store = self._store or TCPStore(self.master_addr, port, is_master=False, timeout=limit)
        torch.distributed.init_process_group(
            "nccl" if spec.device == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=limit,
        )
        self.build()
        store.set(f"built-{self.rank}", "")
        if self._store is not None:  # all have met, and strangers have no business here
            self._store.wait([f"built-{rank}" for rank in range(self.world_size)], limit)
            self._store.stop_listening()

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._store = None

    def wake(self) -> None:
        while self._offloaded:
            self._offloaded.pop().restore()
        if self._host_memory is not None:
            self._host_memory.rewind()

    def device_used(self) -> tuple[int, int] | None:
        if self.spec.device != "cuda":
            return None
        left, size = torch.cuda.mem_get_info()
        return size - left, size

    def host_memory(self) -> HostMemory:
        """Where tensors wait during `sleep`."""
        self._host_memory = self._host_memory or HostMemory()
        return self._host_memory

    def new_movement(self) -> Movement | None:
        """Return what follows the weights of a new optimizer; None: they are float32, frozen, or adapters."""
        narrow = self.spec.dtype != "float32" and not self.spec.lora.rank and self.spec.teaches is None
        return Movement(getattr(torch, self.spec.dtype), self.rounding) if narrow else None

    # --- batches

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        multiple, routing = self.spec.row_multiple, self.spec.router_replay
        self._shard, self._rows = shard, fetch_rows(shard, fetch, multiple, self.device, routing=routing)

    def add_logprobs(self, column: LogprobColumn) -> None:
        with self.under_weights_of(column):
            self.add_column(column)

    def add_column(self, column: str) -> None:
        """Add the first row of the model's output to the loaded batch, where this rank has the output."""
        rows = self._all_rows()
        for row, out in zip(rows, self._outputs(rows), strict=False):  # empty but on the last pipeline stage
            row.columns_R[column] = out[0]

    @torch.no_grad()
    def _outputs(self, rows: list[PackedRow]) -> list[Tensor]:
        """The output of the model for each row; empty but on the last pipeline stage."""
        found = self.run_rows(rows, lambda row, out: (out[0].sum(), {"out": out}), forward_only=True)
        report(len(rows), len(rows))
        return [one["out"] for one in found]

    def teach(self) -> tuple[None, list[GroupLogprobs]]:
        found = self._outputs(self._all_rows())
        reports = self.spec.parallel.reports(self.rank)
        return None, taught_by_group(self._shard, self._rows, found) if reports else []

    def learn_from(self, taught: Mapping[int, Sequence[object]], fetch: Fetch) -> None:
        add_taught(self._shard, self._rows, taught, fetch)

    def logprob_difference(self, column: LogprobColumn) -> LogprobStats | None:
        rows = self._all_rows()
        if not all(column in row.columns_R for row in rows):  # the last pipeline stage alone has them
            return None
        return self._result(logprob_stats([row.columns_R for row in rows], column, self.data_group))

    def train_minibatch(
        self, index: int, loss: MicroBatchLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        return self.train_on(index, loss, PackedRow.token_batch, lr, weight_decay)

    def train_on(
        self,
        index: int,
        loss: Callable[[Any], LossOutput],
        batch_of: Callable[[PackedRow, Tensor], Any],
        lr: float,
        weight_decay: float | None,
    ) -> MinibatchResult | None:
        """Take one optimizer step on a mini-batch. `batch_of` makes of a row and the output what `loss` takes."""
        if index >= len(self._rows):
            raise InputError(f"mini-batch {index} of {len(self._rows)} was asked for; load_batch comes first.")
        rows = self._rows[index]
        self.clear_gradients()
        found = self.run_rows(rows, lambda row, out: micro_batch_loss(loss, batch_of, row, out), forward_only=False)
        report(len(rows), len(rows))
        outcome = self.take_step(lr, weight_decay)
        if self.movement is not None and not outcome.skipped:
            outcome = replace(outcome, rounded=self.movement.total(self.device))
        return self._result(minibatch_result(found, outcome, self.data_group) if found else None)

    def counted(self, rows: list[PackedRow]) -> Iterator[PackedRow]:
        """Yield the rows, and tell the driver how many came before; one rank tells it for all."""
        for number, row in enumerate(rows):
            if self.rank == 0:
                report(number, len(rows))
            yield row

    def _all_rows(self) -> list[PackedRow]:
        return [row for minibatch in self._rows for row in minibatch]

    def _result(self, result: Any) -> Any:
        return result if self.rank == self.spec.parallel.result_rank else None

    # --- checkpoints

    def save_begin(self, directory: Path | str) -> None:
        if self._save is not None:
            raise WorkerError("save_begin was called while a save was under way.")
        self._save = self.begin_save(Path(directory))

    def save_written(self) -> bool:
        return self._save is None or self._save.written

    def save_finish(self) -> dict[str, str]:
        save, self._save = self._save, None
        if save is None:
            raise WorkerError("save_finish was called, but no save is under way.")
        return save.finish()

    def damaged_files(self, directory: Path | str, digests: dict[str, str]) -> list[str]:
        names = sorted(digests)[self.rank :: self.world_size]
        return damaged_files(Path(directory), {name: digests[name] for name in names})
