"""Runs whose engine and policy compute log-probs with equal bits (`checks.exact`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.telemetry.metrics import read_metrics
from rlctl.tiny_models.text import write_tiny_family
from support.commands import rlctl
from support.runs import command, finish


def differences(family: str, folder: Path, *more: str) -> list[float]:
    """The largest difference of log-probs of each step of a run with completions of up to 90 tokens."""
    model = write_tiny_family(folder / "model", family)
    done = finish(command(model, folder / "run", "--steps", "2", "--max-new-tokens", "90", *more))
    assert done.returncode == 0, done.stderr
    return [line["logprob_diff"]["max"] for line in read_metrics(folder / "run" / "metrics.jsonl")]


CASES = [
    pytest.param("llama", ("model.dtype=bfloat16", "training.backend=megatron"), marks=pytest.mark.guard),
    ("qwen3", ("model.dtype=float32", "training.backend=dtensor", "generation.colocated=false")),
    ("qwen3", ("model.dtype=bfloat16", "training.backend=megatron", "training.dp=2", "generation.threads=2")),
    ("qwen2", ("model.dtype=float32", "training.backend=megatron", "training.threads=3", "training.pp=2")),
    ("qwen2", ("model.dtype=bfloat16", "training.backend=dtensor", "training.share_prompts=false")),
    ("mistral", ("model.dtype=float32", "training.backend=megatron", "generation.max_batched_tokens=32")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_log_probs_of_engine_and_policy_have_equal_bits(family: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    words = [word for setting in ("checks.exact=true", *settings) for word in ("--set", setting)]
    assert differences(family, tmp_path, *words) == [0.0, 0.0]


@pytest.mark.slow
def test_without_it_they_differ(tmp_path: Path) -> None:
    assert min(differences("llama", tmp_path, "--set", "model.dtype=float32")) > 0


@pytest.mark.parametrize(
    ("family", "setting", "named"),
    [
        ("llama", "training.tp=2", "training.tp = 2"),
        ("llama", "generation.top_p=0.9", "generation.top_p"),
        ("gemma3", "run.seed=1", "the model family gemma3"),
    ],
)
def test_what_has_other_numbers_is_refused_by_name(
    family: str, setting: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_family(tmp_path / "model", family)
    words = command(model, tmp_path / "run", "--dry-run", "--set", "checks.exact=true", "--set", setting)
    code, _, message = rlctl(capsys, *words[1:])
    assert code == 2, message
    assert f"checks.exact = True does not go with {named}" in " ".join(message.split())
