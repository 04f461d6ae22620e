import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlctl.errors import InputError
from rlctl.telemetry.display import step_line
from rlctl.telemetry.metrics import (
    Metric,
    MetricsFile,
    TensorBoardLogger,
    flatten,
    nested,
    read_metrics,
)
from rlctl.telemetry.phases import Phase
from rlctl.telemetry.report import write_report
from support.metrics import without_timing


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
    first = MetricsFile(path, keep_before=0)
    for step in range(4):
        first.log(step, {"reward_mean": float(step)})
    first.close()
    again = MetricsFile(path, keep_before=2)
    assert again.steps == {0, 1}
    again.log(2, {"reward_mean": 9.0})
    again.close()
    assert [(entry["step"], entry["reward_mean"]) for entry in read_metrics(path)] == [(0, 0.0), (1, 1.0), (2, 9.0)]


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
    MetricsFile(path, keep_before=0).log(0, {"grad_norm": math.nan, "logprob_diff": {"max": [math.inf, 1.0]}})
    assert json.loads(path.read_text()) == {"step": 0, "grad_norm": None, "logprob_diff": {"max": [None, 1.0]}}


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
    text = step_line(2, 12, line(2), declared, plain=True)
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
    text = step_line(0, 5, {"seconds": {"total": 1.0}}, [Metric("margin", "mean", column="margin")], plain=True)
    assert text.startswith("step 1/5 reward - acc - length - margin - grad - tok/s - total 1.0s")


def test_nested_undoes_flatten():
    values = {"a": 1.0, "b/c": 2.5, "b/d/e": 3.0}
    assert nested(values) == {"a": 1.0, "b": {"c": 2.5, "d": {"e": 3.0}}}
    assert dict(flatten(nested(values))) == values


def test_the_report_holds_the_curves_and_the_time_of_every_phase(tmp_path):
    path = tmp_path / "report.html"
    write_report(
        path, "run <1>", [line(0), line(1, accuracy=None), line(2)], [Metric("kl", "mean", curve="divergence")]
    )
    text = path.read_text()
    assert "divergence" in text
    assert text.count("<svg") == 2
    assert "run &lt;1&gt;" in text
    assert "Mean reward 0.250 at step 1, 0.450 at step 3" in text
    assert "<td>generation<td>1.5<td>0.50<td>14.3%" in text


def test_tensorboard_shows_a_resumed_run_without_the_steps_that_ran_again(tmp_path):
    for first, steps in ((0, range(4)), (2, range(2, 4))):
        logger = TensorBoardLogger(tmp_path, keep_before=first)
        for step in steps:
            logger.log(step, {"reward_mean": step + first / 10, "logprob_diff": {"max": 0.5}})
        logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward_mean")] == [(0, 0), (1, 1), (2, 2.2), (3, 3.2)]
    assert [e.step for e in events.Scalars("logprob_diff/max")] == [0, 1, 2, 3]


def test_a_report_is_made_of_odd_metrics(tmp_path):
    odd = {"reward_mean": None, "accuracy": None, "response_tokens_mean": 1e300, "grad_norm": None, "tokens_per_s": 0}
    write_report(tmp_path / "report.html", "run", [line(0, **odd)])
    seconds = {"seconds": {**dict.fromkeys((phase.value for phase in Phase), 0.0), "total": 0.0}}
    write_report(tmp_path / "report.html", "run", [{"step": 0, **seconds}])  # without a single curve
    assert "1 steps" in (tmp_path / "report.html").read_text()
