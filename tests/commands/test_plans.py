"""`generate` and `refit-test` go through the plan: the same pins, explanations and refusals as `train`."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlctl.preparation.open_model import open_model
from rlctl.settings.data import ModelConfig
from support.commands import rlctl

NODE = ["--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--gpus-per-node", "8", "--dry-run"]
GENERATE, REFIT_TEST = ["generate", "--prompt", "Name a color.", *NODE], ["refit-test", *NODE]


def test_a_dry_generate_shows_the_engines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = rlctl(capsys, *GENERATE, "--json", "--set", "generation.tp=2", "--n", "4")
    assert code == 0, err
    found = json.loads(out)
    plan = found["plan"]
    assert plan["training"] is None
    assert plan["mover"] is None
    assert (plan["generation"]["tp"], plan["generation"]["engines"]) == (
        2,
        1,
    )  # one engine completes one prompt
    assert list(plan["memory_gib"]) == ["generation"]
    assert plan["seconds"]["generation"] == plan["seconds"]["total"] > 0
    assert {reason["value"]: reason["rule"] for reason in plan["reasons"]}["generation.tp=2"].startswith("Pinned")
    assert found["arguments"]["vllm"]["tensor_parallel_size"] == 2
    assert found["config"]["generation.tp"]["value"] == 2
    assert not any(key.startswith("megatron") for key in found["arguments"])


def test_prompts_are_dealt_to_engines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(f"Prompt {i}" for i in range(64)))
    code, out, _ = rlctl(capsys, *GENERATE, "--prompts-file", str(tmp_path / "prompts.txt"), "--json")
    assert code == 0
    generation = json.loads(out)["plan"]["generation"]
    assert generation["engines"] * generation["tp"] == 8


CLUSTER = ["--gpu", "h100", "--gpus-per-node", "8", "--nodes", "32"]
GRPO = ["train", "grpo", "--dry-run", "--data", "gsm8k", "--reward", "exact-match"]


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("name", ["LGAI-EXAONE/EXAONE-4.0-32B", "baidu/ERNIE-4.5-21B-A3B-PT"])
def test_a_family_that_transformers_builds_is_planned_for_dtensor_by_every_command(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for command in (["plan"], GRPO, ["refit-test", "--dry-run"], ["generate", "--prompt", "hi", "--dry-run"]):
        code, out, err = rlctl(capsys, *command, "--model", name, *CLUSTER, "--json")
        assert code == 0, (command, err)
        found = json.loads(out)
        plan = found.get("plan", found)
        assert plan["runnable"], command
        if command[0] != "generate":
            assert plan["training"]["backend"] == "dtensor", command
            assert found["arguments"]["optimizer"]["lr"] > 0
    code, out, _ = rlctl(capsys, "doctor", "--model", name, "--json", "--set", "cluster.nodes=32", *CLUSTER[:4])
    assert "plan" not in {check["name"] for check in json.loads(out)["checks"] if check["status"] == "fail"}


@pytest.mark.slow
@pytest.mark.guard
def test_a_family_that_no_backend_has_is_refused_in_one_sentence_by_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, sentence = "XiaomiMiMo/MiMo-7B-RL", "rlctl has no file of the family MiMoForCausalLM, and the installed "
    commands = (["plan"], GRPO, ["refit-test", "--dry-run"], ["generate", "--prompt", "hi", "--dry-run"], ["rehearse"])
    for command in commands:
        for backend in ([], ["--backend", "dtensor"]) if command[0] != "generate" else ([],):
            code, _, err = rlctl(capsys, *command, "--model", name, *CLUSTER, *backend)
            assert code == 2, (command, backend)
            (line,) = [line for line in err.splitlines() if line.startswith("rlctl: ")]
            assert sentence in line, (command, backend)
    code, _, err = rlctl(capsys, "plan", "--model", name, *CLUSTER, "--backend", "megatron")
    assert code == 2
    assert "MiMoForCausalLM has no weight map for the backend megatron" in err
    _, out, _ = rlctl(capsys, "doctor", "--model", name, "--json", "--set", "cluster.nodes=32", *CLUSTER[:4])
    (check,) = [check for check in json.loads(out)["checks"] if check["name"] == "plan"]
    assert (check["status"], sentence in check["detail"]) == ("fail", True)


def test_a_refusal_names_what_each_backend_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = rlctl(
        capsys, "plan", "--model", "zai-org/GLM-4.5-Air", *CLUSTER, "--set", "megatron.hidden_dropout=0.1"
    )
    assert code == 2
    assert "megatron: megatron.hidden_dropout = 0.1 is refused" in err
    assert "dtensor: megatron.hidden_dropout is refused" in err


def test_set_wins_over_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = rlctl(capsys, *REFIT_TEST, "--json", "--tp", "4", "--set", "training.tp=2")
    assert code == 0, err
    assert json.loads(out)["plan"]["training"]["tp"] == 2
    code, out, err = rlctl(capsys, *GENERATE, "--json", "--temperature", "0.5", "--set", "generation.temperature=0.7")
    assert code == 0, err
    assert json.loads(out)["config"]["generation.temperature"]["value"] == 0.7


def test_what_is_true_of_both_plans_of_a_comparison_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.preparation.shown_plan.local_gpus", lambda: [])
    asked = ["plan", "--preset", "1node", "--model", "Qwen/Qwen3-8B", "--compare", "training.tp=1", "training.tp=2"]
    code, _, err = rlctl(capsys, *asked)
    assert (code, err.count("This machine has no GPU")) == (0, 1)


def test_a_dry_refit_test_is_laid_out_as_training_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = rlctl(capsys, *REFIT_TEST, "--json", "--tp", "4", "--set", "training.pp=2")
    assert code == 0, err
    found = json.loads(out)
    training = found["plan"]["training"]
    assert (training["tp"], training["pp"], training["dp"]) == (4, 2, 1)
    assert found["plan"]["mover"] == "cuda-ipc"
    given = found["arguments"]["megatron"]
    assert (given["tensor_model_parallel_size"], given["pipeline_model_parallel_size"]) == (4, 2)
    code, out, _ = rlctl(capsys, "plan", *NODE[:-1], "--json", "--set", "training.tp=4", "--set", "training.pp=2")
    assert json.loads(out)["training"] == training


@pytest.mark.parametrize(
    ("command", "arguments", "code", "said"),
    [
        (GENERATE, ["--set", "generation.tp=3"], 2, "The nearest value that works is generation.tp="),
        (GENERATE, ["--set", "generation.dp=2"], 2, "the replicas of an engine share its experts"),
        (GENERATE, ["--model", "deepseek-ai/DeepSeek-V3"], 4, "The smallest machine of this kind that fits"),
        (REFIT_TEST, ["--tp", "3"], 2, "The nearest value that works is training.tp="),
        (REFIT_TEST, ["--model", "deepseek-ai/DeepSeek-V3"], 4, "The smallest machine of this kind that fits"),
        (REFIT_TEST, ["--synthetic", "deepseek-v3"], 2, "--synthetic"),
        (["refit-test", "--model", "x"], ["--synthetic", "deepseek-v3"], 2, "--model x would do nothing"),
        (["refit-test", "--receive", "loader"], ["--synthetic", "deepseek-v3"], 2, "--receive loader would do nothing"),
        (GENERATE, ["--step", "3"], 2, "--step 3 needs a run"),
        (GENERATE, ["--prompts-file", os.devnull], 2, f"--prompts-file {os.devnull} holds no prompt"),
        (GENERATE, ["--run-dir", "absent"], 2, "absent is not a run: it has no manifest.json"),
        (GENERATE, ["--temperature", "-1"], 2, "(flag --temperature)"),
        (["plan", "--run", "x"], ["--model", "y"], 2, "--model would do nothing"),
        (GENERATE, ["--set", "run.steps=3"], 2, "--set run.steps=3 has no effect on completions"),
        (["plan", "--model", "Qwen/Qwen3-8B"], ["--max-length", "1"], 2, "--max-new-tokens 1 leaves no room"),
        (["plan", "--run", "x"], ["--explain"], 2, "--explain would do nothing"),
        (["plan", "--run", "x"], ["--split"], 2, "--split would do nothing"),
        (["plan", "--compare", "1node", "2nodes"], ["--top", "2"], 2, "--top would do nothing"),
        (["plan", "--model", "Qwen/Qwen3-8B"], ["--algorithm", "distillation"], 2, "needs a teacher"),
        (["plan", "--model", "Qwen/Qwen3-8B"], ["--teacher", "Qwen/Qwen3-32B"], 2, "learns nothing from a teacher"),
        (["doctor", "--quick"], ["--model", "./absent"], 2, "model ./absent: there is no such directory"),
        (["plan", "--model", "Qwen/Qwen3-8B"], ["--compare", "a", "1node"], 2, "--compare a: neither pins"),
    ],
)
def test_what_has_no_plan_is_refused_as_train_refuses_it(
    capsys: pytest.CaptureFixture[str], command: list[str], arguments: list[str], code: int, said: str
) -> None:
    given, out, err = rlctl(capsys, *command, *arguments)
    assert given == code, err
    assert said in err
    assert not out


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["refit-test"], ["train", "grpo"]])
def test_devices_that_lack_are_named_before_anything_is_opened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, command: list[str]
) -> None:
    monkeypatch.setattr("rlctl.preparation.shown_plan.local_gpus", lambda: [])
    monkeypatch.setattr("rlctl.rollouts.prompt_order.PromptStream.open", lambda *_: pytest.fail("the data was opened"))
    monkeypatch.setattr("rlctl.jobs.generate.load_tokenizer", lambda *_: pytest.fail("the tokenizer was opened"))
    code, _, err = rlctl(capsys, *command, "--model", str(tiny_llama), "--gpu", "h100", "--gpus-per-node", "1")
    assert code == 3, err
    assert "needs 1 GPU, and this machine has none" in err


def test_a_dry_run_shows_the_plan_then_what_was_set_then_what_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody set is behind --explain, and no line is longer than a terminal of 100 columns."""
    arguments = ["train", "grpo", *NODE, "--preset", "1node", "--set", "training.tp=2"]
    code, out, err = rlctl(capsys, *arguments)
    assert code == 0, err
    assert out.index("training    megatron  TP2 DP4") < out.index("  set\n") < out.index("  to know\n")
    assert re.search(r"^    training\.tp +2 +--set$", out, re.MULTILINE)
    assert "optimizer.beta1" not in out
    assert "TransformerConfig" not in out
    assert "is taken as" not in out  # --gpu names the type
    assert max(map(len, out.splitlines())) <= 100
    code, out, _ = rlctl(capsys, *arguments, "--explain")
    assert code == 0
    assert re.search(r"^    optimizer\.beta1 +0\.9 +default$", out, re.MULTILINE)
    assert "TransformerConfig:" in out
    assert "training.ep=1                          The model has no experts." in out
    code, _, err = rlctl(capsys, "train", "grpo", "--preset", "laptop", "--explain")
    assert code == 2
    assert "--explain applies to --dry-run" in err


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["refit-test"], ["train", "grpo"]])
def test_heads_that_a_cpu_engine_lacks_are_named_before_anything_is_opened(
    capsys: pytest.CaptureFixture[str], tiny_llama: Path, tmp_path: Path, command: list[str]
) -> None:
    config = json.loads((tiny_llama / "config.json").read_text()) | {"head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))  # there is nothing else to open
    code, _, err = rlctl(capsys, *command, "--model", str(tmp_path), "--gpu", "cpu")
    assert code == 2, err
    assert f"{tmp_path} has attention heads of size 16, and on a CPU" in err
    assert "32, 64, 80" in err


UNREAD = {
    "hqq": ({}, "does not read (quant_method hqq): it reads awq, gptq"),
    "awq": ({"bits": 8}, "does not read (quant_method awq): of AWQ it reads 4 bits"),
    "bitsandbytes": ({"load_in_4bit": True}, "does not train (bitsandbytes): rlctl plans it and has no reader"),
}


@pytest.mark.parametrize("method", UNREAD)
def test_quantized_weights_without_a_reader_are_refused_before_anything_else(
    method: str, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    values, reason = UNREAD[method]
    quantization = {"quantization_config": {"quant_method": method} | values}
    (model / "config.json").write_text(json.dumps(config | quantization))
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "2 + 3?", "answer": "5"}\n' * 8)
    here = ["--model", str(model), "--gpu", "cpu"]
    train = ["train", "grpo", *here, "--data", str(data), "--reward", "exact-match", "--prompts", "4", "--dry-run"]
    for line in (train, ["refit-test", *here, "--dry-run"]):
        code, _, err = rlctl(capsys, *line)
        assert (code, reason in err) == (2, True), err
    # An engine reads such weights by itself.
    assert rlctl(capsys, "generate", *here, "--prompt", "2 + 3?", "--dry-run")[0] == 0
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert open_model(ModelConfig(name=str(model))).facts.layers == config["num_hidden_layers"]  # its scales are read


PACKED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "bitsandbytes": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
}  # fmt: skip
SCALES = {"awq": 3 / 128, "gptq": 3 / 128, "bitsandbytes": 0.127 / 8}
"""Bytes of scales and zero points for each weight; QLoRA (arXiv 2305.14314, section 3): 0.127 bits."""
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
}  # fmt: skip
SIZES = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600, "num_attention_heads": 64},
}


