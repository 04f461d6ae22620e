"""Measures the start of `rlctl train grpo` against its longest part alone, and its end.

    python benchmarks/start.py [--repeats 1] [--parts data ray engine policy whole resume]

The run is the laptop preset with one small step, its model in the cache and converted before. `data`, `ray`, `engine`
and `policy` are the parts of the start, each alone in a process of its own: reading model and data and planning, with
the imports of the command; Ray; the processes of an engine, and of a policy with its weights. `whole` is the command up
to the first step, and from the last step to its end; `resume` is the same for `--resume` on that run. Both have the
seconds of each phase. The ratio is the start over the longest part and Ray. Prints one JSON object, medians over the
repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

RUN = {"run.steps": 1, "batch.prompts": 2, "batch.generations": 4, "generation.max_new_tokens": 16}
PARTS = ("data", "ray", "engine", "policy", "whole", "resume")


def job_of_run() -> Any:
    """Prepare the run as its command does."""
    from rlctl.methods.configuration import resolve
    from rlctl.preparation.job import prepare_job

    return prepare_job(resolve("laptop", flags=RUN), starts=lambda config, plan, workers: None)


def data() -> float:
    import rlctl.jobs.train  # noqa: F401 - as the command does

    job_of_run()
    return time.time() - float(os.environ["BEGUN"])


def ray() -> float:
    from rlctl.cluster.ray_session import ray_session

    begun = time.time()
    with ray_session(gpus=0):
        return time.time() - begun


def processes(*, policy: bool) -> float:
    """Start the processes of the policy or of the engines alone, on a session that is there."""
    from rlctl.checkpoints.conversion.prepared_model import prepared
    from rlctl.cluster.ray_session import ray_session
    from rlctl.preparation.run_workers import start_engines, start_run_workers

    job = job_of_run()
    job = replace(job, base_model=prepared(job.base_model, job.dtype, 1, lambda text: None))
    spec, log_dir = replace(job.workers_spec(), reward=None), Path(tempfile.mkdtemp(prefix="rlctl-start-"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(ray_session(gpus=0))
        begun = time.time()
        if policy:
            load = lambda one, teacher: one.load_model(job.base_model.weights)  # noqa: E731
            stack.enter_context(start_run_workers(replace(spec, engines=None), log_dir, load=load))
        else:
            assert spec.engines is not None
            stack.enter_context(start_engines(spec.engines, job.config.cluster, log_dir))
        return time.time() - begun


def whole(*, resumed: bool) -> dict[str, float]:
    """Run the command, or resume a run that the command made; return seconds to its first step, and from its last one
    to its end, with their phases."""
    with tempfile.TemporaryDirectory(prefix="rlctl-start-") as work:
        keys = [part for key, value in RUN.items() for part in ("--set", f"{key}={value}")]
        begun = timed(["-p", "laptop", *keys, "--run-dir", f"{work}/run"], Path(work))
        if not resumed:
            return begun
        return {f"resume {name}": value for name, value in timed(
            ["--resume", "--run-dir", f"{work}/run", "--steps", "2"], Path(work)).items()}  # fmt: skip


def timed(arguments: list[str], work: Path) -> dict[str, float]:
    log = work / "run/logs/driver.log"
    known = len(log.read_text()) if log.exists() else 0
    command = [sys.executable, "-m", "rlctl", "train", "grpo", *arguments]
    begun = time.time()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        found: dict[str, float] = {}
        for line in run.stderr:
            if "started in" in line:
                found["start"] = time.time() - begun
            elif re.search(r" step \d+/\d+ ", line):
                found["end"] = -time.time()
    found["end"] += time.time()
    if run.returncode:
        raise SystemExit(f"the run failed with {run.returncode}: see {command}")
    phases = re.findall(r"\d\d:\d\d:\d\d ([a-z][^:]+): ([\d.]+) s\n", log.read_text()[known:])
    return found | {f"phase: {what}": float(value) for what, value in phases}


def measured(part: str) -> dict[str, float]:
    if part in ("whole", "resume"):
        return whole(resumed=part == "resume")
    environment = os.environ | {"BEGUN": str(time.time())}
    command = [sys.executable, __file__, "--part", part]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return {part: float(done.stdout.split()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        ways = {"data": data, "ray": ray, "engine": partial(processes, policy=False)}
        print(ways.get(args.part, partial(processes, policy=True))())
        return
    taken: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for part in args.parts:
            for name, value in measured(part).items():
                taken.setdefault(name, []).append(value)
    report: dict[str, Any] = {name: round(statistics.median(values), 1) for name, values in taken.items()}
    alone = [report[part] for part in ("data", "engine", "policy") if part in report]
    if alone and "ray" in report and "start" in report:
        report["times_longest_and_ray"] = round(report["start"] / (max(alone) + report["ray"]), 2)
    report["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
