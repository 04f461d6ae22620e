"""`rlctl plan` as a user runs it: exit codes, pins, comparison, JSON."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from support.commands import rlctl

NODE = ["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--gpus-per-node", "8", "--max-length", "4096"]


def test_a_plan_is_printed_with_memory_seconds_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, *NODE)
    assert code == 0
    for word in ("memory, GiB a GPU", "seconds a step", "why", "not chosen", "training.dp="):
        assert word in out


def test_json_is_one_object_with_pins_kept(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, *NODE, "--json", "--set", "training.tp=4", "--set", "generation.tp=2", "--top", "2")
    assert code == 0
    data = json.loads(out)
    assert (data["training"]["tp"], data["generation"]["tp"]) == (4, 2)
    assert len(data["alternatives"]) <= 2


def test_float8_training_is_planned_also_where_its_engine_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)  # no driver of GPUs here either
    more = ("--set", "megatron.fp8=hybrid", "--set", "megatron.fp8_recipe=blockwise")
    code, out, _ = rlctl(capsys, *NODE, *more, "--json", "--explain")
    data = json.loads(out)
    assert (code, data["runnable"], data["training"]["precision"]) == (0, True, "fp8")
    assert data["arguments"]["megatron"]["transformer_impl"] == "transformer_engine"
    assert any("copies of the matrices in float8" in line for line in data["explain"])
    assert "precision=fp8" in rlctl(capsys, *NODE, *more)[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--gpus-per-node", "1", "--set", "training.optimizer_offload=false"], 4, "No plan fits"),
        (["--gpu", "h10"], 2, "h100"),
        (["--model", "meta-llama/Llama-3.1-9B"], 2, "Llama-3.1-8B"),
        (["--set", "training.tpp=3"], 2, "training.tp"),
        (["--set", "training.etp=2"], 2, "needs a model with experts"),
        (["--set", "generation.ep=8"], 2, "needs a model with experts"),
        (
            ["--set", "generation.max_batched_tokens=2"],
            2,
            "The nearest value that works is generation.max_batched_tokens=",
        ),
        (["--set", "generation.kv_cache_bytes=1000"], 4, "1,000 bytes hold 0 tokens"),
        (["--set", "megatron.fp8=e5m2"], 2, "e4m3 | hybrid"),
        (["--set", "megatron.fp8_multi_head_attention=true"], 2, "attention is rlctl's own"),
    ],
)
def test_what_cannot_be_planned_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given, out, err = rlctl(capsys, *NODE, *arguments)
    assert given == code
    assert said in err
    assert not out


def test_two_plans_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, *NODE, "--compare", "training.tp=1", "training.tp=4,generation.tp=4")
    assert code == 0
    assert any(line.startswith("* training.tp") for line in out.splitlines())
    assert "B parameters" not in out


def test_any_number_of_plans_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    variants = [f"generation.tp={size}" for size in (1, 2, 4)]
    code, out, _ = rlctl(capsys, *NODE, "--compare", *variants, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["names"] == variants
    assert [plan["generation"]["tp"] for plan in found["plans"]] == [1, 2, 4]
    for replaced in (["generation.tp=4", "--compare", *variants[:2]], ["--compare", *variants[:1]]):
        code, _, err = rlctl(capsys, *NODE, *replaced)
        assert code == 2
        assert "--compare generation.tp=1" in err


@pytest.mark.long
def test_a_table_of_machines_counts_gpus_seconds_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """GPU-hours are GPUs times seconds; a machine that is too small has the reason in place of a layout."""
    asked = ["plan", "--preset", "1node", "--gpu", "h100", "--model", "Qwen/Qwen2.5-14B", "--table"]
    code, out, _ = rlctl(capsys, *asked, "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [row["gpus"] for row in rows] == [1, 2, 4, 8, 16, 32]
    assert not rows[0]["fits"]
    assert "fit" in rows[0]["why"]
    able = [row for row in rows if row["fits"]]
    for row in able:
        low, high = row["seconds_range"]
        assert low < row["seconds"] < high
        assert row["gpu_hours"] == pytest.approx(row["gpus"] * row["seconds"] / 3600, abs=0.002)
        assert row["memory_gib"] <= 80
    assert [row["seconds"] for row in able] == sorted((row["seconds"] for row in able), reverse=True)
    for more in (["--explain"], ["--top", "2"], ["--gpu", "cpu"]):
        code, _, err = rlctl(capsys, *asked, *more)
        assert code == 2
        assert "--table" in err


@pytest.mark.slow
def test_a_table_of_machines_has_a_line_for_each_and_an_exit_code_where_none_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "--preset", "1node", "--gpu", "h100", "--model"]
    code, out, _ = rlctl(capsys, *asked, "Qwen/Qwen2.5-14B", "--table")
    assert (code, len(out.splitlines())) == (0, 1 + len([1, 2, 4, 8, 16, 32]))
    for none, code in (("deepseek-ai/DeepSeek-V3", 4), ("meta-llama/Llama-9", 2)):  # no machine fits, or no such model
        assert rlctl(capsys, *asked, none, "--table", "--set", "generation.tp=1")[0] == code


def test_a_plan_names_the_size_of_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """14 bytes a parameter: a bfloat16 weight, and three float32 numbers of the optimizer. Adapters alone are saved."""

    def saved(*more: str) -> dict[str, float]:
        code, out, _ = rlctl(capsys, *NODE, *more, "--json")
        assert code == 0
        return json.loads(out)["checkpoint"]

    assert saved()["gb"] == pytest.approx(14 * 8.03, rel=0.01)
    assert saved("--set", "training.tp=4", "--set", "training.pp=2")["gb"] == pytest.approx(14 * 8.03, rel=0.02)
    assert saved("--backend", "dtensor")["gb"] == pytest.approx(12 * 8.03, rel=0.01)
    assert saved("--set", "training.lora.rank=16")["gb"] < 2
    assert saved("--set", "run.checkpoint_every=0", "--set", "run.save_final=false") is None
    assert 0 < saved()["copy_s"] < saved()["write_s"] < 120


def test_the_arithmetic_of_two_plans(capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["--compare", "training.tp=1", "training.tp=4", "--explain"]
    code, out, _ = rlctl(capsys, *NODE, *sides)
    assert code == 0
    assert out.count("8.030B parameters") == 2
    assert "a rank (TP 1)" in " ".join(out.split())
    assert "a rank (TP 4)" in " ".join(out.split())
    code, out, _ = rlctl(capsys, *NODE, *sides, "--json")
    assert [any("8.030B" in line for line in lines) for lines in json.loads(out)["explain"]] == [True, True]


@pytest.mark.long
@pytest.mark.parametrize("preset", ["laptop", "1gpu", "1node", "2nodes", "8nodes", "long-context", "moe-large"])
def test_every_preset_has_a_plan_for_a_model_of_its_size(capsys: pytest.CaptureFixture[str], preset: str) -> None:
    models = {"1gpu": "Qwen/Qwen3-0.6B", "1node": "meta-llama/Llama-3.1-8B", "2nodes": "Qwen/Qwen3-32B"}
    models |= {"8nodes": "Qwen/Qwen2.5-72B", "long-context": "Qwen/Qwen3-14B", "moe-large": "Qwen/Qwen3-235B-A22B"}
    model = ["--model", models[preset], "--gpu", "h100"] if preset in models else []
    code, out, err = rlctl(capsys, "plan", "--preset", preset, *model, "--json")
    assert code == 0, err
    assert json.loads(out)["fits"]


def test_a_nemo_rl_recipe_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[1] / "recipes" / "nemo_rl" / "llama_megatron.yaml"
    code, out, err = rlctl(capsys, "plan", "--config", str(recipe), "--gpu", "h100", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert (data["training"]["tp"], data["training"]["dp"], data["training"]["recompute"]) == (2, 4, "full")


def test_a_recipe_that_cannot_run_says_so_in_its_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base, recipe = Path(__file__).parents[1] / "recipes" / "nemo_rl" / "base.yaml", tmp_path / "other.yaml"
    recipe.write_text(f"defaults: {base}\npolicy: {{generation: {{backend: llamacpp}}}}\n")
    code, out, err = rlctl(capsys, "plan", "--config", str(recipe), "--gpu", "h100", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert not data["runnable"]
    assert data["training"]["backend"] == "dtensor"
    assert any("policy.generation.backend" in why for why in data["not_runnable_because"])


def test_a_run_that_is_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = rlctl(capsys, "plan", "--run", str(tmp_path))
    assert code == 2
    assert "manifest.json" in err


def test_the_engines_arguments_come_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["--set", "training.tp=4", "--set", "megatron.bias_dropout_fusion=false", "--set", "vllm.enforce_eager=true"]
    code, out, _ = rlctl(capsys, *NODE, *pins, "--json")
    assert code == 0
    data = json.loads(out)
    given = data["arguments"]
    assert given["megatron"]["tensor_model_parallel_size"] == data["training"]["tp"] == 4
    assert given["megatron"]["num_layers"] == 32
    assert given["vllm"]["tensor_parallel_size"] == data["generation"]["tp"]
    assert given["vllm"]["max_num_batched_tokens"] == data["generation"]["max_batched_tokens"]
    assert given["optimizer"]["adam_beta2"] == 0.999
    assert given["megatron"]["bias_dropout_fusion"] is False
    assert given["vllm"]["enforce_eager"] is True
    assert [line.partition(" ")[0] for line in data["pinned"]] == ["megatron.bias_dropout_fusion", "vllm.enforce_eager"]
    assert "without it: True" in data["pinned"][0]
    code, out, _ = rlctl(capsys, *NODE, *pins, "--explain")
    assert "TransformerConfig:" in out
    assert "pinned: vllm.enforce_eager = True (--set); without it: False" in out


def test_a_pin_that_is_what_would_be_anyway_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, *NODE, "--set", "vllm.enforce_eager=false", "--json")
    assert code == 0
    assert json.loads(out)["pinned"] == []


def test_a_length_that_the_model_does_not_take_is_planned_but_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, *NODE[:-1], "200000", "--json")
    assert code == 0
    data = json.loads(out)
    assert not data["runnable"]
    assert any("model.max_length = 200000" in why for why in data["not_runnable_because"])


def test_a_kv_cache_can_be_pinned_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, *NODE, "--set", "generation.kv_cache_bytes=20000000000", "--json")
    assert code == 0
    assert json.loads(out)["arguments"]["vllm"]["kv_cache_memory_bytes"] == 20000000000
    code, _, err = rlctl(capsys, *NODE, "--set", "generation.kv_cache_bytes=200000000000")
    assert code == 4
    assert "generation.kv_cache_bytes" in err


def test_a_field_that_makes_gradients_wrong_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = rlctl(capsys, *NODE, "--set", "megatron.attention_dropout=0.1")
    assert code == 2
    assert "megatron.attention_dropout = 0.1 is refused" in err


CONTRACT: dict[str, object] = {
    "fits": bool, "runnable": bool, "not_runnable_because": list, "colocated": bool, "host_memory_gib": float,
    "tokens_per_s_per_gpu": float, "mfu": float, "reasons": list, "rejected": list,
    "training": {
        "backend": str, "tp": int, "pp": int, "vpp": int, "cp": int, "ep": int, "etp": int, "dp": int,
        "sequence_parallel": bool, "micro_batch_tokens": int, "recompute": str,
    },
    "generation": {"engines": int, "tp": int, "pp": int, "dp": int, "ep": int, "memory_fraction": float},
    "seconds": dict.fromkeys(
        (
            "generation", "reward", "waiting", "logprobs", "critic", "training", "refit", "validation", "checkpoint",
            "other", "total",
        ),
        float,
    ),
    "memory_gib": {phase: {"total": float} for phase in ("training", "logprobs", "refit", "generation")},
}  # fmt: skip


def check(found: object, expected: object, where: str) -> None:
    """`found` has the keys and the types that programs are promised."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        for key, value in expected.items():
            assert key in found, f"{where}.{key}"
            check(found[key], value, f"{where}.{key}")
    else:
        assert type(found) is expected, f"{where} = {found!r}"


