"""Adapters train as the plain model of weights W + alpha / rank B A does, under any layout, and refits read those."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlctl.backends.clients import only_result
from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.conversion.peft_adapters import megatron_to_peft
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.inspection import inspect
from rlctl.checkpoints.megatron.megatron_directory import find
from rlctl.checkpoints.megatron.megatron_model import open_megatron_model
from rlctl.config.parallel import ParallelSpec
from rlctl.config.schema import LoraConfig
from rlctl.errors import InputError
from support.parallel_cases import (
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
from support.pool import Pool
from support.reference import (
    Optim,
    advantage,
    close,
    facts,
    hf_model,
    make_batch,
    megatron_weights,
    reference_logprobs,
    token_loss,
)

Pools = Callable[[int], Pool]
LORA = LoraConfig(rank=3, alpha=6.0)
TARGETS = (
    *(f"self_attention.linear_{name}" for name in ("qkv", "proj", "q_proj", "q_up_proj", "kv_up_proj")),
    *(f"{place}.linear_{name}" for place in ("mlp", "shared_experts") for name in ("fc1", "fc2")),
)


def adapters(base: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random A and B for every layer, by Megatron's names; both count."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, weight in base.items():
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
        lora = {name: value.clone().requires_grad_() for name, value in adapters(base).items()}
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
                token_loss(*columns, torch.tensor(advantage(*key)), torch.tensor(WEIGHT))
                for key, columns in logprobs.items()
            )
            loss.backward()
            self.losses.append(float(loss.detach()))
            if step == 0:
                self.grads = {name: value.grad.clone() for name, value in lora.items()}
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(lora.values(), optim.clip)))
            adam.step()
        self.begun_with = base | adapters(base)
        self.lora = {name: value.detach() for name, value in lora.items()}
        self.base = base
        self.base_logprobs = {
            k: v[0].detach() for k, v in reference_logprobs(model, hf_weights(base), make_batch()).items()
        }


@cache
def expected() -> Expected:
    return Expected()


class OfPolicy:
    """The same of any family, through the policy without adapters on the merged weights, in one process: the gradient
    of W is that of both factors. That policy is compared with transformers elsewhere."""

    def __init__(self, pool: Pool, kind: str) -> None:
        self.base = base_weights_of(pool, kind)
        self.begun_with = self.base | adapters(self.base)
        optim, lora = Optim(), {name: value.clone() for name, value in adapters(self.base).items()}
        adam = torch.optim.AdamW(
            lora.values(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay
        )
        self.norms, self.losses, scale = [], [], LORA.alpha / LORA.rank
        self.base_logprobs = pool.run(run_plain, Case(kind), self.base)[0][0]
        for step in range(2):
            weights = merge(self.base, lora)
            logprobs, loss, grads = pool.run(run_plain, Case(kind), weights)[0]
            for name in [name.removesuffix("lora_a") for name in lora if name.endswith("lora_a")]:
                a, b, whole = lora[f"{name}lora_a"], lora[f"{name}lora_b"], grads[f"{name}weight"]
                a.grad, b.grad = scale * b.T @ whole, scale * whole @ a.T
            if step == 0:
                self.logprobs, self.merged = logprobs, weights
                self.grads = {name: value.grad.clone() for name, value in lora.items()}
            self.losses.append(loss)
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(lora.values(), optim.clip)))
            adam.step()
        self.lora = lora


def run_plain(rank: int, case: Case, weights: dict[str, Tensor]) -> tuple[dict, float, dict[str, Tensor]]:
    """Log-probs, loss, and gradients before clipping, of the policy that trains all weights."""
    worker = make_worker(rank, case, weights)
    shard = plan_of(case, make_batch()).shards[0]
    worker.load_batch(shard, list)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    result = worker.train_minibatch(0, Loss(), Optim().lr)
    unclip = (result.grad_norm + 1e-6) / Optim().clip
    return logprobs, result.loss, {name: grad * unclip for name, grad, *_ in pieces(worker, "grad")}


def run_weights(rank: int, case: Case) -> dict[str, Tensor]:
    """The weights that a policy is born with, norms moved so that they matter."""
    found = {name: value for name, value, *_ in pieces(make_worker(rank, case, None), "data")}
    generator = torch.Generator().manual_seed(2)
    return {
        name: value + 0.2 * torch.randn(value.shape, generator=generator)
        if "norm" in name
        else value * (1 if "embedding" in name else 4)
        for name, value in found.items()
    }


def base_weights_of(pool: Pool, kind: str) -> dict[str, Tensor]:
    if kind == "gemma3":
        return pool.run(run_weights, Case(kind))[0]
    return megatron_weights(kind, hf_model(kind).state_dict())


def run_lora(rank: int, case: Case, weights: dict[str, Tensor], checkpoint: Path | None = None) -> dict:
    """Two steps; what a refit would read before them; with `checkpoint`, the second after a save and a load."""
    worker = make_worker(rank, case, None)
    fill(worker, weights)
    worker.hold_reference()
    merged = worker.parameters()
    shard = plan_of(case, make_batch()).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    worker.add_logprobs("old_logprobs")
    worker.add_logprobs("reference_logprobs")
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
        worker.save_begin(checkpoint)
        worker.save_finish()
        worker = make_worker(rank, case, None)
        fill(
            worker,
            {name: value for name, value in weights.items() if ".lora_" not in name}
            | {name: torch.zeros_like(value) for name, value in weights.items() if ".lora_" in name},
        )
        worker.load_saved(checkpoint)
        worker.load_batch(shard, list)
    out["results"].append(worker.train_minibatch(0, Loss(), Optim().lr))
    out["params"] = list(pieces(worker, "data"))
    return out


def _local_names(worker) -> list[str]:
    """In the order of `pieces`."""
    return [
        worker._name(core, name)
        for core in worker._cores()
        for name in (
            *(name for name, _ in core.named_parameters()),
            *(name for name, _ in core.named_buffers() if name.endswith("expert_bias")),
        )
    ]


CASES = {
    "one": Case(),
    "recompute": Case(recompute="full"),
    "tp2-sp": Case(parallel=ParallelSpec(tp=2)),
    "tp2": Case(parallel=ParallelSpec(tp=2, sequence_parallel=False)),
    "pp2": Case(parallel=ParallelSpec(pp=2), recompute="full"),
    "dp2": Case(parallel=ParallelSpec(dp=2)),
    "cp2": Case(parallel=ParallelSpec(cp=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_the_merged_model_does(pools: Pools, name: str, tmp_path: Path) -> None:
    check(pools, CASES[name], expected(), tmp_path if name in ("recompute", "tp2-sp") else None)


OTHERS = {
    "vpp2": Case(parallel=ParallelSpec(pp=2, vpp=2), packing=False),
    "moe-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "moe-tp2": Case("qwen3moe", ParallelSpec(tp=2)),
    "moe-tp2-etp1": Case("qwen3moe", ParallelSpec(tp=2, ep=2, etp=1)),
    "mla-one": Case("deepseek"),
    "mla-tp2": Case("deepseek", ParallelSpec(tp=2)),
    "mla-ep2": Case("deepseek", ParallelSpec(dp=2, ep=2)),
    "mla-pp2": Case("deepseek", ParallelSpec(pp=2), recompute="full"),
    "mla-cp2": Case("deepseek", ParallelSpec(cp=2)),
    "gemma-one": Case("gemma3"),
    "gemma-tp2": Case("gemma3", ParallelSpec(tp=2)),
    "gemma-pp2": Case("gemma3", ParallelSpec(pp=2)),
}
QUICK = ("moe-ep2", "mla-tp2", "gemma-tp2")
SAVED = ("vpp2", "moe-ep2", "mla-tp2", "gemma-tp2")
BASES: dict[str, OfPolicy] = {}


def check_other(pools: Pools, name: str, tmp_path: Path) -> None:
    case = OTHERS[name]
    if case.kind not in BASES:
        BASES[case.kind] = OfPolicy(pools(1), case.kind)
    check(pools, case, BASES[case.kind], tmp_path if name in SAVED else None)


@pytest.mark.parametrize("name", QUICK)
def test_adapters_of_any_family_and_layout_do(pools: Pools, name: str, tmp_path: Path) -> None:
    check_other(pools, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(OTHERS) - set(QUICK)))
def test_adapters_of_more_families_and_layouts_do(pools: Pools, name: str, tmp_path: Path) -> None:
    check_other(pools, name, tmp_path)


def check(pools: Pools, case: Case, wanted: Expected | OfPolicy, checkpoint: Path | None) -> None:
    case = replace(case, lora=LORA)
    ranks = pools(case.parallel.world_size).run(run_lora, case, wanted.begun_with, checkpoint)
    for column, theirs in (("logprobs", wanted.logprobs), ("reference", wanted.base_logprobs)):
        found = {key: value for rank in ranks for key, value in rank[column].items()}
        assert found.keys() == theirs.keys()
        assert all(close(found[key], value, 1e-5) for key, value in theirs.items()), column
    merged, _ = assemble([rank["merged"] for rank in ranks])
    assert merged.keys() == wanted.merged.keys()
    assert all(close(merged[key], value, 1e-6) for key, value in wanted.merged.items())
    results = [only_result([rank["results"][step] for rank in ranks]) for step in range(2)]
    tolerance = 5e-6 if case.kind == "gemma3" else 1e-6  # 1e-7 of its weights move its gradients by 2e-5 of the largest
    for result, loss, norm in zip(results, wanted.losses, wanted.norms, strict=True):
        assert abs(result.loss - loss) <= 1e-6 * max(1, abs(loss))
        assert abs(result.grad_norm - norm) <= tolerance * max(1, norm)
    grads, _ = assemble([rank["grads"] for rank in ranks])
    unclip = (results[0].grad_norm + 1e-6) / Optim().clip
    assert grads.keys() == wanted.grads.keys()
    for key, value in wanted.grads.items():
        assert close(grads[key] * unclip, value, tolerance), (key, (grads[key] * unclip - value).abs().max())
    params, spread = assemble([rank["params"] for rank in ranks])
    assert spread == 0
    for key, value in (wanted.base | wanted.lora).items():
        assert close(params[key], value, 1e-6 if ".lora_" in key else 0), key


def run_saved(rank: int, case: Case, weights: dict[str, Tensor], directory: Path) -> dict:
    """Log-probs of a policy with adapters, which is saved."""
    worker = make_worker(rank, case, None)
    fill(worker, weights)
    shard = plan_of(case, make_batch()).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    worker.add_logprobs("old_logprobs")
    found = column_by_rollout(worker, shard, "old_logprobs")
    worker.train_minibatch(0, Loss(), 0.0)  # there is an optimizer to save; the weights stay
    worker.save_begin(directory)
    worker.save_finish()
    return found


def saved_run(pools: Pools, case: Case, path: Path) -> tuple[Path, dict[str, Tensor], dict]:
    """A run with a checkpoint of adapters, the merged weights by Megatron's names, and the policy's log-probs."""
    model, run = hf_model(case.kind), path / "run"
    model.save_pretrained(path / "base")
    base = megatron_weights(case.kind, model.state_dict())
    policy = run / "checkpoints" / "step_1" / "policy"
    policy.mkdir(parents=True)
    lora = adapters(base)
    ranks = pools(case.parallel.world_size).run(run_saved, replace(case, lora=LORA), base | lora, policy)
    manifest = {
        "model": {"directory": str(path / "base"), "fingerprint": model_fingerprint(path / "base")},
        "config": {"training.lora.rank": {"value": LORA.rank}, "training.lora.alpha": {"value": LORA.alpha}},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    return run, merge(base, lora), {key: value for rank in ranks for key, value in rank.items()}


@pytest.mark.parametrize("name", ["moe-tp2", "mla-tp2"])
def test_exported_adapters_are_in_the_weights_that_transformers_reads(pools: Pools, name: str, tmp_path: Path) -> None:
    import transformers

    case = OTHERS[name]
    run, merged, logprobs = saved_run(pools, case, tmp_path)
    assert inspect(run).adapters
    report = megatron_to_hf(run, tmp_path / "merged")
    assert report.verified
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    exported = megatron_weights(case.kind, model.state_dict())
    for key, value in merged.items():
        assert close(exported[key], value, 1e-6), key
    theirs = reference_logprobs(model, dict(model.state_dict()), make_batch())
    assert theirs.keys() == logprobs.keys()
    assert all(close(logprobs[key], value[0].detach(), 1e-5) for key, value in theirs.items())


@pytest.mark.parametrize("name", ["one", "mla-tp2"])
def test_adapters_are_written_as_peft_names_them(pools: Pools, name: str, tmp_path: Path) -> None:
    """The base and what was written add up to the merged weights."""
    from safetensors.torch import load_file

    case = (OTHERS | CASES)[name]
    run, merged, _ = saved_run(pools, case, tmp_path)
    report = megatron_to_peft(run, tmp_path / "adapters")
    assert report.verified
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", LORA.rank, LORA.alpha)
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    model = hf_model(case.kind)
    for key in [key for key in written if key.endswith("lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert any(module == target or module.endswith(f".{target}") for target in config["target_modules"])
        update = LORA.alpha / LORA.rank * written[key.replace("lora_A", "lora_B")] @ written[key]
        model.get_submodule(module).weight.data += update
    weights = megatron_weights(case.kind, model.state_dict())
    assert all(close(weights[key], value, 1e-6) for key, value in merged.items())


def test_a_run_that_trained_all_weights_has_no_adapters_to_write(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path / "model")
    hf_to_megatron(tmp_path / "model", tmp_path / "ckpt")
    with pytest.raises(InputError, match=r"--adapter-only: .* holds no adapters"):
        megatron_to_peft(tmp_path / "ckpt", tmp_path / "adapters")


def test_adapters_without_their_model_are_refused(pools: Pools, tmp_path: Path) -> None:
    run, _, _ = saved_run(pools, Case(), tmp_path)
    base, moved = tmp_path / "base", tmp_path / "moved"
    base.rename(moved)
    with pytest.raises(InputError, match=r"began with is not at .*base any more"):
        megatron_to_hf(run, tmp_path / "out")
    assert megatron_to_hf(run, tmp_path / "out", config_from=moved).verified
    (moved / "config.json").write_text((moved / "config.json").read_text().replace("512", "256"))
    with pytest.raises(InputError, match="moved is not the model that the run"):
        megatron_to_hf(run, tmp_path / "again", config_from=moved)
    with pytest.raises(InputError, match="holds adapters and not the weights"):
        open_megatron_model(find(run), facts("llama"))
    (run / "manifest.json").unlink()
    with pytest.raises(InputError, match="which names the model, cannot be read"):
        megatron_to_hf(run, tmp_path / "again", config_from=moved)
