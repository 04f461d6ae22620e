"""The crew: six small training runs that tests read and none changes, each made when a test first asks for it.

A test of what a run writes reads one of them. A test that needs other settings, a signal or a resume copies it
(`support.runs.cut_after`) or starts a run of its own, and is slow.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlctl import cli
from rlctl.commands.output import JsonMode
from support.runs import REWARD, command, finish
from support.vision_models import square, write_vision_model

Recorded = tuple[Path, subprocess.CompletedProcess[str]]
"""The directory of a run and what it printed."""
Crew = Callable[[str], Recorded]

TOYS = Path(__file__).with_name("toy_environments.py")
ASYNC = ("--async", "--max-staleness", "1", "--set", "run.checkpoint_every=1")
EVEN = ("--env", f"{TOYS}:Even", "--set", "environment.turns=3", "--set", "run.checkpoint_every=1")
COLORS = ("red", "green", "blue", "yellow")
SIZES = ((64, 64), (96, 48), (40, 100), (70, 70))


def playing(model: Path, run_dir: Path, *more: str) -> list[str]:
    """The command of a run on an environment in place of data and rewards."""
    words = command(model, run_dir, *EVEN, *more)
    return [*words, "--set", "data.name=null", "--set", "data.params={}", "--set", "reward.terms=[]"]


def write_image_rows(folder: Path) -> Path:
    """Rows with one image, two and none."""
    rows = []
    for number in range(8):
        color, size = COLORS[number % 4], SIZES[number % 4]
        square(color, size).save(folder / f"{number}.png")
        images = {0: {}, 1: {"image": f"{number}.png"}, 2: {"images": [f"{number}.png", "0.png"]}}[number % 3]
        rows.append({"prompt": f"what color is square {number}?", "answer": color, **images})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def on_images(model: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    """The command of a run on the rows of `write_image_rows`."""
    reward = data.parent / "reward.py"
    reward.write_text(REWARD)
    return [
        str(Path(sys.executable).with_name("rlctl")), "train", "grpo", "--model", str(model), "--data", str(data),
        "--reward", f"{reward}:even", "--gpu", "cpu", "--prompts", "4", "--generations", "4", "--max-new-tokens", "6",
        "--lr", "1e-3", "--seed", "1", "--run-dir", str(run_dir), "--set", "run.checkpoint_every=2",
        "--set", "training.threads=1", "--set", "generation.threads=1", *more,
    ]  # fmt: skip


def on_texts(model: Path, folder: Path, run_dir: Path) -> list[str]:
    sums = [(first, second) for first in range(6) for second in (3, 7)]
    rows = [{"prompt": f"What is {a} + {b}?", "completion": f"It is {a + b}."} for a, b in sums]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "rlctl", "train", "sft", "--model", str(model), "--data", str(folder / "texts.jsonl"), "--gpu", "cpu",
        "--set", "training.threads=1", "--seed", "1", "--set", "model.convert=false", "--lr", "3e-3", "--steps", "5",
        "--batch-size", "4", "--max-length", "96", "--run-dir", str(run_dir), "--set", "validation.holdout=3",
        "--set", "validation.every=2", "--set", "validation.at_start=true", "--set", "training.dp=2",
        "--backend", "dtensor", "--set", "run.checkpoint_every=3",
    ]  # fmt: skip


def run_in_process(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `rlctl` in the process of the tests, in their Ray session."""
    JsonMode.wanted = JsonMode.printed = False
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(arguments[1:])
    JsonMode.wanted = JsonMode.printed = False
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def crew(placement: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Crew:
    """Name of a run (sync, async, dtensor, sft, environment, images) -> the run."""
    place = tmp_path_factory.mktemp("crew")

    def arguments(name: str, folder: Path) -> list[str]:
        run_dir = folder / "run"
        if name == "sft":
            return on_texts(tiny_llama, folder, run_dir)
        if name == "images":
            model = write_vision_model(folder / "model", "idefics3")
            return on_images(model, write_image_rows(folder), run_dir, "--steps", "2", "--set", "training.dp=2")
        if name == "environment":
            return playing(tiny_llama, run_dir, "--set", "validation.every=2", "--set", "validation.max_prompts=2")
        more = {"async": ASYNC, "dtensor": ("--backend", "dtensor", "--steps", "2", "--set", "training.dp=2")}
        return command(tiny_llama, run_dir, *more[name])

    @cache
    def run(name: str) -> Recorded:
        folder = place / name
        folder.mkdir()
        done = run_in_process(arguments(name, folder))
        assert done.returncode == 0, done.stderr
        return folder / "run", done

    return run


@pytest.fixture(scope="session")
def uninterrupted(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The crew's synchronous run, by the installed command in separate processes."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = finish(command(tiny_llama, run_dir, "--json"))
    assert done.returncode == 0, done.stderr
    return run_dir, done
