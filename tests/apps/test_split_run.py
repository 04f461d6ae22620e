"""Runs whose engines have devices of their own, as a user starts them: slots and threads of their own on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import command, results, resume

SPLIT = ("--split", "--set", "run.checkpoint_every=1", "--set", "refit.verify_every=1")
COLLECTIVE = ("--set", "refit.mover=collective")
pytestmark = pytest.mark.slow


def trained(run_dir: Path) -> list[int]:
    return [p for line in results(run_dir) for first, last in line["positions"] for p in range(first, last + 1)]


@pytest.mark.guard
def test_a_split_run_refits_in_flight_compares_every_tensor_and_resumes_colocated(here, tiny_llama, tmp_path):
    """Samples go on under new weights, which come over the collective mover; every refit is read back."""
    run_dir = tmp_path / "run"
    fast = ("--async", "--set", "refit.in_flight=keep", "--set", "rollouts.order=arrival", "--steps", "3")
    done = here(command(tiny_llama, run_dir, *SPLIT, *COLLECTIVE, *fast))
    assert done.returncode == 0, done.stderr
    plan = json.loads((run_dir / "manifest.json").read_text())["plan"]
    assert (plan["colocated"], plan["mover"], plan["generation"]["devices"]) == (False, "collective", 1)
    lines = results(run_dir)
    assert all(line["refit_verified"] > 0 for line in lines)
    assert lines[-1]["staleness"]["max"] <= 1
    done = here(resume(run_dir, "--steps", "5", "--colocated", "--set", "refit.mover=auto"))
    assert done.returncode == 0, done.stderr
    assert len(results(run_dir)) == 5
    assert len(trained(run_dir)) == len(set(trained(run_dir))) == 10


@pytest.mark.parametrize("mover", ["collective", "disk", "shared-memory"])
def test_a_synchronous_split_run_computes_what_a_colocated_one_does(here, tiny_llama, tmp_path, mover):
    more = ("--set", f"refit.directory={tmp_path / 'versions'}") if mover == "disk" else ()
    split, together = tmp_path / "split", tmp_path / "together"
    done = here(command(tiny_llama, split, *SPLIT, "--set", f"refit.mover={mover}", *more, "--steps", "3"))
    assert done.returncode == 0, done.stderr
    done = here(command(tiny_llama, together, "--steps", "3"))
    assert done.returncode == 0, done.stderr
    for apart, shared in zip(results(split), results(together), strict=True):
        assert apart["loss"] == shared["loss"]
        assert apart["reward_mean"] == shared["reward_mean"]
