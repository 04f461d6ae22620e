"""Directories of runs as these are on disk, made without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.phases import Phase

GIB = 2**30


def step_line(step: int) -> dict[str, Any]:
    seconds = dict.fromkeys((phase.value for phase in Phase), 0.5)
    return {"step": step, "reward_mean": step / 10, "tokens_per_s": 9.0, "seconds": {**seconds, "total": 3.5}}


def made_run(path: Path, steps: int = 5, **settings: Any) -> RunDirectory:
    """A run as it is on disk, of 8 steps that it is to take."""
    run = RunDirectory(path)
    (path / "rollouts").mkdir(parents=True)
    run.logs.mkdir()
    run.log.write_text("2026-01-01 12:00:00 run: x\n2026-01-01 12:00:09 Warning, step 2: they differ\n")
    run.metrics.write_text("".join(json.dumps(step_line(step)) + "\n" for step in range(1, steps + 1)))
    for step in range(1, steps + 1):
        rows = [{"prompt": f"p{step}", "completion": f"c{step}.{i}", "reward": i / 10} for i in (3, 9, 1, 5, 4, 7)]
        (path / "rollouts" / f"step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run.steps": {"value": 8, "origin": "--steps"}, "model.name": {"value": "tiny", "origin": "--model"},
        "batch.prompts": {"value": 8, "origin": "default"}, "training.tp": {"value": 1, "origin": "planner"},
        **{key.replace("__", "."): {"value": value, "origin": "--set"} for key, value in settings.items()},
    }  # fmt: skip
    plan = {
        "cluster": {"gpu": "h100", "nodes": 2, "gpus_per_node": 8, "memory_gib": 80.0},
        "training": {"backend": "megatron", "tp": 2, "dp": 8}, "generation": {"engines": 16, "tp": 1},
        "seconds": {"generation": 0.75, "total": 4.0}, "memory_gib": {"training": {"weights": 3.0}},
    }  # fmt: skip
    run.write_manifest({
        "rlctl": "0.1", "python": "3.11", "packages": {"torch": "2.13"},
        "host": {"host": "node7", "GPUs": "8 x NVIDIA H100", "driver": "580.95"},
        "commits": {"rlctl": "0123456789ab", "working directory": None}, "command": ["/usr/bin/rlctl", "train", "a b"],
        "config": config, "plan": plan, "curves": {"margin": "the margin"}, "algorithm": {"name": "grpo"},
    })  # fmt: skip
    (path / "memory.json").write_text(json.dumps({"policy": [{"device": 2 * GIB}], "engine": []}))
    return run
