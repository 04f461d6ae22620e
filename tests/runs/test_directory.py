import errno
import json
import os
import shutil
from datetime import date
from decimal import Decimal
from types import SimpleNamespace

import pytest

from rlctl.checkpoints.locations import write_problem
from rlctl.config.files import write_json
from rlctl.errors import InputError, RlctlError, WaitTimeoutError, WorkerError
from rlctl.runs.directory import MANIFEST, RunDirectory, is_edited, newest_run
from rlctl.runs.evaluation_file import SampleFile
from rlctl.runs.samples import read_samples


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "r")
    run.create()
    yield run
    run.release()


def save(run: RunDirectory, step: int, reward: float = 0.0) -> None:
    new = run.new_checkpoint(step)
    with new.writing():
        new.begin()
        (new.policy / "weights").write_bytes(b"w" * 100)
        new.commit({"version": step * 10, "source": {}, "metrics": {"reward_mean": reward}, "files": {"weights": "0"}})


def test_checkpoints_come_back_in_order_with_their_state(run):
    for step in (10, 2, 9):
        save(run, step)
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [2, 9, 10]
    newest = run.checkpoints()[-1]
    assert (newest.state()["version"], newest.state()["step"], newest.goodness("reward_mean")) == (100, 10, 0.0)
    assert (newest.policy / "weights").read_bytes() == b"w" * 100


def test_a_save_that_fails_leaves_the_one_before_and_nothing_else(run):
    save(run, 1)
    full = OSError(28, "No space left on device")
    new = run.new_checkpoint(2)
    new.begin()
    (new.policy / "part").write_bytes(b"x")
    with pytest.raises(RlctlError, match="step 2 could not be written"), new.writing():
        raise full
    new = run.new_checkpoint(3)
    new.begin()
    with pytest.raises(KeyboardInterrupt), new.writing():
        raise KeyboardInterrupt
    assert os.listdir(run.path / "checkpoints") == ["step_1"]


def test_a_save_that_was_killed_is_not_a_checkpoint_and_is_cleared_away(run):
    save(run, 1)
    (run.path / "checkpoints" / ".step_2.partial").mkdir()
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1]
    run.recover_partial(print)
    assert os.listdir(run.path / "checkpoints") == ["step_1"]


def taken(run: RunDirectory, step: int, reward: float, sampled: dict[int, int], **metrics) -> None:
    """Log a step and save its checkpoint; `sampled`: tokens by the version of the weights that sampled them."""
    run.open_metrics(None if step == 1 else run.checkpoints()[-1])
    line = {"reward_mean": reward, "tokens_by_version": [*map(list, sampled.items())], **metrics}
    new = run.new_checkpoint(step)
    with new.writing():
        new.begin()
        new.commit({"version": step, "source": {}, "metrics": line, "files": {"weights": "0"}})


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "left"),
    [
        (None, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (None, 1, [2, 4]),
        (1, 2, [1, 2, 4]),
        (1, 9, [1, 2, 3, 4]),
    ],
)
def test_prune_keeps_the_newest_and_those_whose_weights_earn_most(run, keep_last, keep_best, left):
    """Step N samples with the weights of checkpoint N - 1: 0.610 is what the untrained model earns, 0.237 what
    checkpoint 2 does."""
    for step, reward in enumerate((0.610, 0.187, 0.237, 0.168), start=1):
        taken(run, step, reward, {step - 1: 100})
        run.prune(keep_last, keep_best)
    assert [checkpoint.step for checkpoint in run.checkpoints()] == left


def test_rewards_of_asynchronous_steps_count_for_the_weights_that_sampled(run):
    """Two steps of lag, and steps whose tokens come from several versions."""
    sampled = [{0: 9}, {0: 9}, {1: 9}, {1: 3, 2: 6}, {3: 9}, {4: 9}]
    for step, (reward, by_version) in enumerate(zip((0.9, 0.9, 0.2, 0.8, 0.6, 0.1), sampled, strict=True), start=1):
        taken(run, step, reward, by_version)
        run.prune(1, 1)
        unmeasured = [one for one in range(1, step + 1) if one > max(max(known) for known in sampled[:step])]
        assert {*unmeasured} <= {checkpoint.step for checkpoint in run.checkpoints()}
    # 1: (9 x 0.2 + 3 x 0.8) / 12 = 0.35, 2: 0.8, 3: 0.6, 4: 0.1; 5 has sampled nothing yet, and 6 is the newest.
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [2, 5, 6]


