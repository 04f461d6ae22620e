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
from rlctl.models.families import facts_from_hf_config, weights_of
from support.family_models import hf_model

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
        "without the multi-token-prediction layers that config.json calls for: "
        f"{tmp_path / 'moved'} is not the model that the run of {directory}/checkpoints/step_1/policy began with."
    ]
    same(tmp_path / "exported", trained)
    (tmp_path / "moved" / "tokenizer.json").unlink()
    megatron_to_hf(directory, tmp_path / "again", tmp_path / "moved", options)
    assert len(said) == 1
    same(tmp_path / "again", expected)
