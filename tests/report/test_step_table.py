"""The step-time table of `rlctl report --steps`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.errors import InputError
from rlctl.report.step_table import step_table, table_text
from support.run_directories import made_run


def test_steps_are_averaged_next_to_the_prediction(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=0)
    lines = [
        {"step": step, "response_tokens_mean": tokens,
         "seconds": {"training": 2.0 * step, "generation": 5.0, "refit": 1.0, "logprobs": 0.5, "total": 2.0 * step + 7}}
        for step, tokens in ((1, 10.0), (2, 20.0), (3, 40.0))
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = step_table(run.path, "2-3")
    assert table["measured"] == {
        "total": 12.0, "training": 5.0, "refit": 1.0, "generation": 5.0, "logprobs": 0.5, "other": 0.5,
        "mean_generated_tokens": 30.0,
    }  # fmt: skip
    assert (table["predicted"]["generation"], table["predicted"]["total"]) == (0.75, 4.0)
    assert table["measured/predicted"]["total"] == 3.0
    text = table_text(table)
    assert "mean of steps 2 to 3" in text
    assert "policy training" in text
    for steps, why in (("2-9", "has no step 4"), ("3-2", "not a range"), ("x", "not a range"), ("0-1", "not a range")):
        with pytest.raises(InputError, match=why):
            step_table(run.path, steps)
