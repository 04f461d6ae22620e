"""`rlctl refit-test` for every family: engine and trainer hold the same weights and compute the same log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.jobs.refit_test import refit_workers
from rlctl.jobs.refit_test_job import refit_test_job
from rlctl.methods.configuration import resolve
from rlctl.preparation.run_workers import start_run_workers
from rlctl.tiny_models.text import write_tiny_family
from support.commands import Run

MEAN, MOST = 1e-5, 1e-4  # float32 on both sides
FAMILIES = [
    "llama", "llama-tied", "llama-dynamic", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gemma3",
    "gpt_oss",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree(run_here: Run, family: str, tmp_path: Path) -> None:
    require_equal(refit_test(run_here, write_tiny_family(tmp_path / family, family)))


def require_equal(found: dict) -> None:
    assert found["passed"], found
    assert [found[key] for key in ("mismatched", "missing", "extra", "unread")] == [[]] * 4
    assert found["logprobs"]["mean_abs"] <= MEAN
    assert found["logprobs"]["max_abs"] <= MOST
    assert found["logprobs_before"]["max_abs"] > 100 * MOST


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_reach_the_engine_through_every_mover(placement: Any, family: str, tmp_path: Path) -> None:
    """`--backend dtensor`, tensor parallel. One set of workers for all movers."""
    model = write_tiny_family(tmp_path / family, family)
    sizes = {"training.tp": 2, "training.dp": 1, "training.threads": 1, "generation.threads": 1}
    flags = {"model.name": str(model), "cluster.gpu": "cpu", "training.backend": "dtensor", **sizes}
    job = refit_test_job(resolve(flags=flags, environment={}), "auto", 2, print)
    with start_run_workers(job.workers(), tmp_path) as workers:
        workers.policy.load_model(job.base_model.weights)
        for mover in ("shared-memory", "collective", "disk"):
            settings = job.config.refit.model_copy(update={"mover": mover, "directory": str(tmp_path)})
            report = refit_workers(job, workers, settings, print)
            assert report.to_json()["mover"] == mover
            require_equal(report.to_json())


@pytest.mark.slow
def test_a_bfloat16_engine_keeps_its_router_bias_in_float32(run_here: Run, tmp_path: Path) -> None:
    """Fingerprints are of bits: rounded on either side or on the way, the bias would differ."""
    model = write_tiny_family(tmp_path / "model", "deepseek_v3")
    for receive in ("direct", "loader"):
        found = refit_test(run_here, model, "--receive", receive, "--set", "model.dtype=bfloat16")
        assert found["passed"], found
        assert found["mismatched"] == found["unread"] == []
        assert found["receive"] == receive


def refit_test(run_here: Run, model: Path, *more: str) -> dict:
    arguments = [
        "refit-test", "--model", str(model), "--gpu", "cpu", "--json", "--set", "training.threads=1",
        "--set", "generation.threads=1", *more,
    ]  # fmt: skip
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
