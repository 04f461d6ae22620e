"""One process of a Megatron policy: implements `backends.base.PolicyWorker`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rlctl.backends.base import PolicySpec
from rlctl.backends.batch import BatchShard, Estimate, Fetch, LogprobColumn, MinibatchResult, ValueLoss
from rlctl.backends.megatron import cpu
from rlctl.backends.megatron.backend import policy_world
from rlctl.backends.policy_rank import LossOf, PolicyRank, Save
from rlctl.backends.results import StepOutcome
from rlctl.backends.rows import PackedRow
from rlctl.checkpoints.megatron.megatron_model import names_modules
from rlctl.checkpoints.rank_loading import load_moments, load_rank, require_policy
from rlctl.errors import InputError, WorkerError
from rlctl.weights.megatron import MegatronWorld

if TYPE_CHECKING:
    from rlctl.backends.megatron.model import PolicyModel
    from rlctl.backends.megatron.value_worker import ValueWorker

CRITIC = "critic"
"""The critic's part of a checkpoint, a directory inside of the policy's."""


class MegatronWorker(PolicyRank):
    """One rank. Its process must be its own: Megatron's groups are globals."""

    def __init__(self, rank: int, world_size: int, master_addr: str, spec: PolicySpec) -> None:
        super().__init__(rank, world_size, master_addr, spec)
        self.critic: ValueWorker | None = None

    # --- life cycle

    def prepare(self) -> None:
        cpu.install()
        from rlctl.backends.megatron.compat import require_version

        require_version()

    def build(self) -> None:
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
        super().close()

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
    def weights_of(self, column: LogprobColumn) -> Iterator[None]:
        """Nothing is copied."""
        self._gather_parameters()
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
        """The bytes returned include those of an earlier `sleep` that kept the weights. A critic that does not take
        turns with the policy sleeps whenever it does."""
        from rlctl.backends.megatron.optimizer import offload

        of_critic = self.critic.sleep() if self.critic is not None and not self.critic.offloads else 0
        if not self._offloaded:
            self._gather_parameters()
        reference = (self._reference or {}).values()
        self._offloaded.append(
            offload(self.chunks, self.optimizer, self.host_memory(), reference, keep_weights=keep_weights)
        )
        return of_critic + sum(part.device_bytes for part in self._offloaded)

    def wake(self) -> None:
        super().wake()
        if self.critic is not None and not self.critic.offloads:
            self.critic.wake()

    # --- batches

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        super().load_batch(shard, fetch)
        if self.critic is not None:
            self.critic._rows = self._rows

    def clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def take_step(self, lr: float, weight_decay: float | None) -> StepOutcome:
        from rlctl.backends.megatron.optimizer import take_step

        return take_step(self.optimizer, lr, weight_decay)

    def run_rows(self, rows: list[PackedRow], loss_of: LossOf, *, forward_only: bool) -> list[dict[str, Any]]:
        """Megatron's schedule; the last pipeline stage has the output."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from rlctl.backends.megatron.model import forward_step

        for chunk in self.chunks:
            # Without a backward pass nothing is recomputed: it costs time, and under delayed float8 scaling it would
            # leave copies of scales that the next recomputation takes for its own.
            chunk.train(not forward_only)
        for replay in (one for own in self._replays.values() for one in own):
            replay.begin(training=not forward_only)
        iterators = [self.counted(rows), *(iter(rows) for _ in self.chunks[1:])]
        return get_forward_backward_func()(
            forward_step_func=forward_step(loss_of, self._replays),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(rows),
            seq_length=max(row.tokens_T.shape[0] for row in rows),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @property
    def data_group(self) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()

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

    def begin_save(self, directory: Path) -> Save:
        from rlctl.backends.megatron.checkpoint import Save as MegatronSave

        self._gather_parameters()
        return MegatronSave(directory, self.chunks, self.optimizer)

    def save_begin(self, directory: Path | str) -> None:
        super().save_begin(directory)
        if self.critic is not None:
            place = Path(directory, CRITIC)
            place.mkdir(exist_ok=True)  # each rank makes sure of it
            with self._critics_turn():
                self.critic.save_begin(place)

    def save_written(self) -> bool:
        return super().save_written() and (self.critic is None or self.critic.save_written())

    def save_finish(self) -> dict[str, str]:
        digests = super().save_finish()
        if self.critic is not None:
            digests |= {f"{CRITIC}/{name}": digest for name, digest in self.critic.save_finish().items()}
        return digests

    def load(self, directory: Path | str) -> None:
        from rlctl.backends.megatron.checkpoint import load

        if names_modules(require_policy(Path(directory))):
            self._load_of_modules(Path(directory))
            return
        load(Path(directory), self.chunks, self.optimizer)
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load(Path(directory, CRITIC))

    def _load_of_modules(self, directory: Path) -> None:
        """Read what the dtensor backend saved. In bfloat16 the optimizer's weights begin as those of the model."""
        from rlctl.backends.megatron.optimizer import set_moments

        world = self.layouts()
        trained = {name: value for name, value in self._named() if value.requires_grad}
        moments = {
            moment: {name: torch.zeros_like(value, dtype=torch.float32) for name, value in trained.items()}
            for moment in ("exp_avg", "exp_avg_sq")
        }
        steps = load_moments(directory, world, self.rank, moments, world.facts)
        set_moments(self.optimizer, {trained[name]: {m: moments[m][name] for m in moments} for name in trained}, steps)
        self.load_model(directory)  # last: making room for moments takes a step of its own, which decays weights
