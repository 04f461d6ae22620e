"""`rlctl train grpo` of a model that takes images as well, from its own directory to the same model trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from support.multimodal_models import write_multimodal
from support.runs import command, results, resume

RLCTL = str(Path(sys.executable).with_name("rlctl"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("megatron", marks=pytest.mark.guard), "dtensor"])
def test_a_model_with_images_is_trained_on_text_and_published_whole(here: Any, backend: str, tmp_path: Path) -> None:
    """Gemma 3: run, resumed, completed by its engine as by transformers, and exported into the whole model."""
    from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration

    model, run = write_multimodal(tmp_path / "gemma", "gemma3"), tmp_path / "run"
    done = here(command(model, run, "--steps", "2", "--backend", backend))
    assert done.returncode == 0, done.stderr
    assert "takes images or sound as well as text: its text part is trained, which lies in" in done.stderr
    done = here(resume(run, "--steps", "3"))
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in results(run)] == [1, 2, 3]

    done = here([RLCTL, "convert", "megatron-to-hf", str(run), str(tmp_path / "whole"), "--into", str(model), "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verified"]
    megatron_to_hf(run, tmp_path / "text")
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        first, whole = (
            Gemma3ForConditionalGeneration.from_pretrained(place).eval()(input_ids=tokens).logits
            for place in (model, tmp_path / "whole")
        )
        text = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()(input_ids=tokens).logits
    assert torch.equal(whole, text)
    assert not torch.allclose(whole, first, atol=1e-3)
    asked = ["--prompt", "2 + 3", "--max-new-tokens", "4", "--temperature", "0", "--json", "--gpu", "cpu"]
    shown = []
    for given in (["--run-dir", str(run)], ["--model", str(tmp_path / "whole")]):
        done = here([RLCTL, "generate", *given, *asked])
        assert done.returncode == 0, done.stderr
        shown.append(json.loads(done.stdout)["completions"][0])
    assert shown[0]["token_ids"] == shown[1]["token_ids"]
    assert shown[0]["logprobs"] == pytest.approx(shown[1]["logprobs"], abs=1e-4)
