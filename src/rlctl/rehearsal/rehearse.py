"""A rehearsal: the whole of a run on a machine without GPUs, before the cluster is taken.

The configuration is the user's own, made small by `rehearsal/shrink.py`, and the model is a tiny random one of the same
family. Everything else is done as in a run: two steps, the second after the process was killed, and an export of the
trained weights.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.checkpoints.model_source import Tell
from rlctl.cluster.ray_session import environment
from rlctl.config.files import temporary_folder
from rlctl.config.load import Resolved
from rlctl.data.prompts import open_prompts
from rlctl.errors import AbsentError, InputError, KilledError, RlctlError, VerificationError
from rlctl.jobs.backend_arguments import differences
from rlctl.jobs.dry_run import about
from rlctl.jobs.train import train_grpo
from rlctl.jobs.training_run import RunSummary
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.result import Plan
from rlctl.planner.views.render import wrapped
from rlctl.preparation.open_model import published_facts, published_teacher
from rlctl.preparation.prepare import ASSUMED_GPU, Job, check_plan, checked_method, prepare_job, with_images
from rlctl.processes.child import call_in_child
from rlctl.rehearsal.row_checks import look_at_rows, look_at_run
from rlctl.rehearsal.shrink import (
    MOST_LENGTH,
    REHEARSAL,
    VARYING,
    ReplacedValue,
    StandIns,
    changes,
    shrunk,
    usual_letter,
)
from rlctl.rehearsal.stand_ins import generated_rows, names_of_data, write_model
from rlctl.rollouts.source import Batch
from rlctl.runs.directory import RunDirectory
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.metrics import read_metrics
from rlctl.training.loop import Loop
from rlctl.training.method import Method

WIDEST = 36
"""Most columns of the names of parts in the table; a longer one stands out."""
LIMIT_S = 1800.0
"""Longest time of each part of a rehearsal."""
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
"""Environment of a rehearsed run: what would go to a server stays in its directory."""


@dataclass
class Rehearsal:
    """The findings of a rehearsal."""

    folder: str
    done: list[tuple[str, str]] = field(default_factory=list)
    """Parts that were rehearsed, and how."""
    stand_ins: list[tuple[str, str]] = field(default_factory=list)
    """Parts that something else played."""
    shrunk: list[ReplacedValue] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Parts that could not be rehearsed, and why."""
    notices: list[str] = field(default_factory=list)
    """Troubles that the run would have without an error."""
    error: RlctlError | None = None
    """The error that ended the rehearsal; None: it came to its end."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, without the error."""
        return {
            "rehearsed": dict(self.done),
            "stand_ins": dict(self.stand_ins),
            "shrunk": [asdict(change) for change in self.shrunk],
            "not_rehearsed": dict(self.left_out),
            "notices": self.notices,
            "seconds": round(self.seconds, 1),
        }

    def text(self) -> str:
        """Return the table, and the notices below it."""
        rows = [("rehearsed", what, how) for what, how in self.done]
        rows += [("stand-in", what, how) for what, how in self.stand_ins]
        rows += [("shrunk", one.key, f"{_short(one.was)} -> {_short(one.now)}") for one in self.shrunk]
        rows += [("not rehearsed", what, why) for what, why in self.left_out]
        width = min(WIDEST, max((len(what) for _, what, _ in rows), default=0))
        lines = [
            line
            for kind, what, how in rows
            for line in wrapped(how, f"  {kind:<13}  {what:<{width}}  ", " " * (width + 19))
        ]
        for notice in self.notices:
            lines += wrapped(notice, "  notice: ", "    ")
        ended = "stopped by an error" if self.error else "every part was rehearsed"
        return "\n".join([*lines, f"{ended} ({self.seconds:.0f} s)"])


