"""`rlctl doctor --deep`: probes from the lowest layer up, each in a process with a time limit. Probes of a stage run
together. Engine runs have the GPU alone, because vLLM stops if others change memory while it measures or sleeps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rlctl.config.files import temporary_folder
from rlctl.doctor.gpus import list_gpus
from rlctl.doctor.probes import CPU, GPU, LAYERS, Probe
from rlctl.errors import InputError, NoPlanError, suggest
from rlctl.planner.from_config import require_whole_gpus

LIMIT_S, LIMIT_CPU_S = 480.0, 300.0
CPU_PATIENCE = 2.0
GRACE_S = 10.0
"""Seconds for a probe to end its processes after an interrupt."""
LEAST_S = 15.0
"""Less time than this is not worth a start."""
POLL_S = 0.1
LINE_CHARACTERS = 400
SMALL = ("--max-length", "256", "--set", "run.save_final=false", "--json")
GRPO = (
    "train", "grpo", "--data", "{models}/prompts.jsonl", "--reward", "{models}/reward.py:letters", "--generations", "4",
    "--steps", "3",
)  # fmt: skip
TINY = (*SMALL, "--model", "{models}/tiny", "--prompts", "4", "--max-new-tokens", "32")
EAGER = ("--set", "vllm.enforce_eager=true")
RUNS = (
    Probe(
        "sft", "supervised training with Megatron", 120, "Compare with the probe `megatron`; try `--backend dtensor`.",
        package="megatron.core", run=(
            "train", "sft", "--data", "{models}/texts.jsonl", "--steps", "3", "--batch-size", "8", *SMALL,
            "--model", "{models}/tiny", "--backend", "megatron",
        ),
    ),
    Probe(
        "refit-experts", "weight transfer into vLLM, of a model with experts", 150,
        "Compare with `rlctl refit-test --receive loader`, and with `--mover shared-memory` or `--mover disk`.",
        run=("refit-test", "--model", "{models}/experts", "--json"), cuda_run=EAGER,
    ),
    Probe(
        "grpo", "GRPO with Megatron and vLLM on one device", 150, "Compare with the probes `megatron`, `vllm` and "
        "`sleep`.", package="megatron.core", run=(*GRPO, *TINY, "--backend", "megatron"), cuda_run=EAGER,
    ),
    Probe(
        "grpo-dtensor", "GRPO with FSDP2 and vLLM on one device", 150, "Train with `--backend megatron`.",
        run=(*GRPO, *TINY, "--backend", "dtensor"), cuda_run=EAGER,
    ),
    Probe(
        "grpo-billion", "GRPO of 1.24 billion parameters, with CUDA graphs", 220, "Compare with the probe `grpo`: "
        "if that passed, memory or graphs are to blame; try `--set vllm.enforce_eager=true`.", cuda_only=True,
        run=(
            *GRPO, "--model", "{models}/billion", "--prompts", "32", "--max-new-tokens", "256", "--max-length", "512",
            "--set", "run.save_final=false", "--json",
        ),
    ),
)  # fmt: skip
PROBES = LAYERS | {run.name: run for run in RUNS}
STAGES = (
    ("rates", "models"),
    ("disk",),
    (
        "vllm", "vllm-graphs", "sft", "triton", "collectives", "cuda-ipc", "sleep", "fsdp2", "megatron",
        "transformer-engine", "ray",
    ),
    ("refit-experts",),
    ("grpo",),
    ("grpo-billion",),
    ("grpo-dtensor",),
)  # fmt: skip
"""Probes of a stage run at the same time. Runs with an engine come last, one after the other."""


@dataclass
class ProbeOutcome:
    """The result of one probe."""

    name: str
    layer: str
    status: Literal["ok", "fail", "skip"]
    detail: str = ""
    """The first line of the error, or why the probe was skipped."""
    advice: str = ""
    seconds: float = 0.0
    figures: dict[str, float | str] = field(default_factory=dict)
    phases: list[dict[str, Any]] = field(default_factory=list)
    """A run's phases: seconds of a step, `measured` and `predicted`."""


def chosen(only: Sequence[str]) -> list[list[Probe]]:
    """Return the probes by stage, limited to `only` and their dependencies. Raises InputError for an unknown name."""
    for name in only:
        if name not in PROBES:
            raise InputError(f"--only {name}: no such probe.", suggest(name, PROBES) or f"Choose {', '.join(PROBES)}.")
    names = set(only or PROBES)
    names |= {"models"} if any(PROBES[name].models for name in names) else set()
    return [[PROBES[name] for name in stage if name in names] for stage in STAGES]


