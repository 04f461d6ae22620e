"""Trains the laptop preset with several seeds under several algorithms, and prints rewards before and after as a table.

    python benchmarks/algorithms.py [--algorithms grpo dapo gspo rloo] [--seeds 0 1 2] [--steps N] [--out DIR]

Runs follow one another through `rlctl train grpo --preset laptop`. A finished run is not made again, and one that
was ended goes on. `before` and `after` are the mean rewards of the first and the last `--window` steps, of all rollouts
that were sampled. Prints Markdown, and exits with 1 where an algorithm's mean did not rise.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from rlctl.telemetry.metrics import read_metrics


def main() -> int:
    """Make the runs and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "dapo", "gspo", "rloo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("further", nargs="*", metavar="KEY=VALUE", help="Keys that all runs set.")
    given = parser.parse_args()
    print(f"`rlctl train grpo --preset laptop --algorithm NAME --seed N --steps {given.steps}`\n", flush=True)
    print("| algorithm | " + " | ".join(f"seed {seed}" for seed in given.seeds) + " | before | after | rollouts |")
    print("|---" * (len(given.seeds) + 4) + "|", flush=True)
    risen = True
    for algorithm in given.algorithms:
        runs = [rewards(algorithm, seed, given) for seed in given.seeds]
        pairs = [(statistics.fmean(run[: given.window]), statistics.fmean(run[-given.window :])) for run, _ in runs]
        before, after = (statistics.fmean(values) for values in zip(*pairs, strict=True))
        cells = [f"{first:.3f} -> {last:.3f}" for first, last in pairs]
        sampled = sum(count for _, count in runs)
        print(f"| {algorithm} | {' | '.join(cells)} | {before:.3f} | {after:.3f} | {sampled:,} |", flush=True)
        risen = risen and after > before
    return 0 if risen else 1


def rewards(algorithm: str, seed: int, given: argparse.Namespace) -> tuple[list[float], int]:
    """Make one run, or what is left of it; return the mean reward of each step, and the number of rollouts."""
    directory = given.out / f"{algorithm}-{seed}"
    metrics = directory / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    if len(lines) < given.steps:
        begun = ["--resume"] if lines else ["--preset", "laptop", "--algorithm", algorithm, "--seed", str(seed)]
        command = ["rlctl", "train", "grpo", *begun, "--steps", str(given.steps), "--run-dir", str(directory)]
        command += given.further if not lines else []
        print(shlex.join(command), file=sys.stderr, flush=True)
        subprocess.run(command, check=True, stdout=sys.stderr)
        lines = read_metrics(metrics)
    return [line["reward_mean"] for line in lines], sum(line["sampled_rollouts"] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
