"""Plans of published runs against their published step times, by the function that `rlctl plan` calls."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUNS = (
    ("NeMo-RL v0.3 blog", "grpo_math_8B_megatron", "h100"),
    ("NeMo-RL v0.3 blog", "grpo_math_qwen30ba3b_megatron", "h100"),
    ("NeMo-RL v0.6 summary", "grpo-deepseek-v3-32n8g", "h100"),
    ("NeMo-RL v0.6 summary", "grpo-deepseek-v3-64n8g-async-1off", "h100"),
    ("NeMo-RL v0.6 summary", "grpo-qwen3-30ba3b-4n4g", "gb200"),
    ("NeMo-RL v0.5 summary", "grpo-llama3.1-8b-instruct-2n8g-fp8-async-1off", "h100"),
    ("NeMo-RL v0.5 summary", "grpo-deepseek-v3-64n8g-fp8-async-1off", "h100"),
    ("NeMo-RL v0.7 summary", "grpo-qwen3-30ba3b-4n8g-40K", "h100"),
    ("NeMo-RL v0.7 summary", "grpo-deepseek-v3-64n4g", "gb200"),
    ("NeMo-RL v0.7 summary", "grpo-qwen3-32b-4n8g", "h100"),
    ("NeMo-RL pull 3278", "grpo-qwen3-235b-32n8g-async-1off", "h100"),
    ("rlctl on one H100", "", "h100"),
)

QUICK = (0, 3, 4, 6, 11)
"""A dense model, an asynchronous run, another GPU, float8, and a run of rlctl."""


@pytest.mark.parametrize(
    ("publication", "recipe", "gpu"),
    [pytest.param(*run, marks=() if number in QUICK else pytest.mark.slow) for number, run in enumerate(RUNS)],
)
def test_a_published_step_is_within_its_range(
    publication: str, recipe: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("published_steps", None)
    from published_steps import plan_of, write_recipes  # type: ignore[import-not-found]

    data = BENCHMARKS / "data"
    write_recipes(data / "published_settings.csv", tmp_path)
    with (data / "published_steps.csv").open(newline="") as file:
        row = next(
            one
            for one in csv.DictReader(file)
            if (one["publication"], Path(one["recipe"]).stem, one["gpu"]) == (publication, recipe, gpu)
        )
    plan = plan_of(row, tmp_path)
    low, high = plan.ranges["total"]
    assert low <= float(row["step_s"]) <= high
