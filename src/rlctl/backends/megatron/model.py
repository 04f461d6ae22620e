"""The policy as a Megatron GPTModel: configuration and layers from `ModelFacts`, log-probs as output, and the forward
step of Megatron's schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from rlctl.backends.base import PolicySpec, Teaching
from rlctl.backends.batching.context_parallel import JoinContext
from rlctl.backends.batching.packed_rows import PackedRow
from rlctl.backends.logprobs import ValueHead, VocabPart, row_logprobs
from rlctl.backends.megatron.args import AUXILIARY, has_transformer_engine, transformer_values
from rlctl.backends.megatron.backend import refuse_wrong_numbers
from rlctl.backends.megatron.balance import Balance
from rlctl.backends.megatron.compat import call_known, make_config, mlp_submodules, require_transformer_engine
from rlctl.backends.megatron.lora import adapt
from rlctl.backends.megatron.modules import (
    PackedAttention,
    RMSNorm,
    RowParams,
    RowRotary,
    leave_norms_out,
    normed_output,
    own_angles,
    wide_norm,
)
from rlctl.backends.megatron.routing import Replay, hand_out, routers_of, weigh_as_published
from rlctl.backends.messages import Truncation
from rlctl.backends.policy_rank import LossOf
from rlctl.config.parallel import ParallelSpec
from rlctl.models.constraints import require_policy_sizes
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Role

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "quick_gelu": quick_gelu}


class PolicyModel(GPTModel):
    """GPTModel that returns float32 [2, R], log-prob and entropy of chosen tokens, plus rows for further tokens
    (`chunked_logprobs`). The output layer runs only at predicting positions."""

    def __init__(
        self,
        *args: Any,
        temperature: float,
        truncation: Truncation | None,
        chunk: int,
        vocab: int,
        teaches: Teaching | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.temperature, self.truncation, self.chunk = temperature, truncation, chunk
        self.true_vocab, self.teaches = vocab, teaches

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: RowParams, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        row, part = packed_seq_params.row, packed_seq_params.part
        assert row is not None
        assert part is not None
        cp_group = self.pg_collection.cp
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        out = self._outputs(hidden_states[:, 0].index_select(0, part.sources_U), part)
        if cp_group.size() == 1:
            return out
        return JoinContext.apply(out, part.columns_R["index"], row.targets_R.shape[0], cp_group)

    def _outputs(self, hidden_U: Tensor, part: PackedRow) -> Tensor:
        """Return log-prob and entropy of this rank's chosen tokens, [2, R], from the hidden states before them."""
        tp_group = self.pg_collection.tp
        width = self.vocab_size // tp_group.size()
        start = tp_group.rank() * width
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = partial(self._logits, weight=weight, width=min(width, self.true_vocab - start))
        vocab = VocabPart(tp_group, start)
        context = self.pg_collection.cp
        return row_logprobs(
            hidden_U, part, logits, vocab, self.temperature, self.truncation, self.chunk, self.teaches, context
        )

    def _logits(self, hidden_U: Tensor, weight: Tensor | None, width: int) -> Tensor:
        """Return this rank's logits [U, V] without vocabulary padding."""
        layer = self.output_layer
        gathers, reduces = layer.sequence_parallel, layer.allreduce_dgrad
        # The hidden states are whole already, so the layer must not gather; their gradient is summed over the ranks
        # instead.
        layer.sequence_parallel, layer.allreduce_dgrad = False, self.pg_collection.tp.size() > 1
        try:
            logits_UV, _ = layer(hidden_U, weight=weight)
        finally:
            layer.sequence_parallel, layer.allreduce_dgrad = gathers, reduces
        return logits_UV if width == logits_UV.shape[-1] else logits_UV[:, :width].contiguous()


