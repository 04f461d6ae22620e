"""`rlctl convert` with as little as a user may type."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl import cli
from rlctl.checkpoints.conversion.prepared_model import prepared
from rlctl.checkpoints.model_source import resolve_model


def test_a_model_alone_is_converted_to_where_runs_look_for_it(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path))
    assert cli.run(["convert", "hf-to-megatron", str(tiny_llama), "-q"]) == 0
    printed = capsys.readouterr()
    assert str(tmp_path / "rlctl") in printed.out
    assert printed.err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.run(["convert", "hf-to-megatron", str(tiny_llama), "--force", "-q"]) == 0
    assert "\x1b[32mevery tensor read back and equal\x1b[0m" in capsys.readouterr().out
    said: list[str] = []
    assert prepared(resolve_model(str(tiny_llama)), "float32", 1, said.append).megatron is not None
    assert "converted by an earlier run" in said[0]


@pytest.mark.parametrize(("name", "said"), [("absent", "absent does not exist"), (".", "is no Megatron checkpoint")])
def test_what_is_no_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert cli.run(["convert", "megatron-to-hf", str(tmp_path / name), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
