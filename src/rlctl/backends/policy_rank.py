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
from rlctl.backends.base import PolicySpec, Teaching, WeightSource
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
from rlctl.backends.batching.mixtures import Mixture, Taught
from rlctl.backends.batching.packed_rows import (
    PackedRow,
    VocabProjection,
    add_teacher_logprobs,
    add_teacher_tokens,
    counted_positions,
    fetch_rows,
    logprobs_by_group,
)
from rlctl.backends.hidden_states import HeadTap, Paths, Spans, States, policy_states, recorded
from rlctl.backends.host_memory import HostMemory, Offloaded
from rlctl.backends.lora_adapter import Adapter, dropout_of, without_adapters
from rlctl.backends.movement import Movement
from rlctl.backends.quantization import WeightGrid
from rlctl.backends.results import StepOutcome, add_advantages, logprob_stats, micro_batch_loss, minibatch_result
from rlctl.backends.teacher_endpoint import Endpoint
from rlctl.checkpoints.background_writes import Snapshot, write_less_urgently
from rlctl.checkpoints.identity import damaged_files, file_digest
from rlctl.checkpoints.megatron.megatron_model import names_modules
from rlctl.checkpoints.rank_loading import Pairs, load_adapters, load_value_head, peft_adapters, require_policy
from rlctl.cluster.progress import report
from rlctl.data.cross_tokens import Projection
from rlctl.data.rollouts import MediaPart
from rlctl.garbage import many_objects
from rlctl.settings.training import Rounding
from rlctl.transport.process_group import ServedStore
from rlctl.weights.adapter_sites import saved_whole
from rlctl.weights.layout import Layout
from rlctl.weights.rounding import narrowed

