"""Faults of a turn: thoughts inside the answer, and invalid tool calls. `</think>` divides a turn into thought and
answer. Without it, the turn is a thought if prompt or turn opens one, else an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

THINK, THOUGHT = "<think>", "</think>"
CALL_MARKS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
BITS = {"malformed_thinking": 1, "invalid_tool_call": 2}
"""Bits of the faults in the column `FAULTS`, by key of the section `advantage`; the stronger fault is last."""


def parts_of(text: str, *, opened: bool) -> tuple[str, str]:
    """Return the thought and the answer of a turn; `opened`: its prompt ends with `<think>`."""
    thought, ends, answer = text.partition(THOUGHT)
    if not ends and not opened and not text.lstrip().startswith(THINK):
        thought, answer = "", text
    return thought.strip().removeprefix(THINK).strip(), answer.strip()


def faults_of(text: str, *, opened: bool, called: bool, broken: bool) -> list[str]:
    """Return a turn's faults. `called`: a tool call has none; `broken`: an invalid call. Otherwise the answer has no
    thought tags or call marks, and a lone thought has each tag at most once."""
    if called:
        return []
    thought, answer = parts_of(text, opened=opened)
    allowed, judged = (0, answer) if answer else (1, thought)
    faults = {
        "malformed_thinking": any(judged.count(tag) > allowed for tag in (THINK, THOUGHT)),
        "invalid_tool_call": broken or any(mark in judged for mark in CALL_MARKS),
    }
    return [name for name, is_present in faults.items() if is_present]


@dataclass(frozen=True)
class JudgedTurn:
    """A turn of the model, with its faults."""

    text: str
    spoken: str
    """The text without its tool call."""
    opened: bool
    called: bool
    faults: Sequence[str]


def episode_faults(turns: Sequence[JudgedTurn]) -> set[str]:
    """Return an episode's faults, named as in `environment.no_reward`. Its answer is the last turn beyond a thought or
    call; an episode may end with a call."""
    parts = [parts_of(turn.spoken, opened=turn.opened) for turn in turns]
    answers = (
        answer for turn, (thought, answer) in zip(turns, parts, strict=True) if answer or not (thought or turn.called)
    )
    wrong_tags = (
        THINK in turn.text or turn.text.count(THOUGHT) != turn.opened or "malformed_thinking" in turn.faults
        for turn in turns
    )
    faults = {
        "duplicated-thinking": any(thought and thought == answer for thought, answer in parts),
        "empty-answer": not turns[-1].called and not (list(answers) or [""])[-1],
        "malformed-thinking": any(wrong_tags),
    }
    return {name for name, is_present in faults.items() if is_present}