def _short(value: Any, most: int = 60) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def rehearse(resolved: Resolved, tell: Tell, *, quiet: bool, keep: Path | None = None) -> Rehearsal:
    """Rehearse a run. Raises what `train` refuses the configuration for before it starts anything; what fails later is
    the `error` of the result. `keep` is a directory for model, rows, run and export, which are otherwise removed."""
    started = time.perf_counter()
    resolved = with_images(resolved)
    method = checked_method(resolved, tell)
    config = resolved.config
    facts, teacher = published_facts(config.model, tell), published_teacher(config, tell)
    resolved, plan = check_plan(resolved, facts, method, ASSUMED_GPU, teacher=teacher)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise InputError(f"--keep {keep}: the directory is not empty.", "Name another.")
    with nullcontext(keep) if keep is not None else temporary_folder("rehearsal", tell) as folder:
        found = Rehearsal(str(folder))
        try:
            _rehearse(resolved, method, plan, folder, found, tell, quiet)
        except RlctlError as error:
            found.error = error
        found.left_out += not_rehearsed(plan)
        found.seconds = time.perf_counter() - started
        return found


def _rehearse(
    resolved: Resolved, method: Method, plan: Plan, folder: Path, found: Rehearsal, tell: Tell, quiet: bool
) -> None:
    stand_ins = _write_stand_ins(resolved.config, method, plan, folder, found)
    planned = resolved.with_plan(plan)
    small = shrunk(planned, plan, stand_ins)
    found.shrunk, left_out = changes(planned, small)
    found.left_out += [(one.key, f"{_short(one.was)}: only GPUs compute or need it") for one in left_out]
    with environment(**_variables(folder)):
        job = _prepared(small, resolved.config, plan, tell)
        known = ("model: ", "note: ", *differences(job.resolved))
        said = [line.partition(": ") for line in about(job) if not line.startswith(known)]
        found.done += [(what, how) if colon else ("", what) for what, colon, how in said]
        found.done.append(("plan", job.plan.name()))
        found.notices += look_at_rows(job, resolved.config, plan.facts, {str(path) for _, path in stand_ins.rows})
        run = RunDirectory(folder / "run")
        _run(small, run, found, quiet)
        found.notices += look_at_run(job, run, resolved.config, stand_ins.stop)
        tell("rehearsing the export")
        exported = partial(export, run.path, folder / "export")
        found.done.append(("export", call_in_child("the rehearsal of the export", exported, limit_s=LIMIT_S)))


def _write_stand_ins(config: RlctlConfig, method: Method, plan: Plan, folder: Path, found: Rehearsal) -> StandIns:
    tokenizer, why = write_model(folder / "model", config.model, plan)
    found.stand_ins.append(("model", f"a random {plan.facts.family} of two layers for {config.model.name}"))
    if why is None:
        found.done.append(("tokenizer", f"that of {config.model.tokenizer or config.model.name}"))
    else:
        found.stand_ins.append(("tokenizer", why))
    teacher = None
    if plan.teacher is not None:
        teacher, scores = folder / plan.teacher.role, plan.teacher.choice.valued
        write_model(teacher, config.model, plan, plan.teacher.facts, scores=scores)
        found.stand_ins.append((plan.teacher.label, f"a random {plan.teacher.facts.family} of two layers"))
    rows: list[tuple[str, Path]] = []
    for number, (name, data, rewards) in enumerate(names_of_data(config)):
        try:
            open_prompts(data, config.run.seed, method.rows)
        except AbsentError as error:
            path = folder / f"rows_{number}.jsonl"
            generated_rows(
                path, data, rewards, method.rows, plain=config.teacher_has_tokenizer,
                images=plan.facts.vision is not None,
            )  # fmt: skip
            rows.append((name, path))
            found.stand_ins.append((f"rows of {name}", f"generated sums; {error.message}"))
    if config.turn_tokens:
        (folder / "rehearsal.py").write_text(VARYING)
        said = "the share of some letters is added to the rewards, and one letter ends completions"
        found.stand_ins.append(("success of a random model", said))
    letter = usual_letter([*map(str, tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))])
    keeps = config.model.tokenizer is not None and why is None
    return StandIns(folder, folder / "model", teacher, keeps, letter, tuple(rows))


def _prepared(small: Resolved, config: RlctlConfig, plan: Plan, tell: Tell) -> Job:
    """Return the job of a rehearsal. Where a prompt is longer than it usually allows, it allows what the run does."""
    try:
        return prepare_job(small, tell)
    except InputError:
        length = config.model.max_length or plan.facts.max_length
        if length <= MOST_LENGTH:
            raise
        return prepare_job(small.replacing({"model.max_length": length}, REHEARSAL), tell)


