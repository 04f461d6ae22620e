"""Reports of run directories, as a run and `rlctl report` write them."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from rlctl.cli import run as rlctl
from rlctl.errors import InputError
from rlctl.preparation.manifest import host_facts
from rlctl.report import run_report as report
from rlctl.report.run_report import LiveReport, compare_runs, state_of, write_report
from support.run_directories import made_run


def test_the_report_tells_what_was_run_planned_and_said(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    found = report.reported(run, "stopped")
    facts, identity = dict(found.facts), dict(found.identity)
    assert list(identity) == ["model", "algorithm", "command", "commit", "versions"]
    assert identity["command"] == "rlctl train 'a b'"
    assert identity["commit"] == "rlctl 0123456789ab"
    assert identity["versions"] == "rlctl 0.1, python 3.11, torch 2.13"
    assert found.config == {"batch.prompts": "8", "model.name": '"tiny"', "run.steps": "8"}
    assert facts["machine"] == "2 nodes, 8 h100 GPUs a node, 80.0 GiB of memory"
    assert facts["training"] == "backend megatron, tp 2, dp 8"
    assert (facts["host"], facts["GPUs"], facts["driver"]) == ("node7", "8 x NVIDIA H100", "580.95")
    assert [key for key, _, _ in found.settings] == ["model.name", "run.steps"]
    assert [(one.name, one.predicted, one.measured) for one in found.forecasts][-2:] == [
        ("total", 4.0, 3.5), ("memory, policy process", 3.0, 2.0),
    ]  # fmt: skip
    assert [step for step, _ in found.samples] == [1, 3, 5]
    assert [row["completion"] for row in found.samples[0][1]] == ["c1.3", "c1.9", "c1.1", "c1.7"]  # best two, worst two
    assert (found.steps, found.titles, len(found.messages)) == (8, {"margin": "the margin"}, 2)
    assert [line["step"] for line in write_report(run, "stopped")] == [1, 2, 3, 4, 5]
    assert "stopped, step 5 of 8" in run.report.read_text()


def test_the_machine_is_named_as_the_system_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    row = "%d, GPU-%d, NVIDIA H100"
    smi.write_text(f"""#!/bin/sh
case "$1" in *driver_version*) end=", 580.95";; esac
printf '{row}%s\\n' 0 0 "$end" 1 1 "$end"
""")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = host_facts()
    assert (facts["GPUs"], facts["driver"]) == ("2 x NVIDIA H100", "580.95")
    assert facts["host"] == Path("/proc/sys/kernel/hostname").read_text().strip()
    assert facts["processor"].startswith(f"{len(os.sched_getaffinity(0))} cores, ")


def test_the_report_shows_a_completion_with_any_end_of_a_line(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    text = "a\u2028b\u0085c\nd"
    run.write_rollouts(5, [{"prompt": "p", "completion": text, "reward": 1.0}])
    assert report.reported(run, "stopped").samples[-1][1][0]["completion"] == text


@pytest.mark.parametrize("name", ["memory.json", "rollouts/step_5.jsonl", "logs/driver.log"])
def test_a_report_does_without_a_file_that_is_damaged(tmp_path: Path, name: str) -> None:
    run = made_run(tmp_path / "run")
    (run.path / name).write_text('{"cut')
    assert len(write_report(run, "stopped")) == 5


def test_the_report_shows_what_validations_sampled(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert report.reported(run, "stopped").validated == []
    lines[0]["validation_at_start"] = lines[3]["validation"] = {"accuracy": 0.5}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.path / "validation").mkdir()
    for step in (0, 4, 7):  # 7: of a step that a resume took back
        row = {"prompt": "held out", "completion": f"v{step}", "reward": 0.5}
        (run.path / "validation" / f"step_{step}.jsonl").write_text(json.dumps(row) + "\n")
    assert [step for step, _ in report.reported(run, "stopped").validated] == [0, 4]
    write_report(run, "stopped")
    text = run.report.read_text()
    before, after = text.index("<h3>Before step 1</h3>"), text.index("<h3>After step 4</h3>")
    assert text.index("Samples of validation") < before < text.index("v0") < after < text.index("v4")


def test_a_live_report_is_rewritten_when_it_is_due_and_tried_once_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told = [100.0], []
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    run = made_run(tmp_path / "run")
    live = LiveReport(run, told.append)
    live.step()
    assert "running, step 5 of 8" in run.report.read_text()
    run.report.unlink()
    now[0] += 1
    live.step()
    assert not run.report.exists()
    now[0] += report.LEAST_INTERVAL_S
    live.step()
    assert run.report.exists()
    run.metrics.unlink()
    now[0] += 3600
    live.step()
    now[0] += 3600
    live.step()
    assert len(told) == 1
    assert "The report could not be written" in told[0]


def test_a_run_that_another_process_writes_to_is_running(tmp_path: Path) -> None:
    run, done = made_run(tmp_path / "run"), made_run(tmp_path / "done", steps=8)
    assert (state_of(run), state_of(done)) == ("stopped", "finished")
    lock = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert state_of(run) == "running"
    os.close(lock)


def test_the_command_writes_one_report_or_compares_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        made_run(tmp_path / "a" / "run", optimizer__lr=1e-5),
        made_run(tmp_path / "b" / "run", optimizer__lr=1e-6),
    )
    assert rlctl(["report", str(first.path)]) == 0
    assert capfd.readouterr().out.strip() == str(first.report)
    assert "To look at" in first.report.read_text()
    monkeypatch.chdir(tmp_path)
    assert rlctl(["report", str(first.path), str(second.path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["report"] == str(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert f"<title>{second.path}</title>" in text  # runs of the same name are told apart
    assert "<td>optimizer.lr</td><td>1e-05</td><td>1e-06</td>" in text
    assert not second.report.exists()


def test_what_is_no_run_or_took_no_step_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert rlctl(["report", str(tmp_path / "nothing")]) == 2
    assert capfd.readouterr().err.startswith(f"rlctl: {tmp_path / 'nothing'} is not a run")  # no flag is named
    empty = made_run(tmp_path / "empty", steps=0)
    with pytest.raises(InputError, match="no finished step"):
        compare_runs([empty.path], None)
    with pytest.raises(InputError, match="--output"):
        compare_runs([made_run(tmp_path / "run").path], tmp_path / "not" / "there.html")
    with pytest.raises(InputError, match="null cannot be written: it is not a file"):
        compare_runs([tmp_path / "run"], Path(os.devnull))
