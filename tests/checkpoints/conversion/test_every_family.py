"""Every family there and back: the same bits, under keys that Megatron writes, loaded by transformers in silence."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.conversion.hf_megatron import Options, hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from support.family_models import ALIKE, FAMILIES, hf_model
from support.pool import slowly


@pytest.mark.parametrize("family", slowly(FAMILIES.keys(), *(FAMILIES.keys() - ALIKE)))
def test_there_and_back(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as theirs

    model = hf_model(family)
    model.save_pretrained(tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    before, after = SafetensorsDirectory.open(tmp_path / "hf"), SafetensorsDirectory.open(tmp_path / "back")
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        assert torch.equal(before.read(name), after.read(name)), name
    theirs.enable_propagation()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "back", output_loading_info=True, attn_implementation="eager"
        )
    assert not any(info[kind] for kind in info), info
    assert [record.message for record in caplog.records] == []
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded.float()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_of_a_dtype_of_its_own_comes_back_in_it(dtype: torch.dtype, tmp_path: Path) -> None:
    """The correction bias of routers is float32 in Megatron, and in published files what their author chose."""
    hf_model("moonlight").save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    held = {name: value.to(torch.bfloat16) for name, value in load_file(path).items()}
    own = [name for name in held if name.endswith("e_score_correction_bias") or name == "model.norm.weight"]
    assert len(own) > 1
    save_file(held | {name: held[name].to(dtype) for name in own}, path, metadata={"format": "pt"})
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert megatron_to_hf(tmp_path / "megatron", tmp_path / "back").verified
    before, after = SafetensorsDirectory.open(tmp_path / "hf"), SafetensorsDirectory.open(tmp_path / "back")
    for name in before.tensors:
        assert after.tensors[name].dtype == before.tensors[name].dtype, name
        assert torch.equal(before.read(name), after.read(name)), name
    megatron_to_hf(tmp_path / "megatron", tmp_path / "wide", options=Options(dtype="float32"))
    assert {stored.dtype for stored in SafetensorsDirectory.open(tmp_path / "wide").tensors.values()} == {"float32"}
