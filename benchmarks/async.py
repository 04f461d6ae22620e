"""Measures what asynchronous rollouts gain, what their lag costs, and what their machinery costs.

    python benchmarks/async.py [--parts abcd --steps 12 --curve-steps 40 --pairs 20 --warm-up 3 --directory DIR]

All runs are of the laptop preset on this machine; ratios are of the same work.

(a) A scorer that is waited for, as a remote one is: it sleeps, on average as long in a step as the step computes, with
    a long tail (log-normal, sigma 1), and for each prompt as long in all runs. Steps of asynchronous runs in the time
    of a synchronous one, at an equal batch, and the shares of time in which the policy waited for rollouts and in which
    the engine computed nothing. With both sides computing on the same processor the limit of the ratio is 2.
(b) Staleness 0 to 4 for the same number of trained rollouts: the mean reward of each tenth of the run, side by side,
    with the importance weights' effective sample size. `--plot FILE` draws the curves.
(c) No scorer sleeps and both sides compute on the same cores, so that nothing can overlap: seconds of an asynchronous
    step over those of a synchronous one. One run takes both kinds of steps in turn, on the same prompts, so that what
    else the machine does falls on both. The limit is 1.05.
(d) The same for whole runs, each with the processor threads that its own plan gives both sides: synchronous and
    asynchronous runs in turn; how many steps the asynchronous ones take in the time of a synchronous step, and how many
    sampled tokens a second for one of a synchronous run (completions that end early arrive first). `--set`
    changes the asynchronous ones. The goal is 1.25.

Prints one JSON object. Other programs on the machine disturb (a), and not (b). Runs that DIR has are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from pictures import picture

import rlctl
from rlctl.report.charts import Series
from rlctl.rollouts.source import RolloutBatch
from rlctl.rollouts.synchronous import SynchronousSource
from rlctl.telemetry.metrics import read_metrics
from rlctl.training.loop import Loop

LIMIT_S = 6 * 3600
RLCTL = str(Path(sys.executable).with_name("rlctl"))
FAST = ("--set", "refit.in_flight=keep", "--set", "rollouts.order=arrival")
QUIET = {"run.save_final": False, "run.checkpoint_every": 0, "run.loggers": []}
SLEEPS = """
import collections, hashlib, math, os, statistics, time
SIGMA, GROUP = 1.0, 4
scored = collections.Counter()
def slow(completion, answer, prompt, **row):
    scored[prompt] += 1
    inside = (int(hashlib.sha256(prompt.encode()).hexdigest()[:12], 16) + 1) / (2**48 + 2)
    share = (scored[prompt] % GROUP + inside) / GROUP  # one of each quarter of the distribution
    tail = math.exp(SIGMA * statistics.NormalDist().inv_cdf(share) - SIGMA**2 / 2)  # of mean 1
    time.sleep(float(os.environ["SLEEP_S"]) * tail)
    return 0.0
"""


def run(place: Path, name: str, steps: int, *more: str, sleep_s: float = 0.0) -> list[dict[str, Any]]:
    """Train the laptop preset, unless that was done; return the metrics of its steps."""
    metrics = place / name / "metrics.jsonl"
    if metrics.exists() and len(lines := read_metrics(metrics)) == steps:
        return lines
    command = [
        RLCTL, "train", "grpo", "--preset", "laptop", "--steps", str(steps), "--run-dir", str(place / name),
        *(part for key, value in QUIET.items() for part in ("--set", f"{key}={json.dumps(value)}")), "-q", *more,
    ]  # fmt: skip
    environment = {**os.environ, "SLEEP_S": str(sleep_s)}
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=sys.stderr, env=environment)
    return read_metrics(metrics)


def seconds(lines: list[dict[str, Any]], *phases: str) -> float:
    """Return the mean seconds a step of some phases."""
    return fmean(sum(line["seconds"][phase] for phase in phases) for line in lines)


def waited(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of a step, and the share of them in which each side did nothing."""
    total = seconds(lines, "total")
    idle = seconds(lines, "generation", "reward", "waiting") / total
    computing = fmean(line["system"]["engine_cpu_percent"] for line in lines) / 100
    return {"step_s": total, "policy_waits": idle, "engine_idle": max(0.0, 1 - computing)}


def scorer_that_sleeps(place: Path, steps: int, warm_up: int, lags: list[int]) -> dict[str, Any]:
    """Part (a)."""
    scorer = place / "slow.py"
    scorer.write_text(SLEEPS)
    reward = ("--reward", "task", "--reward", f"{scorer}:slow", "--set", "reward.timeout_s=600")
    lines = run(place, "a-awake", steps, *reward)[warm_up:]
    computing_s = seconds(lines, "total") - seconds(lines, "reward")
    sleep_s = computing_s / lines[0]["sampled_rollouts"]
    found: dict[str, Any] = {"computing_s": computing_s, "mean_sleep_s": sleep_s}
    found["synchronous"] = waited(run(place, "a-sync", steps, *reward, sleep_s=sleep_s)[warm_up:])
    for staleness in lags:
        lag = ("--async", "--max-staleness", str(staleness), *FAST)
        lines = run(place, f"a-async-{staleness}", steps, *reward, *lag, sleep_s=sleep_s)
        # The last steps begin no groups that no step trains on, and are not like the others.
        steady = waited(lines[warm_up : len(lines) - staleness])
        steady["times_the_steps"] = found["synchronous"]["step_s"] / steady["step_s"]
        found[f"asynchronous, staleness {staleness}"] = steady
    return found


