"""Adapters train as the plain model of weights W + alpha / rank B A does, on both backends and under any layout, and
refits read those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlctl.backends.clients import only_result
from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.conversion.peft_adapters import megatron_to_peft
from rlctl.checkpoints.inspection import inspect
from rlctl.checkpoints.megatron.megatron_directory import find
from rlctl.checkpoints.megatron.megatron_model import open_megatron_model
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import InputError
from rlctl.preparation.open_model import find_model
from support.lora_cases import LORA, expected, megatron_adapters, merge, policy_of, run_adapters, run_saved
from support.parallel_cases import Case, assemble, model_of, of_modules
from support.pool import Pools, Published, slowly
from support.reference_policy import (
    Optim,
    close,
    facts,
    hf_model,
    make_batch,
    megatron_weights,
    reference_logprobs,
    reference_weights,
)

CASES = {
    "one": Case(),
    "recompute": Case(recompute="full"),
    "tp2-sp": Case(parallel=ParallelSpec(tp=2)),
    "tp2": Case(parallel=ParallelSpec(tp=2, sequence_parallel=False)),
    "pp2": Case(parallel=ParallelSpec(pp=2), recompute="full"),
    "dp2": Case(parallel=ParallelSpec(dp=2)),
    "cp2": Case(parallel=ParallelSpec(cp=2)),
    "moe-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "mla-tp2": Case("deepseek", ParallelSpec(tp=2)),
    "gemma-tp2": Case("gemma3", ParallelSpec(tp=2)),
}
QUICK = frozenset(CASES) - {"one", "tp2", "pp2", "dp2"}
CASES |= {
    "vpp2": Case(parallel=ParallelSpec(pp=2, vpp=2), packing=False),
    "moe-tp2": Case("qwen3moe", ParallelSpec(tp=2)),
    "moe-tp2-etp1": Case("qwen3moe", ParallelSpec(tp=2, ep=2, etp=1)),
    "mla-one": Case("deepseek"),
    "mla-ep2": Case("deepseek", ParallelSpec(dp=2, ep=2)),
    "mla-pp2": Case("deepseek", ParallelSpec(pp=2), recompute="full"),
    "mla-cp2": Case("deepseek", ParallelSpec(cp=2)),
    "gemma-one": Case("gemma3"),
    "gemma-pp2": Case("gemma3", ParallelSpec(pp=2)),
}
SAVED = {name: CASES[name] for name in ("recompute", "tp2-sp", "vpp2", "moe-ep2", "mla-tp2", "gemma-tp2")}
"""The second step comes after a save, and a load under this layout."""


CASES |= {
    "fsdp-one": of_modules("llama", "full"),
    "fsdp-dp2": of_modules("llama-tied", dp=2),
    "fsdp-replicate2": of_modules("qwen2", dp=2, replicate=2),
    "fsdp-tp2": of_modules("qwen2", "full", tp=2),
    "fsdp-cp2": of_modules("qwen3", "selective", cp=2),
    "fsdp-moe-dp2": of_modules("qwen3moe", dp=2),
    "fsdp-mla-ep2": of_modules("deepseek", dp=2, ep=2),
    "fsdp-tp2-dp2": of_modules("llama-tied", "selective", tp=2, dp=2),
    "fsdp-tp4-of-2-key-heads": of_modules("qwen2", tp=4),
    "fsdp-tp2-cp2": of_modules("qwen3", tp=2, cp=2),
    "fsdp-replicate2-tp2": of_modules("llama", tp=2, dp=2, replicate=2),
    "fsdp-mla-ep2-shard2": of_modules("deepseek", dp=4, ep=2),
    "fsdp-moe-tp2": of_modules("qwen3moe", tp=2),
    "fsdp-mla-tp2-ep2": of_modules("deepseek", "full", tp=2, dp=2, ep=2),
}
QUICK |= {"fsdp-dp2", "fsdp-tp2", "fsdp-mla-ep2"}
SAVED |= {
    "fsdp-dp2": of_modules("llama-tied", tp=2),
    "fsdp-tp2": of_modules("qwen2", dp=2),
    "fsdp-mla-ep2": of_modules("deepseek", cp=2),
    "fsdp-tp2-dp2": of_modules("llama-tied", dp=4),
    "fsdp-moe-tp2": of_modules("qwen3moe", dp=2, ep=2),
}


@pytest.mark.parametrize("name", slowly(CASES.keys(), *QUICK))
def test_adapters_train_as_the_merged_model_does(pools: Pools, published: Published, name: str, tmp_path: Path) -> None:
    case, saved, wanted = CASES[name], None, expected(CASES[name].kind)
    if name in SAVED:
        saved = tmp_path / "saved"
        saved.mkdir()
    arguments = case, SAVED.get(name, case), model_of(case, published), make_batch(), wanted.merged, saved
    ranks = pools(case.parallel.world_size).run(run_adapters, *arguments)
    for column, theirs in (("logprobs", wanted.logprobs), ("reference", wanted.base_logprobs)):
        found = {key: value for rank in ranks for key, value in rank[column].items()}
        assert found.keys() == theirs.keys()
        assert all(close(found[key], value, 1e-5) for key, value in theirs.items()), column
    assert max(rank["differs"] for rank in ranks) <= 1e-6
    results = [only_result([rank["results"][step] for rank in ranks]) for step in range(2)]
    tolerance = 5e-6 if case.kind == "gemma3" else 1e-6  # 1e-7 of its weights move its gradients by 2e-5 of the largest
    for result, loss, norm in zip(results, wanted.losses, wanted.norms, strict=True):
        assert abs(result.loss - loss) <= 1e-6 * max(1, abs(loss))
        assert abs(result.grad_norm - norm) <= tolerance * max(1, norm)
    grads, lora, trained = wanted.grads, wanted.lora, merge(wanted.base, wanted.lora)
    if case.backend == "megatron":
        grads, lora = (megatron_adapters(case.kind, own) for own in (grads, lora))
        trained, merged = (megatron_weights(case.kind, own) for own in (trained, wanted.merged))
        refit, _ = assemble([rank["merged"] for rank in ranks])
        assert all(close(refit[key], value, 1e-6) for key, value in merged.items())
    found, _ = assemble([rank["grads"] for rank in ranks])
    unclip = max(1.0, (results[0].grad_norm + 1e-6) / Optim().clip)  # clipping scales them in place
    assert found.keys() <= grads.keys()  # a shared A of transformers' modules once
    assert {key for key in grads if case.backend == "megatron" or key.endswith("lora_b")} <= found.keys()
    for key, value in found.items():
        assert close(value * unclip, grads[key], tolerance), (key, (value * unclip - grads[key]).abs().max())
    params, spread = assemble([rank["params"] for rank in ranks])
    assert spread == 0
    for key, value in params.items():
        assert close(value, (trained | lora)[key], 1e-6), key
    assert all(freed > 0 and left == 0 for freed, left in (rank["asleep"] for rank in ranks))


def saved_run(pools: Pools, case: Case, path: Path) -> tuple[Path, dict[str, Tensor], dict]:
    """A run with a checkpoint of adapters, the merged weights by Megatron's names, and the policy's log-probs."""
    hf_model(case.kind).save_pretrained(path / "base")
    arguments = case, reference_weights(case.kind), make_batch(), policy_of(path / "run", path / "base")
    ranks = pools(case.parallel.world_size).run(run_saved, *arguments)
    merged = megatron_weights(case.kind, expected(case.kind).merged)
    return path / "run", merged, {key: value for rank in ranks for key, value in rank.items()}


@pytest.mark.parametrize("name", ["moe-tp2", "mla-tp2"])
def test_exported_adapters_are_in_the_weights_that_transformers_reads(pools: Pools, name: str, tmp_path: Path) -> None:
    import transformers

    case = CASES[name]
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


def test_a_run_that_trained_adapters_is_a_model_to_start_from(pools: Pools, tmp_path: Path) -> None:
    """Merged once; what is planned before, and what takes it again, knows it as the same model."""
    from safetensors.torch import load_file

    run, _, _ = saved_run(pools, CASES["one"], tmp_path)
    megatron_to_hf(run, tmp_path / "merged")
    told: list[str] = []
    planned, made, again = (find_model(str(run), copies=copies, tell=told.append) for copies in (False, True, True))
    assert planned.note != made.note == again.note
    assert planned.fingerprint() == made.fingerprint() == again.fingerprint()
    assert [line for line in told if line.startswith(f"merging the adapters of {run}")] == told[:1]
    assert made.megatron is None
    held, wanted = (load_file(place / "model.safetensors") for place in (made.directory, tmp_path / "merged"))
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("name", ["one", "mla-tp2"])
def test_adapters_are_written_as_peft_names_them(pools: Pools, name: str, tmp_path: Path) -> None:
    """The base and what was written add up to the merged weights."""
    from safetensors.torch import load_file

    case = CASES[name]
    run, merged, _ = saved_run(pools, case, tmp_path)
    report = megatron_to_peft(run, tmp_path / "adapters")
    assert report.verified
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", LORA.rank, LORA.alpha)
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    model = hf_model(case.kind)
    for key in [key for key in written if key.endswith("lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        named = [*config["target_modules"], *(n.removesuffix(".weight") for n in config.get("target_parameters", ()))]
        assert any(module == target or module.endswith(f".{target}") for target in named)
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