@pytest.mark.parametrize(
    ("more", "runnable"),
    [([], True), (["--backend", "dtensor"], True), (["--split"], True), (["--model", "Qwen/Qwen3-30B-A3B"], True)],
)
def test_programs_find_every_promised_key(capsys: pytest.CaptureFixture[str], more: list[str], runnable: bool) -> None:
    code, out, _ = rlctl(capsys, *NODE, *more, "--json")
    assert code == 0
    data = json.loads(out)
    check(data, CONTRACT, "plan")
    assert data["fits"]
    assert (data["runnable"], not data["not_runnable_because"]) == (runnable, runnable)
    assert all(set(reason) == {"value", "rule"} for reason in data["reasons"])
    assert all(set(other) == {"plan", "why"} for other in data["rejected"])
    for memory in data["memory_gib"].values():
        assert sum(v for k, v in memory.items() if k != "total") == pytest.approx(memory["total"], abs=0.03)
    assert sum(v for k, v in data["seconds"].items() if k != "total") == pytest.approx(
        data["seconds"]["total"], abs=0.01
    )


def test_the_same_keys_are_there_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, *NODE, "--model", "deepseek-ai/DeepSeek-V3", "--json")
    assert code == 4
    data = json.loads(out)
    assert data["error"]["exit_code"] == 4
    assert data.keys() >= CONTRACT.keys()
    assert (data["fits"], data["runnable"], data["training"], data["generation"]) == (False, False, None, None)
    assert data["seconds"].keys() == CONTRACT["seconds"].keys()  # type: ignore[attr-defined]
    assert data["rejected"]
    assert "GiB" in data["rejected"][0]["why"]
    assert "smallest machine" in data["error"]["hint"]


