"""The preset laptop-vision: its model, a run with nothing else given, and what people look at afterwards."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rlctl.data.drawn_shapes import QUESTIONS, picture
from rlctl.preparation.laptop_vision import LABEL, NAME
from rlctl.preparation.open_model import find_model
from support.runs import results

RLCTL = str(Path(sys.executable).with_name("rlctl"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: Any) -> Path:
    """A cache with the model, which the runs of this file share."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLCTL_CACHE_DIR", str(folder))
        assert find_model(NAME, images=True).directory == folder / "models" / LABEL
    return folder


class Answers:
    """The model in transformers."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self._model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self._processor: Any = AutoProcessor.from_pretrained(directory)

    def to(self, question: str, png: bytes, tokens: int = 4) -> list[int]:
        """The most likely tokens."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = self._processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self._processor(text=[text], images=[[Image.open(io.BytesIO(png))]], return_tensors="pt")
        found = self._model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        return found[0, inputs["input_ids"].shape[1] :].tolist()

    def text(self, tokens: list[int]) -> str:
        return self._processor.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
def test_the_model_answers_at_random_in_the_right_form(cache: Path) -> None:
    shown, asked = [picture(7, index) for index in range(120)], Answers(cache / "models" / LABEL)
    answers = [asked.text(asked.to(one.question, one.png)) for one in shown]
    assert sum(answer in QUESTIONS[one.question] for answer, one in zip(answers, shown, strict=True)) > 110
    right = sum(answer == one.answer for answer, one in zip(answers, shown, strict=True))
    assert 0.1 < right / len(shown) < 0.45


@pytest.mark.slow
def test_the_preset_needs_nothing_else(here: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(cache))
    run, model = tmp_path / "run", cache / "models" / LABEL
    more = ["--steps", "2", "--prompts", "8", "--set", "validation.max_prompts=8", "--run-dir", str(run)]
    done = here([RLCTL, "train", "grpo", "--preset", "laptop-vision", *more])
    assert done.returncode == 0, done.stderr
    assert f"--run-dir {run} --image FILE --prompt" in done.stdout
    lines = results(run)
    assert all(line["logprob_diff"]["max"] < 1e-5 for line in lines)
    assert [line["images"] for line in lines] == [8, 8]
    assert "accuracy" in lines[-1]["validation"]

    # The images of the run's own pictures stand next to the completions.
    done = here([RLCTL, "samples", str(run), "--step", "1", "-n", "1", "--json"])
    [sample] = json.loads(done.stdout)["rollouts"]
    [image] = sample["images"]
    thumbnail = Image.open(io.BytesIO(base64.b64decode(image["thumbnail"].partition(",")[2])))
    pictures = (Image.open(io.BytesIO(picture(0, index).png)) for index in range(2000))
    assert any(thumbnail.tobytes() == one.tobytes() for one in pictures)
    assert "image of 64 x 64 pixels" in here([RLCTL, "rollouts", str(run)]).stdout
    assert (run / "report.html").read_text().count("<img src=") >= 4

    # generate says what transformers says, and eval scores images of other seeds.
    shown = picture(5, 0)
    (tmp_path / "shown.png").write_bytes(shown.png)
    asked = ["--image", str(tmp_path / "shown.png"), "--prompt", shown.question, "--max-new-tokens", "4"]
    done = here([RLCTL, "generate", "--model", str(model), *asked, "--temperature", "0", "--gpu", "cpu", "--json"])
    assert done.returncode == 0, done.stderr
    expected = Answers(model).to(shown.question, shown.png)
    assert json.loads(done.stdout)["completions"][0]["token_ids"] == expected
    rows = [{"prompt": one.question, "image": "shown.png", "answer": one.answer} for one in (shown, shown)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = ["--task", "drawn-shapes", "--task", str(tmp_path / "rows.jsonl"), "--limit", "6"]
    done = here([RLCTL, "eval", "--run-dir", str(run), "--model", str(model), *tasks, "--json"])
    assert done.returncode == 0, done.stderr
    found = [(one["task"], one["model"]) for one in json.loads(done.stdout)["tasks"]]
    models = ["run step 2", LABEL]
    assert found == [(task, one) for task in ("drawn-shapes", str(tmp_path / "rows.jsonl")) for one in models]