def deep(
    gpu: str,
    only: Sequence[str],
    limit_s: float | None,
    folder: Path,
    done: Callable[[ProbeOutcome], None],
    directory: Path = Path("runs"),
) -> list[ProbeOutcome]:
    """Run the probes in `folder` and return their outcomes. `gpu`: the value of `cluster.gpu`; without GPUs the CPU.
    `done` receives each outcome; `directory`: the runs' directory."""
    if gpu != CPU:
        require_whole_gpus()
    gpu = gpu if list_gpus() else CPU
    stages, deadline = chosen(only), time.monotonic() + (limit_s or (LIMIT_CPU_S if gpu == CPU else LIMIT_S))
    outcomes: list[ProbeOutcome] = []
    with temporary_folder("deep-models") as models:
        runner = Runner(gpu, folder, models, deadline, directory)
        for stage in stages:
            for outcome in runner.run(stage):
                done(outcome)
                outcomes.append(outcome)
    return outcomes


class Runner:
    """Runs probes, and passes failed ones on to later probes."""

    def __init__(self, gpu: str, folder: Path, models: Path, deadline: float, directory: Path = Path("runs")) -> None:
        self.directory = directory
        self.gpu, self.folder, self.models, self.deadline = gpu, folder, models, deadline
        self.device = CPU if gpu == CPU else GPU
        self.later: list[str] = []
        """Arguments of runs that do without what failed."""
        self.failed: set[str] = set()

    def run(self, stage: Sequence[Probe]) -> Iterator[ProbeOutcome]:
        """Yield each probe's outcome when it ends, running several if cores allow."""
        waiting, live = list(stage), list[ProbeProcess]()
        at_once = max(1, len(os.sched_getaffinity(0)) // 2)
        try:
            while waiting or live:
                while waiting and len(live) < at_once:
                    probe = waiting.pop(0)
                    if reason := self.why_skipped(probe):
                        yield ProbeOutcome(probe.name, probe.layer, "skip", reason)
                        continue
                    left = self.deadline - time.monotonic()
                    limit = probe.limit_s * (CPU_PATIENCE if self.device == CPU else 1)
                    live.append(
                        ProbeProcess(probe, self.command(probe), self.folder, min(limit, left), self.environment())
                    )
                time.sleep(POLL_S)
                for process in [active for active in live if active.over()]:
                    live.remove(process)
                    yield self.judged(process)
        finally:
            for process in live:
                process.stop()

    def why_skipped(self, probe: Probe) -> str:
        left = self.deadline - time.monotonic()
        if probe.cuda_only and self.device != GPU:
            return "needs a GPU"
        if probe.package and find_spec(probe.package.partition(".")[0]) is None:
            return f"the package {probe.package.partition('.')[0]} is not installed"
        if probe.models and "models" in self.failed:
            return "the probe `models`, which writes its model, has failed"
        if left < LEAST_S:
            return f"no time was left; run it by `rlctl doctor --deep --only {probe.name}`, or raise --limit"
        return ""

    def command(self, probe: Probe) -> list[str]:
        python = [sys.executable, "-P", "-m"]
        if not probe.run:
            return [*python, "rlctl.doctor.probes", probe.name, self.device, str(self.models)]
        words = ["--nodes", "1", "--gpus-per-node", "1"] if self.device == GPU else []
        template_words = [text.format(models=self.models) for text in probe.run]
        more = [*probe.cuda_run, *self.later] if self.device == GPU else []
        directory = ["--run-dir", str(self.folder / probe.name)] if probe.run[0] == "train" else []
        return [*python, "rlctl", *template_words, "--gpu", self.gpu, *words, *more, *directory]

    def environment(self) -> dict[str, str]:
        packages = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), packages)))
        compiled = {"TORCHDYNAMO_DISABLE": "1"} if "triton" in self.failed else {}
        converted = {"RLCTL_MEGATRON_CHECKPOINT_DIR": str(self.models / "converted")}
        variables = {"PYTHONPATH": path, "COLUMNS": "200", "RLCTL_PROBE_DIRECTORY": str(self.directory.absolute())}
        return {**os.environ, **variables, **compiled, **converted}

    def judged(self, process: ProbeProcess) -> ProbeOutcome:
        outcome = process.outcome()
        probe = process.probe
        if outcome.status == "fail":
            self.note_failure(probe)
            if probe.later and self.device == GPU:
                outcome.advice += f" The runs that follow have {' '.join(probe.later)}."
        if outcome.status == "ok" and probe.run and probe.run[0] == "train":
            outcome.phases = self.phases(self.folder / probe.name)
        return outcome

    def note_failure(self, probe: Probe) -> None:
        """Make later runs avoid the probe's feature."""
        self.failed.add(probe.name)
        self.later += probe.later

    def phases(self, run: Path) -> list[dict[str, Any]]:
        command = [sys.executable, "-P", "-m", "rlctl", "plan", "--run", str(run), "--json"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, env=self.environment(), timeout=60, check=False)
            return [row for row in json_object(done.stdout).get("phases", []) if row["measured"] >= 0.005]
        return []


