"""A disk without room for a plan's checkpoints is found before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlctl.jobs import train
from rlctl.methods.configuration import resolve
from rlctl.models.catalog import lookup
from rlctl.preparation.disk_space import checkpoints_held, require_disk
from rlctl.preparation.named import name_run
from rlctl.preparation.step_plan import step_plan
from support.commands import rlctl

MODEL = "HuggingFaceTB/SmolLM2-135M"
PARAMETERS = 134_515_008
"""As its model card and its safetensors file have it."""
SIZE = 12 * PARAMETERS
"""Weight, master weight and two moments, of which weight and master weight are one in float32."""


def held_at(free: float, monkeypatch: pytest.MonkeyPatch, *sets: str) -> list[str]:
    resolved = resolve("laptop", sets=["model.dtype=float32", "cluster.gpu=cpu", *sets], environment={})
    facts, told = lookup(MODEL), list[str]()
    assert facts is not None
    plan = step_plan(resolved.config, facts, name_run(resolved, told.append).method, None, (), None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free)))
    require_disk(resolved.config, plan, Path("runs"), told.append)
    return told


def test_a_disk_with_room_for_all_checkpoints_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert held_at(1.01 * SIZE, monkeypatch) == []  # by time: only the last one is certain
    every = ("run.checkpoint_every=5", "run.steps=20", "run.keep_last=2")
    assert held_at(3.01 * SIZE, monkeypatch, *every) == []
    [warning] = held_at(2.9 * SIZE, monkeypatch, *every)
    assert "a checkpoint of this run takes about 1.61 GB; the run will hold 3 of them" in warning
    assert "lower run.keep_last" in warning


def test_a_disk_without_room_for_one_is_refused_before_ray_starts(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.BesideSession, "begin", lambda *_, **__: pytest.fail("Ray starts"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    place = tmp_path / "new" / "run"
    command = ("train", "grpo", "--preset", "laptop", "--model", str(tiny_llama), "--run-dir", str(place))
    code, _, said = rlctl(capsys, *command)
    assert code == 3
    assert f"{tmp_path} has 0.1 MB free, and a checkpoint of this run takes about " in said
    assert "--run-dir" in said
    assert not place.exists()


@pytest.mark.parametrize(
    ("sets", "held"),
    [
        ([], 1),
        (["run.save_final=false"], 0),
        (["run.checkpoint_every=0"], 1),
        (["run.checkpoint_every=3"], 4),  # steps 3, 6, 9 and 10
        (["run.checkpoint_every=3", "run.save_final=false"], 3),
        (["run.checkpoint_every=3", "run.keep_last=1"], 2),
        (["run.checkpoint_every=3", "run.keep_best=1"], 3),  # the best, the newest, and the one being written
    ],
)
def test_checkpoints_that_a_run_holds_at_the_same_time(sets: list[str], held: int) -> None:
    config = resolve("laptop", sets=["run.steps=10", *sets], environment={}).config
    assert checkpoints_held(config.run) == held