def _run(small: Resolved, run: RunDirectory, found: Rehearsal, quiet: bool) -> None:
    """Take two steps; the process is killed between them, and the run resumed."""
    train = partial(train_grpo, small, quiet=quiet)
    try:
        call_in_child("the rehearsed run", partial(train, resume=False, loop=KilledLoop), limit_s=LIMIT_S)
    except KilledError:
        if not run.checkpoints():  # else it was this file's own signal
            raise
    [line] = read_metrics(run.metrics)
    found.done.append(("step 1", _said(line)))
    found.done.append(("save", f"the checkpoint of step 1, {_size(run.checkpoints()[-1].path)}"))
    summary: RunSummary = call_in_child("the resumed run", partial(train, resume=True), limit_s=LIMIT_S)
    lines = read_metrics(run.metrics)
    found.done.append(("kill and resume", f"killed after step 1, resumed, and finished step {summary.steps}"))
    found.done.append(("step 2", _said(lines[-1])))
    report = run.path / "report.html"
    found.done.append(("report", f"{report.name}, {_size(report)}"))


def _said(line: dict[str, Any]) -> str:
    values = {name: line.get(name) for name in ("loss", "grad_norm", "reward_mean", "accuracy")}
    difference = (line.get("logprob_diff") or {}).get("mean")
    shown = [f"{name} {value:.3g}" for name, value in values.items() if isinstance(value, int | float)]
    shown += [f"engine and trainer differ by {difference:.1e}"] if difference is not None else []
    shown += [f"validated: {', '.join(line['validation'])}"] if line.get("validation") else []
    return ", ".join(shown)


def _size(path: Path) -> str:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return f"{sum(one.stat().st_size for one in files) / 1e6:.1f} MB"


class KilledLoop(Loop):
    """Kills its own process after the first step, as a machine that fails would."""

    def sample(self) -> Batch:
        if self.step:
            self.parts.saver.finish()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample()


def _variables(folder: Path) -> dict[str, str]:
    """Return the variables of a rehearsed run; an offline logger writes into the folder."""
    own = {"RLCTL_MEGATRON_CHECKPOINT_DIR": str(folder / "converted"), "WANDB_DIR": str(folder)}
    return {**OFFLINE, **own, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": str(folder)}


def export(run: Path, destination: Path) -> str:
    """Write the Hugging Face model of a run, have transformers load it and compute a text, and say so. Raises
    VerificationError where it lacks a weight or computes what is not a number."""
    import torch
    import transformers

    from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf

    report = megatron_to_hf(run, destination)
    kind = getattr(transformers, read_config(destination)["architectures"][0])
    model, told = kind.from_pretrained(destination, output_loading_info=True)
    if lacking := [*told["missing_keys"], *told["mismatched_keys"]]:
        raise VerificationError(f"The export lacks {lacking[0]}.", "Report it: the run's weights cannot be used.")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(destination)
    with torch.no_grad():
        found = model(tokenizer("How many are two and three?", return_tensors="pt").input_ids).logits
    finite = bool(torch.isfinite(found).all())
    if not finite:
        raise VerificationError("The exported model computes values that are not finite.")
    return f"{report.tensors} tensors, read back and equal; transformers loads them as {type(model).__name__}"


def not_rehearsed(plan: Plan) -> list[tuple[str, str]]:
    """Return what no rehearsal can show, with what the plan says of it."""
    if plan.cluster.is_cpu:
        return [("memory and speed", "those of a tiny model say nothing of the run's")]
    most = max(plan.memory.values(), key=lambda phase: phase.total).total / GIB
    gpus = f"{plan.cluster.gpus} x {plan.cluster.device.name.upper()}"
    return [
        ("kernels of GPUs", "all was computed on processors"),
        ("memory", f"planned are {most:.0f} GiB of a GPU ({gpus})"),
        ("speed", f"planned are {plan.total_s:.0f} s a step"),
        ("links between GPUs and nodes", "all processes were on this machine"),
    ]
