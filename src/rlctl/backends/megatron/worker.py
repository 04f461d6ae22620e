"""One process of a Megatron policy: implements `backends.base.PolicyWorker`."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rlctl.backends.base import (
    BatchShard,
    Fetch,
    LogprobColumn,
    LogprobStats,
    MicroBatch,
    MinibatchResult,
    PolicySpec,
    TokenLoss,
)
from rlctl.backends.megatron import cpu
from rlctl.backends.megatron.weights import policy_world
from rlctl.checkpoints.identity import damaged_files
from rlctl.checkpoints.load import load_rank
from rlctl.data.rollouts import RolloutColumns
from rlctl.errors import InputError, WorkerError

if TYPE_CHECKING:
    from rlctl.backends.megatron.checkpoint import Save
    from rlctl.backends.megatron.host_memory import HostMemory
    from rlctl.backends.megatron.offload import Offloaded


class MegatronWorker:
    """One rank. Its process must be its own: Megatron's groups are globals. Methods as in `PolicyWorker`."""

    def __init__(self, rank: int, world_size: int, master_addr: str, spec: PolicySpec) -> None:
        """`master_addr`: address of the node of rank 0."""
        if spec.parallel.world_size != world_size:
            raise InputError(
                f"the parallel sizes make {spec.parallel.world_size} ranks, but there are {world_size} processes."
            )
        self.rank, self.world_size, self.spec = rank, world_size, spec
        self._master_addr = master_addr
        self._store: torch.distributed.TCPStore | None = None
        self.device = torch.device("cpu")
        self._rows: list[list[Any]] = []
        self._reference: dict[str, Tensor] | None = None
        self._save: Save | None = None
        self._offloaded: list[Offloaded] = []
        self._host_memory: HostMemory | None = None

    # --- life cycle
    # ----------------------------------------------------------------------------------------------------------

    def open_store(self) -> int:
        """On rank 0: serve what the ranks meet at; the port for `setup`. It is this process's from the start, where one
        looked for beforehand may be another's by then."""
        self._store = self._tcp_store(0, serves=True)
        return self._store.port

    def _tcp_store(self, port: int, *, serves: bool) -> torch.distributed.TCPStore:
        limit = datetime.timedelta(seconds=self.spec.timeout_s)
        return torch.distributed.TCPStore(
            self._master_addr, port, is_master=serves, wait_for_workers=False, timeout=limit
        )

    def setup(self, port: int) -> None:
        """Joins the process group at the port that `open_store` gave on rank 0, builds model and optimizer with random
        weights."""
        spec = self.spec
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        cpu.install()
        from rlctl.backends.megatron.compat import require_version

        require_version()
        if spec.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.distributed.init_process_group(
            "nccl" if spec.device == "cuda" else "gloo",
            store=self._store or self._tcp_store(port, serves=False),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=spec.timeout_s),
        )
        self.build()

    def build(self) -> None:
        """(Re)builds groups, model and optimizer from the spec in the running process group."""
        from megatron.core import parallel_state, tensor_parallel

        from rlctl.backends.megatron import compat, model, optimizer, routing

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
        self.config = model.model_config(spec, finalize_model_grads_func=optimizer.finalize_without_scaling)
        if self.config.fp8:
            compat.require_float8(self.config)
        stages = range(parallel.vpp) if parallel.vpp > 1 else [None]
        models = [model.build_model(spec, self.config, stage) for stage in stages]
        self.chunks = optimizer.wrap_chunks(spec, self.config, models)
        self._replays = {id(chunk): routing.install(chunk) for chunk in self.chunks if spec.router_replay}
        self.optimizer = optimizer.build_optimizer(spec, self.chunks)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self._reference = None
        self._rows = []
        cpu.install()  # covers the modules that building has imported
        compat.write_checkpoints_in_this_process()

    def close(self) -> None:
        """Leaves the process group."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._store = None

    # --- weights
    # -------------------------------------------------------------------------------------------------------------

    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's parameters and persistent buffers by Megatron's names, for reading; views of the live weights
        but for those with adapters, which are merged when they are asked for.

        Layers are counted within the pipeline stage, over the whole model where a rank has several chunks of it.
        """
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
        """The GPTModel of each chunk, inside its wrappers."""
        cores = []
        for chunk in self.chunks:
            core = chunk.module
            while hasattr(core, "module"):
                core = core.module
            cores.append(core)
        return cores

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the model itself (no adapters) and its persistent buffers."""
        from rlctl.backends.megatron.lora import is_adapter

        for core in self._cores():
            buffers = ((name, value) for name, value in core.named_buffers() if name.endswith("expert_bias"))
            for name, value in (*core.named_parameters(), *buffers):
                if not is_adapter(name):
                    yield self._name(core, name), value

    def _name(self, core: Any, name: str) -> str:
        parts = name.split(".")
        if len(self.chunks) > 1 and parts[:2] == ["decoder", "layers"]:
            parts[2] = str(core.decoder.layers[int(parts[2])].layer_number - 1)
        return ".".join(parts)

    @property
    def layer_spec(self) -> Literal["local", "te"]:
        """Whose layers the policy is made of: Megatron's own, or TransformerEngine's."""
        return "te" if self.config.transformer_impl == "transformer_engine" else "local"

    @torch.no_grad()
    def load_hf(self, directory: Path | str) -> None:
        """Fills the weights from a Hugging Face directory or a Megatron checkpoint, each rank reading its own part;
        the optimizer starts afresh."""
        world = policy_world(self.spec, self.layer_spec)
        load_rank(Path(directory), world, self.rank, {name: value.data for name, value in self._named()}, world.facts)
        self.weights_changed()

    def hold_reference(self) -> None:
        """Keeps a frozen copy of the current weights as the reference policy; with adapters it is the model without
        them, and nothing is copied."""
        values = {} if self.spec.lora.rank else self.parameters()
        self._reference = {name: value.clone() for name, value in values.items()}

    def weights_changed(self) -> None:
        """To be called after the live weights were written from outside: the optimizer takes them over."""
        for inner in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner.reload_model_params()

    def _gather_parameters(self) -> None:
        """With overlapped all-gather the last one is only issued by the next forward pass."""
        for chunk in self.chunks:
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
        """Moves weights, optimizer and reference to host memory until `wake`; returns the bytes that the device got
        back, those of an earlier `sleep` that kept the weights included."""
        from rlctl.backends.megatron.host_memory import HostMemory
        from rlctl.backends.megatron.offload import Offloaded

        if not self._offloaded:
            self._gather_parameters()
        self._host_memory = self._host_memory or HostMemory()
        reference = (self._reference or {}).values()
        self._offloaded.append(
            Offloaded(self.chunks, self.optimizer, self._host_memory, reference, keep_weights=keep_weights)
        )
        return sum(part.device_bytes for part in self._offloaded)

    def wake(self) -> None:
        """Brings back what `sleep` moved."""
        while self._offloaded:
            self._offloaded.pop().restore()
        if self._host_memory is not None:
            self._host_memory.rewind()

    # --- batches
    # -------------------------------------------------------------------------------------------------------------

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        """Fetches and packs what this rank trains on."""
        columns = dict(zip(shard.columns, fetch(list(shard.columns.values())), strict=True))
        multiple = self.spec.row_multiple
        self._rows = [
            [self._row(micro, columns, shard, multiple) for micro in minibatch] for minibatch in shard.minibatches
        ]

    def _row(self, micro: MicroBatch, columns: dict[int, RolloutColumns], shard: BatchShard, multiple: int) -> Any:
        from rlctl.backends.megatron.routing import row_routing
        from rlctl.backends.megatron.rows import build_row

        row = build_row(micro, columns, shard.share_prompts, multiple, self.device, shard.rectangular)
        if self.spec.router_replay:
            row.routing_TLK = row_routing(micro, columns, shard.share_prompts, row)
        return row

    def logprobs(self, column: LogprobColumn) -> LogprobStats | None:
        """Adds the log-probs under the current (or the reference) weights to the loaded batch."""
        rows = [row for minibatch in self._rows for row in minibatch]
        self._gather_parameters()
        with self._weights_of(column), torch.no_grad():
            found = self._run(rows, lambda row, out: (out[0].sum(), {"logprobs": out[0]}), forward_only=True)
        for row, result in zip(rows, found, strict=False):  # empty but on the last pipeline stage
            row.columns_C[column] = result["logprobs"]
        from rlctl.backends.megatron.results import logprob_stats

        return self._result(logprob_stats([row.columns_C for row in rows], column) if found else None)

    def train_minibatch(
        self, index: int, loss: TokenLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        """One optimizer step on mini-batch `index` of the loaded batch; `weight_decay` None: the optimizer's own."""
        from rlctl.backends.megatron.optimizer import take_step
        from rlctl.backends.megatron.results import micro_batch_loss, minibatch_result

        if index >= len(self._rows):
            raise InputError(f"mini-batch {index} of {len(self._rows)} was asked for; load_batch comes first.")
        rows = self._rows[index]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self._run(rows, lambda row, out: micro_batch_loss(loss, row, out), forward_only=False)
        outcome = take_step(self.optimizer, lr, weight_decay)
        return self._result(minibatch_result(rows, found, outcome, lr) if found else None)

    def _run(
        self, rows: list[Any], loss_of: Callable[[Any, Tensor], tuple[Tensor, dict]], forward_only: bool
    ) -> list[dict]:
        """Megatron's schedule over `rows`; what `loss_of` returned beside the loss, on the last pipeline stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from rlctl.backends.megatron.forward import forward_step

        for chunk in self.chunks:
            # Without a backward pass nothing is recomputed: it costs time, and under delayed float8 scaling it would
            # leave copies of scales that the next recomputation takes for its own.
            chunk.train(not forward_only)
        for replay in (one for own in self._replays.values() for one in own):
            replay.begin(training=not forward_only)
        iterators = [iter(rows) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step(loss_of, self._replays),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(rows),
            seq_length=max(row.tokens_T.shape[0] for row in rows),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _result(self, result: Any) -> Any:
        return result if self.rank == self.spec.parallel.result_rank else None

    # --- checkpoints
    # ---------------------------------------------------------------------------------------------------------

    def save(self, directory: Path | str) -> None:
        """Writes model, optimizer and random state into an existing directory; not atomic."""
        self.save_begin(directory)
        self.save_finish()

    def save_begin(self, directory: Path | str) -> None:
        """Takes a snapshot and starts writing it into an existing directory; one save at a time."""
        from rlctl.backends.megatron.checkpoint import Save

        if self._save is not None:
            raise WorkerError("save_begin while a save is under way.")
        self._gather_parameters()
        self._save = Save(Path(directory), self.chunks, self.optimizer)

    def save_written(self) -> bool:
        """Whether `save_finish` would not have to wait for this rank."""
        return self._save is None or self._save.written

    def save_finish(self) -> dict[str, str]:
        """Waits until the checkpoint is complete on all ranks; returns the digests of the files of this one."""
        save, self._save = self._save, None
        if save is None:
            raise WorkerError("save_finish without a save under way.")
        return save.finish()

    def damaged_files(self, directory: Path | str, digests: dict[str, str]) -> list[str]:
        """What is wrong with this rank's share of the files that a save wrote: a sentence each."""
        names = sorted(digests)[self.rank :: self.world_size]
        return damaged_files(Path(directory), {name: digests[name] for name in names})

    def load(self, directory: Path | str) -> None:
        """Reads what `save` wrote, under any parallelism."""
        from rlctl.backends.megatron.checkpoint import load

        load(Path(directory), self.chunks, self.optimizer)
