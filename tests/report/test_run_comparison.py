"""Prediction beside measurement of a run on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.errors import InputError
from rlctl.report.run_comparison import compare_memory, compare_run, comparison_text


def run_directory(path: Path, predicted: dict[str, float], steps: list[dict[str, float]]) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"plan": {"seconds": predicted}, "config": {}}))
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "seconds": s}) + "\n" for i, s in enumerate(steps))
    )
    return path


def test_phases_are_compared_with_the_median_of_the_steady_steps(tmp_path: Path) -> None:
    steps = [{"training": 99.0, "generation": 99.0, "total": 198.0}] + 3 * [
        {"training": 4.0, "generation": 6.0, "total": 10.0}
    ]
    run = run_directory(tmp_path / "run", {"training": 8.0, "generation": 6.0, "total": 14.0}, steps)
    rows = {row.name: row for row in compare_run(run)}
    assert rows["training"].ratio == 0.5  # measured over predicted, as a calibration's factors
    assert rows["training"].suspect is not None
    assert rows["generation"].suspect is None
    assert "matmul" in comparison_text(list(rows.values()), "phase", "s")


def test_a_run_without_a_finished_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no step"):
        compare_run(run_directory(tmp_path / "run", {"total": 1.0}, []))


def test_memory_is_compared_by_process(tmp_path: Path) -> None:
    """On a CPU the whole process, on a GPU what torch reserved: without contexts, graphs and sleeping neighbors."""
    run = run_directory(tmp_path / "run", {"total": 1.0}, [{"total": 1.0}])
    assert compare_memory(run) == []
    gib = 1024**3
    memory = {
        "training": {"weights": 4.0, "runtime": 2.0, "engine asleep": 1.0, "total": 7.0},
        "logprobs": {"weights": 4.0, "total": 4.0},
        "generation": {"KV": 10.0, "runtime": 0.5, "total": 10.5},
    }
    peaks = {
        "policy": [{"host": 3 * gib, "device": gib}, {"host": 7 * gib, "device": 4 * gib}],
        "engine": [{"host": 5 * gib}],
    }
    (run / "memory.json").write_text(json.dumps(peaks))
    for gpu, expected in (
        ("cpu", {"policy": (7.0, 7.0, False), "engine": (10.5, 5.0, True)}),
        ("h100", {"policy": (4.0, 4.0, False)}),
    ):
        plan = {"seconds": {"total": 1.0}, "memory_gib": memory, "cluster": {"gpu": gpu}}
        (run / "manifest.json").write_text(json.dumps({"plan": plan, "config": {}}))
        rows = compare_memory(run)
        assert {r.name: (r.predicted, r.measured, r.suspect is not None) for r in rows} == expected
    assert "policy" in comparison_text(rows, "process", "GiB")


@pytest.mark.parametrize("file", ["manifest.json", "metrics.jsonl"])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, file: str) -> None:
    run = run_directory(tmp_path / "run", {"training": 1.0, "total": 1.0}, [{"training": 1.0, "total": 1.0}])
    (run / file).write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match=f"{file}(, line 1 is not| cannot be read)"):
        compare_run(run)
