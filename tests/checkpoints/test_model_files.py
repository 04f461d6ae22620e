"""From what `--model` says to a directory, and the answers where there is none."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron
from rlctl.checkpoints.hf.hf_files import copy_companions
from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory, refuse_others_for_vllm
from rlctl.checkpoints.identity import source_identity
from rlctl.checkpoints.locations import converted_directory
from rlctl.checkpoints.model_files import CONFIG_FILES, IGNORED_FILES, resolve_model, stored_parameters
from rlctl.errors import InputError, RlctlError


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to break."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_local_directory(tiny_llama: Path) -> None:
    found = resolve_model(str(tiny_llama))
    assert (found.directory, found.label, found.note) == (tiny_llama.resolve(), str(tiny_llama), None)


def test_a_megatron_checkpoint_is_a_model(tiny_llama: Path, tmp_path: Path) -> None:
    hf_to_megatron(tiny_llama, tmp_path / "ckpt")
    found = resolve_model(str(tmp_path / "ckpt"))
    assert found.weights == tmp_path / "ckpt" / "release"
    assert (found.directory / "tokenizer_config.json").is_file()
    shutil.rmtree(found.directory)
    with pytest.raises(InputError, match="is a Megatron checkpoint without") as refused:
        resolve_model(str(tmp_path / "ckpt"))
    assert "huggingface" in (refused.value.hint or "")


def test_stored_parameters_counts_the_tensors(tiny_llama: Path) -> None:
    assert stored_parameters(tiny_llama) == 426_624


def test_directory_without_config(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        resolve_model(str(model))


def test_directory_with_broken_config(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json cannot be read as JSON"):
        resolve_model(str(model))


def test_missing_shards_are_named(model: Path) -> None:
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors").rename(model / shards["a"])
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(InputError, match=r"lacks 1 shard.*model-00002-of-00002"):
        resolve_model(str(model))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a pointer of Git LFS in place of the weights",
    ),
    "truncated": (lambda file: file.write_bytes(b"\x10" + bytes(40)), "is not a safetensors file, or it is truncated"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_weights_are_named_before_anything_reads_them(model: Path, kind: str) -> None:
    """An engine that is given the directory would end with a traceback of its own."""
    damage, said = DAMAGE[kind]
    file = model / "model.safetensors"
    file.unlink()
    damage(file)
    with pytest.raises(InputError, match=said):
        resolve_model(str(model))


def test_directory_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no safetensors weights"):
        resolve_model(str(model))
    assert resolve_model(str(model), weights=False).directory == model


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent-model"])
def test_absent_directory(name: str) -> None:
    with pytest.raises(InputError, match="there is no such directory"):
        resolve_model(name)


def test_unknown_name_without_a_network(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no directory here, not in the Hugging Face cache, and the hub cannot be reached"
    ):
        resolve_model("nobody/no-such-model")


def test_a_misspelled_name_has_a_suggestion_without_a_network() -> None:
    with pytest.raises(InputError) as caught:
        resolve_model("Qwen/Qwen3-8b-Instrct")
    assert (caught.value.hint or "").startswith("Did you mean Qwen/Qwen3-8B or ")


def test_a_place_of_the_hub_that_cannot_be_read_is_not_blamed_on_the_network(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path))
    monkeypatch.setattr("rlctl.checkpoints.model_files.hub_answers", lambda: True)
    with pytest.raises(RlctlError) as caught:
        resolve_model("someone/some-model")
    assert str(tmp_path) in caught.value.message
    assert "HF_HOME" in (caught.value.hint or "")


def test_name_that_is_none() -> None:
    with pytest.raises(InputError, match="neither a directory nor a hub name"):
        resolve_model("what is this")


def test_cached_name_needs_no_network(tiny_llama: Path, tmp_path: Path) -> None:
    """The layout of the hub's cache: refs/main names the snapshot. A file of it that is damaged is named."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(tiny_llama, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    code = """
from rlctl.checkpoints.model_files import resolve_model
found = resolve_model("someone/tiny").directory
print(found)
(found / "model.safetensors").write_bytes(b"")
try:
    resolve_model("someone/tiny")
except ValueError as error:
    print(error)
