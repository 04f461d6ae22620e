"""Every family there and back: the same bits, under keys that Megatron writes, loaded by transformers in silence."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch

from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from support.parallel_families import FAMILIES, hf_model


@pytest.mark.parametrize("family", FAMILIES)
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
