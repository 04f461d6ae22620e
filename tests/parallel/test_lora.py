"""Adapters train as the plain model of weights W + alpha / rank B A does, on both backends and under any layout, and
refits read those."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.backends.clients import only_result
from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.conversion.peft_adapters import megatron_to_peft
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.inspection import inspect
from rlctl.checkpoints.megatron.megatron_directory import find
from rlctl.checkpoints.megatron.megatron_model import open_megatron_model
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import InputError
from rlctl.methods.configuration import resolve
from rlctl.models.families import weights_of
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs.adapters import lora_choice
from rlctl.planner.costs.memory import waiting_adapter_bytes
from rlctl.preparation.open_model import find_model
from rlctl.preparation.start_adapter import with_adapter
from rlctl.settings.training import LoraConfig
from rlctl.transport.rounds import whole_tensors
from rlctl.weights.adapters import adapter_table
from rlctl.weights.plan_execution import execute
from rlctl.weights.transfer_plan import receive_plan
from support.lora_cases import (
    LORA,
    adapted,
    adapters_of,
    expected,
    megatron_adapters,
    merge,
    policy_of,
    run_adapters,
    run_saved,
    run_sent,
    run_started,
    settings,
    train_in_turns,
    train_with_dropout,
)
from support.parallel_cases import Case, assemble, model_of, of_modules
from support.peft_models import with_adapter as with_adapter_of_peft
from support.peft_models import write_adapter
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
    "experts-one": Case("qwen3moe-experts"),
    "experts-ep2": Case("qwen3moe-experts", ParallelSpec(dp=2, ep=2)),
    "experts-tp2": Case("deepseek-experts", ParallelSpec(tp=2, etp=1)),
    "experts-tp2-ep2": Case("qwen3moe-experts", ParallelSpec(tp=2, etp=1, dp=2, ep=2), recompute="full"),
    "mla-tp2": Case("deepseek", ParallelSpec(tp=2)),
    "gemma-tp2": Case("gemma3", ParallelSpec(tp=2)),
    "some-pp2": Case("qwen2-some", ParallelSpec(pp=2)),  # the first stage has no adapters
}
QUICK = frozenset({"some-pp2", "tp2-sp", "cp2", "moe-ep2", "mla-tp2", "gemma-tp2", "experts-ep2"})
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
SAVED |= {
    "some-pp2": Case("qwen2-some", ParallelSpec(tp=2)),
    "experts-ep2": Case("qwen3moe-experts", ParallelSpec(tp=2, etp=1)),
    "experts-tp2-ep2": Case("qwen3moe-experts", ParallelSpec(dp=4)),
}
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
    "fsdp-whole-dp2": of_modules("llama-whole", dp=2),
    "fsdp-whole-tp2": of_modules("llama-whole", "full", tp=2),
    "fsdp-whole-tied-tp2": of_modules("llama-tied-whole", tp=2),
    "fsdp-experts-dp2": of_modules("qwen3moe-experts", dp=2),
    "fsdp-experts-mla": of_modules("deepseek-experts", "full"),
    "fsdp-stacks-dp2": of_modules("gpt-oss-experts", dp=2),
    "fsdp-stacks-ep2": of_modules("gpt-oss-experts", dp=2, ep=2),
    "fsdp-experts-ep2": of_modules("qwen3moe-experts", dp=2, ep=2),
    "fsdp-experts-tp2": of_modules("qwen3moe-experts", tp=2),
    "fsdp-experts-tp2-ep2": of_modules("deepseek-experts", tp=2, dp=2, ep=2),
}
QUICK |= {"fsdp-whole-tied-tp2", "fsdp-experts-ep2", "fsdp-tp2", "fsdp-mla-ep2"}
SAVED |= {
    "fsdp-dp2": of_modules("llama-tied", tp=2),
    "fsdp-tp2": of_modules("qwen2", dp=2),
    "fsdp-mla-ep2": of_modules("deepseek", cp=2),
    "fsdp-tp2-dp2": of_modules("llama-tied", dp=4),
    "fsdp-moe-tp2": of_modules("qwen3moe", dp=2, ep=2),
    "fsdp-whole-tied-tp2": of_modules("llama-tied-whole", dp=2),
    "fsdp-stacks-ep2": of_modules("gpt-oss-experts", dp=2),
    "fsdp-experts-ep2": of_modules("qwen3moe-experts", tp=2),
    "fsdp-experts-tp2-ep2": of_modules("deepseek-experts", dp=4),
}
ADDS = LoraConfig(refit="adapters")
"""Layers add adapters to the products of base weights."""
CASES |= {
    f"adds-{name}": replace(CASES[name], lora=ADDS)
    for name in ("one", "recompute", "tp2-sp", "tp2", "vpp2", "cp2", "gemma-tp2",
                 "fsdp-one", "fsdp-dp2", "fsdp-tp2", "fsdp-tp2-cp2", "fsdp-tp4-of-2-key-heads")
}  # fmt: skip
QUICK |= {"adds-tp2-sp", "adds-gemma-tp2", "adds-fsdp-tp2"}
KEPT = {"adds-tp2-sp", "fsdp-experts-ep2"}
SAVED |= {f"adds-{name}": replace(SAVED[name], lora=ADDS) for name in ("recompute", "tp2-sp", "fsdp-tp2")}


@pytest.mark.parametrize("name", slowly(CASES.keys(), *KEPT, guards=QUICK - KEPT))
def test_adapters_train_as_the_merged_model_does(pools: Pools, published: Published, name: str, tmp_path: Path) -> None:
    case, saved, wanted = CASES[name], None, expected(CASES[name].kind)
    if name in SAVED:
        saved = tmp_path / "saved"
        saved.mkdir()
    held = wanted.base if case.lora.adds else wanted.merged
    arguments = case, SAVED.get(name, case), model_of(case, published), make_batch(), held, saved
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
    grads, lora = wanted.grads, wanted.lora
    trained = wanted.base if case.lora.adds else merge(case.kind, wanted.base, wanted.lora)
    if case.backend == "megatron":
        grads, lora = (megatron_adapters(case.kind, own) for own in (grads, lora))
        trained, held = (megatron_weights(case.kind, own) for own in (trained, held))
        refit, _ = assemble([rank["merged"] for rank in ranks])
        assert all(close(refit[key], value, 1e-6) for key, value in held.items())
    found = _by_stack(assemble([rank["grads"] for rank in ranks])[0])
    unclip = max(1.0, (results[0].grad_norm + 1e-6) / Optim().clip)  # clipping scales them in place
    assert found.keys() == grads.keys()
    for key, value in found.items():
        assert close(value * unclip, grads[key], tolerance), (key, (value * unclip - grads[key]).abs().max())
    params, spread = assemble([rank["params"] for rank in ranks])
    assert spread == 0
    for key, value in _by_stack(params).items():
        assert close(value, (trained | lora)[key], 1e-6), key
    assert all(freed > 0 and left == 0 for freed, left in (rank["asleep"] for rank in ranks))


def _by_stack(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.replace("proj_lora", "proj.lora"): value for key, value in found.items()}


@pytest.mark.parametrize("name", slowly(("moe-tp2", "gemma-tp2", "fsdp-tp2", "fsdp-moe-dp2"), "gemma-tp2", "fsdp-tp2"))
def test_adapters_alone_are_sent_whole(pools: Pools, published: Published, name: str) -> None:
    """Parts of all ranks are A and B of each published matrix, with its rank and scale."""
    case, whole = CASES[name], adapters_of(CASES[name].kind)
    ranks = pools(case.parallel.world_size).run(run_sent, case, model_of(case, published))
    rows, world, _ = ranks[0]
    numbers = {row.tensor.removesuffix(".weight"): (row.rank, row.scale) for row in rows}
    assert numbers == {name: pytest.approx(pair) for name, pair in adapted(case.kind).items()}
    table = adapter_table(rows, weights_of(facts(case.kind)).tensors, "float32")
    arrived = {name: torch.full(shape, float("nan")) for name, _, shape in table}
    for copy in receive_plan(world, whole_tensors(table)).prove().copies:
        execute(copy, ranks[copy.source_rank][2][copy.source_param], arrived[copy.destination_param])
    assert arrived.keys() == {name.replace(".lora", ".weight.lora") for name in whole}
    assert all(torch.equal(arrived[name.replace(".lora", ".weight.lora")], value) for name, value in whole.items())


STARTS: dict[str, dict[str, Any]] = {
    "tp2-sp": {
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"],
        "rank_pattern": {"up_proj": 5},
        "dtype": torch.bfloat16,
    },
    "moe-ep2": {"target_modules": ["q_proj", "k_proj", "o_proj", "gate"], "use_rslora": True},
    "experts-ep2": {"target_modules": "all-linear", "alpha_pattern": {"down_proj": 3}},
    "mla-tp2": {"target_modules": r".*self_attn\..*_proj(_with_mqa)?", "alpha_pattern": {"o_proj": 3}},
    "fsdp-tp2": {"target_modules": "all-linear", "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"o_proj": 3}},
    "fsdp-moe-dp2": {"target_modules": ["gate", "k_proj"], "use_rslora": True},
    "fsdp-experts-ep2": {"target_modules": "all-linear", "alpha_pattern": {"down_proj": 3}},
    "fsdp-stacks-dp2": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
    "fsdp-whole-tp2": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "fsdp-whole-tied-tp2": {
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "fsdp-experts-mla": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "use_rslora": True},
}


@pytest.mark.parametrize(
    "name", slowly(STARTS.keys(), "tp2-sp", "mla-tp2", "fsdp-experts-ep2", "fsdp-stacks-dp2", "fsdp-whole-tied-tp2")
)
def test_a_run_starts_from_an_adapter_of_peft(pools: Pools, published: Published, name: str, tmp_path: Path) -> None:
    case, base = CASES[name], tmp_path / "base"
    hf_model(case.kind).save_pretrained(base)
    adapter = write_adapter(tmp_path / "adapter", base, r=4, lora_alpha=6, **STARTS[name])
    resolved = resolve(sets=["run.method=sft", f"training.lora.adapter={adapter}"])
    case = replace(case, lora=with_adapter(resolved, facts_in(base), print).config.training.lora)
    arguments = case, model_of(case, published), make_batch(), adapter
    ranks = pools(case.parallel.world_size).run(run_started, *arguments)
    theirs = reference_logprobs(with_adapter_of_peft(base, adapter), {}, make_batch())
    plain = reference_logprobs(hf_model(case.kind), {}, make_batch())
    found = {key: value for rank in ranks for key, value in rank.items()}
    assert found.keys() == theirs.keys()
    for key, columns in theirs.items():
        assert close(found[key], columns[0].detach(), 1e-5), key
    assert not all(close(plain[key][0].detach(), columns[0].detach(), 0.01) for key, columns in theirs.items())


DROPPED = {name: CASES[name] for name in ("tp2-sp", "pp2", "fsdp-tp2", "fsdp-dp2")}


@pytest.mark.parametrize("name", slowly(DROPPED.keys(), guards=("tp2-sp", "fsdp-tp2")))
def test_dropout_is_of_training_passes_and_repeats_after_a_resume(
    pools: Pools, published: Published, name: str, tmp_path: Path
) -> None:
    """Steps after a load have the bits of those before; recomputed passes have the masks of the first ones."""
    case, model = DROPPED[name], model_of(DROPPED[name], published)
    found = {}
    recomputed = [] if case.parallel.pp > 1 else [(0.3, "full")]
    for rate, recompute in ((0.0, "none"), (0.3, "none"), *recomputed):
        other = replace(case, lora=LoraConfig(rank=3, dropout=rate), recompute=recompute)
        saved = tmp_path / f"{rate}-{recompute}"
        saved.mkdir()
        ranks = pools(2).run(train_with_dropout, other, model, make_batch(), saved)
        assert all(again == results[1:] for results, again, _ in ranks)
        found[rate, recompute] = [only_result([results[step] for results, *_ in ranks]) for step in range(3)]
        logprobs = {key: value for *_, values in ranks for key, value in values.items()}
        theirs = reference_logprobs(hf_model(case.kind), {}, make_batch())
        assert all(close(logprobs[key], columns[0].detach(), 1e-5) for key, columns in theirs.items())
    plain, dropped = (found[rate, "none"] for rate in (0.0, 0.3))
    assert plain[0].loss == dropped[0].loss  # B is 0
    assert dropped[0].grad_norm != pytest.approx(plain[0].grad_norm, rel=1e-3)
    for one, other in zip(dropped, found.get((0.3, "full"), dropped), strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


TURNS = {
    "dp2": replace(CASES["dp2"], dtype="bfloat16"),
    "moe-ep2": CASES["moe-ep2"],
    "fsdp-dp2": replace(CASES["fsdp-dp2"], dtype="bfloat16"),
    "fsdp-tp2": replace(CASES["fsdp-tp2"], optimizer_offload=True),
}


@pytest.mark.parametrize("name", slowly(TURNS.keys(), guards=("moe-ep2", "fsdp-tp2")))
def test_adapters_in_turns_over_one_base_equal_separate_runs_bit_for_bit(
    pools: Pools, published: Published, name: str
) -> None:
    case, rates = TURNS[name], [1e-2, 3e-3]
    model = model_of(case, published)
    together = pools(2).run(train_in_turns, case, model, make_batch(), rates)
    choice = TrainingChoice(
        case.parallel, precision="bf16" if case.dtype == "bfloat16" else "float32",
        sharding="full" if case.backend == "dtensor" else "optimizer",
        adapters=lora_choice(facts(case.kind), settings(case.kind)),
    )  # fmt: skip
    held = [ours[0]["waiting"] for ours in together]  # tiny parts of two ranks are not equal
    assert sum(held) / 2 == pytest.approx(waiting_adapter_bytes(facts(case.kind), choice), rel=1e-3), held
    for number, rate in enumerate(rates):
        alone = pools(2).run(train_in_turns, case, model, make_batch(), [rate])
        for ours, [theirs] in zip(together, alone, strict=True):
            assert ours[number]["results"] == theirs["results"]
            for (key, value, *_), (other, expected_value, *_) in zip(
                ours[number]["params"], theirs["params"], strict=True
            ):
                assert key == other
                assert torch.equal(value, expected_value), key
            assert ours[number]["weights"].keys() == theirs["weights"].keys()
            assert all(torch.equal(ours[number]["weights"][key], value) for key, value in theirs["weights"].items())


def saved_run(pools: Pools, case: Case, path: Path) -> tuple[Path, dict[str, Tensor], dict]:
    """A run with a checkpoint of adapters, the merged weights by Megatron's names, and the policy's log-probs."""
    hf_model(case.kind).save_pretrained(path / "base")
    arguments = (
        case,
        reference_weights(case.kind),
        make_batch(),
        policy_of(path / "run", path / "base", settings(case.kind)),
    )
    ranks = pools(case.parallel.world_size).run(run_saved, *arguments)
    merged = megatron_weights(case.kind, expected(case.kind).merged)
    return path / "run", merged, {key: value for rank in ranks for key, value in rank.items()}


@pytest.mark.parametrize("name", ["moe-tp2", "mla-tp2", pytest.param("experts-ep2", marks=pytest.mark.slow)])
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
        update = adapted(case.kind)[module][1] * written[key.replace("lora_A", "lora_B")] @ written[key]
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
    directory = find(run)
    assert directory is not None
    with pytest.raises(InputError, match="holds adapters and not the weights"):
        open_megatron_model(directory, facts("llama"))
    (run / "manifest.json").unlink()
    with pytest.raises(InputError, match="which names the model, cannot be read"):
        megatron_to_hf(run, tmp_path / "again", config_from=moved)
