"""Adapters on transformers' modules: as those of the Megatron backend, of families without a file, and as PEFT has
them."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlctl.backends.base import PolicySpec
from rlctl.backends.clients import only_result
from rlctl.backends.dtensor.lora import adapt, held_adapters
from rlctl.backends.lookup import policy_backend
from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.conversion.peft_adapters import megatron_to_peft
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.inspection import inspect
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError
from rlctl.settings.training import LoraConfig, OptimizerConfig
from rlctl.weights.dtensor import DTensorWorld
from support.family_models import hf_model as family_model
from support.lora_cases import LORA, adapted, adapters_of, expected, policy_of, run_family, run_saved, settings
from support.parallel_cases import WEIGHT, assemble, model_of, of_family, of_modules, run_case
from support.parallel_families import make_batch as family_batch
from support.peft_models import TOKENS, base_model, engine_logprobs, logprobs, with_adapter
from support.pool import Pools, Published
from support.reference_policy import (
    advantage,
    close,
    hf_model,
    make_batch,
    megatron_weights,
    reference_logprobs,
    token_loss,
)

TOLERANCE = 1e-6
"""As in `test_dtensor.py`."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3moe-experts"])
def test_both_backends_train_the_same_adapters(pools: Pools, published: Published, kind: str) -> None:
    """They begin with the same A."""
    case = replace(of_modules(kind, dp=2), lora=settings(kind))
    weights = megatron_weights(case.kind, hf_model(case.kind).state_dict())
    ours = pools(2).run(run_case, case, published(case.kind), make_batch())
    theirs = pools(2).run(run_case, replace(case, backend="megatron"), weights, make_batch())
    params, _ = assemble([rank.params for rank in ours])
    for step in range(2):
        one, other = (only_result([rank.results[step] for rank in ranks]) for ranks in (ours, theirs))
        for name in ("loss", "grad_norm"):
            assert abs(getattr(one, name) - getattr(other, name)) <= TOLERANCE * max(1, abs(getattr(other, name)))
    theirs_by_name = {name: value for name, value, *_ in theirs[0].params}
    fused = {name: value for name, value in theirs_by_name.items() if name.endswith("linear_proj.lora_b")}
    assert fused
    for name, value in fused.items():
        layer = name.split(".")[2]
        assert close(params[f"model.layers.{layer}.self_attn.o_proj.lora_b"], value, TOLERANCE)
    stacks = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
    of_experts = [name for name in theirs_by_name if ".local_experts." in name and ".lora_" in name]
    assert bool(of_experts) == (kind != "qwen3")
    for name in of_experts:
        _, _, layer, *_, expert, matrix, which = name.split(".")
        stack = params[f"model.layers.{layer}.mlp.experts.{stacks[matrix]}_{which}"]
        assert close(stack[int(expert)], theirs_by_name[name], TOLERANCE), name


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp"), [("phi3", 1), ("phi3", 2), ("glm4", 2)])
def test_both_backends_train_the_same_adapters_of_fused_tensors(
    pools: Pools, family: str, tp: int, tmp_path: Path
) -> None:
    """One adapter of the published tensor of q, k and v, or of gate and up, where Megatron has other rows."""
    base, merged = tmp_path / "model", dict[str, dict[str, Tensor]]()
    family_model(family).save_pretrained(base)
    hf_to_megatron(base, tmp_path / "converted")
    facts, outcomes = facts_in(base), dict[str, list[Any]]()
    for backend, ranks in (("dtensor", 1), ("megatron", tp)):
        case = replace(of_family(facts, ParallelSpec(tp=ranks)), backend=backend)
        model = base if backend == "dtensor" else tmp_path / "converted" / "release"
        policy = policy_of(tmp_path / backend, base)
        outcomes[backend] = pools(ranks).run(run_family, case, model, facts, family_batch(), policy)
        assert megatron_to_hf(tmp_path / backend, tmp_path / f"{backend}-merged").verified
        merged[backend] = load_file(tmp_path / f"{backend}-merged" / "model.safetensors")
    ours, theirs = outcomes["dtensor"], outcomes["megatron"]
    for step in range(3):
        one, other = (only_result([rank["results"][step] for rank in ranks]) for ranks in (ours, theirs))
        assert abs(one.loss - other.loss) <= TOLERANCE * max(1, abs(other.loss))
        assert abs(one.grad_norm - other.grad_norm) <= TOLERANCE * max(1, other.grad_norm)
    begun = load_file(base / "model.safetensors")
    for name, value in merged["dtensor"].items():
        assert close(merged["megatron"][name], value, 1e-6), name
        assert torch.equal(value, begun[name]) != name.endswith("proj.weight"), name


