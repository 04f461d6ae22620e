"""One rank of a policy, independent of the backend: rendezvous, batches, passes, background saves, and moves to host
memory.

A critic is a second model in the policy's process and groups (`PolicySpec.valued`) that trains, sleeps, saves and loads
alike. Its rows are the policy's, so both see each other's columns.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - not in __all__

from rlctl.backends import cpu_sums
from rlctl.backends.base import PolicySpec, WeightSource
from rlctl.backends.batching.batch import (
    AdvantageEstimate,
    BatchShard,
    Fetch,
    GroupLogprobs,
    LogprobColumn,
    LogprobStats,
    LossOutput,
    MicroBatchLoss,
    MinibatchResult,
    ValueLoss,
)
from rlctl.backends.batching.packed_rows import (
    PackedRow,
    VocabProjection,
    add_teacher_logprobs,
    counted_positions,
    fetch_rows,
    logprobs_by_group,
)
from rlctl.backends.host_memory import HostMemory, Offloaded
from rlctl.backends.lora_adapter import Adapter
from rlctl.backends.movement import Movement
from rlctl.backends.quantization import WeightGrid
from rlctl.backends.results import StepOutcome, add_advantages, logprob_stats, micro_batch_loss, minibatch_result
from rlctl.checkpoints.background_writes import Snapshot, write_less_urgently
from rlctl.checkpoints.identity import damaged_files, file_digest
from rlctl.checkpoints.megatron.megatron_model import names_modules
from rlctl.checkpoints.rank_loading import require_policy
from rlctl.cluster.progress import report
from rlctl.data.cross_tokens import Projection
from rlctl.data.rollouts import MediaPart
from rlctl.garbage import many_objects
from rlctl.settings.training import Rounding
from rlctl.transport.process_group import ServedStore
from rlctl.weights.layout import Layout
from rlctl.weights.plan_execution import with_adapter
from rlctl.weights.rounding import narrow_into, narrowed

LossOf = Callable[[PackedRow, Tensor], tuple[Tensor, dict[str, Any]]]
"""(row, output) -> (loss, collected values)."""
CRITIC = "critic"
"""The critic's part of a checkpoint, a directory inside of the policy's."""


class Save(ABC):
    """A snapshot that one rank writes in the background. The checkpoint is complete when every rank has finished."""

    def __init__(self, directory: Path, snapshot: Snapshot) -> None:
        """Start writing into an existing empty directory; to be called when all but `snapshot` is made."""
        self.directory, self.snapshot = directory, snapshot
        pool = ThreadPoolExecutor(1, "checkpoint", initializer=write_less_urgently)
        self._writing = pool.submit(self._write)
        pool.shutdown(wait=False)

    def _write(self) -> dict[str, str]:
        try:
            return self.write()
        finally:
            self.snapshot.drop()

    @abstractmethod
    def write(self) -> dict[str, str]:
        """Write the snapshot; return the digests of this rank's files."""

    @abstractmethod
    def write_index(self) -> None:
        """Complete the checkpoint when this rank has written; collective."""

    @property
    def written(self) -> bool:
        return self._writing.done()

    def finish(self) -> dict[str, str]:
        """Wait until the checkpoint is complete; collective. Returns the digests of this rank's files."""
        digests = self._writing.result()
        self.write_index()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            index = [path for path in self.directory.iterdir() if path.is_file() and path.suffix != ".distcp"]
            digests |= {path.name: file_digest(path) for path in index}
        return digests


