"""Samples of a run's rollouts, for people to read: which are kept, and how they are shown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.errors import InputError
from rlctl.runs.request_tree import request_tree
from rlctl.runs.thumbnails import IMAGES, MORE_IMAGES, caption, drawn
from rlctl.telemetry.conversation import as_text, conversation

Sample = dict[str, Any]
"""A line of rollouts/step_N.jsonl."""
FOLDER = "rollouts"
CUT_OFF = {
    "length": "cut off at the length limit",
    "timeout": "cut off at rollouts.timeout_s",
    "abort": "cut off by a refit",
    "turns": "ended by environment.turns",
    "context": "ended by the length limit",
    "sampled_tokens": "ended by environment.sampled_tokens",
    "tool_calls": "ended by environment.tool_calls",
    "broken_calls": "ended by environment.broken_calls",
    "episode_timeout": "ended by environment.timeout_s",
}
"""Words for how a completion was ended, by its stop reason."""


def chosen(groups: Sequence[RolloutGroup], count: int) -> list[tuple[RolloutGroup, Rollout]]:
    """Return up to `count` rollouts of a step with groups: best, worst (of another group), then one per group, then
    more. Without rewards the first two are arbitrary."""
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    pairs.sort(key=lambda pair: pair[1].reward or 0.0)
    if not pairs:
        return []
    best = next(pair for pair in pairs if (pair[1].reward or 0.0) == (pairs[-1][1].reward or 0.0))
    others = [pair for pair in pairs if pair[0] is not best[0]] or [pair for pair in pairs if pair is not best]
    picks = [best, *others[:1]]
    places = {group.position: place for place, group in enumerate(groups)}
    rest = sorted(
        (pair for pair in pairs if all(pair is not taken for taken in picks)), key=lambda pair: pair[1].sample
    )
    while rest and len(picks) < count:
        picked_positions = [group.position for group, _ in picks]
        picks.append(min(rest, key=lambda pair: (picked_positions.count(pair[0].position), places[pair[0].position])))
        rest = [pair for pair in rest if pair is not picks[-1]]
    return picks[:count]


def kept_steps(run: Path) -> dict[int, Path]:
    """Return the samples file of each step (from 1) that has one. Raises InputError for no run."""
    if not (run / "manifest.json").exists():
        raise InputError(f"{run} is not the directory of a run.", "Name one, such as runs/my-run.")
    files = {path: re.fullmatch(r"step_(\d+)\.jsonl", path.name) for path in (run / FOLDER).glob("step_*.jsonl")}
    return {int(match[1]): path for path, match in sorted(files.items()) if match}


def read_samples(run: Path, step: int | None = None) -> list[Sample]:
    """Return samples of `step` (None: all, in order). Raises InputError if missing or foreign."""
    steps = kept_steps(run)
    if step is not None and step not in steps:
        there = f"It kept some of steps {min(steps)} to {max(steps)}." if steps else "It kept none (run.log_rollouts)."
        raise InputError(f"--step {step}: {run} holds no samples of it.", there)
    samples: list[Sample] = []
    for number in sorted(steps) if step is None else [step]:
        try:
            for line in filter(None, steps[number].read_text(encoding="utf-8").split("\n")):  # others may be in a text
                samples.append({"step": number} | json.loads(line))
                if not isinstance(samples[-1].get("reward"), int | float | None):  # a run may have no rewards
                    raise TypeError("a reward is not a number")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(
                f"{steps[number]} cannot be read: {error}.", "Remove it, or name another --step."
            ) from error
    if not samples:
        raise InputError(f"{run} holds no samples of rollouts.", "A run keeps run.log_rollouts of each step.")
    return samples


def sample_text(sample: Sample, *, draws: bool = False) -> str:
    """Return a sample as readable text: scores, the prompt as the model saw it, its images, and the completion.
    `draws`: the reader is a terminal that shows images in 24-bit colors."""
    terms = ", ".join(f"{name} {value:.3f}" for name, value in (sample.get("terms") or {}).items())
    cut = CUT_OFF.get(sample.get("stop_reason", ""), CUT_OFF["length"])
    marks = ["right" * bool(sample.get("right")), cut * bool(sample.get("truncated"))]
    heading = [
        f"step {sample['step']}",
        f"prompt {sample.get('position')}, sample {sample.get('sample')}",
        "no reward" if sample.get("reward") is None else f"reward {sample['reward']:.3f}" + f" ({terms})" * bool(terms),
        *filter(None, marks),
        f"{sample.get('tokens')} tokens",
    ]
    rendered, turns = sample.get("rendered"), conversation(sample)
    visible = [("prompt", rendered), turns[-1]] if rendered else turns
    parts = [" · ".join(heading)]
    if tree := request_tree(sample):
        parts += ["  requests", *(f"    {line}" for line in tree)]
    for role, text in visible[:-1]:
        parts += [f"  {role}", *_indented(text)]
    for image in sample.get(IMAGES) or ():
        parts += [f"  {caption(image)}", *(f"    {line}" for line in (drawn(image) if draws else ()))]
    if more := sample.get(MORE_IMAGES):
        parts.append(f"  {more} more image{'s' * (more > 1)}")
    role, text = visible[-1]
    parts += [f"  {role}", *_indented(text)]
    if sample.get("answer") is not None:
        parts += ["  answer", *_indented(as_text(sample["answer"]))]
    return "\n".join(parts)


def one_line(sample: Sample, name: str, width: int) -> str:
    """Return a sample in at most `width` columns: the end of its question, and the beginning of the completion."""
    question, answer = (" ".join(turn.text.split()) for turn in conversation(sample)[-2:])
    head = "sample  " if sample["reward"] is None else f"{name:>7} {sample['reward']:.3f}  "
    room = max(20, width - len(head) - 4)
    question = question if len(question) <= room // 2 else f"...{question[-(room // 2 - 3) :]}"
    left = room - len(question)
    return f"{head}{question} -> {answer if len(answer) <= left else answer[: left - 3] + '...'}"


def _indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.strip().splitlines()]
