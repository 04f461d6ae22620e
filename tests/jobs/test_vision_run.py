"""`rlctl train grpo` on images, from a model's own directory to the same model trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from rlctl.models.vision import VISION_FAMILIES
from support.crew import on_images, write_image_rows
from support.runs import results, resume
from support.vision_models import WITH_ENGINES, write_vision_model

RLCTL = str(Path(sys.executable).with_name("rlctl"))
DRAWING = f"{Path(__file__).parents[1] / 'support' / 'toy_environments.py'}:Drawing"


def read(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_ENGINES)
def test_a_model_is_trained_on_images_resumed_and_published(here: Any, family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, data = write_vision_model(tmp_path / "model", family), write_image_rows(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = here(on_images(model, data, whole, "--steps", "4", "--set", "training.dp=2"))
    assert done.returncode == 0, done.stderr
    assert "reads images: all of it is trained, by the backend dtensor" in done.stderr
    done = here(on_images(model, data, parts, "--steps", "2", "--set", "training.dp=2"))
    assert done.returncode == 0, done.stderr
    done = here(resume(parts, "--steps", "4"))
    assert done.returncode == 0, done.stderr
    assert all(line["logprob_diff"]["max"] < 1e-5 for line in results(whole))

    megatron_to_hf(whole, tmp_path / "exported")
    megatron_to_hf(parts, tmp_path / "resumed")
    begun, trained, resumed = (read(place) for place in (model, tmp_path / "exported", tmp_path / "resumed"))
    assert trained.keys() == begun.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in trained.items())
    made: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported", output_loading_info=True)
    loaded, told = made
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    first = dict(AutoModelForImageTextToText.from_pretrained(model).named_parameters())
    part_of = VISION_FAMILIES[family].part_of
    moved = {part_of(name) for name, value in loaded.named_parameters() if not torch.equal(value, first[name])}
    assert moved == {"vision", "projector", "language"}

    # vLLM loads the export too, and says what transformers says.
    asked = ["--set", "model.images=true", "--prompt", "what color?", "--max-new-tokens", "4", "--temperature", "0"]
    done = here([RLCTL, "generate", "--model", str(tmp_path / "exported"), *asked, "--gpu", "cpu", "--json"])
    assert done.returncode == 0, done.stderr
    chosen = json.loads(done.stdout)["completions"][0]["token_ids"]
    tokenizer = AutoProcessor.from_pretrained(tmp_path / "exported").tokenizer
    said = [{"role": "user", "content": [{"type": "text", "text": "what color?"}]}]
    inputs = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answered = loaded.eval().generate(**inputs, max_new_tokens=len(chosen), do_sample=False)
    assert answered[0, inputs["input_ids"].shape[1] :].tolist() == chosen


@pytest.mark.slow
def test_samples_in_flight_see_their_images_under_new_weights(here: Any, tmp_path: Path) -> None:
    """What the tower made of an image goes with its weights, also where a sample is half done."""
    model, data = write_vision_model(tmp_path / "model", "idefics3"), write_image_rows(tmp_path)
    more = ["--steps", "4", "--async", "--set", "refit.in_flight=keep", "--set", "refit.verify_every=1"]
    done = here(on_images(model, data, tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr
    lines = results(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["logprob_diff"]["max"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"), [("idefics3", ["--set", "refit.verify_every=1"]), ("qwen3_vl", ["--async", "--lora"])]
)
def test_environments_show_images(here: Any, family: str, more: list[str], tmp_path: Path) -> None:
    model, data = write_vision_model(tmp_path / "model", family), write_image_rows(tmp_path)
    asked = ["--steps", "3", "--env", DRAWING, "--set", "environment.turns=3", *more]
    asked = on_images(model, data, tmp_path / "run", *asked)
    at = asked.index("--reward")  # the environment's own is learned from
    done = here([*asked[:at], *asked[at + 2 :]])
    assert done.returncode == 0, done.stderr
    lines = results(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["images"] >= 4 * 3 for line in lines)  # three of the environment for each of four prompts
    assert max(line["logprob_diff"]["max"] for line in (lines[:1] if "--async" in more else lines)) < 1e-5
