"""`rlctl convert` where users are unlucky: what must stay, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.conversion import record
from rlctl.checkpoints.conversion.hf_megatron import Options, hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.conversion.prepared_model import fingerprints_of
from rlctl.checkpoints.identity import file_digest
from rlctl.checkpoints.inspection import inspect
from rlctl.checkpoints.model_files import resolve_model
from rlctl.errors import InputError
from rlctl.tiny_models.text import write_tiny_family


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_family(tmp_path / "model")


def test_force_takes_nothing_away_that_is_no_model(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "note").write_text("text")
    (tmp_path / "megatron").mkdir()
    monkeypatch.chdir(tmp_path / "thesis")
    before = sorted(tmp_path.rglob("*"))
    refused = {
        model: "read from",
        model / "..": "the directory that rlctl runs in",
        Path("."): "the directory that rlctl runs in",
        tmp_path / "note": "is a file",
        tmp_path / "note" / "below": "cannot be written: File exists|Not a directory",
    }
    for destination, words in refused.items():
        with pytest.raises(InputError, match=words):
            hf_to_megatron(model, destination, Options(force=True))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"holds no model but other files \(chapter\.tex\)"):
        hf_to_megatron(model, tmp_path / "thesis", Options(force=True))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_is_not_replaced_by_what_is_made_of_it(model: Path, tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    for destination in (tmp_path / "megatron", tmp_path / "megatron" / "huggingface"):
        with pytest.raises(InputError, match="read from"):
            megatron_to_hf(tmp_path / "megatron", destination, options=Options(force=True))
    assert inspect(tmp_path / "megatron").problems == []


def test_a_link_is_where_it_points(model: Path, tmp_path: Path) -> None:
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "link").symlink_to("large_disk")
    hf_to_megatron(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert inspect(tmp_path / "large_disk").problems == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large_disk", "link", "model"]


def test_what_is_incomplete_is_not_reused(model: Path, tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    (tmp_path / "megatron" / "release" / "__0_0.distcp").unlink()
    with pytest.raises(InputError, match="not the complete conversion"):
        hf_to_megatron(model, tmp_path / "megatron", Options(reuse=True))
    (tmp_path / "megatron" / record.RECORD).write_text("[")
    with pytest.raises(InputError, match="not the complete conversion"):
        hf_to_megatron(model, tmp_path / "megatron", Options(reuse=True))


def test_values_beyond_float16_are_named(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e30
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.norm\.weight holds 1e\+30, which float16 cannot represent"):
        hf_to_megatron(model, tmp_path / "megatron", Options(dtype="float16"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_wrong_byte_in_a_run_s_checkpoint_is_found(model: Path, tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    step = tmp_path / "run" / "checkpoints" / "step_2"
    step.mkdir(parents=True)
    (tmp_path / "megatron" / "release").rename(step / "policy")
    files = {path.name: file_digest(path) for path in (step / "policy").iterdir()}
    (step / "state.json").write_text(json.dumps({"step": 2, "files": files}))
    megatron_to_hf(tmp_path / "run", tmp_path / "good", model)
    shard = step / "policy" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match=r"step_2 is damaged: __0_0\.distcp is not what was written"):
        megatron_to_hf(tmp_path / "run", tmp_path / "back", model)
    assert not (tmp_path / "back").exists()


def test_a_wrong_byte_in_a_converted_checkpoint_is_found(model: Path, tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    shard = tmp_path / "megatron" / "release" / "__0_0.distcp"
    data, held = bytearray(shard.read_bytes()), load_file(model / "model.safetensors")["model.norm.weight"]
    data[data.index(held.numpy().tobytes()) + 5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match=r"1 tensors are not those that were converted \(model\.norm\.weight\)"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(InputError, match="not those that were converted"):
        megatron_to_hf(tmp_path / "megatron" / "release", tmp_path / "back")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", options=Options(verify=False))


def test_a_file_that_no_tensor_is_in_belongs_to_the_whole(model: Path, tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    (tmp_path / "megatron" / "release" / "common.pt").unlink()
    assert "release/common.pt cannot be read" in inspect(tmp_path / "megatron").problems[0]
    with pytest.raises(InputError, match="not the complete conversion"):
        hf_to_megatron(model, tmp_path / "megatron", Options(reuse=True))


def test_what_was_trained_from_a_conversion_is_not_taken_for_it(model: Path, tmp_path: Path) -> None:
    """Megatron-LM saves its iterations beside what it began with, where it loads and saves in one directory."""
    converted, trained = tmp_path / "megatron", tmp_path / "other" / "model"
    hf_to_megatron(model, converted)
    held = load_file(write_tiny_family(trained) / "model.safetensors")
    save_file({name: value + 1 for name, value in held.items()}, trained / "model.safetensors")
    hf_to_megatron(trained, tmp_path / "trained")
    (tmp_path / "trained" / "release").rename(converted / "iter_0000100")
    (converted / "latest_checkpointed_iteration.txt").write_text("100")
    megatron_to_hf(converted, tmp_path / "back")
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert all((written[name] == value + 1).all() for name, value in held.items())
    assert fingerprints_of(resolve_model(str(converted)), "float32") == {}
    with pytest.raises(InputError, match="not the complete conversion"):
        hf_to_megatron(model, converted, Options(reuse=True))
