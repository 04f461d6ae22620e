"""The policy as a transformers model: built without memory, sharded by FSDP2, with attention over packed rows and
log-probs as output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlctl.backends.base import PolicySpec
from rlctl.backends.batching.context_parallel import Gather, GatherValues, JoinContext, context_part
from rlctl.backends.batching.packed_rows import PackedRow, RowUnit
from rlctl.backends.batching.row_attention import RowAttention, attend
from rlctl.backends.dtensor import exact
from rlctl.backends.dtensor.experts import Replay, experts_of, install_replay, spread
from rlctl.backends.dtensor.lora import adapt, begin
from rlctl.backends.dtensor.mixed_precision import mixed_precision
from rlctl.backends.dtensor.packed_linear import pack_layers
from rlctl.backends.dtensor.tensor_parallel import divide, divide_alike, local_part, with_views
from rlctl.backends.dtensor.vision_inputs import RowImages
from rlctl.backends.logprobs import ValueHead, VocabPart, row_logprobs
from rlctl.backends.messages import NEVER
from rlctl.checkpoints.hf.transformers_model import (
    body_path,
    computed_buffers,
    head_of,
    layers_of,
    meta_model,
    tower_layers,
)
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError, InputError
from rlctl.models.families import weights_of
from rlctl.models.matrices import BUFFER_ROLES, Role
from rlctl.models.vision import VISION_FAMILIES
from rlctl.settings.training import Rounding
from rlctl.weights.dtensor import DTensorWorld
from rlctl.weights.rounding import narrowed

ATTENTION = "rlctl_rows"
"""The name under which transformers finds `row_attention`. It has no mask function there, so no mask is made."""
COMPUTE = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Compute dtype by `model.dtype`; None: the parameters', float32."""


@dataclass(frozen=True)
class Groups:
    """The ranks of a policy, as FSDP2 and as the passes over rows see them."""

    sharding: DeviceMesh
    """(replicate, shard, tp): context-parallel ranks are shards."""
    passes: DeviceMesh
    """(dp, cp, tp)"""
    experts: DeviceMesh | None
    """(replicate, shard, ep, tp), where experts are spread."""

    @classmethod
    def of(cls, parallel: ParallelSpec, device: str) -> Groups:
        copies, shards, ep = parallel.replicate, parallel.fsdp_shards, parallel.ep

        def mesh(names: str, *sizes: int) -> DeviceMesh:
            return init_device_mesh(device, sizes, mesh_dim_names=tuple(names.split()))

        return cls(
            mesh("replicate shard tp", copies, shards, parallel.tp),
            mesh("dp cp tp", parallel.dp, parallel.cp, parallel.tp),
            mesh("replicate shard ep tp", copies, shards // ep, ep, parallel.tp) if ep > 1 else None,
        )

    def group(self, name: str) -> Any:
        return self.passes.get_group(name)


@dataclass(frozen=True)
class RowPass:
    """The row that is passed, as the attention of each layer has to know it."""

    attention: RowAttention
    context: Any
    """The context-parallel group."""


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    row: RowPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, h, T, d] -> [1, T, h, d], transformers' attention interface; `s_aux` are gpt-oss's sinks. Dropout is ignored,
    because log-probs must be the sampling policy's."""
    assert row is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if row.context.size() > 1:
        k, v = Gather.apply(k, row.context), Gather.apply(v, row.context)
    out = attend(q, k, v, row.attention, scale=scaling, window=sliding_window, sinks=s_aux, cap=softcap)
    return out.view(1, q.shape[0], q.shape[1], -1), None