def test_a_validation_measures_the_checkpoint_of_its_step(run):
    for step, loss in enumerate((0.5, 0.3, 0.4), start=1):
        taken(run, step, 0.0, {}, validation={"loss": loss})
        run.prune(1, 1, "validation/loss")
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [2, 3]


def test_a_place_that_is_taken_is_refused(run, tmp_path):
    write_json(run.path / MANIFEST, {})
    with pytest.raises(InputError, match="holds a run already"):
        RunDirectory(run.path).create()
    with pytest.raises(InputError, match="Another process is writing"):
        RunDirectory(run.path).reopen()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        RunDirectory(tmp_path / "file").create()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(InputError, match="not empty"):
        RunDirectory(tmp_path / "full").create()


def test_a_file_system_that_locks_no_files_is_named(tmp_path, monkeypatch):
    """As Lustre is without its option `flock`."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(InputError, match=r"--run-dir .*r is on a file system that locks no files: Function not impl"):
        RunDirectory(tmp_path / "r").create()
    assert not RunDirectory(tmp_path / "r").is_locked()
    assert write_problem(tmp_path) == f"no file can be written in {tmp_path} (Function not implemented)"


def test_a_file_that_is_named_from_where_the_run_was_started_is_told(run, tmp_path, monkeypatch):
    run.write_manifest({"config": {}, "working_directory": str(tmp_path)})
    monkeypatch.chdir(run.path)
    said = f"There is no file. The run was started in {tmp_path}: go on from there"
    with pytest.raises(InputError, match=said), run.opened_from_here():
        raise InputError("There is no file.")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as raised, run.opened_from_here():
        raise InputError("It is empty.", "Fill it.")
    assert str(raised.value) == "It is empty. Fill it."


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be made: File name too long"):
        RunDirectory(tmp_path / ("x" * 300)).require_place()


def test_a_save_killed_while_it_takes_the_place_of_a_damaged_one_is_completed(run):
    for step in (1, 2):
        save(run, step)
    place = run.path / "checkpoints"
    shutil.copytree(place / "step_2", place / ".step_2.partial")
    (place / "step_2" / "state.json").unlink()  # half of what was there before is removed
    run.recover_partial(print)
    assert sorted(os.listdir(place)) == ["step_1", "step_2"]
    assert run.checkpoints()[-1].step == 2


def test_resume_wants_a_run(tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        RunDirectory(tmp_path / "none").reopen()
    with pytest.raises(InputError, match="there is no run below"):
        newest_run(tmp_path)


def test_a_run_that_was_started_first_and_written_to_last_is_the_newest(tmp_path):
    for age, name in ((30, "first"), (20, "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
        os.utime(tmp_path / name / MANIFEST, (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "first" / "metrics.jsonl").write_text("{}")
    assert newest_run(tmp_path).name == "first"


def test_rollouts_are_json_lines_numbered_from_one(run):
    run.write_rollouts(1, [{"text": "é"}, {"text": "b"}])
    lines = (run.path / "rollouts" / "step_1.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["é", "b"]


def test_an_answer_for_which_json_has_no_word_is_written_as_a_text(run):
    """Rows of parquet files and datasets have dates and decimals."""
    run.write_manifest({"config": {}})
    run.write_rollouts(1, [{"answer": Decimal("3.50")}, {"answer": [date(2026, 1, 2)]}])
    assert [sample["answer"] for sample in read_samples(run.path)] == ["3.50", ["2026-01-02"]]


def test_half_of_a_character_is_written_and_comes_back(run, tmp_path):
    """A row of the data may hold it in any field, and a name of a file that is not UTF-8."""
    half = "a\ud800b"
    run.write_manifest({"config": {}, "command": [half, "\udcff"]})
    run.write_rollouts(1, [{"answer": half}])
    assert [sample["answer"] for sample in read_samples(run.path)] == [half]
    assert run.manifest()["command"] == [half, "\udcff"]
    assert not is_edited(run.manifest())
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.begin("t", "m", {"suffix": half})
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.begin("t", "m", {"suffix": half})


def test_a_run_that_did_not_start_leaves_its_place_free(tmp_path):
    run = RunDirectory(tmp_path / "r")
    run.create()
    write_json(run.path / MANIFEST, {})
    (run.path / "tensorboard").mkdir()
    run.logs.mkdir()
    (run.logs / "engine-0.log").write_text("why it failed")
    run.abandon(keep_logs=True)
    run.release()
    assert [path.name for path in run.path.iterdir()] == ["logs"]
    again = RunDirectory(run.path)
    again.create()
    assert not again.logs.exists()
    again.abandon(keep_logs=True)
    again.release()
    assert not run.path.exists()


def test_a_full_disk_is_an_error_that_names_the_run(run):
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RlctlError, match=f"{run.path} cannot be written to: No space left"), run.writing():
        raise full
    with pytest.raises(RlctlError, match="step 2 could not be written"), run.new_checkpoint(2).writing():
        raise WorkerError(f"policy rank 0 failed in `save`: {full}.")
    with pytest.raises(WaitTimeoutError), run.writing(), run.new_checkpoint(2).writing():
        raise WaitTimeoutError("policy rank 0 did not finish `save`")  # an OSError by its class, but not of the disk
    with pytest.raises(ConnectionResetError), run.writing():
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_a_write_that_torch_could_not_finish_on_a_full_disk_says_so(run, monkeypatch):
    torchs = WorkerError("policy rank 0 failed in `save_finish`: PytorchStreamWriter failed writing file data/0.")
    with pytest.raises(WorkerError, match="PytorchStreamWriter"), run.new_checkpoint(2).writing():
        raise torchs
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with (
        pytest.raises(RlctlError, match=r"step 2 could not be written .* No space left"),
        run.new_checkpoint(2).writing(),
    ):
        raise torchs


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"config": {"run.steps": 3}}',
        '{"config": {}, "plan": 5}',
        "[1]",
    ],
    ids=["too deep", "no origin", "no plan", "no mapping"],
)
def test_a_damaged_manifest_is_named(run, text):
    (run.path / MANIFEST).write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json"):
        run.manifest()


def test_a_run_directory_that_is_removed_is_said_to_be_gone(run):
    shutil.rmtree(run.path)
    with pytest.raises(RlctlError, match="is gone: it was removed"), run.writing():
        run.write_rollouts(1, [])
    with pytest.raises(RlctlError, match="is gone: it was removed"), run.writing():
        save(run, 1)
    run.abandon(keep_logs=True)  # none of its steps is there any more
    with pytest.raises(RlctlError, match="is gone: it was removed"), run.writing():
        raise WorkerError("policy rank 0 failed in `save_begin`: FileNotFoundError")
    assert not run.path.exists()


def test_a_run_that_is_removed_while_it_writes_ends_at_the_next_save(run):
    """Removing finds the directory full again, and leaves it without its manifest."""
    run.write_manifest({"config": {}})
    save(run, 1)
    (run.path / MANIFEST).unlink()
    with pytest.raises(RlctlError, match="is gone: it was removed"), run.writing():
        save(run, 2)


def test_an_error_before_the_first_step_is_not_taken_for_a_directory_that_is_gone(run, tmp_path):
    loop = OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(tmp_path / "model"))

    def fail():
        run.abandon(keep_logs=False)  # the place is given back, and the cause goes on
        raise loop

    with pytest.raises(OSError, match="symbolic links") as raised, run.writing():
        fail()
    assert raised.value is loop


def test_a_disk_other_than_the_run_directorys_is_not_called_by_its_name(run, tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "elsewhere"))
    with pytest.raises(OSError, match="elsewhere") as raised, run.writing():
        raise full
    assert raised.value is full
