"""End of a run's summary: a held-out prompt answered before and after training, and a command that tries the model."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config.user_code import MODEL
from rlctl.methods.available import command_of
from rlctl.preparation.job import Job
from rlctl.report.run_report import validated_steps
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.conversation import as_text, conversation
from rlctl.telemetry.metrics import Metrics

LONGEST = 160
"""Maximum number of characters of a prompt or an answer in the summary."""
TRIED = 32
"""Number of prompts in the printed evaluation command, small enough for a laptop."""
LOOKED_AT = 16
"""Number of rows searched for the shortest prompt to print."""


def answered_twice(run: RunDirectory, lines: Sequence[Metrics]) -> list[str]:
    """Return lines with a held-out prompt and its answers in the first and last validation; empty without two
    validations with samples. Choose the first prompt whose reward changed in the mean's direction, else the first with
    a changed answer, else the first."""
    steps = validated_steps(lines)
    if len(steps) < 2:
        return []
    first, last = (_samples(run.path / "validation" / f"step_{step}.jsonl") for step in (steps[0], steps[-1]))
    pairs = [(first[key], last[key]) for key in first if key in last]
    if not pairs:
        return []
    gains = [(after.get("reward") or 0.0) - (before.get("reward") or 0.0) for before, after in pairs]
    moved = [pair for pair, gain in zip(pairs, gains, strict=True) if gain * sum(gains) > 0]
    changed = [pair for pair in pairs if _answer(pair[0]) != _answer(pair[1])]
    before, after = [*moved, *changed, *pairs][0]
    when = "before step 1" if steps[0] == 0 else f"after step {steps[0]}"
    names = (when, f"after step {steps[-1]}")
    width = max(map(len, names))
    return [
        f"held-out prompt: {_cut(last_message(before))}",
        *(f"  {name:<{width}}  {_scored(answer)}" for name, answer in zip(names, (before, after), strict=True)),
    ]


def last_message(sample: Mapping[str, Any]) -> str:
    """Return the text of a sample's last message to the model."""
    turns = conversation(sample)[:-1]
    questions = [message.text for message in turns if message.role in ("user", "prompt")]
    return (questions or [message.text for message in turns] or [""])[-1]


def command_to_try(job: Job, run: RunDirectory) -> str:
    """Return a complete command that tries the trained model: it plays episodes of the run's environment, evaluates on
    the run's data, or answers a short prompt of the data. For a reward model, the command exports it."""
    config, place = job.config, shlex.quote(str(run.path))
    rollouts = config.rollout_settings
    if command_of(config.run.algorithm) == "train rm":
        return f"rlctl convert megatron-to-hf {place} {shlex.quote(f'{run.path.name}-hf')}"
    if job.prompts.environment is not None:
        return f"rlctl rollout --run-dir {place} -n 3"
    if rollouts is not None and (task := rollouts.validation.data.name or config.data.name) and _scores(job):
        return f"rlctl eval --run-dir {place} --task {shlex.quote(task)} --limit {TRIED}"
    rows = [job.prompts.prompt_at(position) for position in range(LOOKED_AT)]
    prompt = min((last_message({"prompt": row.prompt}) for row in rows), key=lambda text: (not text, len(text)))
    image = "--image FILE " * any(row.images for row in rows)
    return f"rlctl generate --run-dir {place} {image}--prompt {shlex.quote(_cut(prompt) or 'Hello')}"


def _scores(job: Job) -> bool:
    """Return whether `rlctl eval` can use the run's scorers."""
    return job.rewards is not None and not any(name.startswith(MODEL) for name in job.rewards.scorers)


def _samples(path: Path) -> dict[Any, Mapping[str, Any]]:
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        records = map(json.loads, filter(None, path.read_text(encoding="utf-8").split("\n")))
        return {
            (record.get("position"), record.get("sample")): record for record in records if isinstance(record, dict)
        }
    return {}


def _answer(sample: Mapping[str, Any]) -> str:
    return " ".join(conversation(sample)[-1].text.split())


def _scored(sample: Mapping[str, Any]) -> str:
    reward = sample.get("reward")
    notes = [f"reward {reward:.3g}"] if isinstance(reward, int | float) else []
    notes += ["cut off"] * bool(sample.get("truncated"))
    return _cut(_answer(sample)) + f" ({', '.join(notes)})" * bool(notes)


def _cut(text: str) -> str:
    text = " ".join(as_text(text).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