def test_fsdp_is_planned_with_its_own_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rlctl(capsys, *NODE, "--backend", "dtensor", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["training"]["pp"] == 1
    assert data["runnable"]
    assert "megatron" not in data["arguments"]
    assert data["arguments"]["optimizer"]["fused"] is True
    _, out, _ = rlctl(capsys, *NODE, "--json", "--set", "training.tp=1", "--set", "training.pp=1")
    assert data["memory_gib"]["training"]["gradients"] < json.loads(out)["memory_gib"]["training"]["gradients"]
    _, out, _ = rlctl(capsys, *NODE, "--backend", "dtensor", "--json", "--set", "training.replicate=2")
    assert json.loads(out)["memory_gib"]["training"]["optimizer"] > data["memory_gib"]["training"]["optimizer"]


def test_fsdp_divides_experts_as_it_divides_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--set", "training.tp=4", "--set", "training.ep=2")
    model = ("plan", "--model", "Qwen/Qwen3-30B-A3B", "--gpu", "h100", "--gpus-per-node", "8", "--nodes", "2")
    code, out, _ = rlctl(capsys, *model, "--backend", "dtensor", "--json", *sizes)
    assert code == 0
    training = json.loads(out)["training"]
    assert (training["tp"], training["etp"], training["ep"]) == (4, 4, 2)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("training.pp=2", "FSDP2 has no pipeline stages"),
        ("training.tp=4 training.etp=1", "FSDP2 has experts divided as training.tp = 4 divides the rest"),
        ("training.tp=512", "do not split over 512 ranks"),
        ("training.replicate=16", "do not make 16 equal copies"),
        ("megatron.moe_router_fusion=true", "megatron.moe_router_fusion is refused"),
        ("ddp.overlap_grad_reduce=true", "ddp.overlap_grad_reduce is refused"),
    ],
)
def test_fsdp_refuses_by_key_and_names_the_other_backend(
    capsys: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    model = "Qwen/Qwen3-30B-A3B" if "moe" in setting or "tp" in setting else NODE[2]
    command = ["plan", "--model", model, "--gpu", "h100", "--gpus-per-node", "8", "--backend", "dtensor"]
    code, _, err = rlctl(capsys, *command, *(part for one in setting.split() for part in ("--set", one)))
    assert code == 2
    assert said in err
    if "is refused" in said:
        assert "--backend megatron" in err


def test_copies_of_sharded_weights_are_fsdps(capsys: pytest.CaptureFixture[str]) -> None:
    copies = ("--set", "training.replicate=2", "--json")
    code, _, err = rlctl(capsys, *NODE, "--backend", "megatron", *copies)
    assert code == 2
    assert "training.backend=dtensor" in err
    code, out, _ = rlctl(capsys, *NODE, *copies)
    assert code == 0
    assert json.loads(out)["training"]["backend"] == "dtensor"


def test_the_cheapest_change_is_one_that_runs_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["plan", "--model", "meta-llama/Llama-3.1-70B", "--gpu", "h100", "--gpus-per-node", "4"]
    code, _, err = rlctl(capsys, *one)
    assert code == 4
    assert "It fits with adapters instead of all weights (training.lora.rank=16)." in err
    code, out, _ = rlctl(capsys, *one, "--set", "training.lora.rank=16", "--json")
    assert code == 0
    assert json.loads(out)["runnable"]


@pytest.mark.slow
@pytest.mark.guard
def test_the_smallest_machine_is_the_first_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    node = ["plan", "--model", "Qwen/Qwen3-235B-A22B", "--gpu", "h100", "--gpus-per-node", "8"]
    code, _, err = rlctl(capsys, *node)
    assert code == 4
    nodes = int(err.rpartition("that fits is ")[2].split()[0])
    assert rlctl(capsys, *node, "--nodes", str(nodes))[0] == 0
    assert rlctl(capsys, *node, "--nodes", str(nodes - 1))[0] == 4


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("moe_router_dtype=fp32", "the model has no experts"),
        ("overlap_moe_expert_parallel_comm=true", "the model has no experts"),
        ("cache_mla_latents=true", "the model has no latent attention"),
        ("mamba_num_heads=4", "no model that rlctl trains"),
    ],
)
def test_a_field_for_another_kind_of_model_is_refused(capsys: pytest.CaptureFixture[str], field: str, why: str) -> None:
    code, _, err = rlctl(capsys, *NODE, "--set", f"megatron.{field}")
    assert code == 2
    assert f"megatron.{field.partition('=')[0]}" in err
    assert why in err


