"""The model of the preset laptop-vision: a tiny model that answers questions about pictures at random.

A child process makes it on first use (`python -m rlctl.preparation.laptop_vision DST`) from random weights. Supervised
training on descriptions of pictures teaches it to see; training on questions with random valid answers teaches it the
format of answers.
"""

from __future__ import annotations

import importlib.util
import io
import random
import sys
from pathlib import Path
from typing import Any

from rlctl.checkpoints.model_files import ModelFiles, Tell
from rlctl.data.drawn_shapes import QUESTIONS, SIDE, picture
from rlctl.data.image_sources import IMAGE
from rlctl.errors import MachineError, install_extra
from rlctl.preparation.cached_models import kept, run
from rlctl.tiny_models import vision as tiny_vision

NAME = "rlctl/drawn-shapes-tiny"
LABEL = "drawn-shapes-tiny-1"
NOTE = "made on this machine; it reads images, and all of it is trained, by the backend dtensor"
FAMILY, PATCH = "idefics3", 16
SEED = 1_000_000
"""Seed of the training pictures, far from the usual seeds of runs."""
PICTURES, BATCH, LR = 1024, 32, 1e-3
DESCRIBING, ANSWERING = 400, 80
"""Training steps on descriptions, and training steps on random answers."""
DESCRIBE, END = "Describe.", "<|im_end|>"
IGNORED = -100
"""Label of a token without a loss in transformers."""


def supply_vision(name: str | None, tell: Tell) -> ModelFiles | None:
    """Return the preset's model, made on first use; None for other names."""
    if name != NAME:
        return None
    return ModelFiles(kept(LABEL, lambda _, built: _make(built, tell), {"source": "random weights"}, tell), NAME, NOTE)


def _make(built: Path, tell: Tell) -> None:
    missing = [name for name in ("torch", "transformers", "PIL") if not importlib.util.find_spec(name)]
    if missing:
        hint = f"Install the extra `cpu` ({install_extra('cpu')})."
        raise MachineError(f"Making {NAME} needs {', '.join(missing)}.", hint)
    tell(f"{NAME}: making a tiny vision-language model, and teaching it the form of answers (once, about a minute)")
    run([sys.executable, "-P", "-m", "rlctl.preparation.laptop_vision", str(built)], f"making {NAME}", "Run it again.")


def write(directory: Path) -> None:
    """Make and train the model, and save all its files."""
    import torch

    torch.set_num_threads(1)  # as fast as two threads at this size, and less sensitive to other processes
    answers = [word for words in QUESTIONS.values() for word in words]
    words = ["user assistant", DESCRIBE, *QUESTIONS, *answers]
    assert SIDE == tiny_vision.SIDE
    tiny_vision.write_vision_model(directory, FAMILY, tiles=1, patch=PATCH, words=words)
    _teach(directory)


def _teach(directory: Path) -> None:
    """Train on descriptions, and then on random answers. After it, the model gives each answer to a question equally
    often, for any picture."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(directory)
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    pictures = [picture(SEED, index) for index in range(PICTURES)]
    images = [[Image.open(io.BytesIO(drawing.png))] for drawing in pictures]
    prompts = {question: _prompt(processor, question, images[0]) for question in (DESCRIBE, *QUESTIONS)}
    pixels = processor(text=[processor.image_token] * PICTURES, images=images, return_tensors="pt")["pixel_values"]
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0), random.Random(SEED)
    for step in range(DESCRIBING + ANSWERING):
        chosen = rng.sample(range(PICTURES), BATCH)
        if step < DESCRIBING:
            turns = [(DESCRIBE, pictures[index].description) for index in chosen]
        else:
            turns = [(question := pictures[index].question, rng.choice(QUESTIONS[question])) for index in chosen]
        answers = [processor.tokenizer(text + END, add_special_tokens=False).input_ids for _, text in turns]
        beginnings = [prompts[question] for question, _ in turns]
        rows = {"input_ids": [prompt + answer for prompt, answer in zip(beginnings, answers, strict=True)]}
        inputs = processor.tokenizer.pad(rows, padding_side="left", return_tensors="pt")
        labels = inputs["input_ids"].clone()
        for row_T, answer in zip(labels, answers, strict=True):
            row_T[: -len(answer)] = IGNORED
        loss = model(**inputs, pixel_values=pixels[chosen], labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(directory)


def _prompt(processor: Any, question: str, image: list[Any]) -> list[int]:
    """Return the tokens of a prompt. All images have the same size, so one image serves for all prompts."""
    content = [{"type": IMAGE}, {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(text=[text], images=[image]).input_ids[0]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