class PolicyRank(WeightSource, ABC):
    """The base of policy workers; methods as in `PolicyWorker` and `CriticWorker`."""

    saves_modules: ClassVar[bool]
    """Whether checkpoints have the names of transformers' modules, or Megatron's."""

    def __init__(self, rank: int, world_size: int, master_addr: str, spec: PolicySpec) -> None:
        self.rank, self.world_size, self.spec = rank, world_size, spec
        self.master_addr = master_addr
        self.rounding: Rounding = spec.optimizer.rounding
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._store: ServedStore | None = None
        self.device = torch.device("cpu")
        self.groups: Any = None
        self.critic: Self | None = None
        self._shard = BatchShard({}, ())
        self._rows: list[list[PackedRow]] = []
        self._reference: dict[str, Tensor] | None = None
        self._projection: VocabProjection | None = None
        self.begun_with = Path()
        """Where the weights were loaded from."""
        self._base = dict[str, Tensor]()
        """Base weights of adapted layers after the first step, in host memory and in the compute dtype."""
        self._saves = dict[bool, Save]()
        """Saves under way: to the run's directory (False), and to memory (True)."""
        self._offloaded: list[Offloaded] = []
        self._host_memory: HostMemory | None = None
        self.movement: Movement | None = None
        self.grid: WeightGrid | None = None

    # --- what a backend does, to one model

    @abstractmethod
    def prepare(self) -> None:
        """Called once, before the ranks meet."""

    @abstractmethod
    def join_groups(self) -> Any:
        """Make the groups of ranks in the running process group; returns what `groups` is to hold."""

    @abstractmethod
    def build_model(self) -> None:
        """Build model and optimizer from the spec, with random weights."""

    @property
    @abstractmethod
    def models(self) -> list[nn.Module]:
        """The model, or its chunks."""

    @property
    @abstractmethod
    def data_group(self) -> Any:
        """The data-parallel ranks that hold the same part of a model."""

    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]: ...

    @abstractmethod
    def adapters(self) -> Iterable[tuple[str, Adapter]]:
        """The adapted weights by name; collective."""

    @abstractmethod
    def trained(self) -> Iterable[tuple[str, Tensor]]:
        """This rank's part of each trained parameter, by name."""

    @abstractmethod
    def load_weights(self, directory: Path, *, saved: bool = False) -> None:
        """Load the model's weights and reset the optimizer. `saved`: the directory is a checkpoint with float32
        weights."""

    @abstractmethod
    def round_weights(self) -> None:
        """Round weights to the grid (`grid`), if any, after each change. Collective."""

    @abstractmethod
    def run_rows(self, rows: list[PackedRow], loss_of: LossOf, *, forward_only: bool) -> list[dict[str, Any]]:
        """Run the model over `rows` and accumulate gradients unless `forward_only`; return `loss_of`'s second values on
        output ranks."""

    @abstractmethod
    def with_weights(self, others: dict[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Put other weights, by the names of `parameters`, in place for a moment."""

    @abstractmethod
    def clear_gradients(self) -> None: ...

    @abstractmethod
    def take_step(self, lr: float, weight_decay: float | None) -> StepOutcome:
        """Take one optimizer step on the gradients, or none at all where these are not finite."""

    @abstractmethod
    def offload(self, keep_weights: bool) -> Offloaded:
        """Move weights, optimizer and reference of this model to host memory."""

    @abstractmethod
    def begin_save(self, directory: Path, *, in_memory: bool = False) -> Save:
        """Take a snapshot for an existing empty directory and start writing it; saves to memory and others may meet."""

    @abstractmethod
    def load_checkpoint(self, directory: Path) -> None:
        """Read what `begin_save` wrote."""

    @abstractmethod
    def load_adapters(self, directory: Path) -> None:
        """Read the adapters that the other backend saved."""

    # --- life cycle

    def open_store(self) -> int:
        """Hold the port from here on: one that was looked for beforehand may be another process's by `setup`."""
        self._store = ServedStore(self.master_addr, self.spec.timeout_s)
        return self._store.port

    def build(self) -> None:
        """(Re)build groups, models and optimizers from the spec in the running process group."""
        self.keep_saved()
        self.groups = self.join_groups()
        self.build_model()
        self._reference = None
        self._base = {}
        self._rows = []
        self.critic, critic = None, self.spec.critic
        if critic is None:
            return
        if critic.offload:  # turns on the device: the critic is built where the policy was, and waits from here on
            self.sleep()
        spec = replace(self.spec, optimizer=critic.optimizer, critic=None, router_replay=False, valued=True)
        other = type(self)(self.rank, self.world_size, self.master_addr, spec)
        other.groups, other.device = self.groups, self.device
        other.build_model()
        self.critic = other
        if critic.offload:
            other.sleep()
            self.wake()

    def setup(self, port: int) -> None:
        spec = self.spec
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        if spec.device == "cpu":
            cpu_sums.install()
        with many_objects():
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

    def sleep(self, keep_weights: bool = False) -> int:
        """Also return the bytes of an earlier `sleep` that kept the weights. A critic without turns sleeps with the
        policy."""
        self.keep_saved()
        of_critic = self.critic.sleep() if self.critic is not None and not self._takes_turns else 0
        self._offloaded.append(self.offload(keep_weights))
        return of_critic + sum(part.device_bytes for part in self._offloaded)

    def wake(self) -> None:
        while self._offloaded:
            self._offloaded.pop().restore()
        if self._host_memory is not None:
            self._host_memory.rewind()
        if self.critic is not None and not self._takes_turns:
            self.critic.wake()

    def device_used(self) -> tuple[int, int] | None:
        if self.spec.device != "cuda":
            return None
        left, size = torch.cuda.mem_get_info()
        return size - left, size

    def host_memory(self) -> HostMemory:
        self._host_memory = self._host_memory or HostMemory()
        return self._host_memory

    def new_movement(self) -> Movement | None:
        """Return what follows the weights of a new optimizer; None: they are float32, frozen, or adapters."""
        narrow = self.spec.dtype != "float32" and not self.spec.lora.rank and self.spec.teaches is None
        return Movement(self.dtype, self.rounding) if narrow else None

    def new_grid(self, layout: Layout) -> WeightGrid | None:
        """Return what rounds the weights of `layout`, this rank's; None: they are not rounded."""
        spec = self.spec
        none = spec.quantization.format == "none" or spec.valued or spec.teaches is not None
        return None if none else WeightGrid(spec, layout)

    # --- weights

    def load_model(self, directory: Path | str) -> None:
        self.keep_saved()
        self._base = {}
        self.begun_with = Path(directory)
        self.load_weights(self.begun_with)
        self.round_weights()
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load_model(directory)

    def hold_reference(self) -> None:
        """With adapters the reference is the model without them, and nothing is copied."""
        values = {} if self.spec.lora.rank else self.parameters()
        if self.spec.reference_offload:
            self._reference = {name: _on_host(value) for name, value in values.items()}
        else:
            self._reference = {name: value.clone() for name, value in values.items()}

    def hold_projection(self, projection: Projection) -> None:
        self._projection = VocabProjection.of(projection, self.device)

    @torch.no_grad()
    def _exchange(self, others: dict[str, Tensor]) -> None:
        for name, live in self.parameters().items():
            kept = live.clone()
            live.copy_(others[name])
            others[name].copy_(kept)

    @contextlib.contextmanager
    def exchanged(self, others: dict[str, Tensor]) -> Iterator[None]:
        """The weights and `others` in each other's place for a moment."""
        self._exchange(others)
        try:
            yield
        finally:
            self._exchange(others)

    @contextlib.contextmanager
    def under_weights_of(self, column: LogprobColumn) -> Iterator[None]:
        """Put the weights that `column` is computed under in place for a moment."""
        if column == "old_logprobs":
            yield
            return
        assert self._reference is not None  # `hold_reference` came before
        self.keep_saved()
        with self._without_adapters() if self.spec.lora.rank else self.with_weights(self._reference):
            yield

    @torch.no_grad()
    def merge_adapters(self) -> None:
        """Use W' in each adapted layer; call after adapters change."""
        for name, layer in self.adapters() if self.spec.lora.rank else ():
            if name not in self._base:
                self._base[name] = _on_host(narrowed(layer.weight, self.dtype, self.rounding))
            merged = with_adapter(self._base[name].to(layer.weight.device), layer.a, layer.b, layer.scale)
            narrow_into(layer.weight, merged, self.rounding)

    def sent_parameters(self) -> Mapping[str, Tensor]:
        """With `training.lora.refit` = delta or adapters, the base: adapters follow apart (`AdapterSource`)."""
        parameters = self.parameters()
        if not self.spec.lora.rank or self.spec.lora.refit == "merged":
            return parameters
        return {**parameters, **{name: base.to(parameters[name].device) for name, base in self._base.items()}}

    @contextlib.contextmanager
    def _without_adapters(self) -> Iterator[None]:
        try:
            for name, layer in self.adapters():
                if name in self._base:
                    layer.weight.copy_(self._base[name])
            yield
        finally:
            self.merge_adapters()

    def parameters_not_finite(self) -> list[str]:
        odd = [name for name, value in self.trained() if not value.isfinite().all()]
        if self.critic is not None:
            with self._critics_turn():
                odd += [f"{CRITIC}: {name}" for name in self.critic.parameters_not_finite()]
        return odd

    # --- batches

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        multiple, routing = self.spec.row_multiple, self.spec.router_replay
        self._shard = shard
        self._rows = fetch_rows(shard, fetch, multiple, self.device, self.positions, routing=routing)
        if self.critic is not None:
            self.critic._rows = self._rows

    def positions(self, tokens_T: np.ndarray, media: Sequence[MediaPart]) -> np.ndarray:
        return counted_positions(tokens_T, media)

    def add_logprobs(self, column: LogprobColumn) -> None:
        """With truncated sampling, the last row of the output has the log-probs over the whole vocabulary."""
        columns = {column: 0}
        if self.spec.truncation is not None:
            columns = {column: -1} if column == "reference_logprobs" else {column: 0, "old_full_logprobs": -1}
        with self.under_weights_of(column):
            self.add_columns(columns)

    def add_columns(self, columns: Mapping[str, int]) -> None:
        """Add rows of the model's output to the loaded batch, where this rank has the output."""
        rows = self._all_rows()
        for row, out in zip(rows, self._outputs(rows), strict=False):  # empty but on the last pipeline stage
            row.columns_R |= {column: out[index] for column, index in columns.items()}

    @torch.no_grad()
    def _outputs(self, rows: list[PackedRow]) -> list[Tensor]:
        results = self.run_rows(rows, lambda row, out: (out[0].sum(), {"out": out}), forward_only=True)
        report(len(rows), len(rows))
        return [result["out"] for result in results]

    def export_logprobs(self) -> tuple[None, list[GroupLogprobs]]:
        outputs = self._outputs(self._all_rows())
        reports = self.spec.parallel.reports(self.rank)
        return None, logprobs_by_group(self._shard, self._rows, outputs) if reports else []

    def import_logprobs(self, handles: Mapping[int, Sequence[object]], fetch: Fetch) -> None:
        add_teacher_logprobs(self._shard, self._rows, handles, fetch, self._projection)

    def logprob_difference(self, column: LogprobColumn) -> LogprobStats | None:
        rows = self._all_rows()
        if not all(column in row.columns_R for row in rows):  # the last pipeline stage alone has them
            return None
        return self._result(logprob_stats([row.columns_R for row in rows], column, self.data_group))

    def estimate(self, estimate: AdvantageEstimate) -> None:
        if self.critic is not None:
            self.critic.add_columns({"values": 0})
        rows = self._all_rows()
        if all(estimate.column in row.columns_R for row in rows):  # the last pipeline stage alone has it
            add_advantages(rows, estimate, self.data_group)

    def train_minibatch(
        self, index: int, loss: MicroBatchLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        return self.train_on(index, loss, PackedRow.token_batch, lr, weight_decay)

    @torch.no_grad()
    def evaluate_minibatch(self, index: int, loss: MicroBatchLoss) -> MinibatchResult | None:
        rows = self._rows[index]
        results = self.run_rows(
            rows, lambda row, out: micro_batch_loss(loss, PackedRow.token_batch, row, out), forward_only=True
        )
        report(len(rows), len(rows))
        unchanged = StepOutcome(grad_norm=0.0, skipped=False)
        return self._result(minibatch_result(results, unchanged, self.data_group) if results else None)

    def train_on(
        self,
        index: int,
        loss: Callable[[Any], LossOutput],
        batch_of: Callable[[PackedRow, Tensor], Any],
        lr: float,
        weight_decay: float | None,
    ) -> MinibatchResult | None:
        """Take one optimizer step on a mini-batch. `batch_of` makes of a row and the output what `loss` takes."""
        rows = self._rows[index]
        self.clear_gradients()
        results = self.run_rows(rows, lambda row, out: micro_batch_loss(loss, batch_of, row, out), forward_only=False)
        report(len(rows), len(rows))
        self.keep_saved()
        outcome = self.take_step(lr, weight_decay)
        self.merge_adapters()
        self.round_weights()
        if self.movement is not None and not outcome.skipped:
            outcome = replace(outcome, rounded=self.movement.total(self.device))
        return self._result(minibatch_result(results, outcome, self.data_group) if results else None)

    def counted(self, rows: list[PackedRow]) -> Iterator[PackedRow]:
        """Yield the rows and report their number so far to the driver, from one rank for all."""
        for number, row in enumerate(rows):
            if self.rank == 0:
                report(number, len(rows))
            yield row

    def _all_rows(self) -> list[PackedRow]:
        return [row for minibatch in self._rows for row in minibatch]

    def _result(self, result: Any) -> Any:
        return result if self.rank == self.spec.parallel.result_rank else None

    # --- checkpoints

    def save_begin(self, directory: Path | str, in_memory: bool = False) -> None:
        self._saves[in_memory] = self.begin_save(Path(directory), in_memory=in_memory)
        if self.critic is not None:
            place = Path(directory, CRITIC)
            place.mkdir(exist_ok=True)  # each rank makes sure of it
            with self._critics_turn():
                self.critic.save_begin(place, in_memory)

    def keep_saved(self) -> None:
        """Call before weights or optimizer states change: a save under way may be reading them."""
        for save in self._saves.values():
            save.snapshot.keep()

    def save_written(self, in_memory: bool = False) -> bool:
        save, critic = self._saves.get(in_memory), self.critic
        return (save is None or save.written) and (critic is None or critic.save_written(in_memory))

    def save_finish(self, in_memory: bool = False) -> dict[str, str]:
        digests = self._saves.pop(in_memory).finish()
        if self.critic is not None:
            digests |= {f"{CRITIC}/{name}": digest for name, digest in self.critic.save_finish(in_memory).items()}
        return digests

    def damaged_files(self, directory: Path | str, digests: dict[str, str]) -> list[str]:
        names = sorted(digests)[self.rank :: self.world_size]
        return damaged_files(Path(directory), {name: digests[name] for name in names})

    def load_saved(self, directory: Path | str) -> None:
        """Load only the weights of the other backend's checkpoint; the optimizer starts anew."""
        directory = require_policy(Path(directory))
        self.keep_saved()
        if names_modules(directory) == self.saves_modules:
            self.load_checkpoint(directory)
        elif self.spec.lora.rank:
            self.load_adapters(directory)
        else:
            self.load_weights(directory, saved=True)
        self.merge_adapters()
        self.round_weights()
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load_saved(directory / CRITIC)

    # --- the critic

    @property
    def _takes_turns(self) -> bool:
        return self.spec.critic is not None and self.spec.critic.offload

    def critic_begin(self) -> None:
        critic = self._require_critic()
        if self._takes_turns:
            self.sleep()
            critic.wake()

    def critic_end(self) -> None:
        if self._takes_turns:
            self._require_critic().sleep()
            self.wake()

    @contextlib.contextmanager
    def _critics_turn(self) -> Iterator[None]:
        self.critic_begin()
        yield
        self.critic_end()

    def _require_critic(self) -> Self:
        assert self.critic is not None  # only with a driver
        return self.critic

    def train_critic(
        self, index: int, loss: ValueLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        return self._require_critic().train_on(index, loss, PackedRow.value_batch, lr, weight_decay)


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
