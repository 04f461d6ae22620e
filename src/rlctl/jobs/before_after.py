"""What a run's end shows to try: a held-out prompt answered before and after training, and a command to paste."""

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
"""Characters of a prompt or an answer in the summary."""
TRIED = 32
"""Prompts that the printed evaluation takes, so that it ends soon on a laptop."""
LOOKED_AT = 16
"""Rows of the data among which the shortest prompt is printed."""


def answered_twice(run: RunDirectory, lines: Sequence[Metrics]) -> list[str]:
    """Return a held-out prompt with its answers in the first and the last validation, in lines; empty if there are no
    two validations with samples. Of the logged prompts it is the first whose reward moved as the mean did, else the
    first whose answer changed, else the first."""
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
        f"held-out prompt: {_cut(asked(before))}",
        *(f"  {name:<{width}}  {_scored(answer)}" for name, answer in zip(names, (before, after), strict=True)),
    ]


def asked(sample: Mapping[str, Any]) -> str:
    """Return the text of a sample's last message to the model."""
    turns = conversation(sample)[:-1]
    questions = [message.text for message in turns if message.role in ("user", "prompt")]
    return (questions or [message.text for message in turns] or [""])[-1]


def command_to_try(job: Job, run: RunDirectory) -> str:
    """Return a complete command that tries the trained model: episodes of the run's environment, an evaluation on the
    run's data, or an answer to a short prompt of the data. A reward model is exported."""
    config, place = job.config, shlex.quote(str(run.path))
    rollouts = config.rollout_settings
    if command_of(config.run.algorithm) == "train rm":
        return f"rlctl convert megatron-to-hf {place} {shlex.quote(f'{run.path.name}-hf')}"
    if job.prompts.environment is not None:
        return f"rlctl rollout --run-dir {place} -n 3"
    if rollouts is not None and (task := rollouts.validation.data.name or config.data.name) and _scores(job):
        return f"rlctl eval --run-dir {place} --task {shlex.quote(task)} --limit {TRIED}"
    rows = [job.prompts.prompt_at(position) for position in range(LOOKED_AT)]
    prompt = min((asked({"prompt": row.prompt}) for row in rows), key=lambda text: (not text, len(text)))
    image = "--image FILE " * any(row.images for row in rows)
    return f"rlctl generate --run-dir {place} {image}--prompt {shlex.quote(_cut(prompt) or 'Hello')}"


def _scores(job: Job) -> bool:
    """Whether an evaluation can score completions as the run does."""
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