LossOf = Callable[[PackedRow, Tensor], tuple[Tensor, dict[str, Any]]]
"""(row, output) -> (loss, collected values)."""
CRITIC, OWN_TEACHER = "critic", "teacher"
"""The parts of a checkpoint of the critic and of the policy's own teacher, directories inside of the policy's."""


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
        self.dropout = dropout_of(spec, rank)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._store: ServedStore | None = None
        self.device = torch.device("cpu")
        self.groups: Any = None
        self.critic: Self | None = None
        self.own_teacher: Self | None = None
        self.beside: list[Self] = []
        self._active: Self = self
        """The model of a teacher's processes that is asked for."""
        self._shard = BatchShard({}, ())
        self._rows: list[list[PackedRow]] = []
        self._reference: dict[str, Tensor] | None = None
        self._projections: dict[int, VocabProjection] = {}
        self.begun_with = Path()
        """Where the weights were loaded from."""
        self._base = dict[str, Tensor]()
        self._whole_base = dict[str, Tensor]()
        """Base weights of adapted layers after the first step, in host memory and in the compute dtype."""
        self.averages = dict[str, Tensor]()
        """Of an own teacher that averages weights in a narrow format: its float32 weights, in host memory."""
        self._adapter, self._waiting = 0, dict[int, dict[str, Tensor]]()
        """The number of the adapter in use, and the states of the others, in host memory."""
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
    def sublayers(self, paths: Paths) -> tuple[Spans, list[HeadTap]]:
        """Return the modules of the points that this rank has, and its output layer's function."""

    @abstractmethod
    def with_weights(self, others: dict[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Put other weights, by the names of `parameters`, in place for a moment."""

    @abstractmethod
    def take_task(self, task: Teaching) -> None:
        """Have the model, a teacher's, compute another task."""

    @abstractmethod
    def clear_gradients(self) -> None: ...

    @abstractmethod
    def take_step(self, lr: float, weight_decay: float | None) -> StepOutcome:
        """Take one optimizer step on the gradients, or none at all where these are not finite."""

    @abstractmethod
    def steps_taken(self) -> int:
        """Return the number of optimizer steps of the trained weights, also those before a resume."""

    @abstractmethod
    def offload(self, keep_weights: bool) -> Offloaded:
        """Move weights, optimizer and reference of this model to host memory."""

    @abstractmethod
    def begin_save(self, directory: Path, *, in_memory: bool = False) -> Save:
        """Take a snapshot for an existing empty directory and start writing it; saves to memory and others may meet."""

    @abstractmethod
    def load_checkpoint(self, directory: Path) -> None:
        """Read what `begin_save` wrote."""

    def take_whole(self, values: dict[str, Tensor]) -> None:
        """Copy whole parameters into this rank's, where the backend trains some beside adapters."""
        assert not values, self.spec.lora.modules_to_save

    @abstractmethod
    def take_adapters(self, pairs: Pairs, head: Tensor | None) -> None:
        """Copy A and B of published tensors into this rank's layers, and a head of values into the model's."""

    @abstractmethod
    def adapter_states(self) -> dict[str, Tensor]:
        """Return host copies of this rank's adapter and of its optimizer states."""

    @abstractmethod
    def set_adapter_states(self, states: dict[str, Tensor]) -> None:
        """Write what `adapter_states` returned."""

    # --- life cycle

    def open_store(self) -> int:
        """Hold the port from here on: one that was looked for beforehand may be another process's by `setup`."""
        self._store = ServedStore(self.master_addr, self.spec.timeout_s)
        return self._store.port

    def build(self) -> None:
        """(Re)build groups, models and optimizers from the spec in the running process group."""
        self.keep_saved()
        self.groups = self.join_groups()
        self.dropout = dropout_of(self.spec, self.rank)
        self.build_model()
        self._reference = None
        self._base = {}
        self._adapter, self._waiting = 0, {}
        self._rows = []
        self.own_teacher = None
        if (teacher := self.spec.own_teacher) is not None:
            vocab = self.spec.facts.vocab
            self.own_teacher = self._beside(self.spec.teaching(Teaching(vocab, min(teacher.top, vocab))))
        self.beside, self._active = [], self
        for other in self.spec.beside:
            if not self.spec.together:
                ([self, *self.beside][-1]).sleep_alone()
            self.beside.append(self._beside(other))
        if self.beside and not self.spec.together:
            self.beside[-1].sleep_alone()
            self.wake_alone()
        self.critic, critic = None, self.spec.critic
        if critic is None:
            return
        if critic.offload:  # turns on the device: the critic is built where the policy was, and waits from here on
            self.sleep()
        spec = replace(self.spec, optimizer=critic.optimizer, critic=None, router_replay=False, valued=True)
        self.critic = self._beside(spec)
        if critic.offload:
            self.critic.sleep()
            self.wake()

    def _beside(self, spec: PolicySpec) -> Self:
        """Build another model in this process and its groups."""
        other = type(self)(self.rank, self.world_size, self.master_addr, spec)
        other.groups, other.device = self.groups, self.device
        other.build_model()
        return other

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

    def use_model(self, number: int) -> None:
        model = [self, *self.beside][number]
        if model is self._active:
            return
        if not self.spec.together:
            self._active.sleep_alone()
            model.wake_alone()
        self._active = model

    def teach(self, task: Teaching) -> None:
        model = self._active
        model.spec = replace(model.spec, teaches=task)
        model.take_task(task)

    @property
    def _awake(self) -> list[Self]:
        return [self, *self.beside] if self.spec.together else [self._active]

    def sleep(self, keep_weights: bool = False) -> int:
        return sum(model.sleep_alone(keep_weights) for model in self._awake)

    def wake(self) -> None:
        for model in self._awake:
            model.wake_alone()

    def sleep_alone(self, keep_weights: bool = False) -> int:
        """Also return the bytes of an earlier `sleep` that kept the weights. A critic without turns sleeps with the
        policy."""
        self.keep_saved()
        of_others = self.critic.sleep() if self.critic is not None and not self._takes_turns else 0
        of_others += self.own_teacher.sleep() if self.own_teacher is not None else 0
        self._offloaded.append(self.offload(keep_weights))
        return of_others + sum(part.device_bytes for part in self._offloaded)

    def wake_alone(self) -> None:
        while self._offloaded:
            self._offloaded.pop().restore()
        if self._host_memory is not None:
            self._host_memory.rewind()
        if self.critic is not None and not self._takes_turns:
            self.critic.wake()
        if self.own_teacher is not None:
            self.own_teacher.wake()

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
        if self._active is not self:
            self._active.load_model(directory)
            return
        self.keep_saved()
        self._base = {}
        self.begun_with = Path(directory)
        self.load_weights(self.begun_with)
        if whole := saved_whole(self.spec.facts, self.spec.lora):
            live = self.parameters()
            self._whole_base = {name: on_host(live[name]) for name in whole}
        self.round_weights()
        self.update_teacher(1.0)
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load_model(directory)

    def load_adapter(self, directory: Path | str) -> None:
        self.keep_saved()
        adapter = peft_adapters(Path(directory), self.spec.facts, self.spec.lora)
        self.take_adapters(adapter.pairs, None)
        self.take_whole(adapter.whole)
        self.merge_adapters()
        self.update_teacher(1.0)

    def hold_reference(self) -> None:
        """With adapters the reference is the model without them, and nothing is copied but modules that are trained
        whole (`load_model`)."""
        values = {} if self.spec.lora.rank else self.parameters()
        if self.spec.reference_offload:
            self._reference = {name: on_host(value) for name, value in values.items()}
        else:
            self._reference = {name: value.clone() for name, value in values.items()}

    def hold_projections(self, projections: Mapping[int, Projection]) -> None:
        self._projections = {number: VocabProjection.of(each, self.device) for number, each in projections.items()}

    @torch.no_grad()
    def _exchange(self, others: dict[str, Tensor]) -> None:
        live = self.parameters()
        for name, other in others.items():
            kept = live[name].clone()
            live[name].copy_(other)
            other.copy_(kept)

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
        """Use W' in each adapted layer whose adapters are not added to products; call after adapters change."""
        for name, layer in self.adapters() if self.spec.lora.rank and not self.spec.lora.adds else ():
            if name not in self._base:
                self._base[name] = on_host(narrowed(layer.weight, self.dtype, self.rounding))
            layer.merge(self._base[name].to(layer.weight.device), self.rounding)

    def sent_parameters(self) -> Mapping[str, Tensor]:
        """With `training.lora.refit` = delta or adapters, the base: adapters follow apart (`AdapterSource`)."""
        parameters = self.parameters()
        if not self.spec.lora.rank or self.spec.lora.refit == "merged":
            return parameters
        return {**parameters, **{name: base.to(parameters[name].device) for name, base in self._base.items()}}

    def hold_adapters(self, count: int) -> None:
        self._adapter, self._waiting = 0, {number: self.adapter_states() for number in range(1, count)}

    def use_adapter(self, number: int) -> None:
        if number == self._adapter:
            return
        self.keep_saved()
        states = self._waiting.pop(number)
        self._waiting[self._adapter] = self.adapter_states()
        self._adapter = number
        self.set_adapter_states(states)
        self.merge_adapters()

    @contextlib.contextmanager
    def _without_adapters(self) -> Iterator[None]:
        with self.exchanged(self._whole_base), without_adapters(self.models):
            try:
                for name, layer in self.adapters() if self._base else ():
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
        if self._active is not self:
            self._active.load_batch(shard, fetch)
            return
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
        if column == "teacher_logprobs":
            self._add_own_teacher()
            return
        with self.under_weights_of(column):
            self.add_columns(columns)

    def _add_own_teacher(self) -> None:
        assert self.own_teacher is not None  # others give their log-probs by `import_logprobs`
        rows, settings = self._all_rows(), self.own_teacher.spec.teaches
        top = settings.top if settings is not None else 0
        for row, out in zip(rows, self.own_teacher._outputs(rows), strict=False):  # empty but on the last stage
            row.columns_R["teacher_logprobs"] = out[0]
            if top:
                row.columns_R["teacher_top"] = out[2 : 2 + top].T
                row.further_RK = out[2 + top :].T.long()

    @torch.no_grad()
    def update_teacher(self, rate: float) -> None:
        """Nothing is done without such a teacher. An average in a narrow format is kept in float32, in host memory: the
        steps of a slow one are below the format's."""
        teacher = self.own_teacher
        if teacher is None:
            return
        teacher.keep_saved()
        live = self.parameters()
        for name, value in teacher.parameters().items():
            source = live[name].to(value.device)
            if rate == 1 or not value.is_floating_point():
                value.copy_(source)
            elif value.dtype == torch.float32:
                value.lerp_(source.float(), rate)
            else:
                average = teacher.averages.setdefault(name, on_host(value).float())
                average.lerp_(source.float().to(average.device), rate)
                value.copy_(narrowed(average.to(value.device), value.dtype, self.rounding))
        if rate == 1:
            teacher.averages.clear()

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

    def hidden_states(self, paths: Paths) -> list[States]:
        rows, parallel = self._all_rows(), self.spec.parallel
        spans, heads = self.sublayers(paths)
        with recorded(spans, heads) as values:
            self._outputs(rows)
        micro_batches = [micro_batch for minibatch in self._shard.minibatches for micro_batch in minibatch]
        cp, tp = (parallel.cp, self.rank // parallel.tp % parallel.cp), (parallel.tp, self.rank % parallel.tp)
        column = heads[0].column if heads else 0
        return policy_states(values, rows, micro_batches, cp=cp, tp=tp, column=column)

    def export_logprobs(self) -> tuple[None, list[GroupLogprobs]]:
        if self._active is not self:
            return self._active.export_logprobs()
        outputs = self._outputs(self._all_rows())
        if not self.spec.parallel.reports(self.rank):
            return None, []
        chunk = self.spec.teaches.chunk if self.spec.teaches is not None else None
        return None, logprobs_by_group(self._shard, self._rows, outputs, chunk)

    def ask_teacher(
        self, endpoint: Endpoint, places: Sequence[int], top: int, fetch: Fetch
    ) -> tuple[None, list[GroupLogprobs]]:
        if not self.spec.parallel.reports(self.rank) or not places:
            return None, []
        columns = dict(zip(places, fetch([self._shard.columns[at] for at in places]), strict=True))
        micros = [micro for minibatch in self._shard.minibatches for micro in minibatch]
        rollouts = [rollout for micro in micros for rollout in micro if rollout.position in columns]
        spans = [(columns[rollout.position], rollout.span(columns[rollout.position])) for rollout in rollouts]
        texts = [(group.tokens_T[span], group.loss_mask_T[span]) for group, span in spans]
        logprobs: dict[int, GroupLogprobs] = {at: {} for at in places}
        for rollout, group_logprobs in zip(rollouts, endpoint.logprobs(texts, top), strict=True):
            logprobs[rollout.position][rollout.key] = group_logprobs
        return None, list(logprobs.values())

    def take_tokens(self, handles: Mapping[int, Sequence[Sequence[object]]], fetch: Fetch) -> None:
        add_teacher_tokens(self._active._shard, self._active._rows, handles, fetch)

    def import_logprobs(self, handles: Mapping[int, Sequence[Taught]], fetch: Fetch, mixture: Mixture) -> None:
        add_teacher_logprobs(self._shard, self._rows, handles, fetch, mixture, self._projections)

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
        with self.dropout.training(self.steps_taken()) if self.dropout else contextlib.nullcontext():
            results = self.run_rows(
                rows, lambda row, out: micro_batch_loss(loss, batch_of, row, out), forward_only=False
            )
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
            if self.dropout:
                self.dropout.row = number
            yield row

    def _all_rows(self) -> list[PackedRow]:
        return [row for minibatch in self._rows for row in minibatch]

    def _result(self, result: Any) -> Any:
        return result if self.rank == self.spec.parallel.result_rank else None

    # --- checkpoints

    def save_begin(self, directory: Path | str, in_memory: bool = False) -> None:
        self._saves[in_memory] = self.begin_save(Path(directory), in_memory=in_memory)
        if self.own_teacher is not None:
            place = Path(directory, OWN_TEACHER)
            place.mkdir(exist_ok=True)
            self.own_teacher.save_begin(place, in_memory)
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
        save, others = self._saves.get(in_memory), filter(None, (self.critic, self.own_teacher))
        return (save is None or save.written) and all(other.save_written(in_memory) for other in others)

    def save_finish(self, in_memory: bool = False) -> dict[str, str]:
        digests = self._saves.pop(in_memory).finish()
        for part, other in ((OWN_TEACHER, self.own_teacher), (CRITIC, self.critic)):
            if other is not None:
                digests |= {f"{part}/{name}": digest for name, digest in other.save_finish(in_memory).items()}
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
            facts = replace(self.spec.facts, mtp_layers=0)  # policies are without these layers
            head = load_value_head(directory) if self.spec.valued else None
            self.take_adapters(load_adapters(directory, facts, self.spec.lora), head)
        else:
            self.load_weights(directory, saved=True)
        self.merge_adapters()
        self.round_weights()
        if self.own_teacher is not None:
            self.own_teacher.load_teacher(require_policy(directory / OWN_TEACHER))
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load_saved(directory / CRITIC)

    def load_teacher(self, directory: Path) -> None:
        """Load the save of the policy's own teacher, which this model is."""
        self.keep_saved()
        self.load_weights(directory)

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


def on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
