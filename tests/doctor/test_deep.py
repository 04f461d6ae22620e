"""`rlctl doctor --deep`: how probes are run, stopped and summed up, and all probes that need no GPU."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from rlctl.backends.vllm import compat
from rlctl.cli import run
from rlctl.doctor import deep
from rlctl.doctor.deep import ProbeOutcome, Runner
from rlctl.doctor.probes import CPU, LAYERS, Probe
from rlctl.errors import MachineError

SCRIPTS = {
    "passes": 'print(\'{"GB/s": 2999.0, "device": "cpu"}\')',
    "fails": 'import sys; print(\'{"error": {"message": "RuntimeError: no peers\\\\nmore"}}\'); sys.exit(1)',
    "hangs": "import subprocess, time; print('waiting for a peer', file=__import__('sys').stderr, flush=True); "
    "open('PIDS', 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)",
    "cannot be interrupted": "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "says nothing useful": "print('no JSON'); import sys; sys.exit('rlctl: the model is too wide.\\n  Take another.')",
    "fits nowhere": 'import sys; print(\'{"error": {"message": "No plan fits."}}\'); sys.exit(4)',
}


class Scripted(Runner):
    """Probes that are short programs."""

    def command(self, probe: Probe) -> list[str]:
        program = SCRIPTS[probe.name].replace("PIDS", str(self.folder / "pid"))
        return [sys.executable, "-S", "-c", program]


def scripted(name: str, limit_s: float = 120.0) -> Probe:
    return Probe(name, f"layer of {name}", limit_s, f"advice on {name}", models=False)


def test_a_probe_that_fails_hangs_or_dies_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "GRACE_S", 1.0)
    monkeypatch.setattr(deep, "CPU_PATIENCE", 1.0)
    runner = Scripted(CPU, tmp_path, tmp_path, time.monotonic() + 600)
    quick = [scripted(name) for name in SCRIPTS if name not in ("hangs", "cannot be interrupted")]
    slow = [scripted("hangs", 3.0), scripted("cannot be interrupted", 1.0)]
    outcomes = {one.name: one for stage in (slow, quick) for one in runner.run(stage)}
    statuses = {name: outcome.status for name, outcome in outcomes.items()}
    assert statuses == dict.fromkeys(SCRIPTS, "fail") | {"passes": "ok", "fits nowhere": "skip"}
    assert outcomes["passes"].figures == {"GB/s": 2999.0, "device": "cpu"}
    assert outcomes["fails"].detail == "RuntimeError: no peers"
    assert "stopped after 3 s; the log says: waiting for a peer" in outcomes["hangs"].detail
    assert "stopped after 1 s" in outcomes["cannot be interrupted"].detail
    assert "killed by signal 9" in outcomes["is killed"].detail
    assert "exit code 1; the log says: rlctl: the model is too wide." in outcomes["says nothing useful"].detail
    assert "No plan fits." in outcomes["fits nowhere"].detail
    with contextlib.suppress(psutil.NoSuchProcess):  # the hanging probe's own child has ended with it
        assert psutil.Process(int((tmp_path / "pid").read_text())).status() == psutil.STATUS_ZOMBIE
    line = deep.line_of(outcomes["fails"])
    assert line.startswith("FAIL  fails")
    assert "layer of fails: RuntimeError: no peers" in line
    assert line.endswith("-> advice on fails")
    assert "1 passed, 5 failed, 1 skipped" in deep.summary(list(outcomes.values()))


def test_runs_do_without_what_failed(tmp_path: Path) -> None:
    runner = Runner("auto", tmp_path, tmp_path, time.monotonic() + 600)
    grpo = deep.PROBES["grpo"]
    assert "refit.mover=shared-memory" not in runner.command(grpo)
    runner.note_failure(LAYERS["cuda-ipc"])
    assert "refit.mover=shared-memory" in runner.command(grpo)
    runner.note_failure(LAYERS["triton"])
    assert runner.environment()["TORCHDYNAMO_DISABLE"] == "1"
    runner.note_failure(LAYERS["models"])
    assert "has failed" in runner.why_skipped(grpo)


def test_what_there_is_no_time_or_no_gpu_for_is_left_out_with_the_reason(tmp_path: Path) -> None:
    late = Runner(CPU, tmp_path, tmp_path, time.monotonic())
    assert "--only fsdp2" in late.why_skipped(LAYERS["fsdp2"])
    assert late.why_skipped(LAYERS["cuda-ipc"]) == "needs a GPU"


def test_the_page_compares_the_largest_run_with_its_plan() -> None:
    small = ProbeOutcome("grpo", "", "ok", phases=[{"phase": "generation", "measured": 1.0, "predicted": 2.0}])
    large = ProbeOutcome("grpo-billion", "", "ok", phases=[{"phase": "generation", "measured": 7.3, "predicted": 3.9}])
    text = deep.summary([small, large])
    assert re.search(r"step of grpo-billion +measured +planned\n +generation +7\.30 +3\.90", text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--deep", "--only", "cuda_ipc"], "Did you mean cuda-ipc"),
        (["--only", "rates"], "Add --deep"),
        (["--deep", "--fix"], "--fix would do nothing"),
        (["--deep", "--model", "x"], "--model would do nothing"),
    ],
)
def test_flags_that_do_nothing_are_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *flags]) == 2
    assert words in capsys.readouterr().err


def test_vllms_assertions_about_memory_name_the_other_process() -> None:
    """Its messages are those of its source; the first was met on an H100."""
    spec = find_spec("vllm")
    assert spec is not None
    source = (Path(spec.submodule_search_locations[0]) / "v1" / "worker" / "gpu_worker.py").read_text()  # type: ignore[index]
    for words in ("Error in memory profiling", "Memory usage increased after sleeping"):
        assert words in source
        with pytest.raises(MachineError, match="Another process on this GPU"), compat.memory_to_itself():
            raise AssertionError(f"{words}. Initial free memory 60.1 GiB, current free memory 61.2 GiB.")
    with pytest.raises(AssertionError, match="another matter"), compat.memory_to_itself():
        raise AssertionError("another matter")


@pytest.mark.slow
def test_every_probe_of_a_cpu_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--deep", "--gpu", "cpu", "--json", "--limit", "1500"]) == 0
    found = json.loads(capsys.readouterr().out)
    probes = {probe["name"]: probe for probe in found["probes"]}
    assert sorted(probes) == sorted(deep.PROBES)
    assert {name for name, probe in probes.items() if probe["status"] == "skip"} == {
        name for name, probe in deep.PROBES.items() if probe.cuda_only
    }
    assert probes["megatron"]["figures"]["last loss"] < probes["megatron"]["figures"]["first loss"]
    assert {phase["phase"] for phase in probes["grpo"]["phases"]} >= {"generation", "training", "refit"}
