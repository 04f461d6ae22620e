"""What a run converts once, and what it starts from as published."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.conversion import prepared_model
from rlctl.checkpoints.conversion.prepared_model import (
    _unseen,
    conversion_directory,
    fingerprints_of,
    prepared,
)
from rlctl.checkpoints.locations import NAMED
from rlctl.checkpoints.model_files import resolve_model
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.errors import InputError, MachineError
from rlctl.tiny_models.text import write_tiny_family


def block_scaled(directory: Path) -> Path:
    """A tiny model whose projections are float8 with a scale for each block of 64 x 64."""
    held = load_file(write_tiny_family(directory) / "model.safetensors")
    for name in [n for n in held if n.endswith("_proj.weight")]:
        rows, columns = held[name].shape
        held[name] = held[name].to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = torch.rand(-(-rows // 64), -(-columns // 64)) + 0.5
    save_file(held, directory / "model.safetensors")
    path = directory / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HOME of a user who has not said where conversions belong."""
    for name in NAMED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("variable", ["NRL_MEGATRON_CHECKPOINT_DIR", pytest.param(None, marks=pytest.mark.slow)])
def test_a_conversion_by_nemo_rl_is_named_and_not_taken(
    tiny_llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """Where `get_megatron_checkpoint_dir` and `validate_model_paths` of NeMo-RL put a local model."""
    folder = home / "nemo_rl"
    if variable:
        folder = home / "own"
        monkeypatch.setenv(variable, str(folder))
    place = folder / f"model_{str(tiny_llama).replace('/', '_')}"
    (place / "iter_0000000").mkdir(parents=True)
    said: list[str] = []
    prepared(resolve_model(str(tiny_llama)), "float32", 1, said.append)
    assert said[0].startswith(f"{place} has another trainer's conversion of this model. rlctl does not use it")
    said.clear()
    prepared(resolve_model(str(tiny_llama)), "float32", 1, said.append)
    assert said == []


@pytest.mark.long
def test_a_model_is_converted_once(tiny_llama: Path, home: Path) -> None:
    source = resolve_model(str(tiny_llama))
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:  # two runs that start together
        first, second = pool.map(lambda _: prepared(source, "float32", 1, said.append), range(2))
    assert first == second
    place = conversion_directory(source.directory, "float32")
    assert first.megatron == place / "release"
    assert place.parent == home / "rlctl"
    assert first.label == source.label
    line = f"converting the model once, for every run to start from: {place} (model.convert=false does without)"
    assert said == [line, line]
    assert [p.name for p in place.parent.iterdir()] == [place.name]
    made = (place / "release" / ".metadata").stat().st_mtime_ns
    assert prepared(source, "float32", 1, said.append) == first
    assert said == [line, line], "nothing is said of a conversion that is there"
    assert (place / "release" / ".metadata").stat().st_mtime_ns == made
    assert conversion_directory(source.directory, "bfloat16") != place
    tensors = load_file(tiny_llama / "model.safetensors")
    assert fingerprints_of(first, "float32") == {name: fingerprint(t, t.shape) for name, t in tensors.items()}
    assert fingerprints_of(first, "bfloat16") == fingerprints_of(source, "float32") == {}
    assert prepared(first, "float32", 1, print) is first


@pytest.mark.slow
@pytest.mark.guard
def test_block_scaled_weights_become_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "shared"))
    monkeypatch.delenv("RLCTL_MEGATRON_CHECKPOINT_DIR")
    model = block_scaled(tmp_path / "model")
    found = prepared(resolve_model(str(model)), "bfloat16", 1, print)
    assert found.megatron == tmp_path / "shared" / "rlctl" / conversion_directory(model, "bfloat16").name / "release"
    assert "quantization_config" not in json.loads((found.directory / "config.json").read_text())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda at: next(at.glob("release/*.distcp")).unlink(), "release/__0_0.distcp cannot be read"),
        (lambda at: cut(at / "release" / ".metadata"), "release/.metadata has 100 bytes instead of "),
        (lambda at: (at / "release" / "common.pt").unlink(), "release/common.pt cannot be read"),
        (lambda at: (at / "huggingface" / "config.json").unlink(), "huggingface/config.json cannot be read"),
        (lambda at: (at / "rlctl_conversion.json").write_text(""), "is not a complete conversion"),
    ],
)
def test_a_conversion_that_was_damaged_is_named_for_removal(
    harm: Callable[[Path], object], said: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_model(str(tiny_llama))
    made = prepared(source, "float32", 1, print).megatron  # where all tests of the session have it
    assert made is not None
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "a place"))
    place = conversion_directory(source.directory, "float32")
    shutil.copytree(made.parent, place)
    harm(place)
    with pytest.raises(InputError, match=re.escape(said)) as failed:
        prepared(source, "float32", 1, print)
    assert str(place) in failed.value.message
    assert f"rm -r '{place}'" in (failed.value.hint or "")


