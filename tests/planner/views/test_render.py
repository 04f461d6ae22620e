"""A plan as people read it: at any width no word is broken, and what is said is true of the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl import cli
from rlctl.planner.inputs.cluster import save_calibration
from rlctl.planner.inputs.constants import CALIBRATED_RANGE, CPU_RANGE
from support.commands import rlctl

BIG = ("--model", "meta-llama/Llama-3.1-70B", "--preset", "8nodes", "--gpu", "a100")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out, _ = rlctl(capsys, *arguments)
    assert code == 0
    return out


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "width"),
    [
        (("plan",), 80),
        (("train", "grpo", "--dry-run"), 100),
        pytest.param(("plan",), 120, marks=pytest.mark.slow),
        pytest.param(("train", "grpo", "--dry-run"), 80, marks=pytest.mark.slow),
    ],
)
def test_lines_fit_and_no_word_is_broken(
    command: tuple[str, ...], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    words = said(capsys, *command, *BIG).split()
    monkeypatch.setenv("COLUMNS", str(width))
    text = said(capsys, *command, *BIG)
    assert [line for line in text.splitlines() if len(line) > width and "--explain" not in line] == []
    assert text.split() == words
    assert re.search(r"refit \d", text)  # a phase stays with its seconds
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_plan_says_where_the_cache_bounds_concurrency_and_only_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(said(capsys, "plan", *BIG).split())
    plan = json.loads(said(capsys, "plan", *BIG, "--json"))["generation"]
    assert plan["kv_cache_tokens"] // (256 + 8192) < plan["max_concurrent"]
    assert "the KV cache bounds them: " in text
    roomy = said(capsys, "plan", "--model", "Qwen/Qwen3-0.6B", "--preset", "1gpu", "--gpu", "h100")
    assert "bounds" not in roomy


@pytest.mark.long
def test_every_time_has_a_range_also_on_a_cpu_and_a_narrower_one_after_a_calibration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCTL_MACHINE_PROFILE", str(tmp_path / "machine.json"))
    for factors in (CPU_RANGE, CALIBRATED_RANGE):
        if factors == CALIBRATED_RANGE:
            save_calibration("cpu", "runs/first", {"training": 2.0})
        for command in (("plan", "--json"), ("train", "grpo", "--dry-run", "--json")):
            code, out, _ = rlctl(capsys, *command, "--preset", "laptop", "--gpu", "cpu")
            assert code == 0
            data = json.loads(out)
            plan = data if "seconds_range" in data else data["plan"]
            timed = {name: seconds for name, seconds in plan["seconds"].items() if seconds}
            assert plan["seconds_range"].keys() == timed.keys()
            for name, (low, high) in plan["seconds_range"].items():
                assert low - 0.05 <= timed[name] <= high + 0.05
            ends = [factor * timed["training"] for factor in factors]
            assert plan["seconds_range"]["training"] == pytest.approx(ends, abs=0.06)  # shown to a tenth of a second
    assert CPU_RANGE[0] < CALIBRATED_RANGE[0] < CALIBRATED_RANGE[1] < CPU_RANGE[1]


def test_a_plan_for_another_machine_speaks_of_that_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", *BIG)
    assert "auto is taken" not in text
    assert "vllm-cpu" not in text
    assert " of 0" not in text
    assert "training.ep=1" in text
    assert "The model has no experts." in text


def test_plan_takes_a_recipes_overrides_and_our_own_keys(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", "policy.model_name=Qwen/Qwen3-1.7B", "training.tp=2", "--preset", "1node")
    assert text.startswith("Qwen/Qwen3-1.7B ")
    assert "megatron  TP2 " in text
    assert cli.run(["plan", "--run", "absent", "training.tp=2"]) == 2
    assert "KEY=VALUE would do nothing" in capsys.readouterr().err


def test_a_dry_run_is_refused_in_the_words_of_the_run(capsys: pytest.CaptureFixture[str], tiny_llama: Path) -> None:
    for line in (
        ["--model", "./absent"],
        ["--model", str(tiny_llama), "--gpu", "cpu", "--reward", "exact-match", "--set", "training.tp=7"],
        ["--model", "Qwen/Qwen3-0.6B", "--gpu", "cpu", "--reward", "tasks"],
        ["--model", "Qwen/Qwen3-0.6B", "--gpu", "cpu", "--set", "run.algorithm=pgo"],
    ):
        capsys.readouterr()
        codes = [cli.run(["train", "grpo", *line, *more]) for more in (["--dry-run"], [])]
        dry, real = capsys.readouterr().err.split("rlctl: ")[1:]
        assert codes == [2, 2]
        assert dry == real


def test_reasons_are_true_of_the_plan_that_they_explain(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("plan", "--model", "Qwen/Qwen3-8B", "--preset", "1node", "--gpu", "h100", "--set", "megatron.fp8=hybrid")
    line = (*line, "--set", "training.pp=2")
    text = said(capsys, *line, "--goal", "safe", "--json")
    reasons = {reason["value"].partition("=")[0]: reason["rule"] for reason in json.loads(text)["reasons"]}
    assert "pipeline bubble" in reasons["training.vpp"]  # stages that would shorten it are not told to do nothing
    assert "fastest" not in reasons["generation.tp"]
    assert "Fastest size" in said(capsys, *line, "--json")
    assert "not installed here" not in said(capsys, *line)
    slower = ("Qwen/Qwen3-14B" if word == "Qwen/Qwen3-8B" else word for word in line)  # than one within the resolution
    assert "No other size is clearly faster" in said(capsys, *slower, "--json")
