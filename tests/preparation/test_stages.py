"""The stages of preparing a run: what each adds, and how often the configuration is resolved."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import run
from rlctl.config import load
from rlctl.methods.configuration import resolve
from rlctl.preparation.job import Job
from rlctl.preparation.located import Located, locate
from rlctl.preparation.named import CLOCK, TIME, Named, name_run
from rlctl.preparation.opened import Opened
from rlctl.preparation.planned import Planned, plan_run


@pytest.fixture
def arguments(tiny_llama: Path, tmp_path: Path) -> list[str]:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(f'{{"prompt": "{i} + {i}?", "answer": "{2 * i}"}}\n' for i in range(16)))
    return ["--model", str(tiny_llama), "--data", str(data), "--reward", "exact-match", "--gpu", "cpu"]


def test_a_dry_run_resolves_the_configuration_at_most_twice(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    merged, resolved_from = [], load.from_sources

    def counted(*sources: Any, **options: Any) -> load.Resolved:
        merged.append(sources)
        return resolved_from(*sources, **options)

    monkeypatch.setattr(load, "from_sources", counted)
    assert run(["train", "grpo", *arguments, "--set", "run.epochs=2", "--dry-run"]) == 0, capsys.readouterr().err
    assert 1 <= len(merged) <= 2
    assert "run.epochs" in capsys.readouterr().out


def test_each_stage_is_frozen_and_adds_to_the_one_before(arguments: list[str]) -> None:
    stages = [Named, Located, Planned]
    assert all(issubclass(later, before) for before, later in itertools.pairwise(stages))
    assert issubclass(Opened, Located)
    assert issubclass(Job, Opened)
    assert all(stage.__dataclass_params__.frozen for stage in (*stages, Opened, Job))  # type: ignore[attr-defined]
    flags = dict(zip(("model.name", "data.name"), arguments[1:4:2], strict=True)) | {"cluster.gpu": "cpu"}
    named = name_run(resolve(flags=flags, environment={}), lambda _: None)
    assert named.resolved.origin[TIME] == CLOCK
    planned = plan_run(locate(named, lambda _: None, assume=None))
    assert planned.facts.family == "llama"
    assert planned.config.training.tp is None  # the steps' plan decides, once the prompts are known
    assert planned.early.training is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned.early = planned.early  # type: ignore[misc]
