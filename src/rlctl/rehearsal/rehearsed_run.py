"""The run of a rehearsal: two steps with a kill between them, and an export."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.config.load import Resolved
from rlctl.errors import KilledError, VerificationError
from rlctl.jobs.run_summary import RunSummary
from rlctl.jobs.train import train_grpo
from rlctl.processes.child import call_in_child
from rlctl.rehearsal.findings import Rehearsal
from rlctl.rollouts.source import Batch
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.metrics import read_metrics
from rlctl.training.loop import Loop

LIMIT_S = 1800.0
"""Timeout of each part of a rehearsal."""
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
"""Environment of a rehearsed run: loggers send nothing to a server."""


def run_twice(small: Resolved, run: RunDirectory, rehearsal: Rehearsal, quiet: bool) -> None:
    """Train one step, kill the process, resume the run, and train the second step."""
    train = partial(train_grpo, small, quiet=quiet)
    try:
        call_in_child("the rehearsed run", partial(train, resume=False, loop=KilledLoop), limit_s=LIMIT_S)
    except KilledError:
        if not run.checkpoints():  # with a checkpoint, the signal came from `KilledLoop`
            raise
    [line] = read_metrics(run.metrics)
    rehearsal.done.append(("step 1", _said(line)))
    rehearsal.done.append(("save", f"the checkpoint of step 1, {_size(run.checkpoints()[-1].path)}"))
    summary: RunSummary = call_in_child("the resumed run", partial(train, resume=True), limit_s=LIMIT_S)
    lines = read_metrics(run.metrics)
    rehearsal.done.append(("kill and resume", f"killed after step 1, resumed, and finished step {summary.steps}"))
    rehearsal.done.append(("step 2", _said(lines[-1])))
    report = run.path / "report.html"
    rehearsal.done.append(("report", f"{report.name}, {_size(report)}"))


def _said(line: dict[str, Any]) -> str:
    values = {name: line.get(name) for name in ("loss", "grad_norm", "reward_mean", "accuracy")}
    difference = (line.get("logprob_diff") or {}).get("mean")
    texts = [f"{name} {value:.3g}" for name, value in values.items() if isinstance(value, int | float)]
    texts += [f"engine and trainer differ by {difference:.1e}"] if difference is not None else []
    texts += [f"validated: {', '.join(line['validation'])}"] if line.get("validation") else []
    return ", ".join(texts)


def _size(path: Path) -> str:
    files = [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB"


class KilledLoop(Loop):
    """Kills its process after the first step, to simulate a failed machine."""

    def sample(self) -> Batch:
        if self.step:
            self.parts.saver.finish()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample()


def variables_of(folder: Path) -> dict[str, str]:
    """Return the environment variables of a rehearsed run; offline loggers write into `folder`."""
    variables = {"RLCTL_MEGATRON_CHECKPOINT_DIR": str(folder / "converted"), "WANDB_DIR": str(folder)}
    return {**OFFLINE, **variables, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": str(folder)}


def export(run: Path, destination: Path) -> str:
    """Export a run to a Hugging Face model, load it in transformers, run it on a text, and return a summary. Raises
    VerificationError for a missing weight or logits that are not finite."""
    import torch
    import transformers

    from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf

    report = megatron_to_hf(run, destination)
    kind = getattr(transformers, read_config(destination)["architectures"][0])
    model, loading = kind.from_pretrained(destination, output_loading_info=True)
    if lacking := [*loading["missing_keys"], *loading["mismatched_keys"]]:
        raise VerificationError(f"The export lacks {lacking[0]}.", "Report it: the run's weights cannot be used.")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(destination)
    with torch.no_grad():
        output = model(tokenizer("How many are two and three?", return_tensors="pt").input_ids).logits
    finite = bool(torch.isfinite(output).all())
    if not finite:
        raise VerificationError("The exported model computes values that are not finite.")
    return f"{report.tensors} tensors, read back and equal; transformers loads them as {type(model).__name__}"
