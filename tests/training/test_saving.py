"""Saves of a run: what is written is kept, whatever ends the run, and what is damaged is never resumed from."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.checkpoints.identity import damaged_files, file_digest
from rlctl.errors import DivergenceError, InputError, WaitTimeoutError, WorkerError
from rlctl.jobs.run_summary import how_to_resume
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.runs.directory import RunDirectory
from rlctl.training.saving import Saver, newest_intact


class FilePolicy:
    """Saves one file, which is written when the test says so; dies when told to."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.dead = False
        self.odd: list[str] = []

    def parameters_not_finite(self) -> list[str]:
        return self.odd

    def save_begin(self, directory: Path) -> None:
        self.directory = directory

    def save_written(self) -> bool:
        if self.dead:
            raise WorkerError("policy rank 0 died.")
        return self.may_write.is_set()

    def save_finish(self) -> dict[str, str]:
        (self.directory / "shard").write_text(self.directory.parent.name)
        return {"shard": file_digest(self.directory / "shard")}

    def damaged_files(self, directory: Path, digests: dict[str, str]) -> list[str]:
        return damaged_files(directory, digests)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = RunDirectory(tmp_path / "run")
    run.create()
    yield run
    run.release()


def config(limit_s: float = 300.0, **run: Any) -> RlConfig:
    sections = {"run": {"checkpoint_every": 1, **run}, "cluster": {"step_timeout_s": limit_s}}
    return RlConfig.model_validate({**sections, "validation": {"every": 3, "data": {"name": "q.jsonl"}}})


def saver(run: RunDirectory, policy: Any, **options: Any) -> Saver:
    return Saver(run, policy, config(**options))


def state(loss: float = 0.5, skipped: int = 0) -> dict[str, Any]:
    return {"version": 1, "source": {}, "metrics": {"reward_mean": 0.0, "loss": loss, "skipped_steps": skipped}}


def saved(run: RunDirectory, *steps: int) -> Any:
    policy: Any = FilePolicy()
    one = saver(run, policy)
    for step in steps:
        one.begin(step, state())
    one.finish()
    return policy


def steps(run: RunDirectory) -> list[int]:
    return [checkpoint.step for checkpoint in run.checkpoints()]


def test_a_save_is_completed_while_the_next_step_is_under_way(run: RunDirectory) -> None:
    policy: Any = FilePolicy()
    one = saver(run, policy)
    one.begin(1, state())
    assert one._under_way is not None
    one._under_way.result(30)  # nobody asks for it
    assert steps(run) == [1]
    assert (run.checkpoints()[0].policy / "shard").exists()


def test_the_end_of_a_run_waits_for_a_save_that_is_being_written(run: RunDirectory) -> None:
    policy: Any = FilePolicy()
    policy.may_write.clear()
    one, said = saver(run, policy), []
    one.begin(2, state())

    def tell(text: str) -> None:
        said.append(text)
        policy.may_write.set()

    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(ZeroDivisionError))
        stack.callback(one.close, tell)
        _ = 1 / 0  # a step that fails
    assert steps(run) == [2]
    assert "completing the checkpoint of step 2" in said[0]
    assert "Resume from step 2 with" in how_to_resume(run)


def test_a_save_whose_policy_dies_is_said_to_be_lost_and_the_one_before_stays(run: RunDirectory) -> None:
    policy = saved(run, 1)
    policy.may_write.clear()
    one, said = saver(run, policy), []
    one.begin(2, state())
    policy.dead = True
    one.close(said.append)
    assert said[-1] == "The checkpoint of step 2 is lost: policy rank 0 died."
    assert os.listdir(run.path / "checkpoints") == ["step_1"]


def test_a_save_that_is_never_written_fails_with_its_place(run: RunDirectory) -> None:
    policy: Any = FilePolicy()
    policy.may_write.clear()
    one = Saver(run, policy, config(0.1))
    one.begin(2, state())
    with pytest.raises(WaitTimeoutError, match=r"step 2 was not written to \S+checkpoints\S+ in 0 s"):
        one.finish(30)
    assert not list((run.path / "checkpoints").iterdir())


