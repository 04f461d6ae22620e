"""Asks whether the demo's gain is more than brevity: trains with room to finish, and scores prompts it never saw.

    python benchmarks/demo_gain.py [--steps 20 --max-new-tokens 64 --held-out 60 --directory DIR]

The demo has a token limit, so that a model that only learns to be brief gains too. Here the laptop preset
trains with a higher cap on some of the 200 sums and differences of two digits; the others are held out. Before and
after, the model completes the held-out prompts with the most likely tokens. Prints one JSON object: of the held-out
prompts the share that is right, the share that is cut off, the share that is right among those that were finished, and
the mean length, each before and after; and the same of the first and last fifth of the training steps, each with its
standard error. If the gain were brevity alone, what is right among the finished would stay as it was.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.telemetry.headline import change
from rlctl.telemetry.metrics import read_metrics

LIMIT_S = 3600
RLCTL = str(Path(sys.executable).with_name("rlctl"))


def sums() -> list[dict[str, str]]:
    """Return every sum and difference of two digits, in an order that is always the same."""
    question = "State the final answer to the following arithmetic problem: {} {} {} ="
    found = [
        {"prompt": question.format(a, sign, b), "answer": str(a + b if sign == "+" else a - b)}
        for a in range(10)
        for b in range(10)
        for sign in "+-"
    ]
    random.Random(0).shuffle(found)
    return found


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(data: Path, run: Path, steps: int, cap: int) -> list[dict[str, Any]]:
    """Train the laptop preset on a file; return the metrics of its steps."""
    command = [
        RLCTL, "train", "grpo", "--preset", "laptop", "--data", str(data), "--reward", "exact-match",
        "--set", "data.params={}", "--set", "reward.extract=last-number", "--steps", str(steps),
        "--max-new-tokens", str(cap), "--run-dir", str(run),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=sys.stderr)
    return read_metrics(run / "metrics.jsonl")


def scored(rows: list[dict[str, str]], prompts: Path, cap: int, *model: str) -> dict[str, float]:
    """Complete the held-out prompts greedily and score them by the last number of each completion."""
    command = [
        RLCTL, "generate", *model, "--prompts-file", str(prompts), "--temperature", "0", "--max-new-tokens", str(cap),
        "--json",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
    completions = [json.loads(line)["completions"][0] for line in done.stdout.splitlines()]
    right = [
        (re.findall(r"-?\d+", one["text"]) or [""])[-1] == row["answer"]
        for one, row in zip(completions, rows, strict=True)
    ]
    finished = [one["finish_reason"] == "stop" for one in completions]
    among = [good for good, ended in zip(right, finished, strict=True) if ended]
    return {
        "right": fmean(right),
        "cut_off": 1 - fmean(finished),
        "right_among_finished": fmean(among) if among else 0.0,
        "tokens": fmean(len(one["token_ids"]) for one in completions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--directory", type=Path, help="keep the run here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = given.directory or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        rows = sums()
        held, cap = rows[: given.held_out], given.max_new_tokens
        prompts = written(place / "held_out.jsonl", held)
        preset = ("--preset", "laptop", "--set", "data.params={}")
        before = scored(held, prompts, cap, *preset)
        lines = train(written(place / "train.jsonl", rows[given.held_out :]), place / "run", given.steps, cap)
        after = scored(held, prompts, cap, "--run-dir", str(place / "run"))
    names = ("reward_mean", "truncated_fraction", "response_tokens_mean")
    training = [asdict(found) for name in names if (found := change(lines, name))]
    shape = {"steps": given.steps, "max_new_tokens": cap, "held_out": len(held)}
    print(json.dumps({**shape, "before": before, "after": after, "training": training}, indent=2))


if __name__ == "__main__":
    main()
