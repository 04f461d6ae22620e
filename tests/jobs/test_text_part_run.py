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
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_model_with_images_is_trained_on_text_and_published_whole(here: Any, backend: str, tmp_path: Path) -> None:
    """Gemma 3: run, resumed, completed by its engine as by transformers, and exported into the whole model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForConditionalGeneration

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
    first, whole = (
        Gemma3ForConditionalGeneration.from_pretrained(place).eval() for place in (model, tmp_path / "whole")
    )
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        trained = whole(input_ids=tokens).logits
        assert torch.equal(trained, text(input_ids=tokens).logits)
        assert not torch.allclose(trained, first(input_ids=tokens).logits, atol=1e-3)

    prompt = AutoTokenizer.from_pretrained(model).apply_chat_template(
        [{"role": "user", "content": "2 + 3"}], add_generation_prompt=True, return_dict=False
    )
    asked = ["--prompt", "2 + 3", "--max-new-tokens", "4", "--temperature", "0", "--json", "--gpu", "cpu"]
    ways = [["--model", str(tmp_path / "whole")], ["--run-dir", str(run)]]
    for given in ways[: 2 if backend == "dtensor" else 1]:
        done = here([RLCTL, "generate", *given, *asked])
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)["completions"][0]
        chosen = torch.tensor(shown["token_ids"])
        with torch.no_grad():
            said = whole(input_ids=torch.cat([torch.tensor(prompt), chosen])[None]).logits[0, len(prompt) - 1 : -1]
        assert torch.equal(said.argmax(-1), chosen)
        logprobs = said.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        assert shown["logprobs"] == pytest.approx(logprobs.tolist(), abs=1e-4)