def test_an_iteration_saved_beside_a_conversion_is_not_started_from(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_model(str(tiny_llama))
    made = prepared(source, "float32", 1, print).megatron
    assert made is not None
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path))
    place = conversion_directory(source.directory, "float32")
    shutil.copytree(made.parent, place)
    shutil.copytree(place / "release", place / "iter_0000003")
    (place / "latest_checkpointed_iteration.txt").write_text("3")
    assert prepared(source, "float32", 1, print).megatron == place / "release"


def test_code_that_changes_is_converted_anew(tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    before = conversion_directory(model, "float32")
    (model / "modeling_own.py").write_text("X = 1")
    with_code = conversion_directory(model, "float32")
    (model / "modeling_own.py").write_text("X = 2")
    assert len({before, with_code, conversion_directory(model, "float32")}) == 3


def test_modules_where_the_user_works_are_not_imported(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "shared"))
    (tmp_path / "fractions.py").write_text("raise RuntimeError('not the one of Python')")
    monkeypatch.chdir(tmp_path)
    assert prepared(resolve_model(str(tiny_llama)), "float32", 1, print).megatron is not None


def test_where_there_is_no_place_the_published_files_will_do(tiny_llama: Path, home: Path) -> None:
    source = resolve_model(str(tiny_llama))
    said: list[str] = []
    home.write_text("a file")
    assert prepared(source, "float32", 1, said.append) is source
    assert f"not converted: {home} is not a directory (RLCTL_MEGATRON_CHECKPOINT_DIR names another place)" in said[-1]
    home.unlink()
    assert prepared(source, "float32", 2, said.append) is source
    assert f"other nodes may not see {home / 'rlctl'}" in said[-1]
    assert not home.exists()


def test_a_place_that_fills_up_does_not_stop_a_run_unless_it_was_named(
    tiny_llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, said = resolve_model(str(tiny_llama)), []

    def fill_up(*_: object) -> None:
        raise MachineError("the disk filled up.")

    monkeypatch.setattr(prepared_model, "call_in_child", fill_up)
    assert prepared(source, "float32", 1, said.append) is source
    assert "starting from the published files" in said[-1]
    monkeypatch.setenv(NAMED[0], str(home / "named"))
    with pytest.raises(MachineError, match="could not be converted into"):
        prepared(source, "float32", 1, said.append)


@pytest.mark.slow
@pytest.mark.guard
def test_a_conversion_on_this_node_alone_is_not_for_runs_on_several(tiny_llama: Path, home: Path) -> None:
    source = resolve_model(str(tiny_llama))
    assert prepared(source, "float32", 1, print).megatron is not None
    assert prepared(source, "float32", 2, print) is source


def test_all_nodes_see_what_lies_beside_the_models_of_the_hub(tiny_llama: Path, home: Path) -> None:
    (home.parent / "large disk").mkdir()
    home.symlink_to(home.parent / "large disk")  # as many users have it
    model = home / "hub" / "models--owner--name" / "snapshots" / "0123"
    shutil.copytree(tiny_llama, model)
    assert _unseen(conversion_directory(model, "float32"), model, 2) is None
    assert "other nodes may not see" in (_unseen(conversion_directory(model, "float32"), tiny_llama, 2) or "")


def test_a_conversion_that_fails_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "shared"))
    model = block_scaled(tmp_path / "model")
    held = load_file(model / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, model / "model.safetensors")
    with pytest.raises(InputError, match=r"could not be converted into .*model\.norm\.weight is missing") as failed:
        prepared(resolve_model(str(model)), "float32", 1, print)
    assert "RLCTL_MEGATRON_CHECKPOINT_DIR" in (failed.value.hint or "")


RUN = """
import sys
from rlctl.checkpoints.conversion import prepared_model
from rlctl.checkpoints.model_files import resolve_model
from rlctl.runs.interrupt import StopRequest

with StopRequest(print):
    prepared_model.prepared(resolve_model(sys.argv[1]), "float32", 1, print)
"""


@pytest.mark.slow
def test_a_signal_to_the_run_alone_leaves_no_part_of_a_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_family(tmp_path / "model", vocab_size=500_000)  # 0.5 GB: longer than to see that it has begun
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "shared"))
    place = tmp_path / "shared" / "rlctl"
    for number, said in ((signal.SIGTERM, "KeyboardInterrupt"), (signal.SIGKILL, "")):
        run = subprocess.Popen([sys.executable, "-c", RUN, str(model)], stderr=subprocess.PIPE)
        while not list(place.glob(".*.partial")):
            assert run.poll() is None
            time.sleep(0.01)
        converting = psutil.Process(run.pid).children()
        for process in converting:  # however slow this machine is, it does not end before the signal
            process.suspend()
        run.send_signal(number)
        time.sleep(0.5)
        for process in converting:
            process.resume()
        assert said in run.communicate(timeout=60)[1].decode()  # until the child has ended too
        assert not [path for path in place.iterdir() if not path.name.endswith(".lock")]
