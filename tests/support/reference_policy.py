"""The independent implementation that policies are compared with: transformers and torch AdamW, a rollout at a time.

Also the map from transformers' weights to Megatron's, written out tensor by tensor (whole model: TP, PP and EP 1).
"""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlctl.backends.messages import Truncation
from rlctl.data.rollouts import ROUTED_EXPERTS, RolloutColumns
from rlctl.models.facts import ModelFacts
from rlctl.models.families import facts_from_hf_config
from support.family_models import BASE, configuration

EXPERTS, VOCAB = 4, 256
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "llama-tied", "qwen2", "qwen3", "gemma3")},
    "qwen3moe": ("qwen3-moe", {}),
    "deepseek": (
        "deepseek-v3",
        {"n_shared_experts": 1, "num_nextn_predict_layers": 0, "rope_parameters": BASE["rope_parameters"]},
    ),
}
KINDS |= {f"{kind}-experts": KINDS[kind] for kind in ("qwen3moe", "deepseek")}  # with adapters on routed experts
KINDS["gpt-oss-experts"] = ("gpt-oss", {})
KINDS["qwen2-some"] = KINDS["qwen2"]  # with adapters on the last layer alone
KINDS |= {f"{kind}-whole": KINDS[kind] for kind in ("llama", "llama-tied")}  # with modules that are trained whole
"""Families, and what is set in them."""


@dataclass(frozen=True)
class Optim:
    """Adam with an epsilon so large that updates depend on the size of gradients, and a clip that bites."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 0.05


class MatrixOptimizer(Protocol):
    """An optimizer of some parameters of a model."""

    def takes(self, parameter: Any) -> bool: ...

    def step(self) -> None: ...


@dataclass
class Reference:
    """What transformers and torch make of a batch in two optimizer steps."""

    logprobs: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (group, row) -> chosen tokens
    entropy: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)  # of the first step, before clipping, by Megatron's names
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)  # after two steps
    module_grads: dict[str, Tensor] = field(default_factory=dict)  # as `grads`, by transformers' names
    module_params: dict[str, Tensor] = field(default_factory=dict)  # as `params`, by transformers' names


def kind_of(kind: str) -> tuple[str, Any]:
    """transformers' class of models and the configuration of a kind."""
    family, more = KINDS[kind]
    return configuration(family, VOCAB, **more)


@cache
def facts(kind: str) -> ModelFacts:
    """The same tiny model as `hf_model(kind)`."""
    name, config = kind_of(kind)
    return facts_from_hf_config(config.to_dict() | {"architectures": [name]})


def hf_model(kind: str, seed: int = 0) -> Any:
    """A random transformers model with norms and biases that matter; float32."""
    import transformers

    name, config = kind_of(kind)
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter, value in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in parameter or parameter.endswith(".bias") or "e_score_correction_bias" in parameter:
                value.add_(torch.randn_like(value) * 0.1)
    return model.float().eval()


def make_batch(groups: int = 4, generations: int = 3, seed: int = 3) -> dict[int, RolloutColumns]:
    """Groups of rollouts of uneven lengths; one with a token in the completion that the policy did not choose."""
    rng = np.random.default_rng(seed)
    batch = {}
    for group in range(groups):
        prompt = rng.integers(0, VOCAB, 4 + 3 * group)
        completions = [rng.integers(0, VOCAB, int(rng.integers(2, 9))) for _ in range(generations)]
        tokens = np.concatenate([np.concatenate([prompt, completion]) for completion in completions])
        mask = np.concatenate([np.arange(len(prompt) + len(c)) >= len(prompt) for c in completions])
        if group == 1:
            mask[len(prompt) + 1] = False
        offsets = np.cumsum([0, *(len(prompt) + len(c) for c in completions)])
        logprobs = np.where(mask, rng.normal(-5.5, 0.3, len(tokens)), 0)
        batch[group] = RolloutColumns(
            tokens.astype(np.int32),
            offsets.astype(np.int32),
            mask,
            logprobs.astype(np.float32),
            np.where(mask, 0, -1).astype(np.int32),
        )
    return batch


