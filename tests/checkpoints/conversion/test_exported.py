"""Multi-token-prediction layers, which runs do not train: kept by conversions, and by the export of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.conversion.hf_megatron import Options, hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.inspection import inspect
from rlctl.checkpoints.model_files import ModelFiles
from rlctl.models.families import facts_from_hf_config, weights_of
from support.family_models import hf_model
from support.module_runs import write_module_run

Tensors = dict[str, torch.Tensor]


def write(directory: Path, held: Tensors, config: dict) -> None:
    directory.mkdir()
    save_file(held, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, Tensors]:
    """A tiny DeepSeek-V3 with a multi-token-prediction layer, and its tensors."""
    hf_model("deepseek-v3").save_pretrained(tmp_path / "without")
    config = json.loads((tmp_path / "without" / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    weights, held = weights_of(facts_from_hf_config(config)), load_file(tmp_path / "without" / "model.safetensors")
    assert set(weights.tensors) - set(held)
    held |= {name: torch.randn(shape) for name, shape in weights.tensors.items() if name not in held}
    held |= {copy: held[name].clone() for copy, name in weights.copies.items()}
    write(tmp_path / "base", held, config)
    return tmp_path / "base", held


@pytest.fixture
def run(base: tuple[Path, Tensors], tmp_path: Path) -> tuple[Path, Tensors]:
    """A run that has changed every weight that it trains, and what the model is then."""
    directory, held = base
    config = json.loads((directory / "config.json").read_text())
    lacking = weights_of(facts_from_hf_config(config | {"num_nextn_predict_layers": 0})).tensors
    trained = {name: held[name] + 1 for name in lacking}
    write(tmp_path / "trained", trained, config)
    hf_to_megatron(tmp_path / "trained", tmp_path / "converted")
    step = tmp_path / "run" / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    shutil.move(tmp_path / "converted" / "release", step / "policy")
    model = {"directory": str(directory), "weights": str(directory), "fingerprint": model_fingerprint(directory)}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps({"model": model, "config": {}}))
    expected = held | trained
    return tmp_path / "run", expected | {
        c: expected[name] for c, name in weights_of(facts_from_hf_config(config)).copies.items()
    }


def same(directory: Path, expected: Tensors) -> None:
    found = load_file(directory / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_conversions_keep_them(base: tuple[Path, Tensors], tmp_path: Path) -> None:
    directory, held = base
    hf_to_megatron(directory, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    same(tmp_path / "back", held)


@pytest.mark.parametrize("base_in", ["huggingface", "megatron"])
def test_a_runs_export_has_them_as_they_were(
    base: tuple[Path, Tensors], run: tuple[Path, Tensors], base_in: str, tmp_path: Path
) -> None:
    directory, expected = run
    if base_in == "megatron":
        hf_to_megatron(base[0], tmp_path / "ckpt")
        at = {"directory": tmp_path / "ckpt" / "huggingface", "weights": tmp_path / "ckpt" / "release"}
        model = {key: str(path) for key, path in at.items()} | {"fingerprint": model_fingerprint(*at.values())}
        (directory / "manifest.json").write_text(json.dumps({"model": model, "config": {}}))
    said: list[str] = []
    report = megatron_to_hf(directory, tmp_path / "exported", options=Options(tell=said.append))
    assert report.verified
    assert said == []
    same(tmp_path / "exported", expected)
    assert inspect(tmp_path / "exported").problems == []


def test_what_is_not_found_is_said(base: tuple[Path, Tensors], run: tuple[Path, Tensors], tmp_path: Path) -> None:
    directory, expected = run
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    base[0].rename(tmp_path / "moved")
    said: list[str] = []
    options = Options(tell=said.append)
    (tmp_path / "moved" / "tokenizer.json").write_text("{}")  # another model by now
    megatron_to_hf(directory, tmp_path / "exported", tmp_path / "moved", options)
    assert said == [
        "without the multi-token-prediction layers that config.json called for, which is changed: "
        f"{tmp_path / 'moved'} is not the model that the run of {directory}/checkpoints/step_1/policy began with."
    ]
    same(tmp_path / "exported", trained)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    (tmp_path / "moved" / "tokenizer.json").unlink()
    megatron_to_hf(directory, tmp_path / "again", tmp_path / "moved", options)
    assert len(said) == 1
    same(tmp_path / "again", expected)


def predicting_model(kind: str, directory: Path) -> dict[str, torch.Tensor]:
    """Write a tiny model whose class in transformers 5.19.0 ignores its multi-token-prediction tensors
    (`_keys_to_ignore_on_load_unexpected`), under their published names; return these tensors."""
    import transformers

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "moe_intermediate_size": 16, "num_experts": 2,
        "n_routed_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    own = {
        "qwen3_next": {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
        "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 16, "route_norm": True, "qk_norm": True},
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(sizes | own))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    if kind == "qwen3_next":
        at, declared = "mtp.layers.0", {"mtp_num_hidden_layers": 1}
        names = {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), f"{at}.mlp.experts.1.down_proj.weight": (32, 16)}
    else:
        at, declared = "model.layers.80", {"num_nextn_predict_layers": 1}
        names = {f"{at}.eh_proj.weight": (32, 64), f"{at}.mlp.gate.e_score_correction_bias": (2,)}
    further = {name: torch.randn(shape) for name, shape in names.items()}
    held = load_file(directory / "model.safetensors") | further
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    read = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(read | declared))
    return further


def trained_run(directory: Path, run: Path) -> Path:
    """A run on the backend dtensor that has halved every weight."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    held = {name: value.detach() / 2 for name, value in model.state_dict().items()}
    return write_module_run(run, ModelFiles(directory, str(directory)), held)


