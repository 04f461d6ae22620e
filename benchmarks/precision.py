"""Trains the laptop preset in several number formats, and prints what each of them learned.

    python benchmarks/precision.py --directory DIR [--formats float32,nearest,unbiased,float16]
                                   [--backends megatron,dtensor] [--seeds 0,1,2] [--steps 12] [--lr 1e-5]

`nearest` and `unbiased` are bfloat16 with `optimizer.rounding` set to that. Each run keeps its directory in DIR, and a
run that is there already is not repeated, so that the command can be given again after an interruption. Prints one JSON
object: for each format and backend the mean reward of the last four steps, the share of 80 other questions (4 samples
each) that the trained policy gets right, its entropy at the end, the mean difference between the log-probs of engine
and trainer, and what arrived in the engine, a value for each seed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.telemetry.metrics import read_metrics

LIMIT_S = 7200
RLCTL = str(Path(sys.executable).with_name("rlctl"))
FORMATS = {
    "float32": ("float32", "unbiased"),
    "nearest": ("bfloat16", "nearest"),
    "unbiased": ("bfloat16", "unbiased"),
    "float16": ("float16", "unbiased"),
}
LAST = 4


def train(run: Path, form: str, backend: str, seed: int, steps: int, lr: float) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps; train it where it is not there."""
    metrics = run / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    if len(lines) >= steps and "validation" in lines[-1]:
        return lines
    shutil.rmtree(run, ignore_errors=True)
    dtype, rounding = FORMATS[form]
    values = {
        "model.dtype": dtype, "optimizer.rounding": rounding, "validation.at_end": "true",
        "validation.max_prompts": 80, "validation.samples": 4, "validation.temperature": 1,
    }  # fmt: skip
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command = [
        RLCTL, "train", "grpo", "--preset", "laptop", "--backend", backend, "--seed", str(seed), "--steps", str(steps),
        "--lr", str(lr), "--run-dir", str(run), "--quiet", *settings,
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=sys.stderr)
    return read_metrics(metrics)


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is shown of one run."""
    return {
        "reward": round(fmean(line["reward_mean"] for line in lines[-LAST:]), 3),
        "held_out": lines[-1]["validation"]["reward_mean"],
        "entropy": lines[-1]["entropy"],
        "logprob_diff": round(fmean(line["logprob_diff"]["mean"] for line in lines if "logprob_diff" in line), 5),
        "rounding": lines[-1].get("rounding"),
        "rewards": [round(line["reward_mean"], 3) for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="keep the runs here")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--backends", default="megatron,dtensor")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-5)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for seed in given.seeds.split(","):
        for backend in given.backends.split(","):
            for form in given.formats.split(","):
                run = given.directory / f"{form}-{backend}-{seed}"
                lines = train(run, form, backend, int(seed), given.steps, given.lr)
                found.setdefault(f"{form}, {backend}", {})[seed] = summary(lines)
    print(json.dumps({"steps": given.steps, "lr": given.lr, "runs": found}, indent=2))


if __name__ == "__main__":
    main()