def routed(kind: str, batch: dict[int, RolloutColumns], seed: int = 5) -> dict[int, RolloutColumns]:
    """`batch` with experts drawn at random for each token; none for dense layers, the last token and one in eight."""
    f = facts(kind)
    assert f.moe is not None
    rng = np.random.default_rng(seed)
    found = {}
    for group, columns in batch.items():
        length = len(columns.tokens_T)
        experts_TLK = np.full((length, f.layers, f.moe.experts_per_token), -1, np.int16)
        for layer in set(range(f.layers)) - set(f.moe.dense_layers):
            experts_TLK[:, layer] = rng.random((length, f.moe.experts)).argsort(axis=1)[:, : f.moe.experts_per_token]
        experts_TLK[rng.random(length) < 1 / 8] = -1
        prompt = prompt_tokens(columns)
        for row in range(columns.rollouts):  # the same prompt under the same weights goes the same way
            span = columns.slice(row)
            experts_TLK[span.start : span.start + prompt] = experts_TLK[:prompt]
            experts_TLK[span.stop - 1] = -1
        found[group] = replace(columns, extra_T={ROUTED_EXPERTS: experts_TLK})
    return found


def recorded(kind: str, batch: dict[int, RolloutColumns]) -> dict[int, RolloutColumns]:
    """`batch` with the experts that transformers' routers choose; every layer must have some."""
    model, found, topk = hf_model(kind), {}, torch.topk
    for group, columns in batch.items():
        heard: list[np.ndarray] = []

        def listening(scores: Tensor, k: int, *args: Any, heard: list[np.ndarray] = heard, **kwargs: Any) -> Any:
            own = topk(scores, k, *args, **kwargs)
            heard.append(own.indices.numpy().astype(np.int16))
            return own

        with unittest.mock.patch("torch.topk", listening), torch.no_grad():
            for row in range(columns.rollouts):
                model(torch.from_numpy(columns.tokens_T[columns.slice(row)].astype(np.int64))[None])
        layers = facts(kind).layers
        rows = [np.stack(heard[first : first + layers], axis=1) for first in range(0, len(heard), layers)]
        found[group] = replace(columns, extra_T={ROUTED_EXPERTS: np.concatenate(rows)})
    return found