@pytest.mark.parametrize("kind", ["qwen3_next", "hy_v3"])
def test_tensors_that_transformers_ignores_are_exported_as_they_were(kind: str, tmp_path: Path) -> None:
    further = predicting_model(kind, tmp_path / "base")
    before = load_file(tmp_path / "base" / "model.safetensors")
    run = trained_run(tmp_path / "base", tmp_path / "run")
    assert megatron_to_hf(run, tmp_path / "out").verified
    same(tmp_path / "out", {name: value if name in further else value / 2 for name, value in before.items()})
    megatron_to_hf(run, tmp_path / "half", None, Options(dtype="bfloat16"))
    name = next(iter(further))
    assert torch.equal(load_file(tmp_path / "half" / "model.safetensors")[name], further[name].bfloat16())


def test_an_export_without_them_declares_none(tmp_path: Path) -> None:
    predicting_model("hy_v3", tmp_path / "base")
    run, told = trained_run(tmp_path / "base", tmp_path / "run"), list[str]()
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["model"] |= {"fingerprint": "of another model", "own_fingerprint": None}
    (run / "manifest.json").write_text(json.dumps(manifest))
    megatron_to_hf(run, tmp_path / "out", None, Options(tell=told.append))
    (line,) = told
    assert "without the multi-token-prediction layers that config.json called for" in line
    assert "is not the model that the run" in line
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_block_scaled_layer_is_exported_in_plain_numbers(tmp_path: Path) -> None:
    """The formula of DeepSeek-V3: value times the scale of its block of 16 x 16."""
    predicting_model("hy_v3", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    held, name = load_file(file), "model.layers.80.eh_proj.weight"
    held[name], held[f"{name}_scale_inv"] = held[name].to(torch.float8_e4m3fn), torch.rand(2, 4) + 0.5
    save_file(held, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    run = trained_run(tmp_path / "base", tmp_path / "run")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | quantized))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["model"]["fingerprint"] = model_fingerprint(tmp_path / "base")
    (run / "manifest.json").write_text(json.dumps(manifest))
    megatron_to_hf(run, tmp_path / "out", None, Options(dtype="float32"))
    scales = held[f"{name}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    found = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(found[name], held[name].float() * scales, rtol=0, atol=0)
    assert f"{name}_scale_inv" not in found
