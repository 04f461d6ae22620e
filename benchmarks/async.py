"""Measures what asynchronous rollouts gain, what their lag costs, and what their machinery costs.

    python benchmarks/async.py [--parts abc --steps 12 --curve-steps 40 --warm-up 3 --directory DIR]

All runs are of the laptop preset on this machine; ratios are of the same work, one run after the other.

(a) A scorer that is waited for, as a remote one is: it sleeps, on average as long in a step as the step computes, with
    a long tail (log-normal, sigma 1.5). Steps of asynchronous runs in the time of a synchronous one, at an equal batch,
    and the shares of time in which the policy waited for rollouts and in which the engine computed nothing. With both
    sides computing on the same processor the limit of the ratio is 2.
(b) Staleness 0 to 4 for the same number of trained rollouts: the mean reward of each tenth of the run, side by side,
    with the importance weights' effective sample size.
(c) No scorer sleeps and both sides compute on the same cores, so that nothing can overlap: seconds of an asynchronous
    step over those of a synchronous one. The limit is 1.05.

Prints one JSON object. Other programs on the machine disturb (a) and (c), and not (b).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.telemetry.metrics import read_metrics

LIMIT_S = 6 * 3600
RLCTL = str(Path(sys.executable).with_name("rlctl"))
FAST = ("--set", "refit.in_flight=keep", "--set", "rollouts.order=arrival")
SLEEPS = """
import hashlib, math, os, statistics, time
SIGMA = 1.5
def slow(completion, answer, prompt, **row):
    share = (int(hashlib.sha256((prompt + completion).encode()).hexdigest()[:12], 16) + 1) / (2**48 + 2)
    tail = math.exp(SIGMA * statistics.NormalDist().inv_cdf(share) - SIGMA**2 / 2)  # of mean 1
    time.sleep(float(os.environ["SLEEP_S"]) * tail)
    return 0.0
"""


def run(place: Path, name: str, steps: int, *more: str, sleep_s: float = 0.0) -> list[dict[str, Any]]:
    """Train the laptop preset; return the metrics of its steps."""
    command = [
        RLCTL, "train", "grpo", "--preset", "laptop", "--steps", str(steps), "--run-dir", str(place / name),
        "--set", "run.save_final=false", "--set", "run.checkpoint_every=0", "--set", "run.loggers=[]", "-q", *more,
    ]  # fmt: skip
    environment = {**os.environ, "SLEEP_S": str(sleep_s)}
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=sys.stderr, env=environment)
    return read_metrics(place / name / "metrics.jsonl")


def seconds(lines: list[dict[str, Any]], *phases: str) -> float:
    """Return the mean seconds a step of some phases."""
    return fmean(sum(line["seconds"][phase] for phase in phases) for line in lines)


def waited(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of a step, and the share of them in which each side did nothing."""
    total = seconds(lines, "total")
    idle = seconds(lines, "generation", "reward", "waiting") / total
    computing = fmean(line["system"]["engine_cpu_percent"] for line in lines) / 100
    return {"step_s": total, "policy_waits": idle, "engine_idle": max(0.0, 1 - computing)}


def scorer_that_sleeps(place: Path, steps: int, warm_up: int) -> dict[str, Any]:
    """Part (a)."""
    scorer = place / "slow.py"
    scorer.write_text(SLEEPS)
    reward = ("--reward", "task", "--reward", f"{scorer}:slow", "--set", "reward.timeout_s=600")
    lines = run(place, "a-awake", steps, *reward)[warm_up:]
    computing_s = seconds(lines, "total") - seconds(lines, "reward")
    sleep_s = computing_s / lines[0]["sampled_rollouts"]
    found: dict[str, Any] = {"computing_s": computing_s, "mean_sleep_s": sleep_s}
    found["synchronous"] = waited(run(place, "a-sync", steps, *reward, sleep_s=sleep_s)[warm_up:])
    for staleness in (1, 2):
        lag = ("--async", "--max-staleness", str(staleness), *FAST)
        lines = run(place, f"a-async-{staleness}", steps, *reward, *lag, sleep_s=sleep_s)
        # The last steps begin no groups that no step trains on, and are not like the others.
        steady = waited(lines[warm_up : len(lines) - staleness])
        steady["times_the_steps"] = found["synchronous"]["step_s"] / steady["step_s"]
        found[f"asynchronous, staleness {staleness}"] = steady
    return found


def cost_of_lag(place: Path, steps: int) -> dict[str, Any]:
    """Part (b)."""
    found = {}
    for staleness in range(5):
        lines = run(place, f"b-{staleness}", steps, "--async", "--max-staleness", str(staleness))
        tenths = [lines[i : i + max(1, steps // 10)] for i in range(0, steps, max(1, steps // 10))]
        effective = [line["importance"]["effective"] for line in lines if "importance" in line]
        found[f"staleness {staleness}"] = {
            "reward": [round(fmean(line["reward_mean"] for line in part), 3) for part in tenths],
            "effective_sample_size": round(fmean(effective), 4),
            "mean_staleness": fmean(line["staleness"]["mean"] for line in lines),
        }
    return found


def overhead(place: Path, steps: int, warm_up: int) -> dict[str, float]:
    """Part (c)."""
    plain = seconds(run(place, "c-sync", steps)[warm_up:], "total")
    lines = run(place, "c-async", steps, "--async")
    overlapped = seconds(lines[warm_up:-1], "total")
    return {"synchronous_s": plain, "asynchronous_s": overlapped, "ratio": overlapped / plain, "limit": 1.05}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="abc")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run of (a) and (c)")
    parser.add_argument("--curve-steps", type=int, default=40, help="steps of each run of (b)")
    parser.add_argument("--warm-up", type=int, default=3, help="first steps that are not counted in (a) and (c)")
    parser.add_argument("--directory", type=Path, help="keep the runs here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = given.directory or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"cores": os.cpu_count(), "steps": given.steps}
        if "a" in given.parts:
            found["a"] = scorer_that_sleeps(place, given.steps, given.warm_up)
        if "b" in given.parts:
            found["b"] = cost_of_lag(place, given.curve_steps)
        if "c" in given.parts:
            found["c"] = overhead(place, given.steps, given.warm_up)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