def cost_of_lag(place: Path, steps: int, plot: Path | None) -> dict[str, Any]:
    """Part (b)."""
    found, curves = {}, list[Series]()
    for staleness in range(5):
        lines = run(place, f"b-{staleness}", steps, "--async", "--max-staleness", str(staleness))
        tenths = [lines[i : i + max(1, steps // 10)] for i in range(0, steps, max(1, steps // 10))]
        effective = [line["importance"]["effective"] for line in lines if "importance" in line]
        found[f"staleness {staleness}"] = {
            "reward": [round(fmean(line["reward_mean"] for line in part), 3) for part in tenths],
            "effective_sample_size": round(fmean(effective), 4),
            "mean_staleness": fmean(line["staleness"]["mean"] for line in lines),
        }
        points = [(float(line["step"]), line["reward_mean"]) for line in lines]
        curves.append(Series(f"staleness {staleness}", points, staleness))
    if plot is not None:
        label = "mean reward of each step, for five bounds of staleness"
        plot.write_text(picture([("mean reward", curves)], steps, label))
    return found


class BothKinds(Loop):
    """Takes steps of synchronous and of asynchronous rollouts in turn, each kind on the same prompts."""

    plain: SynchronousSource | None = None

    @staticmethod
    def is_plain(step: int) -> bool:
        """Whether a step, counted from 1, is synchronous: which kind is first changes from pair to pair."""
        return step % 4 in (0, 1)

    def sample(self) -> RolloutBatch:
        source: Any = self.parts.source
        self.plain = self.plain or SynchronousSource(
            self.config, source._prompts, source._engines, source._groups._rewards, self.parts.sync, self.parts.timer
        )
        return (self.plain if self.is_plain(self.step + 1) else source).next(self.version)


def overhead(place: Path, pairs: int, warm_up: int) -> dict[str, Any]:
    """Part (c)."""
    steps = 2 * (warm_up + pairs)
    values = {**QUIET, "run.dir": str(place / "c"), "run.steps": steps, "rollouts.mode": "async"}
    rlctl.train(rlctl.load_config("laptop", values=values), quiet=True, loop=BothKinds)
    lines = read_metrics(place / "c" / "metrics.jsonl")[2 * warm_up :]
    kinds = [[line for line in lines if BothKinds.is_plain(line["step"]) is plain] for plain in (True, False)]
    plain_s, overlapped_s = ([line["seconds"]["total"] for line in kind] for kind in kinds)
    ratios = [overlapped / plain for plain, overlapped in zip(plain_s, overlapped_s, strict=True)]
    phases = [{name: round(seconds(kind, name), 3) for name in kind[0]["seconds"]} for kind in kinds]
    return {
        "pairs": pairs,
        "synchronous": phases[0],
        "asynchronous": phases[1],
        "ratio": median(ratios),
        "quartiles": quantiles(ratios, n=4)[::2],
        "ratio_of_sums": sum(overlapped_s) / sum(plain_s),
        "limit": 1.05,
        "load": os.getloadavg(),
    }


def whole_runs(place: Path, steps: int, repeats: int, changes: list[str]) -> dict[str, Any]:
    """Part (d)."""
    changed = [part for change in changes for part in ("--set", change)]
    ways: dict[str, tuple[str, ...]] = {"synchronous": (), "asynchronous": ("--async", *FAST, *changed)}
    lines = {way: list[dict[str, Any]]() for way in ways}
    for repeat in range(repeats):
        for way, more in ways.items():
            taken = run(place, f"d-{way}-{repeat}", steps, *more)
            lines[way] += taken[1 : len(taken) - 1]  # the last asynchronous step overlaps with no rollouts
    seconds_of = {way: [line["seconds"]["total"] for line in taken] for way, taken in lines.items()}
    plain, overlapped = (median(values) for values in seconds_of.values())
    phases = {way: {n: round(seconds(taken, n), 3) for n in taken[0]["seconds"]} for way, taken in lines.items()}
    plain_rate, overlapped_rate = (
        sum(line["response_tokens_mean"] * line["sampled_rollouts"] for line in taken) / sum(seconds_of[way])
        for way, taken in lines.items()
    )
    tokens = {"times_the_sampled_tokens": overlapped_rate / plain_rate}
    return {**phases, "times_the_steps": plain / overlapped, **tokens, "goal": 1.25, "load": os.getloadavg()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="abcd")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run of (a)")
    parser.add_argument("--curve-steps", type=int, default=40, help="steps of each run of (b)")
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2], help="bounds of staleness of (a)")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps of (c)")
    parser.add_argument("--warm-up", type=int, default=3, help="first steps of (a), and pairs of (c), not counted")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each kind of (d)")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], help="KEY=VALUE of asynchronous runs of (d)"
    )
    parser.add_argument("--plot", type=Path, help="write the curves of (b) here, as SVG")
    parser.add_argument("--directory", type=Path, help="keep the runs here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = given.directory or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"cores": os.cpu_count(), "steps": given.steps}
        if "a" in given.parts:
            found["a"] = scorer_that_sleeps(place, given.steps, given.warm_up, given.lags)
        if "b" in given.parts:
            found["b"] = cost_of_lag(place, given.curve_steps, given.plot)
        if "c" in given.parts:
            found["c"] = overhead(place, given.pairs, given.warm_up)
        if "d" in given.parts:
            found["d"] = whole_runs(place, given.steps, given.repeats, given.changes)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
