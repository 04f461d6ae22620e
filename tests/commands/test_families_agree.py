"""`rlctl refit-test` for every family: engine and trainer hold the same weights and compute the same log-probs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import Run
from support.tiny_families import write_tiny_family

MEAN, MOST = 1e-5, 1e-4  # float32 on both sides
GUARD = "mixtral"
FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gemma3", "gpt_oss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.guard if name == GUARD else ()) for name in FAMILIES]
)
def test_engine_and_trainer_agree(run_here: Run, family: str, tmp_path: Path) -> None:
    found = refit_test(run_here, write_tiny_family(tmp_path / family, family))
    assert found["passed"], found
    assert [found[key] for key in ("mismatched", "missing", "extra", "unread")] == [[]] * 4
    assert found["logprobs"]["mean_abs"] <= MEAN
    assert found["logprobs"]["max_abs"] <= MOST
    assert found["logprobs_before"]["max_abs"] > 100 * MOST


@pytest.mark.slow
@pytest.mark.guard
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