@contextmanager
def choosing(columns: RolloutColumns, row: int) -> Iterator[None]:
    """Make transformers' routers choose the experts in the columns, in the order of the layers."""
    if ROUTED_EXPERTS not in columns.extra_T:
        yield
        return
    given_TLK = torch.from_numpy(columns.extra_T[ROUTED_EXPERTS][columns.slice(row)].astype(np.int64))
    layers = [layer for layer in range(given_TLK.shape[1]) if (given_TLK[:, layer] >= 0).any()]
    topk = torch.topk

    def chosen(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if scores.dim() != 2 or scores.shape[-1] != EXPERTS:  # groups of experts
            return topk(scores, k, *args, **kwargs)
        own, given = topk(scores, k, *args, **kwargs).indices, given_TLK[:, layers.pop(0)]
        indices = torch.where(given >= 0, given, own)
        return scores.gather(1, indices), indices

    with unittest.mock.patch("torch.topk", chosen):
        yield
    assert not layers, "not every router has asked"


def advantage(group: int, row: int) -> float:
    return (row - 1) * 0.7 + 0.2 * group


def prompt_tokens(columns: RolloutColumns) -> int:
    return int(np.argmax(columns.loss_mask_T))


def token_loss(
    logprobs: Tensor, entropy: Tensor, rollout_logprobs: Tensor, advantages: Tensor, weights: Tensor
) -> Tensor:
    """A policy-gradient loss with a term that is not linear in the log-prob, and an entropy bonus."""
    distance = (logprobs - rollout_logprobs) ** 2
    return (weights * (-advantages * logprobs + 0.05 * distance - 0.3 * entropy)).sum()


def run_reference(
    kind: str,
    batch: dict[int, RolloutColumns],
    weight: float,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    hidden: Callable[[Any, Optim], MatrixOptimizer] | None = None,
) -> Reference:
    """Two optimizer steps on the whole batch. `hidden`: the optimizer of the matrices of layers, which AdamW leaves."""
    model, optim, out = hf_model(kind), Optim(), Reference()
    by_hidden = hidden(model, optim) if hidden is not None else None
    others = [p for p in model.parameters() if by_hidden is None or not by_hidden.takes(p)]
    decay = [p for p in others if p.dim() > 1]
    plain = [p for p in others if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    for step in range(2):
        model.zero_grad()
        total = 0.0
        for group, columns in batch.items():
            for row in range(columns.rollouts):
                logprobs, entropy = _chosen(model, columns, row, temperature, truncation)
                if step == 0:
                    out.logprobs[group, row], out.entropy[group, row] = logprobs.detach(), entropy.detach()
                loss = token_loss(
                    logprobs, entropy, _engine(columns, row), torch.tensor(advantage(group, row)), torch.tensor(weight)
                )
                loss.backward()
                total += float(loss)
        if step == 0:
            out.module_grads = {n: p.grad.clone() for n, p in model.named_parameters()}
            out.grads = megatron_weights(kind, out.module_grads | _tied(model))
        out.losses.append(total)
        out.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)))
        adam.step()
        if by_hidden is not None:
            by_hidden.step()
    out.params = megatron_weights(kind, model.state_dict())
    out.module_params = dict(model.state_dict())
    return out


def reference_logprobs(
    model: Any, weights: dict[str, Tensor], batch: dict[int, RolloutColumns]
) -> dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]:
    """(log-probs, entropies, the engine's log-probs) of each rollout's chosen tokens under `weights` in place of the
    model's own."""

    def call(tokens: Tensor) -> Any:
        return torch.func.functional_call(model, weights, (tokens,))

    return {
        (group, row): (*_chosen(call, columns, row, 1.0), _engine(columns, row))
        for group, columns in batch.items()
        for row in range(columns.rollouts)
    }


def _tied(model: Any) -> dict[str, Tensor]:
    return {"lm_head.weight": model.model.embed_tokens.weight.grad} if model.config.tie_word_embeddings else {}


