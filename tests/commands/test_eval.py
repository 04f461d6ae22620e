"""What `rlctl eval` prints of its results."""

from __future__ import annotations

import json

from rlctl.commands.eval import table
from rlctl.jobs.evaluate import Result
from rlctl.rewards.statistics import Estimate


def result(model: str, values: list[float], task: str = "gsm8k", samples: int = 1) -> Result:
    metrics = {f"mean@{samples}": Estimate.of(values), "pass@1": Estimate.of(values)}
    return Result(task, model, len(values), samples * len(values), metrics)


def test_json_has_value_and_error_of_each_metric() -> None:
    assert json.loads(json.dumps(result("m", [1.0, 0.0, 0.0, 0.0]).to_json())) == {
        "task": "gsm8k", "model": "m", "samples": 4,
        "metrics": {"mean@1": {"value": 0.25, "stderr": 0.25}, "pass@1": {"value": 0.25, "stderr": 0.25}},
    }  # fmt: skip
    assert result("m", [1.0]).to_json()["metrics"]["mean@1"] == {"value": 1.0, "stderr": None}


def test_models_stand_side_by_side_with_their_difference() -> None:
    worse, better = [0.0] * 20, [1.0] * 10 + [0.0] * 10
    shown = table([result("a", worse), result("longer-name", better), result("c", [1.0, *worse[1:]])]).splitlines()
    assert shown[0] == "gsm8k: 20 prompts x 1 sample"
    assert shown[1].split() == ["a", "longer-name", "c"]
    assert shown[2].split() == ["mean@1", "0.0000", "±", "0.0000", "0.5000", "±", "0.1147", "0.0500", "±", "0.0500"]
    assert [line.index("±") for line in shown[2:4]] == [shown[2].index("±")] * 2
    assert shown[4] == "  longer-name - a: mean@1 +0.5000 ± 0.1147, p = 0.002: more than noise"
    assert shown[5] == "  c - a: mean@1 +0.0500 ± 0.0500, p = 1: not more than noise"


def test_each_task_has_a_table_of_its_own() -> None:
    shown = table([result("a", [1.0, 0.0]), result("a", [1.0, 1.0], "aime24", 4)])
    assert [block.splitlines()[0] for block in shown.split("\n\n")] == [
        "gsm8k: 2 prompts x 1 sample",
        "aime24: 2 prompts x 4 samples",
    ]
