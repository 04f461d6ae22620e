"""`rlctl plan --calibrate`: phases that a run measured scale the next plans for its machine, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.errors import InputError
from rlctl.jobs.calibration import calibrate
from rlctl.methods.configuration import resolve
from rlctl.planner.inputs.cluster import ClusterFacts, calibrated, cpu_device, make_cluster
from rlctl.planner.inputs.request import Workload
from rlctl.preparation.shown_plan import shown_plan
from rlctl.telemetry.phases import Phase
from support.catalog_models import make_plan, model
from support.run_directories import GIB, made_run

CPU = ClusterFacts(cpu_device(4, 64 * GIB), 1, 0)
WORK = Workload(4, 4, max_length=256)


def test_measured_phases_scale_the_next_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose phases take longer by fixed factors: the run of one model tells them for another."""
    monkeypatch.setenv("RLCTL_MACHINE_PROFILE", str(tmp_path / "machine.json"))
    truth = {Phase.TRAINING: 1.7, Phase.GENERATION: 0.6, Phase.REFIT: 3.0}
    first, second = (make_plan(model(name), CPU, WORK) for name in ("Qwen3-0.6B", "SmolLM2-135M"))
    run = made_run(tmp_path / "run", steps=0)
    manifest = run.manifest()
    manifest["plan"] |= {"cluster": {"gpu": "cpu"}, "seconds": {p.value: s for p, s in first.seconds.items()}}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    measured = {phase.value: seconds * truth.get(phase, 1.0) for phase, seconds in first.seconds.items()}
    line = {"step": 1, "seconds": measured | {"total": sum(measured.values())}}
    run.metrics.write_text(json.dumps(line) + "\n")
    calibrate(run.path)
    known = calibrated(CPU)
    assert str(run.path) in known.origin
    again = make_plan(model("SmolLM2-135M"), known, WORK)
    for phase, factor in truth.items():
        assert again.seconds[phase] == pytest.approx(factor * second.seconds[phase], rel=0.1)
    assert calibrated(make_cluster("h100")).factors == ()


def test_a_run_without_measurements_calibrates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_MACHINE_PROFILE", str(tmp_path / "machine.json"))
    run = made_run(tmp_path / "run", steps=0)
    with pytest.raises(InputError, match="no step has finished"):
        calibrate(run.path)
    (tmp_path / "machine-phases.json").write_text('{"device": "cpu", "run": "x", "factors": {"training": -1}}')
    with pytest.raises(InputError, match=r"machine-phases\.json is not a calibration"):
        calibrated(CPU)


def test_longer_completions_than_the_plan_assumed_are_no_slower_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine as fast as predicted, and completions of 40 tokens where the plan assumed 16: no phase is scaled."""
    monkeypatch.setenv("RLCTL_MACHINE_PROFILE", str(tmp_path / "machine.json"))
    settings = {
        "model.name": "HuggingFaceTB/SmolLM2-135M-Instruct", "model.dtype": "float32", "cluster.gpu": "cpu",
        "cluster.gpus_per_node": 0, "generation.max_new_tokens": 48, "generation.mean_length": 16,
    }  # fmt: skip
    run = made_run(tmp_path / "run", steps=0, **{key.replace(".", "__"): value for key, value in settings.items()})
    short, long = (
        shown_plan(resolve(environment={}, flags=settings | {"generation.mean_length": mean}), 1, lambda _: None)
        for mean in (16, 40)
    )
    assert long.seconds[Phase.TRAINING] > 1.1 * short.seconds[Phase.TRAINING]
    manifest = run.manifest()
    manifest["plan"] |= {"cluster": {"gpu": "cpu"}, "seconds": {p.value: s for p, s in short.seconds.items()}}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    measured = {phase.value: seconds for phase, seconds in long.seconds.items()}
    line = {"step": 1, "response_tokens_mean": 40.0, "seconds": measured | {"total": sum(measured.values())}}
    run.metrics.write_text(json.dumps(line) + "\n")
    _, factors, _ = calibrate(run.path)
    assert factors.keys() >= {"training", "generation", "refit"}
    assert list(factors.values()) == pytest.approx([1.0] * len(factors), rel=0.02)
