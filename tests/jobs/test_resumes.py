"""The number of a run's resumes, which its manifest keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.errors import InputError
from rlctl.jobs.run_weights import load_newest
from rlctl.runs.directory import RESUMES, RunDirectory, is_edited
from rlctl.telemetry.display import Display


def test_a_manifest_counts_the_resumes_that_loaded_a_checkpoint_or_began_again(tmp_path: Path) -> None:
    def refuse(_: Path) -> None:
        raise InputError("the checkpoint holds no critic.")

    run, policy = RunDirectory(tmp_path), SimpleNamespace(damaged_files=lambda *_: [], load_saved=refuse)
    stated: Any = policy
    run.write_manifest({"config": {}})
    with Display(steps=3) as display:
        load_newest(run, stated, display, {"config": {}})  # there is no checkpoint yet
        assert run.manifest()[RESUMES] == 1
        new = run.new_checkpoint(2)
        new.begin()
        new.commit({"version": 2, "source": {}, "metrics": {}, "files": {"shard": "0"}})
        with pytest.raises(InputError):
            load_newest(run, stated, display, {"config": {}})
        assert run.manifest()[RESUMES] == 1
        policy.load_saved = lambda _: None
        load_newest(run, stated, display, {"config": {}})
    assert run.manifest()[RESUMES] == 2
    assert not is_edited(run.manifest())
