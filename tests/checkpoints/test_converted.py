"""What a run converts once, and what it starts from as published."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.converted import fingerprints_of, is_block_scaled, place_of, prepared
from rlctl.checkpoints.fingerprints import fingerprint
from rlctl.checkpoints.source import resolve_model
from rlctl.errors import InputError
from tiny_models import write_tiny_llama


def block_scaled(directory: Path) -> Path:
    """A tiny model whose projections are float8 with a scale for each block of 64 x 64."""
    held = load_file(write_tiny_llama(directory) / "model.safetensors")
    for name in [n for n in held if n.endswith("_proj.weight")]:
        rows, columns = held[name].shape
        held[name] = held[name].to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = torch.rand(-(-rows // 64), -(-columns // 64)) + 0.5
    save_file(held, directory / "model.safetensors")
    path = directory / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return directory


def test_block_scaled_weights_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "shared"))
    source = resolve_model(str(block_scaled(tmp_path / "model")))
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:  # two runs that start together
        first, second = pool.map(lambda _: prepared(source, "float32", said.append), range(2))
    assert first == second
    place = place_of(source.directory, "float32")
    assert first.megatron == place / "release"
    assert place.parent == tmp_path / "shared" / "rlctl"
    assert "quantization_config" not in json.loads((first.directory / "config.json").read_text())
    assert [p.name for p in place.parent.iterdir()] == [place.name]
    made = (place / "release" / ".metadata").stat().st_mtime_ns
    assert prepared(source, "float32", said.append) == first
    assert (place / "release" / ".metadata").stat().st_mtime_ns == made
    assert place_of(source.directory, "bfloat16") != place


def test_a_directory_that_a_user_names_has_every_model_converted(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "shared"))
    source = resolve_model(str(tiny_llama))
    found = prepared(source, "float32", print)
    assert found.megatron == tmp_path / "shared" / "rlctl" / place_of(tiny_llama, "float32").name / "release"
    assert found.label == source.label
    tensors = load_file(tiny_llama / "model.safetensors")
    assert fingerprints_of(found, "float32") == {name: fingerprint(t, t.shape) for name, t in tensors.items()}
    assert fingerprints_of(found, "bfloat16") == fingerprints_of(source, "float32") == {}
    assert prepared(found, "float32", print) is found


def test_plain_weights_are_read_as_published(tiny_llama: Path) -> None:
    source = resolve_model(str(tiny_llama))
    assert not is_block_scaled(tiny_llama)
    assert prepared(source, "float32", print) is source


def test_a_conversion_that_fails_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "shared"))
    model = block_scaled(tmp_path / "model")
    held = load_file(model / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, model / "model.safetensors")
    with pytest.raises(InputError, match="could not be converted into") as failed:
        prepared(resolve_model(str(model)), "float32", print)
    assert "RLCTL_MEGATRON_CHECKPOINT_DIR" in (failed.value.hint or "")