def _chosen(
    model: Any, columns: RolloutColumns, row: int, temperature: float, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(columns.tokens_T[columns.slice(row)].astype(np.int64))
    mask = torch.from_numpy(columns.loss_mask_T[columns.slice(row)])[1:]
    with choosing(columns, row):
        logits = model(tokens[None]).logits
    logits = logits[0, :-1] / temperature
    table = torch.log_softmax(logits, -1)
    if truncation is not None:
        kept = _kept(logits.detach(), truncation).scatter(1, tokens[1:, None], True)
        logits = logits.masked_fill(~kept, -torch.inf)
    logprobs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
    return logprobs[mask], -(table.exp() * table).sum(-1)[mask]


def _kept(logits: Tensor, truncation: Truncation) -> Tensor:
    """The tokens that transformers' generation would sample from, in vLLM's order."""
    from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids: Any = None
    logits = MinPLogitsWarper(truncation.min_p)(ids, logits)
    if truncation.top_k > 0:
        logits = TopKLogitsWarper(truncation.top_k)(ids, logits)
    return TopPLogitsWarper(truncation.top_p)(ids, logits).isfinite()


def _engine(columns: RolloutColumns, row: int) -> Tensor:
    span = columns.slice(row)
    return torch.from_numpy(columns.logprobs_T[span][columns.loss_mask_T[span]])


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> bool:
    """Whether no element differs by more than `tolerance`, relative where the reference's is larger than 1."""
    return bool(((ours - theirs).abs() <= tolerance * theirs.abs().clamp(min=1)).all())


def reference_weights(kind: str) -> dict[str, Tensor]:
    """The weights of `hf_model(kind)` by Megatron's names."""
    return megatron_weights(kind, hf_model(kind).state_dict())


def megatron_weights(kind: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's local-spec names with global layer and expert numbers, from transformers' names."""
    f = facts(kind)
    out = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not f.tied_embeddings:
        out["output_layer.weight"] = weights["lm_head.weight"]
    for i in range(f.layers):
        theirs = {
            n.removeprefix(f"model.layers.{i}."): w for n, w in weights.items() if n.startswith(f"model.layers.{i}.")
        }
        layer = {
            "input_layernorm.weight": theirs["input_layernorm.weight"],
            **_norms(theirs),
            **(_mla(theirs) if f.mla else _attention(f, theirs)),
            **(_experts(theirs) if f.is_moe_layer(i) else _mlp("mlp", "mlp", theirs)),
        }
        out |= {f"decoder.layers.{i}.{name}": weight for name, weight in layer.items()}
    return {name: weight.detach().clone() for name, weight in out.items()}


def _attention(f: ModelFacts, w: dict[str, Tensor]) -> dict[str, Tensor]:
    def joined(kind: str) -> Tensor:
        parts = [w[f"self_attn.{n}_proj.{kind}"] for n in "qkv"]
        return torch.cat([p.reshape(f.kv_heads, -1, *p.shape[1:]) for p in parts], 1).flatten(0, 1)

    out = {
        "self_attention.linear_qkv.weight": joined("weight"),
        "self_attention.linear_proj.weight": w["self_attn.o_proj.weight"],
    }
    if f.qkv_bias:
        out["self_attention.linear_qkv.bias"] = joined("bias")
    if f.qk_norm:
        out |= {f"self_attention.{n}_layernorm.weight": w[f"self_attn.{n}_norm.weight"] for n in "qk"}
    return out


def _norms(w: dict[str, Tensor]) -> dict[str, Tensor]:
    after_attention = w["post_attention_layernorm.weight"]
    if "pre_feedforward_layernorm.weight" not in w:
        return {"pre_mlp_layernorm.weight": after_attention}
    return {  # Gemma's four
        "pre_mlp_layernorm.weight": w["pre_feedforward_layernorm.weight"],
        "self_attention.linear_proj.post_layernorm.weight": after_attention,
        "mlp.linear_fc2.post_layernorm.weight": w["post_feedforward_layernorm.weight"],
    }


def _mla(w: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "q_a_proj": "linear_q_down_proj",
        "q_a_layernorm": "q_layernorm",
        "q_b_proj": "linear_q_up_proj",
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_a_layernorm": "kv_layernorm",
        "kv_b_proj": "linear_kv_up_proj",
        "o_proj": "linear_proj",
    }
    return {f"self_attention.{ours}.weight": w[f"self_attn.{theirs}.weight"] for theirs, ours in names.items()}


def _mlp(theirs: str, ours: str, w: dict[str, Tensor]) -> dict[str, Tensor]:
    fc1 = torch.cat([w[f"{theirs}.gate_proj.weight"], w[f"{theirs}.up_proj.weight"]])
    return {f"{ours}.linear_fc1.weight": fc1, f"{ours}.linear_fc2.weight": w[f"{theirs}.down_proj.weight"]}


def _experts(w: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {"mlp.router.weight": w["mlp.gate.weight"]}
    if "mlp.gate.e_score_correction_bias" in w:
        out["mlp.router.expert_bias"] = w["mlp.gate.e_score_correction_bias"]
    for e in range(EXPERTS):
        out[f"mlp.experts.local_experts.{e}.linear_fc1.weight"] = w["mlp.experts.gate_up_proj"][e]
        out[f"mlp.experts.local_experts.{e}.linear_fc2.weight"] = w["mlp.experts.down_proj"][e]
    if "mlp.shared_experts.gate_proj.weight" in w:
        out |= _mlp("mlp.shared_experts", "mlp.shared_experts", w)
    return out
