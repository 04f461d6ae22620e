"""Measures what a lost policy rank costs, and what checkpoints in memory cost a step.

    python benchmarks/recovery.py [--backend megatron] [--kills 3] [--by-hand 2] [--rounds 8] [--prompts 16]

A tiny random Llama on the CPU. All runs have the same steps and save a checkpoint to disk after each of them.

`by_hand_s`: a policy rank is killed, the run ends (`cluster.policy_restarts=0`), and `rlctl train grpo --resume` is
started in the same moment; until the next finished step. `healed_s`: the same rank is killed in a run that starts its
policy again from memory; until the next finished step. `ratio`: healed over by hand, medians.

`step_slower`: two runs of the same steps, with a checkpoint to memory after each step and without, compared by the
medians of their steps' seconds. `more_processor_time` compares the seconds of processors that all their processes used
from the second step on, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from rlctl.telemetry.metrics import read_metrics

LIMIT_S = 600.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}


def rlctl(*arguments: str, log: Path) -> psutil.Popen:
    program = Path(sys.executable).with_name("rlctl")
    with log.open("a") as out:
        command = [str(program), "train", "grpo", *arguments]
        return psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT)


def begun(options: argparse.Namespace, model: Path, run_dir: Path, steps: int, *more: str) -> psutil.Popen:
    sizes = (
        *("--prompts", str(options.prompts), "--generations", "8", "--max-new-tokens", str(options.max_new_tokens)),
        *("--steps", str(steps), "--backend", options.backend, "--gpu", "cpu", "--set", "training.dp=1"),
        *("--set", "training.threads=1", "--set", "generation.threads=1", "--set", "run.keep_last=2"),
    )
    data = ("--data", "reasoning-gym:chain_sum", "--reward", "task", "--model", str(model), "--run-dir", str(run_dir))
    return rlctl(*data, *sizes, *more, log=run_dir.with_suffix(".log"))


def finished(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


def wait_for_step(run: psutil.Popen, run_dir: Path, step: int) -> float:
    """Return when a step is finished, of time.monotonic."""
    deadline = time.monotonic() + LIMIT_S
    while finished(run_dir) < step:
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"step {step} was not finished: see {run_dir.with_suffix('.log')}")
        time.sleep(0.02)
    return time.monotonic()


def policy_rank(run: psutil.Popen, run_dir: Path) -> psutil.Process:
    log = str(run_dir / "logs" / "policy-0.log")
    for one in run.children(recursive=True):
        try:
            if os.readlink(f"/proc/{one.pid}/fd/1") == log:
                return one
        except OSError:
            continue
    raise SystemExit("the policy rank was not found")


def killed_and_saved(run: psutil.Popen, run_dir: Path, step: int) -> float:
    """Kill the policy rank when a step and its checkpoint are finished; return when."""
    wait_for_step(run, run_dir, step)
    while not (run_dir / "checkpoints" / f"step_{step}").exists():
        time.sleep(0.02)
    policy_rank(run, run_dir).kill()
    return time.monotonic()


def end(run: psutil.Popen) -> None:
    family = run.children(recursive=True)
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)
    run.wait(120)
    psutil.wait_procs(family, timeout=60)


def by_hand(options: argparse.Namespace, model: Path, work: Path, number: int) -> float:
    run_dir = work / f"by_hand_{number}"
    saves = ("--set", "run.checkpoint_every=1", "--set", "cluster.policy_restarts=0")
    run = begun(options, model, run_dir, 100, *saves)
    killed = killed_and_saved(run, run_dir, 3)
    run.wait(LIMIT_S)
    done = finished(run_dir)
    resumed = rlctl("--resume", "--run-dir", str(run_dir), log=run_dir.with_suffix(".log"))
    seconds = wait_for_step(resumed, run_dir, done + 1) - killed
    end(resumed)
    return seconds


def healed(options: argparse.Namespace, model: Path, work: Path) -> list[float]:
    run_dir, found = work / "healed", list[float]()
    limit = f"cluster.policy_restarts={options.kills}"
    memory = ("--set", "run.checkpoint_every=1", "--set", "run.memory_checkpoint_every=1", "--set", limit)
    run = begun(options, model, run_dir, 1000, *memory)
    for _ in range(options.kills):
        step = finished(run_dir) + 3
        killed = killed_and_saved(run, run_dir, step)
        found.append(wait_for_step(run, run_dir, finished(run_dir) + 1) - killed)
    end(run)
    return found


def cost_of_memory(options: argparse.Namespace, model: Path, work: Path) -> dict[str, float]:
    without, with_them = (measured(options, model, work / f"every_{every}", every) for every in (0, 1))
    slower, more = (after / before - 1 for before, after in zip(without, with_them, strict=True))
    return {"step_s": round(without[0], 2), "step_slower": round(slower, 3), "more_processor_time": round(more, 3)}


def measured(options: argparse.Namespace, model: Path, run_dir: Path, every: int) -> tuple[float, float]:
    """Return the median of a run's steps, and the seconds of processors that all but the first two used."""
    memory = ("--set", "run.checkpoint_every=0", "--set", f"run.memory_checkpoint_every={every}")
    run = begun(options, model, run_dir, options.rounds + 3, *memory)
    wait_for_step(run, run_dir, 2)
    before = processor_seconds(run)
    wait_for_step(run, run_dir, options.rounds + 2)
    used = processor_seconds(run) - before
    run.wait(LIMIT_S)
    seconds = [line["seconds"]["total"] for line in read_metrics(run_dir / "metrics.jsonl")]
    return statistics.median(seconds[2:-1]), used


def processor_seconds(run: psutil.Popen) -> float:
    """Return the seconds of processors that a run's processes have used."""
    used = 0.0
    for one in (run, *run.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            used += times.user + times.system
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="megatron")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--by-hand", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    options = parser.parse_args()

    from rlctl.tiny_models.text import write_tiny_family

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ["RLCTL_MEGATRON_CHECKPOINT_DIR"] = str(work / "converted")
        model = write_tiny_family(work / "tiny-llama")
        found: dict[str, Any] = cost_of_memory(options, model, work)
        print(json.dumps(found), flush=True)
        own = healed(options, model, work)
        print(json.dumps({"healed_s": [round(one, 1) for one in own]}), flush=True)
        hand = [by_hand(options, model, work, number) for number in range(options.by_hand)]
        ratio = statistics.median(own) / statistics.median(hand)
        print(json.dumps({"by_hand_s": [round(one, 1) for one in hand], "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