def test_a_save_under_way_is_hardly_waited_for_where_the_user_asked_twice_to_stop(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.training.saving.AT_ONCE_S", 0.1)
    policy: Any = FilePolicy()
    policy.may_write.clear()
    one, said = saver(run, policy), []
    one.begin(2, state())
    one.close(said.append, at_once=True)
    assert said[-1] == "The checkpoint of step 2 is lost: it was not written in 0 s."


def test_a_checkpoint_that_cannot_be_removed_is_told_and_the_new_one_stays(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(run, 1)
    said: list[str] = []
    one = Saver(run, saved(run, 2), config(keep_last=1), said.append)

    def refuse(path: Path, **_: Any) -> None:
        if path.name.endswith(".removed"):
            raise OSError(39, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr("rlctl.runs.directory.shutil.rmtree", refuse)
        one.begin(3, state())
        one.finish(30)
    assert "could not be removed" in said[0]
    assert steps(run) == [2, 3]
    run.recover_partial(said.append)
    assert not list((run.path / "checkpoints").glob(".*"))


def test_a_checkpoint_that_somebody_removes_meanwhile_holds_nothing_up(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when checkpoints are listed, and gone when they are compared."""
    saved(run, 1)
    said: list[str] = []
    one = Saver(run, saved(run, 2), config(keep_last=1), said.append)
    listed = run.checkpoints()
    monkeypatch.setattr(run, "checkpoints", lambda: listed)
    (listed[1].path / "state.json").unlink()
    one.begin(3, state())
    one.finish(30)
    assert "could not be removed" in said[0]


def test_a_save_killed_before_it_was_renamed_is_completed_at_the_resume(run: RunDirectory) -> None:
    """Everything is written, or one file of it is not: the digests tell when it is looked at."""
    policy = saved(run, 1, 2, 3)
    for step in (2, 3):
        (run.path / "checkpoints" / f"step_{step}").rename(run.path / "checkpoints" / f".step_{step}.partial")
    (run.path / "checkpoints" / ".step_3.partial" / "state.json").unlink()
    said: list[str] = []
    run.recover_partial(said.append)
    assert sorted(os.listdir(run.path / "checkpoints")) == ["step_1", "step_2"]
    assert said == ["the checkpoint of step 2 was written when the run was killed: it is completed"]
    found = newest_intact(run, policy, said.append)
    assert found is not None
    assert found.step == 2


def test_a_policy_with_parameters_that_are_not_finite_is_not_saved(run: RunDirectory) -> None:
    policy = saved(run, 1)
    policy.odd = ["decoder.weight"]
    with pytest.raises(DivergenceError, match=r"step 2, which is not saved: 1 .* \(decoder.weight\)"):
        saver(run, policy, keep_last=1).begin(2, state())
    assert steps(run) == [1]


def test_keep_last_keeps_the_last_checkpoint_of_a_good_step(run: RunDirectory) -> None:
    policy: Any = FilePolicy()
    one = saver(run, policy, keep_last=1)
    for step, found in enumerate([state(), state(), state(skipped=1), state(loss=float("nan"))], 1):
        one.begin(step, found)
        one.finish()
    assert steps(run) == [2, 4]


def break_state(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"files"', '"fyles"'))


def break_shard(path: Path) -> None:
    (path / "policy" / "shard").write_text("something else")


def make_empty(path: Path) -> None:
    shutil.rmtree(path)
    path.with_name("step_9999").mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (break_state, "lacks files"),
        (break_shard, "shard is not what was written"),
        (make_empty, "checkpoint step_9999 is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_never_named_again(run: RunDirectory, damage: Any, said: str) -> None:
    policy, told = saved(run, 2, 4), []
    damage(run.path / "checkpoints" / "step_4")
    found = newest_intact(run, policy, told.append)
    assert found is not None
    assert found.step == 2
    assert said in told[0]
    assert "Resume from step 2 with" in how_to_resume(run)
    run.prune(1)  # it does not count among those to keep
    assert steps(run) == [2]
    one = saver(run, policy, keep_last=1)
    one.begin(4, state())
    one.finish()
    assert steps(run) == [4]  # written again


def test_where_every_checkpoint_is_damaged_none_is_advised(run: RunDirectory) -> None:
    policy = saved(run, 1, 2)
    for step in (1, 2):
        break_shard(run.path / "checkpoints" / f"step_{step}")
    with pytest.raises(InputError, match="every checkpoint in"):
        newest_intact(run, policy, lambda _: None)
    assert how_to_resume(run) == "No checkpoint is left to resume from."


def test_saves_by_time_leave_most_of_it_to_the_steps(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes after five minutes; if it held the steps up for 20 s the next one comes 400 s later. Steps without the
    validation that judges checkpoints are passed over."""
    now = [0.0]
    monkeypatch.setattr("rlctl.training.saving.time.monotonic", lambda: now[0])
    one = saver(run, FilePolicy(), checkpoint_every=None)
    due = []
    for step in range(1, 32):
        now[0] += 40.0
        if one.due(step, ending=False):
            due.append(step)
            with one.measured():
                now[0] += 20.0
                one.begin(step, state())
                one.finish()
    assert due == [8, 18, 28]
    assert [found.step for found in run.checkpoints()] == [18, 28]
    assert one.due(31, ending=True)
    judged = saver(run, FilePolicy(), checkpoint_every=None, keep_best_by="validation/accuracy")
    now[0] += 300.0
    assert [judged.due(step, ending=False) for step in (40, 41, 42)] == [False, False, True]
    assert not saver(run, FilePolicy(), checkpoint_every=0).due(50, ending=False)
