"""What runs write, read from the crew (`support.crew`): one run of each kind for all tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.report.run_comparison import compare_memory
from rlctl.telemetry.metrics import read_metrics
from rlctl.telemetry.phases import Phase
from support.crew import Crew

STEPS = {"async": 4, "dtensor": 2, "sft": 5, "environment": 4, "images": 2}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl")


@pytest.mark.long
@pytest.mark.parametrize("name", STEPS)
def test_run_leaves_every_step_its_report_and_its_checkpoint(crew: Crew, name: str) -> None:
    run, _ = crew(name)
    lines = lines_of(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS[name] + 1))
    for line in lines:
        assert line["grad_norm"] > 0
        parts = [value for phase, value in line["seconds"].items() if phase != "total"]
        assert line["seconds"].keys() == {phase.value for phase in Phase} | {"total"}
        assert sum(parts) == pytest.approx(line["seconds"]["total"], abs=1e-6)
    assert f"step_{STEPS[name]}" in {path.name for path in (run / "checkpoints").iterdir()}
    assert "<svg" in (run / "report.html").read_text()
    assert json.loads((run / "manifest.json").read_text())["config"]["run.steps"]["value"] == STEPS[name]
    said = (run / "logs" / "driver.log").read_text()
    assert "Traceback" not in said


@pytest.mark.parametrize("name", [name for name in STEPS if name != "sft"])
def test_engine_log_probs_are_within_rounding_of_the_policy(crew: Crew, name: str) -> None:
    for line in lines_of(crew(name)[0]):
        if line.get("staleness", {}).get("max", 0) == 0:  # later tokens are of older weights
            assert 0 < line["logprob_diff"]["mean"] <= line["logprob_diff"]["max"] < 1e-4


def test_asynchronous_run_trains_on_each_prompt_once_in_order(crew: Crew) -> None:
    lines = lines_of(crew("async")[0])
    assert [line["positions"] for line in lines] == [[[2 * step, 2 * step + 1]] for step in range(4)]
    assert [line["staleness"]["max"] for line in lines] == [0, 1, 1, 1]


def test_dtensor_run_has_the_steps_of_the_run_on_megatron(crew: Crew, uninterrupted: Any) -> None:
    theirs, ours = lines_of(uninterrupted[0]), lines_of(crew("dtensor")[0])
    assert {path.name for path in (crew("dtensor")[0] / "logs").glob("policy-*.log")} == {
        "policy-0.log",
        "policy-1.log",
    }
    for one, other in zip(ours, theirs, strict=False):
        for name in ("reward_mean", "response_tokens_mean", "entropy", "grad_norm", "loss"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_texts_are_learned_and_validated_without_an_engine(crew: Crew) -> None:
    run, done = crew("sft")
    lines = lines_of(run)
    assert "validation before step 1: loss" in done.stderr
    assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "seconds"} <= lines[0].keys()
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[3]["validation"]["loss"] < lines[0]["validation_at_start"]["loss"]
    assert lines[0]["seconds"]["generation"] == lines[0]["seconds"]["refit"] == 0
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["driver.log", "policy-0.log", "policy-1.log"]
    assert {row.name for row in compare_memory(run)} == {"policy"}


def test_episodes_have_turns_rewards_and_reasons(crew: Crew) -> None:
    run, _ = crew("environment")
    lines = lines_of(run)
    assert all(line["turns_max"] == 2 and line["environment"] == {"said": 2.0} for line in lines)
    assert all(sum(line["stop_reasons"].values()) == 8 for line in lines)
    assert all(set(line["stop_reasons"]) <= {"done", "length"} for line in lines)
    assert "reward_mean" in lines[1]["validation"]
    sample = json.loads((run / "rollouts" / "step_1.jsonl").read_text().splitlines()[0])
    assert [turn["role"] for turn in sample["turns"]] == ["user", "assistant", "user", "assistant"]
    assert sample["reward"] == sum(turn["reward"] for turn in sample["turns"] if turn["role"] == "assistant")


def test_images_are_trained_on_by_the_backend_that_reads_them(crew: Crew) -> None:
    run, done = crew("images")
    assert "reads images: all of it is trained, by the backend dtensor" in done.stderr
    assert all(line["images"] > 0 for line in lines_of(run))