def selective_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`row_attention` that is computed again in the backward pass."""
    return checkpoint(row_attention, *args, use_reentrant=False, **kwargs)


def prepare_process(spec: PolicySpec) -> None:
    """Tell transformers of the attention over rows, and replace operations where `spec` asks for exact ones."""
    AttentionInterface.register(ATTENTION, row_attention)
    AttentionInterface.register(f"{ATTENTION}_selective", selective_attention)
    if spec.exact:
        exact.install()


class PolicyModel(nn.Module):
    """A transformers model that returns float32 [2, R], log-prob and entropy of chosen tokens, plus rows for further
    tokens (`chunked_logprobs`). The head runs only at predicting positions."""

    def __init__(self, inner: Any, groups: Groups, spec: PolicySpec) -> None:
        super().__init__()
        self._context, self._tensor = groups.group("cp"), groups.group("tp")
        self.inner, self.teaches = inner, spec.teaches
        self._head = self._sampled_from(head_of(inner), spec)
        self._temperature, self._truncation = spec.temperature, spec.truncation
        self._chunk = spec.logprob_chunk_tokens
        self._vocab, self._body = spec.facts.vocab, body_path(inner)
        self._packs = not spec.facts.unpacked
        self.images: RowImages | None = None
        """Not None: rows may have images."""
        if spec.facts.vision is not None:
            assert spec.model_dir is not None  # the model was built from it
            # Engines on GPUs use transformers' attention.
            mutual = spec.device == "cuda" and VISION_FAMILIES[spec.facts.vision.kind].mutual
            self.images = RowImages(inner, spec.model_dir, spec.facts.vision, self._tensor, mutual=mutual)
        self.replays: list[Replay] = []
        """Routers that receive a row's experts (router replay)."""

    def _sampled_from(self, head: Callable[[Tensor], Tensor], spec: PolicySpec) -> Callable[[Tensor], Tensor]:
        width = spec.facts.vocab // self._tensor.size()
        first = self._tensor.rank() * width
        local_tokens = [token - first for token in spec.never if first <= token < first + width]

        def lowered(hidden_UH: Tensor) -> Tensor:
            logits = head(hidden_UH)
            logits[:, local_tokens] += NEVER
            return logits

        return lowered if local_tokens else head

    def forward(self, row: PackedRow) -> Tensor:
        if self._packs:
            return self._packed(row)
        # All units have one length, and each is a separate sequence, as in transformers. Padding follows all tokens of
        # a rollout, which never see it.
        units = len(row.units)
        inputs = {"input_ids": row.tokens_T.view(units, -1)}
        if self.images is not None:
            inputs = self.images.sequences(row, units)
        return self._outputs(self._layers(**inputs).flatten(0, 1)[None], row)

    def _layers(self, **inputs: Any) -> Tensor:
        return self.inner.get_submodule(self._body)(use_cache=False, **inputs).last_hidden_state

    def _packed(self, row: PackedRow) -> Tensor:
        size, rank = self._context.size(), self._context.rank()
        part = context_part(row, size, rank)
        for replay in self.replays:
            replay.give(part.routing_TLK)
        mutual_T = self.images.mutual_tokens(row) if self.images is not None else None
        passed = RowPass(RowAttention.of(row, size, rank, mutual_T), self._context)
        hidden = self._layers(**self.inputs(part), row=passed)
        out = self._outputs(hidden, part)
        return out if size == 1 else JoinContext.apply(out, part.columns_R["index"], len(row.targets_R), self._context)

    def inputs(self, part: PackedRow) -> dict[str, Tensor]:
        """Return the layers' inputs of this rank's tokens: one position per token, and a row as a batch of one."""
        if self.images is not None:
            return self.images.inputs(part)
        return {"input_ids": part.tokens_T[None], "position_ids": part.positions_kT}

    def _outputs(self, hidden_1TH: Tensor, part: PackedRow) -> Tensor:
        """Return log-prob and entropy of this rank's chosen tokens, [2, R], from the last hidden states."""
        hidden_TH = Gather.apply(hidden_1TH[0], self._tensor) if self._tensor.size() > 1 else hidden_1TH[0]
        hidden_U = hidden_TH.index_select(0, part.sources_U)
        vocab = VocabPart(self._tensor, self._tensor.rank() * self._vocab // self._tensor.size())
        return row_logprobs(
            hidden_U, part, self._head, vocab, self._temperature, self._truncation, self._chunk, self.teaches,
            self._context,
        )  # fmt: skip


class ValueModel(PolicyModel):
    """A critic: returns float32 [1, R], the value at the position before each chosen token."""

    def __init__(self, inner: Any, groups: Groups, spec: PolicySpec) -> None:
        super().__init__(inner, groups, spec)
        # OPT's last hidden states may be narrower than its layers.
        hidden = getattr(inner.config, "word_embed_proj_dim", None) or spec.facts.hidden
        self.head = ValueHead(hidden, device="meta")

    def _outputs(self, hidden_1TH: Tensor, part: PackedRow) -> Tensor:
        values_T = self.head(hidden_1TH[0])
        if self._tensor.size() > 1:
            values_T = GatherValues.apply(values_T, self._tensor)
        return values_T[part.sources_U][part.inverse_R][None]


def _fsdp(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["replicate", "shard"] if mesh.size(0) > 1 else mesh["shard"]


def build_model(
    spec: PolicySpec,
    world: DTensorWorld,
    groups: Groups,
    device: torch.device,
    frozen: frozenset[str],
    kind: type[PolicyModel] = PolicyModel,
) -> PolicyModel:
    """Return this rank's part of the policy or critic with random weights, frozen where `frozen` or transformers (HRM's
    first state) says so. Raises InputError for buffers that transformers cannot recompute."""
    model = kind(_on_meta(spec, headless=kind is ValueModel), groups, spec)
    for name, parameter in model.inner.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and spec.teaches is None and name not in frozen)
    if compute := COMPUTE[spec.dtype]:
        pack_layers(model.inner, spec.facts, compute)
    if spec.lora.rank:
        adapt(model.inner, world, spec.lora)
    if spec.router_replay:
        model.replays = install_replay(model.inner, world)
    tp = groups.sharding["tp"]
    divide(model.inner, world, tp, groups.experts["ep", "tp"] if groups.experts else None)
    if isinstance(model, ValueModel) and tp.size() > 1:
        divide_alike(model.head, tp)
    if groups.experts is not None:
        spread(model.inner, world, groups.experts.get_group("ep"))
    if compute:
        _compute_narrowly(model.inner, world, compute, spec.optimizer.rounding)
    _recompute(model, spec.recompute)
    if spec.parallel.world_size > spec.parallel.tp or spec.dtype != "float32":
        _shard(model, world, groups, spec)
    computed = computed_buffers(model.inner)
    model.to_empty(device=device)
    _widen_buffers(model.inner, world)
    if not isinstance(model, FSDPModule) and kind is not ValueModel:
        model.inner.tie_weights()  # `to_empty` has made two of tied weights that FSDP2 does not hold
    generator = torch.Generator(device).manual_seed(spec.seed)
    with torch.no_grad():
        for name, values in computed.items():
            model.inner.get_buffer(name).copy_(values)
        for parameter in model.parameters():
            local_part(parameter).normal_(std=0.02, generator=generator)
        if isinstance(model, ValueModel):
            local_part(model.head.weight).zero_()
    begin(model.inner, world, torch.distributed.get_rank(), spec.seed)
    return model.eval()  # no model is trained with dropout


def _widen_buffers(inner: Any, world: DTensorWorld) -> None:
    """Make stored buffers float32, like the parameters, without rounding their files' values."""
    for name, role in world.roles.items():
        if role in BUFFER_ROLES:
            module, _, leaf = name.rpartition(".")
            buffer = inner.get_buffer(name)
            inner.get_submodule(module)._buffers[leaf] = buffer.float() if buffer.is_floating_point() else buffer


def _compute_narrowly(inner: Any, world: DTensorWorld, dtype: torch.dtype, rounding: Rounding) -> None:
    """Run modules in `dtype`, including stored buffers without a fixed dtype, as FSDP2 runs parameters."""
    special = {
        matrix.tensor for matrix in weights_of(world.facts).matrices if matrix.dtype or matrix.role != Role.STORED
    }
    names = [piece.param for piece in world.modules.pieces if piece.tensor not in special]
    for path in {name.rpartition(".")[0] for name in names}:
        module = inner.get_submodule(path)
        leaves = [leaf for leaf in module._buffers if f"{path}.{leaf}" in names]
        views = dict.fromkeys(leaves, partial(narrowed, dtype=dtype, rounding=rounding))
        module.forward = partial(with_views, module, module.forward, views, "buffers")


def _on_meta(spec: PolicySpec, *, headless: bool) -> Any:
    if spec.model_dir is None:
        raise ConfigError("training.backend = dtensor needs the model's config.json.", "Name a model with --model.")
    name = f"{ATTENTION}_selective" if spec.recompute == "selective" else ATTENTION
    inner = meta_model(Path(spec.model_dir), None if spec.facts.unpacked else name, headless=headless, buffers=True)
    inner.get_input_embeddings().padding_idx = None  # row padding has no trained tokens: no token is left out
    if any(hasattr(layer, "altup") for layer in layers_of(inner)):
        inner.get_input_embeddings().register_forward_hook(_finite_at_zero)
    return inner


def _finite_at_zero(_module: nn.Module, _given: Any, embedded: Tensor) -> None:
    """Zero the non-finite gradient of a zero embedding: Gemma 3n takes its root mean square, and untrained padding is
    zero."""
    if embedded.requires_grad:
        zero = (embedded.detach() == 0).all(-1, keepdim=True)
        embedded.register_hook(lambda gradient: gradient.masked_fill(zero & ~gradient.isfinite(), 0.0))


def _recompute(model: PolicyModel, mode: str) -> None:
    """Recompute layers (`full`, including towers) or norms and attention (`selective`) in the backward pass. Forward
    methods are replaced, so parameter names stay and FSDP2's hooks stay outside."""
    if mode == "none":
        return
    for layer in (*layers_of(model.inner), *(tower_layers(model.inner) if mode == "full" else ())):
        norms = (module for module in layer.modules() if type(module).__name__.endswith("Norm"))
        for module in [layer] if mode == "full" else norms:
            module.forward = partial(_checkpointed, module.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (
        checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if torch.is_grad_enabled()
        else forward(*args, **kwargs)
    )


def _shard(model: PolicyModel, world: DTensorWorld, groups: Groups, spec: PolicySpec) -> None:
    """Shard by layer; embedding, last norm and head belong to the root, gathered once per pass. Gradients are summed,
    never averaged."""
    policy = mixed_precision(COMPUTE[spec.dtype], spec.optimizer.rounding)
    mesh = _fsdp(groups.sharding)
    if groups.experts is not None:
        for experts in experts_of(model.inner, world).values():
            fully_shard(experts, mesh=_fsdp(groups.experts), mp_policy=policy)
    for layer in layers_of(model.inner):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that multiplies first


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


PROBED = 8
"""Tokens of each of the two rollouts that `require_causal` makes up."""
MOVED = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
"""Log-probs and entropies may differ by this between two computations of the same tokens."""


@torch.no_grad()
def require_causal(model: PolicyModel, spec: PolicySpec) -> None:
    """Raise InputError if a token's output depends on later tokens or other rollouts. Collective."""
    device, vocab = next(model.parameters()).device, spec.facts.vocab
    token_ids = torch.arange(1, PROBED + 1, device=device) % vocab
    other_end = torch.cat([token_ids[:-1], (token_ids[-1:] + vocab // 2) % vocab])
    before, after = model(_probe(token_ids, token_ids)), model(_probe(other_end, token_ids.flip(0)))
    moved = float((before - after).abs().max())
    if not moved <= MOVED[spec.dtype]:
        raise InputError(
            f"{spec.facts.family} cannot be trained: as transformers computes it, log-probs of a token change by "
            f"{moved:.1e} with tokens behind it or with another rollout.",
            "Name a model that is causal.",
        )


def _probe(first: Tensor, second: Tensor) -> PackedRow:
    places = torch.arange(PROBED - 1, device=first.device)
    tokens_T = torch.cat([first, second])
    units = (RowUnit(0, PROBED), RowUnit(PROBED, PROBED))
    return PackedRow(tokens_T, torch.zeros_like(tokens_T)[None], units, 2 * PROBED, places, places, places + 1)
