"""One process of a Megatron policy: implements `backends.base.PolicyWorker`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlctl.backends.batching.packed_rows import PackedRow
from rlctl.backends.hidden_states import NORM, HeadTap, Paths, Spans, layer_point
from rlctl.backends.host_memory import Offloaded
from rlctl.backends.lora_adapter import Adapted, Adapter, Dropout, is_adapter
from rlctl.backends.megatron import compat, cpu
from rlctl.backends.megatron.args import auxiliary_losses, has_transformer_engine
from rlctl.backends.megatron.backend import layouts
from rlctl.backends.policy_rank import LossOf, PolicyRank, Save, on_host
from rlctl.backends.results import StepOutcome
from rlctl.checkpoints.megatron.lora_weights import fill_layer
from rlctl.checkpoints.rank_loading import Pairs, load_rank, load_value_head, published_value_head
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.rounding import narrow_into

if TYPE_CHECKING:
    from rlctl.backends.base import Teaching
    from rlctl.backends.megatron.balance import Balance

HEAD = "output_layer.weight"
"""The head of values."""
STEPS = "steps"
"""The number of optimizer steps among the states of an adapter."""


class MegatronWorker(PolicyRank):
    """One rank. Its process must be its own: Megatron's groups are globals."""

    saves_modules = False

    # --- life cycle

    def prepare(self) -> None:
        compat.import_transformer_engine(has_transformer_engine(self.spec))
        cpu.install()
        compat.require_version()

    def join_groups(self) -> None:
        from megatron.core import parallel_state, tensor_parallel

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

    def build_model(self) -> None:
        from rlctl.backends.megatron import balance, model, muon, optimizer, routing

        spec = self.spec
        self.config = model.model_config(spec, finalize_model_grads_func=optimizer.finalize_without_scaling)
        if self.config.fp8:
            compat.require_float8(self.config)
        stages = range(spec.parallel.vpp) if spec.parallel.vpp > 1 else [None]
        kind = model.ValueModel if self.spec.valued else model.PolicyModel
        with cpu.no_weights_drawn():
            models = [model.build_model(spec, self.config, stage, kind) for stage in stages]
        self.chunks = optimizer.wrap_chunks(spec, self.config, models)
        if self.dropout is not None:
            self._drop_inputs(self.dropout)
        self.optimizer: Any = None
        if spec.teaches is None:
            named, world = dict(self._named()), self.layouts()
            self.optimizer = optimizer.build_optimizer(
                spec, self.chunks, lambda made: muon.use_muon(made, spec, world, self.rank, named)
            )
            self.config.grad_scale_func = self.optimizer.scale_loss
            self.movement = self.new_movement()
            for inner in optimizer.inner_optimizers(self.optimizer):
                inner.movement = self.movement
        self.grid = self.new_grid(self.layouts().layout(self.rank))
        self._replays = {id(chunk): routing.install(chunk) for chunk in self.chunks if spec.router_replay}
        self._balances: dict[int, list[Balance]] = {}
        if spec.teaches is None and (weights := balance.Coefficients(*auxiliary_losses(spec.megatron))):
            scale = self.optimizer.scale_loss
            self._balances = {id(chunk): balance.install(chunk, weights, scale) for chunk in self.chunks}
        cpu.install()  # covers the modules that building has imported
        if spec.exact:
            from rlctl.backends.megatron import exact

            exact.install()
        compat.write_checkpoints_in_this_process()

    @property
    def models(self) -> list[nn.Module]:
        return self.chunks

    def close(self) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        super().close()

    # --- weights

    def parameters(self) -> Mapping[str, Tensor]:
        """Return views of the live weights. Layers are counted within the pipeline stage, or over the whole model with
        several chunks."""
        self._gather_parameters()
        return {name: value.data for name, value in self._named()}

    def round_weights(self) -> None:
        """Round the live weights in place. Each step makes them anew from the optimizer's float32 weights."""
        if self.grid is not None:
            parameters = self.parameters()
            self.grid.measure(parameters)
            for name, value in parameters.items():
                self.grid.round(name, value)

    def hold_reference(self) -> None:
        """The reference is the model without rounding, which is read once more."""
        if self.grid is not None:
            self.load_weights(self.begun_with)
        super().hold_reference()
        self.round_weights()

    def adapters(self) -> Iterator[tuple[str, Adapter]]:
        self._gather_parameters()
        for name, layer in self._adapted().items():
            yield name, Adapter(layer.weight.data, layer.lora_b.data, layer.parts(layer.lora_a.data))

    def _adapted(self) -> dict[str, Adapted]:
        return {
            f"{self._name(core, name)}.weight": module
            for core in self._cores()
            for name, module in core.named_modules()
            if isinstance(module, Adapted)
        }

    def _drop_inputs(self, dropout: Dropout) -> None:
        """Set the dropout of every adapter. Row-split layers, and with sequence parallelism all layers, have different
        inputs, and so different masks, on each rank."""
        for name, layer in self._adapted().items():
            divided = "lora_a" in layer.split or self.spec.parallel.sequence_parallel  # type: ignore[attr-defined]
            layer.dropped = dropout.of_layer(name, bool(divided))

    def steps_taken(self) -> int:
        from rlctl.backends.megatron.optimizer import count_of

        return count_of(self.optimizer)

    def _cores(self) -> list[Any]:
        from rlctl.backends.megatron.lora import core_of

        return [core_of(chunk) for chunk in self.chunks]

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for core in self._cores():
            buffers = ((name, value) for name, value in core.named_buffers() if name.endswith("expert_bias"))
            for name, value in (*core.named_parameters(), *buffers):
                if not is_adapter(name):
                    yield self._name(core, name), value

    def _name(self, core: Any, name: str) -> str:
        from rlctl.backends.megatron.lora import global_name

        return global_name(core, name) if len(self.chunks) > 1 else name

    def layouts(self) -> MegatronWorld:
        world = layouts(self.spec)
        return replace(world, head=False) if self.spec.valued else world

    @torch.no_grad()
    def load_weights(self, directory: Path, *, saved: bool = False) -> None:
        world, by_name = self.layouts(), dict(self._named())
        head = by_name.pop(HEAD, None) if self.spec.valued else None  # the last pipeline stage alone has it
        if not saved:
            load_rank(directory, world, self.rank, {name: value.data for name, value in by_name.items()}, world.facts)
            if head is not None and (published := published_value_head(directory)) is not None:
                head.data.copy_(published)
            self.weights_changed()
            return
        masters = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in by_name.items()}
        load_rank(directory, replace(world, dtype="float32"), self.rank, masters, world.facts, valued=self.spec.valued)
        weights = {by_name[name]: master for name, master in masters.items()}
        self._take_masters(weights if head is None else weights | {head: load_value_head(directory)})

    def _take_masters(self, masters: dict[Tensor, Tensor]) -> None:
        from rlctl.backends.megatron.optimizer import set_masters

        for live, master in masters.items():
            narrow_into(live.data, master, self.rounding)
        self.weights_changed()
        set_masters(self.optimizer, masters)

    def weights_changed(self) -> None:
        """To be called after the live weights were written from outside: the optimizer takes them over."""
        for inner in getattr(self.optimizer, "chained_optimizers", [self.optimizer] if self.optimizer else []):
            inner.reload_model_params()

    def _gather_parameters(self) -> None:
        for chunk in self.chunks if self.optimizer is not None else ():
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @contextlib.contextmanager
    def with_weights(self, others: dict[str, Tensor]) -> Iterator[None]:
        """Nothing is copied, unless they wait in host memory."""
        if self.spec.reference_offload:
            with self.exchanged(others):
                yield
            return
        live, by_name = self.parameters(), dict(self._named())
        try:
            for name, param in by_name.items():
                param.data = others[name]
            yield
        finally:
            for name, param in by_name.items():
                param.data = live[name]

    def offload(self, keep_weights: bool) -> Offloaded:
        from rlctl.backends.megatron.optimizer import offload

        if not self._offloaded:
            self._gather_parameters()
        reference = (self._reference or {}).values()
        return offload(self.chunks, self.optimizer, self.host_memory(), reference, keep_weights=keep_weights)

    # --- batches

    def take_task(self, task: Teaching) -> None:
        for core in self._cores():
            core.teaches = task

    def clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def take_step(self, lr: float, weight_decay: float | None) -> StepOutcome:
        from rlctl.backends.megatron.balance import router_load
        from rlctl.backends.megatron.optimizer import take_step

        outcome = take_step(self.optimizer, lr, weight_decay)
        if not self._balances:
            return outcome
        facts, balances = self.spec.facts, [balance for chunk in self._balances.values() for balance in chunk]
        assert facts.moe is not None  # others have no routers
        return replace(outcome, routers=router_load(balances, facts.layers, facts.moe.experts, self.device))

    def run_rows(self, rows: list[PackedRow], loss_of: LossOf, *, forward_only: bool) -> list[dict[str, Any]]:
        """Megatron's schedule; the last pipeline stage has the output."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from rlctl.backends.megatron.model import forward_step

        if forward_only:
            self._gather_parameters()
        for chunk in self.chunks:
            # Without a backward pass recomputation would only cost time, and under delayed float8 scaling it would
            # leave copies of scales that the next recomputation would use.
            chunk.train(not forward_only)
        for receivers in (*self._replays.values(), *self._balances.values()):
            for receiver in receivers:
                receiver.begin(training=not forward_only)
        if self._balances and not forward_only:
            tokens = torch.tensor(float(sum(row.tokens for row in rows)), dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(tokens, group=self.data_group)
            for balance in (balance for chunk in self._balances.values() for balance in chunk):
                balance.begin_batch(float(tokens))
        iterators = [self.counted(rows), *(iter(rows) for _ in self.chunks[1:])]
        return get_forward_backward_func()(
            forward_step_func=forward_step(loss_of, self._replays, self._balances),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(rows),
            seq_length=max(row.tokens_T.shape[0] for row in rows),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def sublayers(self, paths: Paths) -> tuple[Spans, list[HeadTap]]:
        spans, heads = Spans(), list[HeadTap]()
        for core in self._cores():
            for layer in core.decoder.layers:
                number = layer.layer_number - 1
                spans[layer_point(number, "attention")] = (layer.input_layernorm, layer.self_attention)
                spans[layer_point(number, "mlp")] = (layer.pre_mlp_layernorm, layer.mlp)
            if core.post_process:
                spans[NORM] = (core.decoder.final_layernorm, core.decoder.final_layernorm)
                tp = self.spec.parallel.tp
                heads.append(HeadTap(core, "_logits", self.rank % tp * (core.vocab_size // tp)))
        return {point: modules for point, modules in spans.items() if point in paths}, heads

    @property
    def data_group(self) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()

    # --- checkpoints

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        for core in self._cores():
            for name, value in core.named_parameters():
                if value.requires_grad:
                    yield self._name(core, name), value.detach()

    def begin_save(self, directory: Path, *, in_memory: bool = False) -> Save:
        from rlctl.backends.megatron.checkpoint import MegatronSave

        self._gather_parameters()
        with self.with_weights(self.averages) if self.averages else contextlib.nullcontext():
            return MegatronSave(
                directory, self.chunks, self.optimizer, self._save_strategy, copies=self.spec.save_copies
            )

    @torch.no_grad()
    def load_teacher(self, directory: Path) -> None:
        """A save of averages has float32 weights; these of copies are exact in float32, too."""
        super().load_teacher(directory)
        if self.dtype == torch.float32:
            return
        world = self.layouts()
        wide = {name: torch.zeros_like(value.data, dtype=torch.float32, device="cpu") for name, value in self._named()}
        load_rank(directory, replace(world, dtype="float32"), self.rank, wide, world.facts)
        self.averages = wide
        for name, value in self._named():
            narrow_into(value.data, wide[name].to(value.device), self.rounding)

    @cached_property
    def _save_strategy(self) -> Any:
        from rlctl.backends.megatron.checkpoint import spread_over_data_ranks

        return spread_over_data_ranks() if self.spec.parallel.dp * self.spec.parallel.cp > 1 else None

    def load_checkpoint(self, directory: Path) -> None:
        from rlctl.backends.megatron.checkpoint import load

        load(directory, self.chunks, self.optimizer)

    def adapter_states(self) -> dict[str, Tensor]:
        from rlctl.backends.megatron.optimizer import count_of, make_states, states_of

        make_states(self.optimizer)
        self._gather_parameters()
        live = {name: on_host(value) for name, value in self.trained()}
        for place, _, param, states in states_of(self.optimizer):
            weights = param.untyped_storage().data_ptr()  # in float32 the optimizer's are views of the model's
            live |= {
                f"{place}.{name}": on_host(value)
                for name, value in states.items()
                if value.untyped_storage().data_ptr() != weights
            }
        return live | {STEPS: torch.tensor(count_of(self.optimizer))}

    @torch.no_grad()
    def set_adapter_states(self, states: dict[str, Tensor]) -> None:
        from rlctl.backends.megatron.optimizer import set_count, states_of

        for name, value in self.trained():
            value.copy_(states[name])
        for place, inner, param, live in states_of(self.optimizer):
            values = {name: states.get(f"{place}.{name}", value).to(value.device) for name, value in live.items()}
            inner._set_main_param_and_optimizer_states(param, values)
        set_count(self.optimizer, int(states[STEPS]))

    @torch.no_grad()
    def take_adapters(self, pairs: Pairs, head: Tensor | None) -> None:
        pieces, masters = self.layouts().layout(self.rank).pieces, dict[Tensor, Tensor]()
        for name, layer in self._adapted().items():
            a, b = (torch.zeros_like(part, dtype=torch.float32) for part in (layer.lora_a, layer.lora_b))
            held = [piece for piece in pieces if piece.param == name]
            for part in layer.parts(a):
                fill_layer(pairs, [piece for piece in held if piece.tensor in part.site.place.tensors], part.a, b)
            masters |= {layer.lora_a: a, layer.lora_b: b}
        if head is not None and (live := dict(self._named()).get(HEAD)) is not None:
            masters[live] = head
        self._take_masters(masters)


if TYPE_CHECKING:
    from rlctl.backends.base import CriticWorker, PolicyWorker

    WORKER: type[PolicyWorker] = MegatronWorker
    CRITIC: type[CriticWorker] = MegatronWorker