UNFILED = {
    "gpt-neox": {"attention": "attention", "mlp": "mlp"},
    "lfm2": {"attention": "self_attn conv", "mlp": "feed_forward"},
    "opt": {"attention": "self_attn", "mlp": "fc1 fc2"},
    "phi3": {"attention": "self_attn", "mlp": "mlp"},
    "gemma2": {"attention": "self_attn", "mlp": "mlp"},
    "qwen2-moe": {"attention": "self_attn", "mlp": "mlp"},
    "phimoe": {"attention": "self_attn"},
    "minimax": {"attention": "self_attn"},
    "gptj": {"attention": "attn", "mlp": "mlp"},
    "bamba": {"attention": "self_attn mamba", "mlp": "feed_forward"},
    "qwen3-next": {"attention": "self_attn linear_attn", "mlp": "mlp"},
}
"""By family without a file, the modules of a layer that are adapted, by target."""


@pytest.mark.parametrize(("family", "dp"), [
    pytest.param(family, dp, marks=() if (family, dp) in (("gpt-neox", 1), ("lfm2", 2)) else pytest.mark.slow)
    for family in UNFILED for dp in (1, 2)
])  # fmt: skip
def test_a_family_without_a_file_takes_adapters_and_is_exported(
    pools: Pools, family: str, dp: int, tmp_path: Path
) -> None:
    import transformers

    base, run = tmp_path / "model", tmp_path / "run"
    family_model(family).save_pretrained(base)
    facts, targets = facts_in(base), UNFILED[family]
    spec = PolicySpec(facts, ParallelSpec(dp=dp), optimizer=OptimizerConfig(), temperature=1.0, lora=LORA)
    policy_backend("dtensor").refuse(spec)
    ranks = pools(dp).run(
        run_family, of_family(facts, ParallelSpec(dp=dp)), base, facts, family_batch(), policy_of(run, base)
    )
    losses = [only_result([rank["results"][step] for rank in ranks]).loss for step in range(3)]
    assert len(set(losses)) == 3
    if family != "phimoe":  # its routers choose anew after a step, and their gradients are estimates
        assert losses == sorted(losses, reverse=True)
    assert megatron_to_hf(run, tmp_path / "merged").verified
    assert megatron_to_peft(run, tmp_path / "adapters").verified
    begun, merged = (load_file(place / "model.safetensors") for place in (base, tmp_path / "merged"))
    changed = {name for name, value in begun.items() if not torch.equal(value, merged[name])}
    layer = re.compile(r"\.\d+\.(\w+)")
    assert {found[1] for name in changed if (found := layer.search(name))} == set(" ".join(targets.values()).split())
    load = transformers.AutoModelForCausalLM.from_pretrained  # its own attention caps no scores
    model = load(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    wanted = reference_logprobs(model, {}, family_batch())
    for column in ("logprobs", "loaded"):
        found = {key: value for rank in ranks for key, value in rank[column].items()}
        assert found.keys() == wanted.keys()
        assert all(close(found[key], columns[0].detach(), 1e-5) for key, columns in wanted.items()), column
    with torch.device("meta"):
        inner = copy.deepcopy(family_model(family)).to("meta")
    for target in ("attention", "mlp"):
        lora = LoraConfig(rank=2, targets=(target,))
        if target not in targets:
            with pytest.raises(ConfigError, match=r"no layers for adapters of this name \(mlp\)"):
                adapt(inner, DTensorWorld(facts, ParallelSpec()), lora)
            continue
        adapted = copy.deepcopy(inner)
        adapt(adapted, DTensorWorld(facts, ParallelSpec()), lora)
        assert {layer.search(held.site.module)[1] for held in held_adapters(adapted)} == set(targets[target].split())


def test_routed_experts_of_a_family_without_a_file_take_adapters(pools: Pools, tmp_path: Path) -> None:
    """Gate and up lie in one matrix of transformers' modules, and are published apart."""
    pytest.importorskip("peft")
    base, run, lora = tmp_path / "model", tmp_path / "run", LoraConfig(rank=3, alpha=6.0, targets="all-linear")
    family_model("qwen2-moe").save_pretrained(base)
    facts = facts_in(base)
    arguments = of_family(facts, ParallelSpec(dp=2)), base, facts, family_batch(), policy_of(run, base, lora), lora
    ranks = pools(2).run(run_family, *arguments)
    assert megatron_to_hf(run, tmp_path / "merged").verified
    assert megatron_to_peft(run, tmp_path / "adapters").verified
    for model in (base_model(tmp_path / "merged"), with_adapter(base, tmp_path / "adapters")):
        wanted = reference_logprobs(model, {}, family_batch())
        found = {key: value for rank in ranks for key, value in rank["loaded"].items()}
        assert all(close(found[key], columns[0].detach(), 1e-5) for key, columns in wanted.items())


def test_excluded_layers_have_no_adapters(tmp_path: Path) -> None:
    family_model("bamba").save_pretrained(tmp_path)
    names = []
    for exclude in ((), ("*out_proj*",)):
        with torch.device("meta"):
            inner = copy.deepcopy(family_model("bamba")).to("meta")
        adapt(inner, DTensorWorld(facts_in(tmp_path), ParallelSpec()), LoraConfig(rank=2, exclude=exclude))
        names.append({held.site.module for held in held_adapters(inner)})
    assert names[0] - names[1] == {name for name in names[0] if name.endswith("mamba.out_proj")} != set()


def test_weights_that_are_published_in_one_tensor_take_no_adapters(tmp_path: Path) -> None:
    """HRM's: queries, keys, values and gates, and gates and up-projections."""
    family_model("hrm").save_pretrained(tmp_path)
    with torch.device("meta"):
        inner = copy.deepcopy(family_model("hrm")).to("meta")
    with pytest.raises(ConfigError, match=r"q_proj\.weight is published in one tensor .* could not be exported"):
        adapt(inner, DTensorWorld(facts_in(tmp_path), ParallelSpec()), LoraConfig(rank=2, targets=("attention",)))


def test_adapters_are_exported_merged_and_as_peft_names_them(
    pools: Pools, published: Published, tmp_path: Path
) -> None:
    import transformers

    case, run, base = of_modules("deepseek", dp=2, ep=2), tmp_path / "run", published("deepseek")
    pools(2).run(run_saved, case, base, make_batch(), policy_of(run, base, settings(case.kind)))
    found = inspect(run)
    assert (found.format, found.adapters) == ("dtensor torch_dist", True)
    wanted = expected(case.kind)

    assert megatron_to_hf(run, tmp_path / "merged").verified
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert close(value, wanted.merged[name], TOLERANCE), name

    assert megatron_to_peft(run, tmp_path / "adapters").verified
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", LORA.rank, LORA.alpha)
    modules = [key.removesuffix(".lora_A.weight") for key in written if key.endswith("lora_A.weight")]
    assert 2 * len(modules) == len(written)
    base_model = hf_model(case.kind).state_dict()
    # PEFT gives routed experts' names to shared experts too, and applies these by `target_parameters` alone.
    targets = [*config["target_modules"], *(key.removesuffix(".weight") for key in config.get("target_parameters", ()))]
    for key in modules:
        name = key.removeprefix("base_model.model.")
        assert any(name == target or name.endswith(f".{target}") for target in targets)
        update = adapted(case.kind)[name][1] * written[f"{key}.lora_B.weight"] @ written[f"{key}.lora_A.weight"]
        assert close(base_model[f"{name}.weight"] + update, wanted.merged[f"{name}.weight"], TOLERANCE)
    changed = {name for name, value in wanted.merged.items() if not torch.equal(value, wanted.base[name])}
    assert changed == {f"{key.removeprefix('base_model.model.')}.weight" for key in modules}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3moe", "deepseek"])
def test_the_peft_library_computes_the_same_with_these_adapters(kind: str) -> None:
    """Log-probs and gradients; what transformers or PEFT have as no linear layer by `target_parameters`."""
    peft = pytest.importorskip("peft")
    wanted, whole, lora = expected(kind), adapters_of(kind), settings(kind)
    by_parameter = [name for name in adapted(kind) if re.search(r"mlp\.(.+\.)?(gate|(gate|up|down)_proj)$", name)]
    modules = [name for name in adapted(kind) if name not in by_parameter]
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=modules,
        target_parameters=[f"{name}.weight" for name in by_parameter],
        rank_pattern={r"shared_experts\.down_proj\.weight": 5, **lora.rank_pattern},
        alpha_pattern=lora.alpha_pattern, use_rslora=lora.rslora,
    )  # fmt: skip
    model = peft.get_peft_model(copy.deepcopy(hf_model(kind)), config).eval()
    found = {f"{module}.{which}": getattr(model.base_model.model.get_submodule(module), name)["default"].weight
             for module in adapted(kind) for which, name in (("lora_a", "lora_A"), ("lora_b", "lora_B"))}  # fmt: skip
    for name, parameter in found.items():
        assert parameter.shape == whole[name].shape
        parameter.data.copy_(whole[name])
    logprobs = reference_logprobs(model, {}, make_batch())
    for key, columns in logprobs.items():
        assert close(columns[0].detach(), wanted.logprobs[key], 1e-5), key
        token_loss(*columns, torch.tensor(advantage(*key)), torch.tensor(WEIGHT)).backward(retain_graph=True)
    assert wanted.grads.keys() == found.keys()
    for name, value in wanted.grads.items():
        assert close(found[name].grad, value, TOLERANCE), name


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "dtensor") for kind in ("qwen2", "deepseek", "qwen3moe", "qwen3moe-experts", "deepseek-experts",
                                      "gpt-oss-experts", "llama-whole", "llama-tied-whole")),
     ("qwen3moe-experts", "megatron"), ("deepseek-experts", "megatron")],
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.guard
def test_peft_computes_the_merged_weights_log_probs_with_exported_adapters(
    pools: Pools, published: Published, tmp_path: Path, kind: str, backend: Literal["dtensor", "megatron"]
) -> None:
    from vllm.lora.peft_helper import PEFTHelper

    pytest.importorskip("peft")
    case, run, base = replace(of_modules(kind, dp=2), backend=backend), tmp_path / "run", published(kind)
    model = model_of(case, published)
    pools(2).run(run_saved, case, model, make_batch(), policy_of(run, base, settings(case.kind)))
    assert megatron_to_hf(run, tmp_path / "merged").verified
    assert megatron_to_peft(run, tmp_path / "adapters").verified
    tokens = tuple(token % hf_model(kind).config.vocab_size for token in TOKENS)
    wanted = logprobs(base_model(tmp_path / "merged"), tokens)
    assert not close(logprobs(base_model(base), tokens), wanted, 0.01)
    assert close(logprobs(with_adapter(base, tmp_path / "adapters"), tokens), wanted, 1e-5)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    engine = PEFTHelper.from_dict(config)
    for module, (rank, scale) in adapted(case.kind).items():
        named = module.replace(".experts.gate_up_proj", ".experts.base_layer").replace(".experts.down_proj", ".experts")
        assert engine.get_rank_and_scaling(named) == (rank, pytest.approx(scale)), module


@pytest.mark.slow
@pytest.mark.guard
def test_an_engine_computes_the_merged_weights_log_probs_with_exported_adapters(
    pools: Pools, published: Published, tmp_path: Path
) -> None:
    """vLLM's LoRA slots read the directory that `--adapter-only` writes, of a run on either backend."""
    base, runs = published("qwen3"), [tmp_path / "dtensor", tmp_path / "megatron"]
    for run in runs:
        case = replace(of_modules("qwen3", dp=2), backend=run.name)  # type: ignore[arg-type]
        policy = policy_of(run, base, settings(case.kind))
        pools(2).run(run_saved, case, model_of(case, published), make_batch(), policy)
        assert megatron_to_hf(run, run / "merged").verified
        assert megatron_to_peft(run, run / "adapters").verified
    tokens = tuple(token % hf_model("qwen3").config.vocab_size for token in TOKENS)
    for run, found in zip(runs, engine_logprobs(base, [run / "adapters" for run in runs], tokens), strict=True):
        wanted = logprobs(base_model(run / "merged"), tokens)
        assert not close(logprobs(base_model(base), tokens), wanted, 0.01)
        assert float((found - wanted).abs().max()) < 1e-5
