"""`rlctl diverge` as a user runs it, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.config.sources import Source, Value
from rlctl.divergence.causes import Cause
from rlctl.divergence.compare import Measure
from rlctl.divergence.report import DivergenceReport, Program
from rlctl.errors import InputError
from rlctl.jobs.diverge import DivergeJob
from rlctl.jobs.diverge_job import diverge_job
from rlctl.methods.configuration import from_sources
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.tiny_models.text import write_tiny_family
from support.commands import Run
from support.crew import Recorded

LAYERS = 80


def measured(point: str, error: float = 3e-7) -> Measure:
    return Measure(point, error, 3e-7, error / 2.4e-6, 0 if error < 1e-6 else 160, 160, error)


def report_of(wrong: str) -> DivergenceReport:
    points = [f"layers.{layer}.{kind}" for layer in range(LAYERS) for kind in ("attention", "mlp")]
    points = ["embedding", *points, "norm", "logits"]
    trainer = tuple(measured(point) for point in points)
    engine = tuple(measured(point, 0.3 if point.endswith(wrong) else 3e-7) for point in points)
    cause = Cause("rotary embedding", "the rotary embedding is without its scaling (theta 10000)", 3e-7, 40)
    programs = (
        Program("trainer", "megatron, TP2 DP1", trainer, ((0, 8, -1.0, -1.0),)),
        Program("engine", "vllm, TP1", engine, ((0, 8, -1.5, -1.0),), cause),
    )
    return DivergenceReport("my-model", "float32", (96, 64), programs, ("a note",))


def test_the_report_fits_on_a_page_and_names_place_and_cause() -> None:
    report = report_of("layers.41.attention")
    lines = report.lines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    assert "engine PARTS at layers.41.attention" in text
    assert "likely cause, rotary embedding: the rotary embedding is without its scaling" in text
    assert "trainer: computes what transformers computes" in text
    assert [line.split()[0] for line in lines if line.startswith("layers")] == [
        "layers.0", "layers.41.attention", "layers.41",
    ]  # fmt: skip
    found = json.loads(json.dumps(report.to_json()))
    assert found["engine"]["first"]["point"] == "layers.41.attention"
    assert found["engine_against_trainer"] == {"mean": 0.5, "max": 0.5, "tokens": 1}
    assert (found["parted"], found["trainer"]["parted"]) == (True, False)


def test_a_fault_of_every_layer_fits_on_a_page() -> None:
    report = report_of("attention")
    assert len(report.lines()) < 50
    assert "rows more (--json has all)" in "\n".join(report.lines())


def job_of(model: Path, tokens: int | None = None, **values: object) -> DivergeJob:
    given = {"model.name": str(model), "cluster.gpu": "cpu", **values}
    source = Source([Value(key, value, "test") for key, value in given.items()])
    return diverge_job(from_sources([source], RlConfig), None, tokens, print)


def test_sequences_exceed_a_sliding_window(tmp_path: Path) -> None:
    model = write_tiny_family(tmp_path / "gemma3", "gemma3", sliding_window=300)
    assert [len(tokens) for tokens in job_of(model).sequences()] == [348, 232]
    assert job_of(model).notes(348) == []
    with pytest.raises(InputError, match="--tokens 3: the model and its plan take 8 to 1022 tokens"):
        job_of(model, 3).sequences()


def test_a_trainer_uses_its_own_routers(tiny_qwen3_moe: Path) -> None:
    job = job_of(tiny_qwen3_moe, **{"training.router_replay": True, "model.dtype": "bfloat16"})
    assert job.test.config.training.router_replay is False
    assert "--set model.dtype=float32 shows differences" in job.notes(96)[0]


@pytest.mark.guard
@pytest.mark.slow
def test_another_reading_of_the_configuration_is_found_in_the_engine_alone(run_here: Run, tiny_llama: Path) -> None:
    done = run_here(
        "diverge", "--model", str(tiny_llama), "--tp", "2", "--gpu", "cpu", "--json", "--backend", "megatron",
        "--set", "vllm.hf_overrides={rms_norm_eps: 0.001}",
        "--set", "training.threads=1", "--set", "generation.threads=1",
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    found = json.loads(done.stdout)
    assert found["trainer"]["program"].startswith("megatron, TP2")
    assert found["trainer"]["parted"] is False
    assert found["trainer"]["not_compared"] == found["engine"]["not_compared"] == []
    assert found["engine"]["first"]["point"] == "layers.0.attention"
    assert found["engine"]["cause"]["operation"] == "norm"
    assert found["engine"]["cause"]["words"] == "input_layernorm has the epsilon 0.001"
    assert found["engine_against_trainer"]["max"] > 1e-2


@pytest.mark.guard
@pytest.mark.slow
def test_a_checkpoint_of_a_run(run_here: Run, uninterrupted: Recorded) -> None:
    run_dir, _ = uninterrupted
    done = run_here("diverge", "--run-dir", str(run_dir), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["model"].startswith("step ")
    assert found["parted"] is False
    assert found["trainer"]["logprobs"]["max"] < 1e-4
    assert found["engine_against_trainer"]["max"] < 1e-4


def test_a_step_needs_a_run(run_here: Run) -> None:
    done = run_here("diverge", "--model", "x", "--step", "3")
    assert done.returncode == 2
    assert "--step 3 needs a run" in done.stderr