"""
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    found, damaged = done.stdout.splitlines()
    assert found == str(repository / "snapshots" / ("0" * 40)), done.stderr
    assert damaged.startswith(f"{found}/model.safetensors is not a safetensors file, or it is truncated")


def test_converted_models_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["RLCTL_MEGATRON_CHECKPOINT_DIR", "NRL_MEGATRON_CHECKPOINT_DIR", "HF_HOME"]
    for name in names:
        monkeypatch.setenv(name, f"/{name.lower()}")
    for name in names:
        assert converted_directory() == Path(f"/{name.lower()}/rlctl")
        monkeypatch.delenv(name)
    assert converted_directory() == Path.home() / ".cache" / "huggingface" / "rlctl"


def test_named_chat_templates_and_all_files_of_tokenizers_are_fetched_and_copied(
    tiny_llama: Path, tmp_path: Path
) -> None:
    from huggingface_hub.utils import filter_repo_objects
    from transformers import AutoTokenizer, utils

    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    templates = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(source)
    read = (utils.PROCESSOR_NAME, utils.VIDEO_PROCESSOR_NAME, utils.IMAGE_PROCESSOR_NAME, "vocab.json", "tekken.json")
    for name in (*read, "model.safetensors.index.json", "hf_quant_config.json"):
        (source / name).write_text("{}")
    copy_companions(source, copied := tmp_path / "copied")
    assert AutoTokenizer.from_pretrained(copied).chat_template == templates
    assert {*read} <= {path.name for path in copied.iterdir()}
    assert not (copied / "model.safetensors.index.json").exists()
    assert not (copied / "hf_quant_config.json").exists()
    assert source_identity(source) != source_identity(tiny_llama)

    files = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    other = ["original/params.json", "onnx/config.json", "added/x.json", "additional_chat_templates_old/x.jinja"]
    patterns = [*CONFIG_FILES, "*.safetensors"]
    kept = filter_repo_objects([*files, *other], allow_patterns=patterns, ignore_patterns=IGNORED_FILES)
    assert {*files} - {*kept} == set()
    assert {*filter_repo_objects(other, allow_patterns=patterns, ignore_patterns=IGNORED_FILES)} <= {other[-1]}


def other_save(model: Path, *names: str) -> None:
    """Write the model's tensors with other values into files of these names."""
    held = sorted(load_file(model / "model.safetensors").items())
    for number, name in enumerate(names):
        save_file({key: value + 1 for key, value in held[number :: len(names)]}, model / name, {"format": "pt"})


def index(model: Path, *names: str) -> None:
    held = {key: name for name in names for key in load_file(model / name)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))


def shards(count: int) -> list[str]:
    return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


SETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file and shards with their index": (
        lambda model: (other_save(model, *shards(2)), index(model, *shards(2))),
        r"are read from model\.safetensors, and not from model-00001-of-00002\.safetensors, model-00002.* another save",
    ),
    "a file and shards": (lambda model: other_save(model, *shards(2)), r"m model\.safetensors, and not from model-0"),
    "indexed shards and those of an earlier save": (
        lambda model: (
            other_save(model, *shards(3)), other_save(model, *shards(2)), index(model, *shards(2)),
            (model / "model.safetensors").unlink(),
        ),
        r"from model-00001-of-00002\.safetensors, model-00002-of-00002\.safetensors, and not from model-00001-of-00003",
    ),
    "a variant": (lambda model: other_save(model, "model.fp16.safetensors"), r"not from model\.fp16\.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_of_two_sets_of_weights_the_one_that_is_read_is_told(name: str, model: Path) -> None:
    """transformers reads the same set of these."""
    make, said = SETS[name]
    make(model)
    told: list[str] = []
    resolve_model(str(model), tell=told.append)
    (line,) = told
    assert re.search(said, line)
    files, theirs = SafetensorsDirectory.open(model), AutoModelForCausalLM.from_pretrained(model)
    assert torch.equal(theirs.state_dict()["model.norm.weight"], files.read("model.norm.weight").to(theirs.dtype))


def test_copies_in_other_formats_are_told_when_they_are_newer(model: Path) -> None:
    for name in ("consolidated.safetensors", "pytorch_model.bin"):
        (model / name).write_bytes(b"old")
        os.utime(model / name, (1, 1))
    told: list[str] = []
    resolve_model(str(model), tell=told.append)
    assert told == []
    os.utime(model / "pytorch_model.bin", (2**31, 2**31))
    resolve_model(str(model), tell=told.append)
    assert [line.partition(", and ")[2] for line in told] == ["not from pytorch_model.bin, which is newer"]


def test_weights_in_a_folder_below_are_named(model: Path) -> None:
    (model / "checkpoint-5").mkdir()
    (model / "model.safetensors").rename(model / "checkpoint-5" / "model.safetensors")
    with pytest.raises(InputError, match="has no safetensors weights") as caught:
        resolve_model(str(model))
    assert f"There are some in {model / 'checkpoint-5'}" in str(caught.value.hint)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_adapter_next_to_a_whole_model_is_told(model: Path, sharded: bool) -> None:
    if sharded:
        (model / "model.safetensors").rename(model / shards(1)[0])
    save_file({"base_model.model.model.norm.lora_A.weight": torch.ones(2, 2)}, model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "me/base"}')
    told: list[str] = []
    resolve_model(str(model), tell=told.append)
    (line,) = told
    assert "holds an adapter (adapter_model.safetensors) next to the whole model. The model is read without it" in line
    open_hf_model(model)
    with pytest.raises(InputError, match=r"and an adapter \(adapter_model\.safetensors\), and vLLM would read both"):
        refuse_others_for_vllm(model)
