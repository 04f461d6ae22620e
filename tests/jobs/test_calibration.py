"""`rlctl plan --calibrate`: phases that a run measured scale the next plans for its machine, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.errors import InputError
from rlctl.jobs.calibration import calibrate
from rlctl.planner.inputs.cluster import ClusterFacts, calibrated, cpu_device, make_cluster
from rlctl.planner.inputs.request import Workload
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
