"""Runs that sample with top-p, top-k or min-p: the policy trains on the distribution that the engine sampled from."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.training.agreement import LIMITS
from support.runs import command, results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kept"),
    [
        pytest.param("megatron", ["top_p=0.9"], marks=pytest.mark.guard),
        ("dtensor", ["top_k=20"]),
        ("dtensor", ["top_p=0.9"]),
        ("megatron", ["top_k=20"]),
        ("megatron", ["min_p=0.2"]),
        ("dtensor", ["top_p=0.3", "top_k=40", "min_p=0.1", "temperature=0.8"]),
    ],
)
def test_fresh_tokens_of_truncated_sampling_are_on_policy(
    here, tiny_llama, tmp_path: Path, backend: str, kept: list[str]
) -> None:
    """No ratio, weight or divergence mistakes the tokens that are left out for a change of the policy, and the KL
    divergence from an equal reference is 0."""
    sets = [f"generation.{one}" for one in kept]
    sets += [
        "training.tp=2",
        "loss.kl_coefficient=0.05",
        "loss.kl_weight=importance",
        "loss.sequence_mask=[0.999,1.001]",
    ]
    more = [word for one in sets for word in ("--set", one)]
    done = here(
        command(tiny_llama, tmp_path / "run", "--algorithm", "dppo", "--backend", backend, "--steps", "2", *more)
    )
    assert done.returncode == 0, done.stderr
    first, second = results(tmp_path / "run")
    for line in (first, second):
        assert line["logprob_diff"]["mean"] < LIMITS["float32"][0]
        assert line["importance"]["mean"] == pytest.approx(1, abs=1e-4)
        assert (line["clip_fraction"], line["importance_limited"]) == (0, 0)
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert second["kl"] > 0
