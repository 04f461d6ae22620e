"""Measures the driver alone on a step of many rollouts: ledger, metrics, advantages, and packing, without engines.

    python benchmarks/driver_scale.py [--prompts 10000] [--samples 16] [--dp 64] [--steps 5]

Rollouts have the scalars and handles of real ones; a handle stands for token columns, which never reach the driver.
Prints one JSON object: CPU seconds of each part, medians over the steps, and the process's memory after the first
step, after step 10 where there are more, and after the last step. `--steps 100` shows whether memory stays flat.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.backends.batching.packing import plan_batch
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.garbage import rare_garbage_collection
from rlctl.methods.rl.algorithm import make_batch
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.rollout_metrics import rollout_metrics
from rlctl.rollouts.ledger import Ledger
from rlctl.rollouts.source import RolloutBatch
from rlctl.training.step_metrics import selection_metrics

MUST_S = 2.0
PROMPT_TOKENS = 200


def sampled_group(position: int, lengths: list[int], rewards: list[float], version: int) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            position=position, sample=sample, seed=sample, versions=((version, count),), stop_reason="stop",
            prompt_tokens=PROMPT_TOKENS, tokens=PROMPT_TOKENS + count, response_tokens=count, reward=reward,
            terms={"math": reward}, accuracy=reward,
        )
        for sample, (count, reward) in enumerate(zip(lengths, rewards, strict=True))
    )  # fmt: skip
    prompt = PromptRow(position, f"data.jsonl, line {position}", "a question", "an answer")
    return RolloutGroup(position, prompt, rollouts, f"columns {position}", f"texts {position}")


def memory_mb() -> float:
    """Return the memory of this process that is not shared with files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def step(number: int, ledger: Ledger, method: Grpo, args: argparse.Namespace) -> dict[str, float]:
    """Take the driver's part of one step; return the CPU seconds of each of its parts."""
    rng, seconds = np.random.default_rng(number), dict[str, float]()

    def timed(name: str, of: Callable[[], Any]) -> Any:
        begun = time.process_time()
        result = of()
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - begun
        return result

    positions = timed("ledger", lambda: ledger.take(args.prompts))
    lengths = np.clip(rng.lognormal(7, 0.7, (args.prompts, args.samples)), 16, args.row - PROMPT_TOKENS).astype(int)
    rewards = rng.integers(0, 2, lengths.shape).astype(float)
    groups = tuple(
        sampled_group(position, lengths[i].tolist(), rewards[i].tolist(), number)
        for i, position in enumerate(positions)
    )

    def hand_over() -> None:
        ledger.finish(positions)
        ledger.hand_over(positions)
        ledger.state()

    timed("ledger", hand_over)
    batch = RolloutBatch(groups)
    timed("metrics", lambda: rollout_metrics(batch, number, compares=True))
    trained = timed("advantages", lambda: make_batch(batch.groups, method, 1))
    timed("metrics", lambda: selection_metrics(batch, trained))
    timed("packing", lambda: plan_batch(trained.minibatches, trained.columns, dp=args.dp, micro_batch_tokens=args.row))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, value in (("prompts", 10_000), ("samples", 16), ("dp", 64), ("row", 16_384), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    method, ledger = Grpo(RlConfig()), Ledger()
    found: list[dict[str, float]] = []
    memory: list[float] = []
    with rare_garbage_collection():
        for number in range(args.steps):
            found.append(step(number, ledger, method, args))
            memory.append(memory_mb())
    parts = {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}
    report = {
        "rollouts": args.prompts * args.samples,
        "cpu_s": parts,
        "total_cpu_s": round(statistics.median(sum(one.values()) for one in found), 3),
        "must_s": MUST_S,
        "memory_mb": {
            f"after step {number}": round(memory[number - 1]) for number in sorted({1, min(10, args.steps), args.steps})
        },
    }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
