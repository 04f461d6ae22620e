"""Trains the laptop preset with several seeds under several algorithms, and prints rewards before and after as a table.

    python benchmarks/algorithms.py [--algorithms grpo dapo gspo rloo] [--seeds 0 1 2] [--steps N] [--out DIR]
    python benchmarks/algorithms.py --algorithms grpo --backends megatron dtensor --plot rewards.svg --out DIR

Runs follow one another through `rlctl train grpo --preset laptop`. A finished run is not made again, and one that
was ended goes on. `before` and `after` are the mean rewards of the first and the last `--window` steps, of all rollouts
that were sampled. Prints Markdown, and exits with 1 where a mean did not rise. `--plot` draws the mean reward of each
step: a chart a seed, and a line an algorithm and backend.
"""

from __future__ import annotations

import argparse
import html
import itertools
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.report.charts import ticks
from rlctl.telemetry.metrics import read_metrics

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, BETWEEN = 250, 170, 40, 26, 24, 14
COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea")
"""Lines of one color each, the first drawn widest, so that lines that coincide are all seen."""


@dataclass(frozen=True)
class Way:
    """An algorithm, on a backend where one is named."""

    algorithm: str
    backend: str | None

    def __str__(self) -> str:
        return self.algorithm if self.backend is None else f"{self.algorithm}, {self.backend}"


def main() -> int:
    """Make the runs and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "dapo", "gspo", "rloo"])
    parser.add_argument("--backends", nargs="+", default=[None])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("further", nargs="*", metavar="KEY=VALUE", help="Keys that all runs set.")
    given = parser.parse_args()
    ways = [Way(*pair) for pair in itertools.product(given.algorithms, given.backends)]
    print(f"`rlctl train grpo --preset laptop --algorithm NAME --seed N --steps {given.steps}`\n", flush=True)
    print("| algorithm | " + " | ".join(f"seed {seed}" for seed in given.seeds) + " | before | after | rollouts |")
    print("|---" * (len(given.seeds) + 4) + "|", flush=True)
    risen, curves = True, {}
    for way in ways:
        runs = [metrics(way, seed, given) for seed in given.seeds]
        curves[str(way)] = rewards = [[line["reward_mean"] for line in lines] for lines in runs]
        pairs = [(statistics.fmean(one[: given.window]), statistics.fmean(one[-given.window :])) for one in rewards]
        before, after = (statistics.fmean(values) for values in zip(*pairs, strict=True))
        cells = [f"{first:.3f} -> {last:.3f}" for first, last in pairs]
        sampled = sum(line["sampled_rollouts"] for lines in runs for line in lines)
        print(f"| {way} | {' | '.join(cells)} | {before:.3f} | {after:.3f} | {sampled:,} |", flush=True)
        risen = risen and after > before
    if given.plot:
        given.plot.write_text(plot(curves, given.seeds))
    return 0 if risen else 1


def metrics(way: Way, seed: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Make one run, or what is left of it; return the metrics of its steps."""
    directory = given.out / "-".join([way.algorithm, *([way.backend] if way.backend else []), str(seed)])
    path = directory / "metrics.jsonl"
    lines = read_metrics(path) if path.exists() else []
    if len(lines) < given.steps:
        begun = ["--resume"] if lines else ["--preset", "laptop", "--algorithm", way.algorithm, "--seed", str(seed)]
        begun += ["--backend", way.backend] if way.backend and not lines else []
        command = ["rlctl", "train", "grpo", *begun, "--steps", str(given.steps), "--run-dir", str(directory)]
        command += given.further if not lines else []
        print(shlex.join(command), file=sys.stderr, flush=True)
        subprocess.run(command, check=True, stdout=sys.stderr)
        lines = read_metrics(path)
    return lines


def plot(curves: dict[str, list[list[float]]], seeds: Sequence[int]) -> str:
    """Draw mean rewards over the steps as SVG: a chart a seed, side by side, with one scale for all."""
    highest = max(value for runs in curves.values() for run in runs for value in run)
    steps = max(len(run) for runs in curves.values() for run in runs)
    whole = LEFT + len(seeds) * (WIDTH + BETWEEN)

    def at(chart: int, step: float, value: float) -> tuple[float, float]:
        x = LEFT + chart * (WIDTH + BETWEEN) + (step - 1) / max(1, steps - 1) * WIDTH
        return x, TOP + (1 - value / (1.05 * highest)) * HEIGHT

    drawn = [f'<rect width="{whole}" height="{TOP + HEIGHT + BOTTOM}" fill="#fff"/>']
    for value in ticks(0.0, highest):
        left, right = at(0, 1, value), at(len(seeds) - 1, steps, value)
        drawn.append(f'<path d="M{left[0]:.1f} {left[1]:.1f}H{right[0]:.1f}" stroke="#dfe3e8"/>')
        drawn.append(text(f"{value:g}", LEFT - 6, left[1] + 4, "end"))
    for chart, seed in enumerate(seeds):
        drawn += [text(str(step), at(chart, step, 0)[0], TOP + HEIGHT + 16, "middle") for step in (1, steps)]
        drawn.append(text(f"seed {seed}", at(chart, (1 + steps) / 2, 0)[0], TOP + HEIGHT + 16, "middle"))
        for number, runs in enumerate(curves.values()):
            places = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(chart, i + 1, v) for i, v in enumerate(runs[chart])))
            wide = 2 + 3 * (len(curves) - 1 - number)
            drawn.append(
                f'<path d="M{places}" fill="none" stroke="{COLORS[number % len(COLORS)]}" stroke-width="{wide}" '
                'stroke-linejoin="round"/>'
            )
    for number, name in enumerate(curves):
        x = LEFT + number * 150
        drawn.append(f'<path d="M{x} 13h22" stroke="{COLORS[number % len(COLORS)]}" stroke-width="4"/>')
        drawn.append(text(name, x + 28, 17, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {TOP + HEIGHT + BOTTOM}" role="img" '
        f'font-family="system-ui,sans-serif" font-size="11"><title>Mean reward of {steps} steps</title>'
        + "".join(drawn)
        + "</svg>\n"
    )


def text(content: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#5b6570">{html.escape(content)}</text>'


if __name__ == "__main__":
    sys.exit(main())