@pytest.mark.parametrize(
    ("size", "method", "gpu", "form"),
    [("8B", "sft", "rtx4090", "awq"), ("8B", "dpo", "rtx4090", "gptq"), ("32B", "sft", "h100", "awq"),
     ("8B", "sft", "rtx4090", "bitsandbytes"), ("32B", "sft", "a100", "bitsandbytes")],
)  # fmt: skip
def test_packed_bases_fit_one_gpu(
    size: str, method: str, gpu: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An 8B model on one GPU of 24 GB, a 32B model on one of 80 GB. QLoRA's format is planned, and not trained."""
    values = QWEN3 | SIZES[size]
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": PACKED[form]}))
    command = ["plan", "--method", method, "--model", str(tmp_path), "--gpu", gpu, "--gpus-per-node", "1", "--lora"]
    code, out, err = rlctl(capsys, *command, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["runnable"] == (form != "bitsandbytes")
    hidden, layers, wide, heads = SIZES[size].values()
    linear = layers * hidden * (2 * 128 * heads + 2 * 1024 + 3 * wide)
    adapters = layers * 16 * (2 * (hidden + 128 * heads) + 2 * (hidden + 1024) + 3 * (hidden + wide))
    expected = linear * (1 / 2 + SCALES[form]) + 4 * (2 * 151936 * hidden + adapters)
    assert plan["memory_gib"]["training"]["weights"] == pytest.approx(expected / 2**30, rel=2e-3)
    out = rlctl(capsys, *command)[1]
    assert ("rlctl cannot run this plan yet" in out) == (form == "bitsandbytes")
    assert ("has no reader of its four-bit floats" in out) == (form == "bitsandbytes")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithm", "grpo", "--lora"], "is quantized (awq), and engines beside a trainer take weights as numbers"),
        (["--method", "sft"], "training.lora.rank = 0 is refused"),
        (["--method", "sft", "--lora", "--backend", "megatron"], "the backend megatron trains no packed layers (awq)"),
        (["--method", "sft", "--lora", "--set", "training.tp=2"], "packed layers are not divided"),
    ],
)
def test_settings_that_do_not_go_with_packed_bases_are_refused_by_name(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = QWEN3 | SIZES["8B"] | {"quantization_config": PACKED["awq"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = rlctl(capsys, "plan", "--model", str(tmp_path), "--gpu", "h100", "--gpus-per-node", "2", *arguments)
    assert (code, said in " ".join(err.split())) == (2, True), err


JAMBA = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_experts": 2,
    "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "pad_token_id": 0,
    "max_position_embeddings": 128, "mamba_d_state": 8,
}  # fmt: skip
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 128, "vocab_size": 64,
    "layers_block_type": ["moe", "attention"], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "what"),
    [
        pytest.param(JAMBA, "state-space layers of Mamba's first kind", id="jamba"),
        pytest.param(NEMOTRON, "experts without a gate", id="nemotron-h", marks=pytest.mark.slow),
    ],
)
def test_layers_that_a_cpu_engine_has_no_kernels_for_are_named_before_anything_is_opened(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, values: dict[str, Any], what: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    code, _, err = rlctl(capsys, "refit-test", "--model", str(tmp_path), "--gpu", "cpu", "--backend", "dtensor")
    assert code == 2, err
    assert f"{tmp_path} has {what}, which this vLLM supports only on GPUs" in err


@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(["--preset", "laptop"], id="measured"),
        pytest.param(["--preset", "laptop", "--max-length", "200", "--lora", "8", "--temperature", "0.5"], id="flags"),
        pytest.param(["--preset", "1node", "--model", "Qwen/Qwen3-8B", "--gpu", "h100"], id="assumed"),
        pytest.param(["--preset", "laptop", "--gpu", "h100", "--gpus-per-node", "1"], id="measured for a GPU"),
    ],
)
def test_a_configuration_has_one_plan(capsys: pytest.CaptureFixture[str], asked: list[str]) -> None:
    code, out, err = rlctl(capsys, "plan", *asked, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["workload"]["measured"] == ("1node" not in asked)
    code, out, err = rlctl(capsys, "train", "grpo", *asked, "--dry-run", "--json")
    assert code == 0, err
    dry = json.loads(out)["plan"]
    assert {key: plan[key] for key in dry} == dry
    code, out, _ = rlctl(capsys, "plan", *asked)
    length = plan["workload"]["prompt_tokens"]
    kind = "their mean" if plan["workload"]["measured"] else "assumed"
    assert f"prompts of {length} tokens ({kind})" in " ".join(out.split())