class ProbeProcess:
    """A probe's process. Its stdout, one JSON object, and its log are files in `folder`."""

    def __init__(
        self, probe: Probe, command: Sequence[str], folder: Path, limit_s: float, environment: dict[str, str]
    ) -> None:
        self.probe, self.limit_s, self.began = probe, limit_s, time.monotonic()
        self.answer, self.log = folder / f"{probe.name}.json", folder / f"{probe.name}.log"
        with self.answer.open("w") as out, self.log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment, start_new_session=True
            )
        self.stopped, self.said = False, ""

    def over(self) -> bool:
        """Whether the process has ended; ends it at its limit."""
        if self.process.poll() is None and time.monotonic() - self.began > self.limit_s:
            self.stopped, self.said = True, self.last_line()
            self.stop()
        return self.process.poll() is not None

    def stop(self) -> None:
        for number, wait_s in ((signal.SIGINT, GRACE_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(wait_s)

    def outcome(self) -> ProbeOutcome:
        probe, code, seconds = self.probe, self.process.returncode, time.monotonic() - self.began
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its remaining processes
        value = json_object(self.answer.read_bytes())
        if code == NoPlanError.exit_code and not self.stopped:
            return ProbeOutcome(
                probe.name, probe.layer, "skip", f"does not fit this machine: {error_of(value)}", seconds=seconds
            )
        if code == 0 and not self.stopped:
            return ProbeOutcome(probe.name, probe.layer, "ok", seconds=seconds, figures=figures_of(value, probe))
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        ended = f"was stopped after {self.limit_s:.0f} s" if self.stopped else ended
        reason = (
            error_of(value) if value.get("error") and not self.stopped else f"{ended}{self.said or self.last_line()}"
        )
        return ProbeOutcome(probe.name, probe.layer, "fail", reason[:LINE_CHARACTERS], probe.advice, seconds)

    def last_line(self) -> str:
        """Return rlctl's error from the log, else its last line."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        line = next((line for line in lines if line.startswith("rlctl: ")), lines[-1] if lines else "")
        return f"; the log says: {line}" if line else ""


def json_object(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}


def error_of(answer: dict[str, Any]) -> str:
    """Return the first line of the error that a command or a probe printed as JSON."""
    return str(answer.get("error", {}).get("message", "")).strip().partition("\n")[0]


def figures_of(answer: dict[str, Any], probe: Probe) -> dict[str, float | str]:
    if not probe.run:
        return answer
    if probe.run[0] == "refit-test":
        figures = {"mover": answer["mover"], "tensors compared": answer["tensors"]}
        return figures | {"refit s": answer["seconds"]["total"], "log-prob difference": answer["logprobs"]["mean_abs"]}
    metric = answer["headline"]["metric"].replace("_", " ")
    return {f"{at} {metric}": answer["headline"][at]["value"] for at in ("first", "last")}


def line_of(outcome: ProbeOutcome) -> str:
    """Return an outcome as a line of the page, with the advice after a failure in a second one."""
    mark = {"ok": "ok  ", "fail": "FAIL", "skip": "skip"}[outcome.status]
    figures = ", ".join(f"{name} {value if isinstance(value, str) else f'{value:.3g}'}"
                        for name, value in outcome.figures.items())  # fmt: skip
    seconds = f"{outcome.seconds:6.1f} s" if outcome.seconds else " " * 8
    detail = f"{outcome.layer}: {outcome.detail}" if outcome.status == "fail" else outcome.detail
    advice = f"\n{'':28}-> {outcome.advice}" if outcome.advice else ""
    return f"{mark}  {outcome.name:<18} {seconds}  {figures or detail}{advice}"


def summary(outcomes: Sequence[ProbeOutcome]) -> str:
    """Return the end of the page: the seconds of the largest run's step next to the plan's, and how many passed."""
    lines = []
    if largest := next((outcome for outcome in reversed(outcomes) if outcome.phases), None):
        lines += ["", f"{'seconds of a step of ' + largest.name:<34} {'measured':>9} {'planned':>9}"]
        lines += [f"  {row['phase']:<32} {row['measured']:9.2f} {row['predicted']:9.2f}" for row in largest.phases]
    count = {status: sum(outcome.status == status for outcome in outcomes) for status in ("ok", "fail", "skip")}
    return "\n".join([*lines, "", f"{count['ok']} passed, {count['fail']} failed, {count['skip']} skipped"])