class ValueModel(PolicyModel):
    """A critic: the last pipeline stage returns float32 [1, R], the value at the position before each chosen token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["share_embeddings_and_output_weights"] = False
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer = ValueHead(self.config.hidden_size, dtype=self.config.params_dtype)

    def _outputs(self, hidden_U: Tensor, part: PackedRow) -> Tensor:
        return self.output_layer(hidden_U)[part.inverse_R][None]


def build_model(
    spec: PolicySpec, config: TransformerConfig, vp_stage: int | None, kind: type[PolicyModel] = PolicyModel
) -> PolicyModel:
    """This rank's part of the policy or its critic (of virtual stage `vp_stage`), with random weights."""
    facts = spec.facts
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    tp = spec.parallel.tp
    config.qk_layernorm = config.qk_layernorm or facts.wide_qk_norm  # 0.19 takes no norms of queries without it
    model = kind(
        config=config,
        transformer_layer_spec=_layer_spec(spec, config, vp_stage),
        vocab_size=-(-facts.vocab // tp) * tp,
        max_sequence_length=facts.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        parallel_output=True,
        share_embeddings_and_output_weights=facts.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(facts.rope.theta),
        vp_stage=vp_stage,
        temperature=spec.temperature,
        truncation=spec.truncation,
        chunk=spec.logprob_chunk_tokens,
        vocab=facts.vocab,
        teaches=spec.teaches,
    )
    config.qk_layernorm = config.qk_layernorm and not facts.wide_qk_norm
    _use_row_rotary(model, facts)
    _correct_experts(model, spec.parallel)
    if (moe := facts.moe) is not None:
        for router in routers_of(model):
            weigh_as_published(router, moe)
    _use_factors(model, facts)
    for name, param in model.named_parameters() if spec.freeze_router else ():
        if ".router." in name:
            param.requires_grad_(False)
    if spec.lora.rank:
        adapt(model, spec)
        if kind is ValueModel and model.post_process:
            model.output_layer.requires_grad_(True)  # a new head needs no adapter
    return model.to(spec.device)


def _correct_experts(model: GPTModel, parallel: ParallelSpec) -> None:
    """Correct silent errors of Megatron with experts.

    Experts held whole by every tensor-parallel rank (etp < tp) see only that rank's tokens, but without expert
    parallelism their gradients are summed over data-parallel ranks only. Expert biases are never divided, but Megatron
    sums down-projection biases over tensor-parallel ranks; and the local linear layer reduces its output over one rank,
    which forbids the in-place bias addition.
    """
    parameters: Any = model.named_parameters()  # Megatron marks them with attributes
    for name, parameter in parameters:
        if ".experts." in name:
            if parallel.etp < parallel.tp:
                parameter.allreduce = False
            if ".bias" in name:  # grouped experts number theirs
                parameter.sequence_parallel = False
    for module in model.modules():
        if isinstance(module, tensor_parallel.RowParallelLinear) and module.is_expert and module.bias is not None:
            module.explicit_expert_comm = True


def _use_factors(model: Any, facts: ModelFacts) -> None:
    """Multiply embeddings and what attention and MLP add, and divide logits, by the model's factors."""
    if facts.embedding_scale != 1 and model.pre_process:
        model.embedding.register_forward_hook(partial(_scale, facts.embedding_scale))
    for layer in model.decoder.layers if facts.residual_scale != 1 else ():
        for module in (layer.self_attention, layer.mlp):
            module.register_forward_hook(partial(_scale_sum, facts.residual_scale))
    if facts.logits_scale != 1 and model.post_process and not isinstance(model, ValueModel):
        model.output_layer.register_forward_hook(partial(_scale_sum, 1 / facts.logits_scale))


def _scale(factor: float, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Forward hook: the output times `factor`, rounded to the output's dtype like the published model's."""
    return output * output.new_tensor(factor)


def _scale_sum(factor: float, module: nn.Module, args: tuple, output: tuple[Tensor, Tensor | None]) -> tuple:
    """Forward hook: the output and the bias that Megatron-Core adds to it later, times `factor`."""
    out, bias = output
    return out * factor, None if bias is None else bias * factor


def _use_row_rotary(model: Any, facts: ModelFacts) -> None:
    if facts.mla is None:
        width = facts.rope.width(facts.head_dim)
        model.rotary_pos_emb = RowRotary(facts.rope, width, facts.rope.interleaved, facts.window_rope)
        for layer in model.decoder.layers if facts.window_rope else ():
            _use_own_rope(layer, facts)
        return
    for layer in model.decoder.layers:  # MLA de-interleaves queries and keys itself
        layer.self_attention.rotary_pos_emb = RowRotary(facts.rope, facts.mla.qk_rope_head_dim)


def _use_own_rope(layer: Any, facts: ModelFacts) -> None:
    """Rotate the queries and keys of a layer by the angles of its kind. Megatron-Core has one factor of cosines and
    sines for all layers; its square belongs to the scores."""
    windowed = facts.is_windowed(layer.layer_number - 1)
    layer.self_attention.register_forward_pre_hook(own_angles(windowed), with_kwargs=True)
    rope = facts.window_rope if windowed else facts.rope
    if rope is not None and rope.attention_factor != 1:
        scale = facts.attention_scale or facts.head_dim**-0.5
        layer.self_attention.core_attention.scale = scale * rope.attention_factor**2


def _layer_spec(policy: PolicySpec, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Megatron's layers with our norm and attention; TransformerEngine's linears and norms where they can be used."""
    use_te = has_transformer_engine(policy)
    if use_te:
        require_transformer_engine()
    facts, roles = policy.facts, weights_of(policy.facts).roles
    spec = call_known(
        get_gpt_decoder_block_spec,
        config=config,
        use_transformer_engine=use_te,
        normalization="RMSNorm",
        vp_stage=vp_stage,
    )
    for layer in {id(layer): layer for layer in spec.layer_specs}.values():  # layers that are alike share theirs
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if facts.wide_qk_norm:
            attention.q_layernorm, attention.k_layernorm = wide_norm(facts.heads), wide_norm(facts.kv_heads)
        if Role.POST_ATTENTION_NORM in roles:
            attention.linear_proj = normed_output(attention.linear_proj)
        if Role.POST_MLP_NORM in roles:
            mlp = mlp_submodules(layer.submodules.mlp)
            mlp.linear_fc2 = normed_output(mlp.linear_fc2)
        if use_te:
            if Role.ATTENTION_NORM not in roles:
                leave_norms_out(layer)
            continue
        before = RMSNorm if Role.ATTENTION_NORM in roles else IdentityOp
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = before
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if config.qk_layernorm and not facts.wide_qk_norm and getattr(attention, name, None) is not None:
                setattr(attention, name, RMSNorm)
        if config.multi_latent_attention:
            # Column-parallel layers get a wrong gradient for the key's rotary part under tensor parallelism.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    if not use_te:
        spec.layer_norm = RMSNorm
    return spec


def model_config(spec: PolicySpec, **runtime: Any) -> TransformerConfig:
    """Megatron's configuration, the user's `megatron` section on top. Raises ConfigError for what cannot be trained."""
    facts = spec.facts
    require_policy_sizes(facts, spec.parallel)
    refuse_wrong_numbers(spec)
    values = transformer_values(spec, has_transformer_engine(spec))
    values |= {"activation_func": ACTIVATIONS[facts.activation]} | runtime
    ours: set[str] = {*AUXILIARY}  # `balance.py` has these
    if spec.megatron.get("moe_router_load_balancing_type") != "sinkhorn":
        ours.add("moe_router_load_balancing_type")
    passed = {key: value for key, value in spec.megatron.items() if key not in ours}
    config = make_config(TransformerConfig if facts.mla is None else MLATransformerConfig, values, passed, "megatron")
    # YaRN multiplies cosines and sines by a factor, which Megatron reads from an attribute that is not a field, as
    # 0.1 ln(scaling) + 1 (`yarn_rotary_pos_embedding.py`).
    if facts.window_rope is None and (factor := facts.rope.attention_factor) > 1:
        config.yarn_rotary_scaling_factor = math.exp(10 * (factor - 1))  # type: ignore[attr-defined]
    return config


def forward_step(
    loss_of: LossOf, replays: Mapping[int, list[Replay]], balances: Mapping[int, list[Balance]]
) -> Callable[[Iterator[PackedRow], Any], tuple[Tensor, Callable]]:
    """Return a forward step for `get_forward_backward_func`: (row iterator, model) -> (output, loss function).
    `loss_of` gets the row and the model's output; its second value is collected. `replays`, `balances`: per model chunk
    `id`, the objects of each router."""

    def step(rows: Iterator[PackedRow], model: Any) -> tuple[Tensor, Callable]:
        row = next(rows)
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        params = RowParams.of(row, size, rank)
        assert params.part is not None
        if recorded := replays.get(id(model)):
            hand_out(recorded, params.part.routing_TLK, get_model_config(model))
        if recorded := balances.get(id(model)):
            filler_T = params.part.filler_T
            counted_T = torch.ones_like(params.part.tokens_T, dtype=torch.bool) if filler_T is None else ~filler_T
            hand_out(recorded, counted_T, get_model_config(model))
        output = model(params.part.tokens_T[None], None, None, packed_seq_params=params)

        def loss_function(out: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            loss, collected = loss_of(row, out)
            # Megatron requires a token count; `finalize_without_scaling` does not divide by it.
            return loss, torch.ones((), dtype=torch.int, device=out.device), collected

        return output, loss_function

    return step