def test_a_field_for_experts_is_passed_to_a_model_with_experts(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--model", "Qwen/Qwen3-30B-A3B", "--set", "megatron.moe_router_dtype=fp64", "--json"]
    code, out, err = rlctl(capsys, *NODE, *more)
    assert code == 0, err
    assert json.loads(out)["arguments"]["megatron"]["moe_router_dtype"] == "fp64"


@pytest.mark.long
def test_nodes_that_no_layout_divides_are_told_of_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["plan", "--model", "deepseek-ai/DeepSeek-V3", "--gpu", "h100", "--gpus-per-node", "8", "--colocated"]
    many += ["--backend", "megatron"]  # the other backend has a plan
    many += ["--set", "run.checkpoint_every=0", "--set", "run.save_final=false"]  # 9 TB of host memory for a save
    code, _, err = rlctl(capsys, *many, "--nodes", "33")
    assert code == 4
    assert "It fits with --nodes 32" in err
    assert "Without generation.colocated=True a plan fits." in err
    assert rlctl(capsys, *many, "--nodes", "32")[0] == 0


def test_what_import_writes_is_planned_as_the_recipe_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Recipes of dense models carry fields of experts, which are refused in a file of rlctl's own."""
    recipe = Path(__file__).parents[1] / "recipes" / "nemo_rl" / "llama_megatron.yaml"
    code, out, _ = rlctl(capsys, "config", "import", str(recipe))
    assert code == 0
    assert "# megatron.moe_router_dtype" in out
    assert "has no effect: the model has no experts" in out
    mine = tmp_path / "mine.yaml"
    mine.write_text(out)
    plans = [
        json.loads(rlctl(capsys, "plan", "--config", str(path), "--gpu", "h100", "--json")[1])
        for path in (recipe, mine)
    ]
    for key in ("fits", "training", "generation", "memory_gib", "seconds"):
        assert plans[0][key] == plans[1][key], key


def test_engines_that_discard_their_weights_keep_no_copy_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """One engine of Llama-3.1-8B on a node: 8,030,261,248 weights of two bytes, pinned in powers of two (1 / ln 2)."""
    host = []
    for value in ("false", "true"):
        flags = ["--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--set", "generation.tp=8", "--json"]
        code, out, err = rlctl(capsys, "plan", *flags, "--set", f"generation.discard_weights={value}")
        assert code == 0, err
        host.append(json.loads(out)["host_memory_gib"])
    assert host[0] - host[1] == pytest.approx(8_030_261_248 * 2 / math.log(2) / 2**30, abs=0.02)


def test_engines_that_keep_their_devices_cannot_discard_weights(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "laptop", "--dry-run", "--set", "generation.discard_weights=true"]
    code, _, err = rlctl(capsys, "train", "grpo", *flags)
    assert code == 2
    assert "generation.discard_weights is for engines that share GPUs with the policy" in err
