"""One process of a Megatron policy: implements `backends.base.PolicyWorker`."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - not in __all__

from rlctl.backends.base import PolicySpec
from rlctl.backends.batch import (
    BatchShard,
    Estimate,
    Fetch,
    GroupLogprobs,
    LogprobColumn,
    LogprobStats,
    LossOutput,
    MicroBatchLoss,
    MinibatchResult,
    ValueLoss,
)
from rlctl.backends.megatron import cpu
from rlctl.backends.megatron.backend import policy_world
from rlctl.checkpoints.identity import damaged_files
from rlctl.checkpoints.rank_loading import load_rank
from rlctl.cluster.progress import report
from rlctl.errors import InputError, WorkerError
from rlctl.transport.collective import ServedStore
from rlctl.weights.megatron import MegatronWorld

if TYPE_CHECKING:
    from rlctl.backends.host_memory import HostMemory, Offloaded
    from rlctl.backends.megatron.checkpoint import Save
    from rlctl.backends.megatron.model import PolicyModel
    from rlctl.backends.megatron.value_worker import ValueWorker

CRITIC = "critic"
"""The critic's part of a checkpoint, a directory inside of the policy's."""


class MegatronWorker:
    """One rank. Its process must be its own: Megatron's groups are globals. Methods as in `PolicyWorker`."""

    def __init__(self, rank: int, world_size: int, master_addr: str, spec: PolicySpec) -> None:
        """`master_addr`: address of the node of rank 0."""
        if spec.parallel.world_size != world_size:
            raise InputError(
                f"the parallel sizes make {spec.parallel.world_size} ranks, but there are {world_size} processes."
            )
        self.rank, self.world_size, self.spec = rank, world_size, spec
        self.master_addr = master_addr
        self._store: ServedStore | None = None
        self.device = torch.device("cpu")
        self._rows: list[list[Any]] = []
        self._shard = BatchShard({}, ())
        self._reference: dict[str, Tensor] | None = None
        self._save: Save | None = None
        self._offloaded: list[Offloaded] = []
        self._host_memory: HostMemory | None = None
        self.critic: ValueWorker | None = None

    # --- life cycle

    def open_store(self) -> int:
        """Hold the port from here on: one that was looked for beforehand may be another process's by `setup`."""
        self._store = ServedStore(self.master_addr, self.spec.timeout_s)
        return self._store.port

    def setup(self, port: int) -> None:
        spec = self.spec
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        cpu.install()
        from rlctl.backends.megatron.compat import require_version

        require_version()
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

    def build(self) -> None:
        """(Re)builds groups, model and optimizer from the spec in the running process group."""
        from megatron.core import parallel_state, tensor_parallel

        from rlctl.backends.megatron import compat, routing

        spec, parallel = self.spec, self.spec.parallel
        parallel_state.destroy_model_parallel()
        compat.destroy_subgroups()
        compat.call_known(
            parallel_state.initialize_model_parallel,
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            distributed_timeout_minutes=max(1, round(spec.timeout_s / 60)),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(spec.seed)
        torch.manual_seed(spec.seed)
        self._build_model()
        self._replays = {id(chunk): routing.install(chunk) for chunk in self.chunks if spec.router_replay}
        self._reference = None
        self._rows = []
        cpu.install()  # covers the modules that building has imported
        compat.write_checkpoints_in_this_process()
        self._build_critic()

    def _build_model(self) -> None:
        from rlctl.backends.megatron import compat, model, optimizer

        spec = self.spec
        self.config = model.model_config(spec, finalize_model_grads_func=optimizer.finalize_without_scaling)
        if self.config.fp8:
            compat.require_float8(self.config)
        stages = range(spec.parallel.vpp) if spec.parallel.vpp > 1 else [None]
        models = [model.build_model(spec, self.config, stage, self._kind) for stage in stages]
        self.chunks = optimizer.wrap_chunks(spec, self.config, models)
        self.optimizer: Any = None
        if spec.teaches is None:
            self.optimizer = optimizer.build_optimizer(spec, self.chunks)
            self.config.grad_scale_func = self.optimizer.scale_loss

    @property
    def _kind(self) -> type[PolicyModel]:
        """The class of the model chunks."""
        from rlctl.backends.megatron.model import PolicyModel

        return PolicyModel

    def _build_critic(self) -> None:
        """With turns on the device, the critic is built where the policy was, and waits from here on."""
        from rlctl.backends.megatron.value_worker import ValueWorker

        self.critic, critic = None, self.spec.critic
        if critic is None:
            return
        if critic.offload:
            self.sleep()
        self.critic = ValueWorker(self, critic)
        if critic.offload:
            self.critic.sleep()
            self.wake()

    def close(self) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._store = None

    # --- weights

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the live weights, but adapted ones are merged when they are asked for. Layers are counted within the
        pipeline stage, over the whole model where a rank has several chunks of it."""
        from rlctl.backends.megatron.lora import Adapted, MergedParameters

        self._gather_parameters()
        plain = {name: value.data for name, value in self._named()}
        if not self.spec.lora.rank:
            return plain
        adapted = {
            f"{self._name(core, name)}.weight": module
            for core in self._cores()
            for name, module in core.named_modules()
            if isinstance(module, Adapted)
        }
        return MergedParameters(plain, adapted)

    def _cores(self) -> list[Any]:
        from rlctl.backends.megatron.lora import core_of

        return [core_of(chunk) for chunk in self.chunks]

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the model itself (no adapters) and its persistent buffers."""
        from rlctl.backends.megatron.lora import is_adapter

        for core in self._cores():
            buffers = ((name, value) for name, value in core.named_buffers() if name.endswith("expert_bias"))
            for name, value in (*core.named_parameters(), *buffers):
                if not is_adapter(name):
                    yield self._name(core, name), value

    def _name(self, core: Any, name: str) -> str:
        from rlctl.backends.megatron.lora import global_name

        return global_name(core, name) if len(self.chunks) > 1 else name

    @property
    def layer_spec(self) -> Literal["local", "te"]:
        """The library that the policy's layers come from: Megatron itself, or TransformerEngine."""
        return "te" if self.config.transformer_impl == "transformer_engine" else "local"

    def layouts(self) -> MegatronWorld:
        return policy_world(self.spec, self.layer_spec)

    @torch.no_grad()
    def load_model(self, directory: Path | str) -> None:
        world = self.layouts()
        load_rank(Path(directory), world, self.rank, {name: value.data for name, value in self._named()}, world.facts)
        self.weights_changed()
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load_model(directory)

    def hold_reference(self) -> None:
        """With adapters the reference is the model without them, and nothing is copied."""
        values = {} if self.spec.lora.rank else self.parameters()
        self._reference = {name: value.clone() for name, value in values.items()}

    def weights_changed(self) -> None:
        """To be called after the live weights were written from outside: the optimizer takes them over."""
        for inner in getattr(self.optimizer, "chained_optimizers", [self.optimizer] if self.optimizer else []):
            inner.reload_model_params()

    def _gather_parameters(self) -> None:
        """With overlapped all-gather the last one is only issued by the next forward pass."""
        for chunk in self.chunks if self.optimizer is not None else ():
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @contextlib.contextmanager
    def _weights_of(self, column: LogprobColumn) -> Iterator[None]:
        """Puts the reference weights in place of the live ones for a moment; nothing is copied."""
        if column == "old_logprobs":
            yield
            return
        if self._reference is None:
            raise InputError("no reference policy is held.", "Call hold_reference before training starts.")
        if self.spec.lora.rank:
            from rlctl.backends.megatron.lora import base_weights

            with base_weights(self._cores()):
                yield
            return
        live = self.parameters()
        named = dict(self._named())
        try:
            for name, param in named.items():
                param.data = self._reference[name]
            yield
        finally:
            for name, param in named.items():
                param.data = live[name]

    def sleep(self, keep_weights: bool = False) -> int:
        """The bytes returned include those of an earlier `sleep` that kept the weights."""
        from rlctl.backends.host_memory import HostMemory
        from rlctl.backends.megatron.optimizer import offload

        if not self._offloaded:
            self._gather_parameters()
        self._host_memory = self._host_memory or HostMemory()
        reference = (self._reference or {}).values()
        self._offloaded.append(
            offload(self.chunks, self.optimizer, self._host_memory, reference, keep_weights=keep_weights)
        )
        return sum(part.device_bytes for part in self._offloaded)

    def wake(self) -> None:
        while self._offloaded:
            self._offloaded.pop().restore()
        if self._host_memory is not None:
            self._host_memory.rewind()

    # --- batches

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        from rlctl.backends.rows import fetch_rows

        multiple, routing = self.spec.row_multiple, self.spec.router_replay
        self._shard, self._rows = shard, fetch_rows(shard, fetch, multiple, self.device, routing=routing)
        if self.critic is not None:
            self.critic._rows = self._rows

    def logprobs(self, column: LogprobColumn) -> None:
        with self._weights_of(column):
            self._add_column(column)

    def _add_column(self, column: str) -> None:
        """Add the first row of the model's output to the loaded batch, on the last pipeline stage."""
        rows = [row for minibatch in self._rows for row in minibatch]
        self._gather_parameters()
        for row, out in zip(rows, self._outputs(rows), strict=False):  # empty but on the last pipeline stage
            row.columns_R[column] = out[0]

    @torch.no_grad()
    def _outputs(self, rows: list[Any]) -> list[Tensor]:
        """The output of the model for each row; empty but on the last pipeline stage."""
        return [one["out"] for one in self._run(rows, lambda row, out: (out[0].sum(), {"out": out}), forward_only=True)]

    def teach(self) -> tuple[None, list[GroupLogprobs]]:
        from rlctl.backends.rows import taught_by_group

        found = self._outputs([row for minibatch in self._rows for row in minibatch])
        reports = self.spec.parallel.reports(self.rank)
        return None, taught_by_group(self._shard, self._rows, found) if reports else []

    def learn_from(self, taught: Mapping[int, Sequence[object]], fetch: Fetch) -> None:
        from rlctl.backends.rows import add_taught

        add_taught(self._shard, self._rows, taught, fetch)

    def logprob_difference(self, column: LogprobColumn) -> LogprobStats | None:
        from rlctl.backends.results import logprob_stats

        rows = [row for minibatch in self._rows for row in minibatch]
        if not all(column in row.columns_R for row in rows):  # the last pipeline stage alone has them
            return None
        return self._result(logprob_stats([row.columns_R for row in rows], column, self._data_group))

    def train_minibatch(
        self, index: int, loss: MicroBatchLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        from rlctl.backends.results import token_batch

        return self._train(index, loss, token_batch, lr, weight_decay)

    def _train(
        self,
        index: int,
        loss: Callable[[Any], LossOutput],
        batch_of: Callable[[Any, Tensor], Any],
        lr: float,
        weight_decay: float | None,
    ) -> MinibatchResult | None:
        """`batch_of` makes of a row and the model's output what `loss` takes."""
        from rlctl.backends.megatron.optimizer import take_step
        from rlctl.backends.results import micro_batch_loss, minibatch_result

        if index >= len(self._rows):
            raise InputError(f"mini-batch {index} of {len(self._rows)} was asked for; load_batch comes first.")
        rows = self._rows[index]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self._run(rows, lambda row, out: micro_batch_loss(loss, batch_of, row, out), forward_only=False)
        outcome = take_step(self.optimizer, lr, weight_decay)
        return self._result(minibatch_result(found, outcome, self._data_group) if found else None)

    def _run(
        self, rows: list[Any], loss_of: Callable[[Any, Tensor], tuple[Tensor, dict]], forward_only: bool
    ) -> list[dict]:
        """Run Megatron's schedule over `rows`; returns the second values of `loss_of` on the last pipeline stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from rlctl.backends.megatron.model import forward_step

        for chunk in self.chunks:
            # Without a backward pass nothing is recomputed: it costs time, and under delayed float8 scaling it would
            # leave copies of scales that the next recomputation takes for its own.
            chunk.train(not forward_only)
        for replay in (one for own in self._replays.values() for one in own):
            replay.begin(training=not forward_only)
        iterators = [self._counted(rows), *(iter(rows) for _ in self.chunks[1:])]
        found = get_forward_backward_func()(
            forward_step_func=forward_step(loss_of, self._replays),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(rows),
            seq_length=max(row.tokens_T.shape[0] for row in rows),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        report(len(rows), len(rows))
        return found

    def _counted(self, rows: list[Any]) -> Iterator[Any]:
        """Yield the rows, and tell the driver how many came before; one rank tells it for all."""
        for number, row in enumerate(rows):
            if self.rank == 0:
                report(number, len(rows))
            yield row

    @property
    def _data_group(self) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()

    def _result(self, result: Any) -> Any:
        return result if self.rank == self.spec.parallel.result_rank else None

    # --- the critic

    def _value_worker(self) -> ValueWorker:
        if self.critic is None:
            raise WorkerError("This policy was started without a critic.")
        return self.critic

    def critic_begin(self) -> None:
        if self._value_worker().offloads:
            self.sleep()
            self._value_worker().wake()

    def critic_end(self) -> None:
        if self._value_worker().offloads:
            self._value_worker().sleep()
            self.wake()

    @contextlib.contextmanager
    def _critics_turn(self) -> Iterator[None]:
        self.critic_begin()
        yield
        self.critic_end()

    def estimate(self, estimate: Estimate) -> None:
        self._value_worker().estimate(estimate)

    def train_critic(
        self, index: int, loss: ValueLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        return self._value_worker().train_critic(index, loss, lr, weight_decay)

    # --- checkpoints

    def parameters_not_finite(self) -> list[str]:
        named = ((self._name(core, name), value) for core in self._cores() for name, value in core.named_parameters())
        odd = [name for name, value in named if value.requires_grad and not value.detach().isfinite().all()]
        if self.critic is not None:
            with self._critics_turn():
                odd += [f"{CRITIC}: {name}" for name in self.critic.parameters_not_finite()]
        return odd

    def save_begin(self, directory: Path | str) -> None:
        from rlctl.backends.megatron.checkpoint import Save

        if self._save is not None:
            raise WorkerError("save_begin was called while a save was under way.")
        self._gather_parameters()
        self._save = Save(Path(directory), self.chunks, self.optimizer)
        if self.critic is not None:
            place = Path(directory, CRITIC)
            place.mkdir(exist_ok=True)  # each rank makes sure of it
            with self._critics_turn():
                self.critic.save_begin(place)

    def save_written(self) -> bool:
        written = self._save is None or self._save.written
        return written and (self.critic is None or self.critic.save_written())

    def save_finish(self) -> dict[str, str]:
        save, self._save = self._save, None
        if save is None:
            raise WorkerError("save_finish was called, but no save is under way.")
        digests = save.finish()
        if self.critic is not None:
            digests |= {f"{CRITIC}/{name}": digest for name, digest in self.critic.save_finish().items()}
        return digests

    def damaged_files(self, directory: Path | str, digests: dict[str, str]) -> list[str]:
        names = sorted(digests)[self.rank :: self.world_size]
        return damaged_files(Path(directory), {name: digests[name] for name in names})

    def load(self, directory: Path | str) -> None:
        from rlctl.backends.megatron.checkpoint import load

        load(Path(directory), self.chunks, self.optimizer)
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load(Path(directory, CRITIC))
