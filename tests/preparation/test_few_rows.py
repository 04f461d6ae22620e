"""Data with fewer rows than a step takes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rlctl.methods.configuration import resolve
from rlctl.preparation.job import prepare_job


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (1, "the data has 1 row, fewer than a step takes (8): each step has a row 8 times"),
        (3, "the data has 3 rows, fewer than a step takes (8): each step has a row 2 or 3 times"),
        (8, None),
    ],
)
def test_rows_that_a_step_takes_several_times_are_counted(
    rows: int, note: str | None, tiny_llama: Path, tmp_path: Path
) -> None:
    """The note agrees with the order in which the run takes its prompts."""
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": "b"}) + "\n" for n in range(rows)))
    asked = {"reward.terms": [{"name": "exact-match"}], "batch.prompts": 8, "generation.max_new_tokens": 8}
    asked |= {"model.name": str(tiny_llama), "data.name": str(data), "cluster.gpu": "cpu"}
    job = prepare_job(resolve(flags=asked, environment={}))
    taken = Counter(job.prompts.prompt_at(position).index for position in range(8))
    found = [said for said in job.notes if "fewer than a step takes" in said]
    assert found == ([note] if note else [])
    if note:
        times = [str(taken[row]) for row in range(rows)]
        assert set(times) == {word for word in note.rpartition(": ")[2].split() if word.isdigit()}
