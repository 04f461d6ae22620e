"""Adapters train as the plain model of weights W + alpha / rank B A does, under any layout, and refits read those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel import families
from parallel.cases import (
    WEIGHT,
    Case,
    Loss,
    assemble,
    column_by_rollout,
    fill,
    gather_gradients,
    make_worker,
    pieces,
    plan_of,
)
from parallel.pool import Pool
from parallel.reference import (
    Optim,
    advantage,
    facts,
    hf_model,
    make_batch,
    megatron_weights,
    reference_logprobs,
    token_loss,
)
from rlctl.backends.base import ParallelSpec, PolicySpec, only_result
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.config.schema import LoraConfig
from rlctl.errors import ConfigError
from rlctl.models.registry import facts_from_hf_config

Pools = Callable[[int], Pool]
LORA = LoraConfig(rank=3, alpha=6.0)
TARGETS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


@cache
def adapters() -> dict[str, Tensor]:
    """Random A and B for every layer, by Megatron's names; both count."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, weight in megatron_weights("llama", hf_model("llama").state_dict()).items():
        layer = name.removesuffix(".weight")
        if layer.endswith(TARGETS):
            found[f"{layer}.lora_a"] = 0.1 * torch.randn(LORA.rank, weight.shape[1], generator=generator)
            found[f"{layer}.lora_b"] = 0.1 * torch.randn(weight.shape[0], LORA.rank, generator=generator)
    return found


