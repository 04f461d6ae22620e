"""Weights & Biases that is asked for and not installed is missed before anything starts."""

from __future__ import annotations

import importlib.util

import pytest

from rlctl.apps.prepare import prepare_job
from rlctl.config.load import resolve
from rlctl.errors import InputError


def test_it_is_missed_before_the_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else found(name, *rest)
    )
    resolved = resolve(flags={"model.name": "./absent", "run.wandb": True}, environment={})
    with pytest.raises(InputError, match=r"\(run.wandb=true\).*rlctl\[wandb\]"):
        prepare_job(resolved)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    with pytest.raises(InputError, match="WANDB_API_KEY is set"):
        prepare_job(resolve(flags={"model.name": "./absent"}, environment={}))
    with pytest.raises(InputError, match="absent"):
        prepare_job(resolve(flags={"model.name": "./absent", "run.wandb": False}, environment={}))
