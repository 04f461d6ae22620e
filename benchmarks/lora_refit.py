"""Measures refits of adapters: merged weights, adapters merged by the engine (delta), and adapters added to products.

    python benchmarks/lora_refit.py [--model DIR] [--rank 16] [--steps 4] [--rounds 2]

Each way of `training.lora.refit` trains the laptop preset with the real command, in turns, so that other work falls on
all of them. Prints one JSON object: bytes that policy ranks sent in a refit and their ratio to the adapters, median
seconds of a refit, of its phase (with comparing a sample of tensors), of generation and of a step without validation,
and the ratio of each way's refit to `merged`. The first two steps of each run are left out of the medians: the first
refit sends the base, and the next works out views. The limits are a fifth of the merged refit (the aim is a tenth) and
twice the adapters' bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

WAYS = ("merged", "delta", "adapters")
LIMIT_S = 1800


def train(way: str, directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with one way; return the lines of the metrics."""
    rlctl = str(Path(sys.executable).with_name("rlctl"))
    command = [rlctl, "train", "grpo", "--preset", "laptop", "--lora", str(options.rank), "--steps", str(options.steps)]
    sets = [
        f"training.lora.refit={way}",
        "validation.at_start=false",
        "validation.at_end=false",
        "run.save_final=false",
    ]
    command += [word for value in sets for word in ("--set", value)]
    command += ["--model", options.model] if options.model else []
    subprocess.run(
        [*command, "--run-dir", str(directory)], check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL,
        stderr=(directory.parent / f"{directory.name}.log").open("w"),
    )  # fmt: skip
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def adapter_bytes(rank: int) -> float:
    """Return the bytes of the adapters of SmolLM2-135M in float32: r (I + O) of each layer, with one A for q, k and v
    and one for gate and up."""
    hidden, kv, ffn, layers = 576, 192, 1536, 30
    elements = (hidden + hidden + 2 * kv) + 2 * hidden + (hidden + 2 * ffn) + (ffn + hidden)
    return 4.0 * rank * layers * elements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory; default: the laptop preset's SmolLM2-135M")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    loads, lines = [os.getloadavg()[0]], defaultdict[str, list[dict[str, Any]]](list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for way in WAYS:
                lines[way] += train(way, Path(folder) / f"{way}-{number}", options)[2:]
                loads.append(os.getloadavg()[0])
    report: dict[str, Any] = {"load": loads, "rank": options.rank, "steps": len(lines[WAYS[0]])}
    for way in WAYS:
        seconds = [line["seconds"] for line in lines[way]]
        report[way] = {
            "bytes": lines[way][-1]["refit_bytes"],
            "refit_s": statistics.median(sum(line["refit_seconds"].values()) for line in lines[way]),
            "phase_s": statistics.median(line["refit"] for line in seconds),
            "generation_s": statistics.median(line["generation"] for line in seconds),
            "step_s": statistics.median(line["total"] - line.get("validation", 0.0) for line in seconds),
            "logprob_diff_max": max(line["logprob_diff"]["max"] for line in lines[way]),
        }
        report[way]["of_merged"] = report[way]["refit_s"] / report["merged"]["refit_s"]
        if not options.model:
            report[way]["of_adapter_bytes"] = report[way]["bytes"] / adapter_bytes(options.rank)
    report["limits"] = {"of_merged": 0.2, "of_adapter_bytes": 2.0}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
