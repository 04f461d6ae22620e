"""One process of a Megatron policy: implements `backends.base.PolicyWorker`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rlctl.backends.base import CriticSpec
from rlctl.backends.batch import LogprobColumn
from rlctl.backends.lora import MergedParameters, base_weights, is_adapter
from rlctl.backends.megatron import compat, cpu
from rlctl.backends.megatron.args import has_transformer_engine
from rlctl.backends.megatron.backend import policy_world
from rlctl.backends.policy_rank import LossOf, Save
from rlctl.backends.rank_with_critic import RankWithCritic
from rlctl.backends.results import StepOutcome
from rlctl.backends.rows import PackedRow
from rlctl.checkpoints.megatron.adapters import fill_layer
from rlctl.checkpoints.megatron.megatron_model import names_modules
from rlctl.checkpoints.rank_loading import load_adapters, load_moments, load_rank, require_policy
from rlctl.checkpoints.rounding import narrow_into
from rlctl.errors import InputError
from rlctl.weights.layout import Piece
from rlctl.weights.megatron import MegatronWorld

if TYPE_CHECKING:
    from rlctl.backends.megatron.lora import AdaptedParallel
    from rlctl.backends.megatron.model import PolicyModel
    from rlctl.backends.megatron.value_worker import ValueWorker


class MegatronWorker(RankWithCritic):
    """One rank. Its process must be its own: Megatron's groups are globals."""

    # --- life cycle

    def prepare(self) -> None:
        compat.import_transformer_engine(has_transformer_engine(self.spec))
        cpu.install()
        compat.require_version()

    def build(self) -> None:
        from megatron.core import parallel_state, tensor_parallel

        from rlctl.backends.megatron import routing

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
        self.build_critic()

    def _build_model(self) -> None:
        from rlctl.backends.megatron import model, optimizer

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
            self.movement = self.new_movement()
            for inner in optimizer.inner_optimizers(self.optimizer):
                inner.movement = self.movement

    @property
    def _kind(self) -> type[PolicyModel]:
        """The class of the model chunks."""
        from rlctl.backends.megatron.model import PolicyModel

        return PolicyModel

    def new_critic(self, critic: CriticSpec) -> ValueWorker:
        from rlctl.backends.megatron.value_worker import ValueWorker

        return ValueWorker(self, critic)

    def close(self) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        super().close()

    # --- weights

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the live weights, but adapted ones are merged when they are asked for. Layers are counted within the
        pipeline stage, over the whole model where a rank has several chunks of it."""
        self._gather_parameters()
        plain = {name: value.data for name, value in self._named()}
        if not self.spec.lora.rank:
            return plain
        merges = {name: partial(module.merged, self.rounding) for name, module in self._adapted().items()}
        return MergedParameters(plain, merges)

    def _adapted(self) -> dict[str, AdaptedParallel]:
        """Adapted layers by the names of their weights."""
        from rlctl.backends.megatron.lora import AdaptedParallel

        return {
            f"{self._name(core, name)}.weight": module
            for core in self._cores()
            for name, module in core.named_modules()
            if isinstance(module, AdaptedParallel)
        }

    def _cores(self) -> list[Any]:
        from rlctl.backends.megatron.lora import core_of

        return [core_of(chunk) for chunk in self.chunks]

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the model itself (no adapters) and its persistent buffers."""
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
    def load_weights(self, directory: Path) -> None:
        world = self.layouts()
        load_rank(directory, world, self.rank, {name: value.data for name, value in self._named()}, world.facts)
        self.weights_changed()

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
    def under_weights_of(self, column: LogprobColumn) -> Iterator[None]:
        """Nothing is copied."""
        self._gather_parameters()
        if column == "old_logprobs":
            yield
            return
        if self._reference is None:
            raise InputError("no reference policy is held.", "Call hold_reference before training starts.")
        if self.spec.lora.rank:
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

    def offload(self, keep_weights: bool) -> int:
        from rlctl.backends.megatron.optimizer import offload

        if not self._offloaded:
            self._gather_parameters()
        reference = (self._reference or {}).values()
        self._offloaded.append(
            offload(self.chunks, self.optimizer, self.host_memory(), reference, keep_weights=keep_weights)
        )
        return sum(part.device_bytes for part in self._offloaded)

    # --- batches

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

    # --- checkpoints

    def trained_not_finite(self) -> list[str]:
        named = ((self._name(core, name), value) for core in self._cores() for name, value in core.named_parameters())
        return [name for name, value in named if value.requires_grad and not value.detach().isfinite().all()]

    def begin_save(self, directory: Path) -> Save:
        from rlctl.backends.megatron.checkpoint import Save as MegatronSave

        self._gather_parameters()
        return MegatronSave(directory, self.chunks, self.optimizer)

    def load_checkpoint(self, directory: Path) -> None:
        from rlctl.backends.megatron.checkpoint import load

        if names_modules(require_policy(directory)):
            self._load_of_modules(directory)
        else:
            load(directory, self.chunks, self.optimizer)

    def _load_of_modules(self, directory: Path) -> None:
        """Read what the dtensor backend saved: the float32 weights, from which the model gets its own, and moments."""
        from rlctl.backends.megatron.optimizer import set_moments

        if self.spec.lora.rank:
            self._load_adapters(directory)
            return
        world, named = self.layouts(), dict(self._named())
        trained = {name: value for name, value in named.items() if value.requires_grad}
        found: dict[str, dict[str, Tensor]] = {
            what: {name: torch.zeros_like(value, dtype=torch.float32) for name, value in own.items()}
            for what, own in (("param", named), ("exp_avg", trained), ("exp_avg_sq", trained))
        }
        masters = found.pop("param")
        self.read_masters(directory, replace(world, dtype="float32"), masters)
        steps = self.read_moments(directory, world, found)
        for name, value in named.items():
            narrow_into(value.data, masters[name], self.rounding)
        self.weights_changed()
        states = {name: {"param": masters[name]} | {what: own[name] for what, own in found.items()} for name in trained}
        set_moments(self.optimizer, {trained[name]: own for name, own in states.items()}, steps)

    def read_moments(self, directory: Path, world: MegatronWorld, moments: dict[str, dict[str, Tensor]]) -> float:
        """Read Adam's moments that the dtensor backend saved; return the steps that were taken."""
        return load_moments(directory, world, self.rank, moments, world.facts)

    def read_masters(self, directory: Path, world: MegatronWorld, masters: dict[str, Tensor]) -> None:
        """Read the weights that the dtensor backend saved, in float32."""
        load_rank(directory, world, self.rank, masters, world.facts)

    @torch.no_grad()
    def _load_adapters(self, directory: Path) -> None:
        """Read adapters that the dtensor backend saved, and their moments."""
        from rlctl.backends.megatron.optimizer import set_moments

        world, adapted = self.layouts(), self._adapted()
        stored = load_adapters(directory, world.facts)
        pieces: dict[str, list[Piece]] = {name: [] for name in adapted}
        for piece in world.layout(self.rank).pieces:
            if piece.param in pieces:
                pieces[piece.param].append(piece)
        states: dict[Tensor, dict[str, Tensor]] = {}
        for name, layer in adapted.items():
            for state, pairs in (("param", stored.weights), *stored.moments.items()):
                a, b = (torch.zeros_like(part, dtype=torch.float32) for part in (layer.lora_a, layer.lora_b))
                fill_layer(pairs, pieces[name], a, b)
                states.setdefault(layer.lora_a, {})[state] = a
                states.setdefault(layer.lora_b, {})[state] = b
        for part, own in states.items():
            narrow_into(part.data, own["param"], self.rounding)
        self.weights_changed()
        set_moments(self.optimizer, states, stored.steps)


if TYPE_CHECKING:
    from rlctl.backends.base import CriticWorker, PolicyWorker

    WORKER: type[PolicyWorker] = MegatronWorker
    CRITIC: type[CriticWorker] = MegatronWorker
