"""Runs whose engines have devices of their own, as a user starts them: slots and threads of their own on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.refit.session import RefitSession
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


@pytest.mark.parametrize("way", ["disk", "changes"])
def test_samples_under_way_go_on_under_weights_that_come_as_files_or_as_changes(
    here, tiny_llama, tmp_path, monkeypatch, way
):
    reports, refit = [], RefitSession.refit
    monkeypatch.setattr(RefitSession, "refit", lambda *args, **how: reports.append(refit(*args, **how)) or reports[-1])
    versions = ("--set", "refit.mover=disk", "--set", f"refit.directory={tmp_path / 'versions'}")
    changes = (*COLLECTIVE, "--set", "refit.sparse=true", "--set", "generation.plain_parameters=true",
               "--set", "model.dtype=bfloat16", "--lr", "1e-6")  # fmt: skip
    fast = ("--async", "--set", "refit.in_flight=keep", "--set", "rollouts.order=arrival", "--steps", "4")
    longer = ("--max-new-tokens", "48", "--set", "checks.logprob_diff_error=null")
    mover = versions if way == "disk" else changes
    done = here(command(tiny_llama, tmp_path / "run", *SPLIT, *fast, *longer, *mover))
    assert done.returncode == 0, done.stderr
    lines = results(tmp_path / "run")
    assert all(line["refit_verified"] > 0 for line in lines)
    assert any(len(line["tokens_by_version"]) > 1 for line in lines)
    assert sorted(trained(tmp_path / "run")) == list(range(8))
    assert [report.sent_bytes < report.bytes for report in reports] == [False] + [way == "changes"] * 4


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
