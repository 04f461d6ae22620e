"""Paths with `~`, of users that there are and that there are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl import cli
from rlctl.checkpoints.locations import converted_directory, nearest_existing
from rlctl.config.files import user_path
from rlctl.config.schema import RlctlConfig
from rlctl.errors import InputError
from rlctl.planner.inputs.cluster import profile_path

NOBODY = "~no_such_user_here/x"


def test_a_home_is_found_and_an_unknown_one_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_path("~/models") == Path("/somewhere/models")
    assert user_path(Path("~root")) != Path("~root")
    assert user_path(NOBODY) == Path(NOBODY)
    assert user_path("a/~") == Path("a/~")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "grpo", "--model", NOBODY, "--data", "reasoning-gym:chain_sum"], "there is no such directory"),
        (["generate", "--model", NOBODY, "--prompt", "hi"], "there is no such directory"),
        (["plan", "--model", NOBODY], "there is no such directory"),
        (["refit-test", "--model", NOBODY], "there is no such directory"),
        (["convert", "hf-to-megatron", NOBODY, "out"], "there is no such directory"),
        (["convert", "hf-to-megatron", NOBODY, "out", "--revision", "main"], "there is no such directory"),
        (["convert", "megatron-to-hf", NOBODY, "out"], "does not exist"),
        (["convert", "inspect", NOBODY], "does not exist"),
        (["train", "grpo", "--resume", "--run-dir", NOBODY], "no_such_user_here"),
    ],
)
def test_an_unknown_user_is_a_directory_that_is_not_there(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert NOBODY in error
    assert "Traceback" not in error


def test_variables_may_name_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLCTL_MEGATRON_CHECKPOINT_DIR", "NRL_MEGATRON_CHECKPOINT_DIR"):  # nothing is to be made there
        with pytest.raises(InputError, match=f"{name}={NOBODY}: there is no user no_such_user_here"):
            converted_directory({name: NOBODY})
    assert converted_directory({"HF_HOME": NOBODY}) == Path(NOBODY) / "rlctl"
    assert profile_path({"RLCTL_MACHINE_PROFILE": NOBODY}) == Path(NOBODY)
    assert profile_path({"RLCTL_CACHE_DIR": NOBODY}).parent == Path(NOBODY)
    assert nearest_existing(Path(NOBODY)) == Path.cwd()


def test_keys_that_hold_paths_know_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    found = RlctlConfig.model_validate({
        "model": {"name": "~/model", "tokenizer": "org/tokenizer", "chat_template": "{{ messages }}"},
        "data": {"name": "~/questions.jsonl"},
        "run": {"dir": "~/runs/one"},
    })  # fmt: skip
    assert (found.model.name, found.model.tokenizer) == ("/home/ada/model", "org/tokenizer")
    assert (found.data.name, found.run.dir) == ("/home/ada/questions.jsonl", "/home/ada/runs/one")
