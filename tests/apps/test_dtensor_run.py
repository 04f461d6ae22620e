"""`rlctl train grpo --backend dtensor` as a user runs it: the same metrics as with Megatron, exported and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from support.runs import STEPS, command, results, resume, same_run


@pytest.mark.slow
@pytest.mark.guard
def test_both_backends_run_the_same_steps(uninterrupted, here, tiny_llama: Path, tmp_path: Path) -> None:
    """Megatron on one rank; FSDP2 on two, whose run goes on with Megatron in the middle."""
    theirs, ours = uninterrupted[0], tmp_path / "dtensor"
    begun = command(tiny_llama, ours, "--backend", "dtensor", "--steps", str(STEPS // 2), "--set", "training.dp=2")
    done = here(begun)
    assert done.returncode == 0, done.stderr
    assert megatron_to_hf(ours, tmp_path / "exported").verified
    more = ("--steps", str(STEPS), "--backend", "megatron", "--set", "training.dp=1")
    done = here(resume(ours, *more))
    assert done.returncode == 0, done.stderr
    assert [line.keys() for line in results(ours)] == [line.keys() for line in results(theirs)]
    same_run(results(theirs), results(ours))
