"""Paths with `~`, of users that there are and that there are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.config.files import user_path
from rlctl.methods.rl.rl_config import RlConfig

NOBODY = "~no_such_user_here/x"


def test_a_home_is_found_and_an_unknown_one_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_path("~/models") == Path("/somewhere/models")
    assert user_path(Path("~root")) != Path("~root")
    assert user_path(NOBODY) == Path(NOBODY)
    assert user_path("a/~") == Path("a/~")


def test_keys_that_hold_paths_know_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    found = RlConfig.model_validate({
        "model": {"name": "~/model", "tokenizer": "org/tokenizer", "chat_template": "{{ messages }}"},
        "data": {"name": "~/questions.jsonl"},
        "run": {"dir": "~/runs/one"},
    })  # fmt: skip
    assert (found.model.name, found.model.tokenizer) == ("/home/ada/model", "org/tokenizer")
    assert (found.data.name, found.run.dir) == ("/home/ada/questions.jsonl", "/home/ada/runs/one")
