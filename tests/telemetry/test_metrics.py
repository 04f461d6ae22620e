import json
import math

import pytest

from rlctl.errors import InputError
from rlctl.telemetry.display import step_line
from rlctl.telemetry.metrics import (
    Metric,
    MetricsFile,
    flatten,
    nested,
    read_metrics,
)
from rlctl.telemetry.phases import Phase
from support.metric_lines import without_timing


def line(step: int, **more) -> dict:
    seconds = dict.fromkeys((phase.value for phase in Phase), 0.5)
    return {
        "step": step, "reward_mean": 0.25 + step / 10, "accuracy": 0.5, "response_tokens_mean": 12.0, "kl": 1e-4,
        "entropy": 1.5, "clip_fraction": 0.0, "grad_norm": 2.0, "tokens_per_s": 100.0,
        "logprob_diff": {"mean": 2e-7, "max": 1e-6, "kl": 1e-13, "prob_error": 1.0000002},
        "seconds": {**seconds, "total": 3.5}, **more,
    }  # fmt: skip


def test_reopening_drops_the_lines_of_steps_that_will_run_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, finished=0)
    for step in range(1, 5):
        first.log(step, {"reward_mean": float(step)})
    again = MetricsFile(path, finished=2)
    assert again.steps == {1, 2}
    again.log(3, {"reward_mean": 9.0})
    assert [(entry["step"], entry["reward_mean"]) for entry in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]


def test_metrics_that_somebody_removes_or_replaces_go_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, finished=0)
    file.log(1, {})
    path.unlink()
    file.log(2, {})
    edited = tmp_path / "edited"
    edited.write_text('{"step": 1}\n{"step": 2}\n')
    edited.replace(path)
    file.log(3, {})
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3]


def test_a_line_cut_off_by_a_kill_is_left_out_but_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert [entry["step"] for entry in read_metrics(path)] == [0]
    for broken in (b'{"step": 0', b"[0]", b'{"stap": 0}', b"\xff\0", b"[" * 100_000):
        path.write_bytes(broken + b'\n{"step": 1}\n')
        with pytest.raises(InputError, match="line 1 is not the metrics of a step"):
            read_metrics(path)


def test_a_value_that_is_not_finite_is_null_and_the_file_stays_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, finished=0).log(1, {"grad_norm": math.nan, "logprob_diff": {"max": [math.inf, 1.0]}})
    assert json.loads(path.read_text()) == {"step": 1, "grad_norm": None, "logprob_diff": {"max": [None, 1.0]}}


def test_times_are_not_part_of_what_two_equal_runs_share():
    assert without_timing(line(1)) == without_timing(line(1, seconds={}, tokens_per_s=7.0, refit_seconds={}))
    assert without_timing(line(1)) != without_timing(line(1, kl=2e-4))


def test_nested_metrics_flatten_to_slashed_names():
    assert dict(flatten({"a": 1, "b": {"c": 2.5}, "name": "x", "flag": True})) == {"a": 1.0, "b/c": 2.5}


def test_a_step_is_one_line_with_every_named_number():
    declared = [
        Metric("kl", "mean", column="kl", form=".2e"), Metric("logprob_diff/mean", "mean", column="diff", form=".1e"),
        Metric("entropy", "mean", curve="entropy", column="entropy"), Metric("ratio/max", "max"),
    ]  # fmt: skip
    text = step_line(3, 12, line(2), declared, plain=True)
    assert "\n" not in text
    for part in (
        "step 3/12",
        "reward 0.450",
        "length 12.0",
        "kl 1.00e-04",
        "diff 2.0e-07",
        "entropy 1.500",
        "tok/s 100",
        "gen 0.5",
        "refit 0.5",
    ):
        assert part in text


def test_a_line_shows_only_what_is_declared_and_survives_what_is_missing():
    text = step_line(1, 5, {"seconds": {"total": 1.0}}, [Metric("margin", "mean", column="margin")], plain=True)
    assert text.startswith("step 1/5 reward - acc - length - margin - grad - tok/s - total 1.0s")


def test_nested_undoes_flatten():
    values = {"a": 1.0, "b/c": 2.5, "b/d/e": 3.0}
    assert nested(values) == {"a": 1.0, "b": {"c": 2.5, "d": {"e": 3.0}}}
    assert dict(flatten(nested(values))) == values