def hf_weights(megatron: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' weights of a Llama from Megatron's; differentiable."""
    f = facts("llama")
    out = {
        "model.embed_tokens.weight": megatron["embedding.word_embeddings.weight"],
        "model.norm.weight": megatron["decoder.final_layernorm.weight"],
        "lm_head.weight": megatron["output_layer.weight"],
    }
    for layer in range(f.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = megatron[f"{ours}self_attention.linear_qkv.weight"].view(f.kv_heads, -1, f.head_dim, f.hidden)
        gate, up = megatron[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        out |= {
            f"{theirs}self_attn.q_proj.weight": qkv[:, :-2].reshape(-1, f.hidden),
            f"{theirs}self_attn.k_proj.weight": qkv[:, -2].reshape(-1, f.hidden),
            f"{theirs}self_attn.v_proj.weight": qkv[:, -1].reshape(-1, f.hidden),
            f"{theirs}self_attn.o_proj.weight": megatron[f"{ours}self_attention.linear_proj.weight"],
            f"{theirs}mlp.gate_proj.weight": gate,
            f"{theirs}mlp.up_proj.weight": up,
            f"{theirs}mlp.down_proj.weight": megatron[f"{ours}mlp.linear_fc2.weight"],
            f"{theirs}input_layernorm.weight": megatron[f"{ours}input_layernorm.weight"],
            f"{theirs}post_attention_layernorm.weight": megatron[f"{ours}pre_mlp_layernorm.weight"],
        }
    return out


def merge(base: dict[str, Tensor], lora: dict[str, Tensor]) -> dict[str, Tensor]:
    merged = dict(base)
    for name in [name for name in lora if name.endswith("lora_a")]:
        layer = name.removesuffix(".lora_a")
        merged[f"{layer}.weight"] = (
            base[f"{layer}.weight"] + LORA.alpha / LORA.rank * lora[f"{layer}.lora_b"] @ lora[name]
        )
    return merged


class Expected:
    """Two steps of torch's AdamW on A and B, through transformers' model on the merged weights."""

    def __init__(self) -> None:
        model, optim = hf_model("llama"), Optim()
        base = megatron_weights("llama", model.state_dict())
        lora = {name: value.clone().requires_grad_() for name, value in adapters().items()}
        adam = torch.optim.AdamW(
            lora.values(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay
        )
        self.norms, self.losses = [], []
        for step in range(2):
            adam.zero_grad()
            weights = hf_weights(merge(base, lora))
            logprobs = reference_logprobs(model, weights, make_batch())
            if step == 0:
                self.logprobs = {key: value[0].detach() for key, value in logprobs.items()}
                self.merged = {name: value.detach() for name, value in merge(base, lora).items()}
            loss = sum(
                token_loss(ours, engine, torch.tensor(advantage(*key)), torch.tensor(WEIGHT))
                for key, (ours, engine) in logprobs.items()
            )
            loss.backward()
            self.losses.append(float(loss.detach()))
            if step == 0:
                self.grads = {name: value.grad.clone() for name, value in lora.items()}
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(lora.values(), optim.clip)))
            adam.step()
        self.lora = {name: value.detach() for name, value in lora.items()}
        self.base = base
        self.base_logprobs = {
            k: v[0].detach() for k, v in reference_logprobs(model, hf_weights(base), make_batch()).items()
        }


@cache
def expected() -> Expected:
    return Expected()


def run_lora(rank: int, case: Case, weights: dict[str, Tensor], checkpoint: Path | None = None) -> dict:
    """Two steps; what a refit would read before them; with `checkpoint`, the second after a save and a load."""
    worker = make_worker(rank, case, None)
    fill(worker, weights)
    worker.hold_reference()
    merged = worker.parameters()
    shard = plan_of(case, make_batch()).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    worker.logprobs("old_logprobs")
    worker.logprobs("reference_logprobs")
    out = {
        "merged": [
            (name, merged[local].clone(), part, parts, axis)
            for (name, _, part, parts, axis), local in zip(pieces(worker, "data"), _local_names(worker), strict=True)
            if local in merged
        ],
        "logprobs": column_by_rollout(worker, shard, "old_logprobs"),
        "reference": column_by_rollout(worker, shard, "reference_logprobs"),
        "results": [worker.train_minibatch(0, Loss(), Optim().lr)],
    }
    gather_gradients(worker)
    out["grads"] = [piece for piece in pieces(worker, "grad") if ".lora_" in piece[0]]
    if checkpoint is not None:
        worker.save(checkpoint)
        worker = make_worker(rank, case, None)
        fill(
            worker,
            {name: value for name, value in weights.items() if ".lora_" not in name}
            | {name: torch.zeros_like(value) for name, value in weights.items() if ".lora_" in name},
        )
        worker.load(checkpoint)
        worker.load_batch(shard, list)
    out["results"].append(worker.train_minibatch(0, Loss(), Optim().lr))
    out["params"] = list(pieces(worker, "data"))
    return out


def _local_names(worker) -> list[str]:
    return [name.removeprefix("module.") for chunk in worker.chunks for name, _ in chunk.module.named_parameters()]


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return bool(((ours - theirs).abs() <= tolerance * theirs.abs().clamp(min=1)).all())


CASES = {
    "one": Case(),
    "recompute": Case(recompute="full"),
    "tp2-sp": Case(parallel=ParallelSpec(tp=2)),
    "tp2": Case(parallel=ParallelSpec(tp=2, sp=False)),
    "pp2": Case(parallel=ParallelSpec(pp=2), recompute="full"),
    "dp2": Case(parallel=ParallelSpec(dp=2)),
    "cp2": Case(parallel=ParallelSpec(cp=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_the_merged_model_does(pools: Pools, name: str, tmp_path: Path) -> None:
    case, wanted = replace(CASES[name], lora=LORA), expected()
    checkpoint = tmp_path if name in ("recompute", "tp2-sp") else None
    ranks = pools(case.parallel.world_size).run(run_lora, case, wanted.base | adapters(), checkpoint)
    for column, theirs in (("logprobs", wanted.logprobs), ("reference", wanted.base_logprobs)):
        found = {key: value for rank in ranks for key, value in rank[column].items()}
        assert found.keys() == theirs.keys()
        assert all(close(found[key], value, 1e-5) for key, value in theirs.items()), column
    merged, _ = assemble([rank["merged"] for rank in ranks])
    assert merged.keys() == wanted.merged.keys()
    assert all(close(merged[key], value, 1e-6) for key, value in wanted.merged.items())
    results = [only_result([rank["results"][step] for rank in ranks]) for step in range(2)]
    for result, loss, norm in zip(results, wanted.losses, wanted.norms, strict=True):
        assert abs(result.loss - loss) <= 1e-6 * max(1, abs(loss))
        assert abs(result.grad_norm - norm) <= 1e-6 * max(1, norm)
    grads, _ = assemble([rank["grads"] for rank in ranks])
    unclip = (results[0].grad_norm + 1e-6) / Optim().clip
    assert grads.keys() == wanted.grads.keys()
    for key, value in wanted.grads.items():
        assert close(grads[key] * unclip, value, 1e-6), (key, (grads[key] * unclip - value).abs().max())
    params, spread = assemble([rank["params"] for rank in ranks])
    assert spread == 0
    for key, value in (wanted.base | wanted.lora).items():
        assert close(params[key], value, 1e-6 if ".lora_" in key else 0), key


def refusal(rank: int, spec: PolicySpec) -> str:
    with pytest.raises(ConfigError) as refused:
        MegatronWorker(rank, 1, "127.0.0.1", 0, spec).build()
    return str(refused.value)


def test_layers_that_adapters_do_not_cover_are_named(pools: Pools) -> None:
    config = families.hf_model("gemma3").config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    gemma = facts_from_hf_config(config)
    assert "linear_proj is a " in pools(1).run(refusal, PolicySpec(gemma, lora=LORA, threads=1))[0]
