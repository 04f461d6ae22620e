"""Conditions over the metrics of a step: the step line, the summary and the report say the same."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.jobs.run_summary import RunSummary
from rlctl.report.page import page
from rlctl.report.reported_run import ReportedRun
from rlctl.telemetry.display import step_line
from rlctl.telemetry.headline import CONDITIONS, findings, marks, removed

GOOD: dict[str, Any] = {
    "step": 1, "reward_mean": 0.5, "stop_reasons": {"length": 1, "stop": 3}, "sampled_rollouts": 4,
    "answered_fraction": 0.5, "groups_without_signal": 0.5, "seconds": {"total": 1.0, "training": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "mark", "advice"),
    [
        ({"stop_reasons": {"length": 2, "stop": 2}}, "! 50% cut off", "Raise --max-new-tokens"),
        ({"answered_fraction": 0.0}, "! 100% without an answer", "reward.extract"),
        ({"groups_without_signal": 1.0}, "! nothing to learn", "more --generations"),
        ({"environment": {"tool_calls": 0.0}, "groups_without_signal": 1.0}, "! no tool called", "form of a call"),
    ],
)
def test_a_condition_is_in_the_step_line_the_summary_and_the_report(
    more: dict[str, Any], mark: str, advice: str
) -> None:
    bad = GOOD | {"environment": {"tool_calls": 1.0}} | more
    for line in (step_line(1, 3, bad, plain=True), step_line(1, 3, bad, plain=False, width=200)):
        assert mark in line
        assert mark not in step_line(1, 3, GOOD, plain=True)
    narrow = step_line(1, 3, bad, plain=False, width=44).splitlines()
    assert [len(line) <= 44 for line in narrow] == [True, True]
    assert mark in narrow[1]
    lines = [{**(bad if step > 2 else GOOD), "step": step} for step in range(1, 5)]
    (told,) = findings(lines)
    assert told.startswith("In 2 of 4 steps ")
    assert advice in told
    assert told in RunSummary("runs/a", 4, False, None, tuple(findings(lines)), 1.0, None, 0).text().splitlines()
    text = page([ReportedRun("a run", lines)])
    assert advice in text.partition("To look at")[2].partition("</section>")[0]


def test_one_step_of_many_is_no_finding_and_old_metrics_have_none() -> None:
    lines = [GOOD] * 40
    assert findings([*lines, GOOD | {"groups_without_signal": 1.0}]) == []
    assert marks({"step": 1}) == ""
    assert findings([{"step": 1}]) == []
    assert len({one.mark for one in CONDITIONS}) == len(CONDITIONS)


def test_what_training_removes_is_no_finding() -> None:
    cut = GOOD | {"stop_reasons": {"length": 2, "stop": 2}}
    assert findings([cut] * 8 + [GOOD] * 2) == []
    assert findings([cut] * 8 + [GOOD, cut]) != []


def test_the_summary_explains_the_marks_of_the_first_steps() -> None:
    cut = GOOD | {"stop_reasons": {"length": 2, "stop": 2}}
    (told,) = removed([cut] * 8 + [GOOD] * 2)
    assert told == (
        "In 8 of 10 steps more than a quarter of the completions ended at the token limit (50% on average); training "
        "removed this: 25% in the last 2 steps."
    )
    assert told in RunSummary("runs/a", 4, False, None, (), 1.0, None, removed=(told,)).text().splitlines()
    assert removed([cut] * 10) == removed([GOOD] * 40 + [cut] + [GOOD] * 4) == []


def test_rollouts_ended_by_time_are_not_cut_off_by_the_token_limit() -> None:
    assert marks(GOOD | {"stop_reasons": {"timeout": 4}}) == ""
