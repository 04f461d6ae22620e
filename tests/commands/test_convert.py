"""`rlctl convert` with as little as a user may type."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl import cli
from rlctl.checkpoints.conversion.prepared_model import prepared
from rlctl.checkpoints.model_files import resolve_model
from rlctl.preparation.open_model import find_model
from support.multimodal_models import write_multimodal


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
    assert not said  # it is taken as it is


@pytest.mark.parametrize(("name", "said"), [("absent", "absent does not exist"), (".", "is not a Megatron checkpoint")])
def test_what_is_no_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert cli.run(["convert", "megatron-to-hf", str(tmp_path / name), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_text_part_is_taken_out_to_where_runs_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "shared"))
    model = write_multimodal(tmp_path / "model", "mistral3")
    assert cli.run(["convert", "inspect", str(model)]) == 0
    assert "text part   MistralForCausalLM; `rlctl convert text-part` extracts it" in capsys.readouterr().out
    assert cli.run(["convert", "text-part", str(model), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["verified"]
    assert not made["reused"]
    assert find_model(str(model)).directory == Path(made["destination"])
    assert cli.run(["convert", "text-part", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"]
    assert cli.run(["convert", "hf-to-megatron", str(model), str(tmp_path / "ckpt")]) == 0
    assert "takes images or sound as well as text: its text part is trained" in capsys.readouterr().err
    written = ["convert", "megatron-to-hf", str(tmp_path / "ckpt"), str(tmp_path / "whole"), "--into", str(model)]
    assert cli.run(written) == 0
    assert "36 tensors, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["text-part", "MODEL"], "is not a multimodal model"),
        (["text-part", "MODEL", "--revision", "main"], "--revision applies to hub models, and .* is a directory"),
        (["megatron-to-hf", "MODEL", "out", "--into", "MODEL"], "is not a multimodal model"),
        (
            ["megatron-to-hf", "MODEL", "out", "--into", "MODEL", "--dtype", "float32"],
            "--dtype: --into keeps",
        ),
        (["megatron-to-hf", "MODEL", "out", "--into", "MODEL", "--adapter-only"], "--adapter-only: --into keeps"),
    ],
)
def test_what_has_no_text_part_to_take_out_or_put_back_is_named(
    words: list[str], said: str, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["convert", *(str(tiny_llama) if word == "MODEL" else word for word in words)]) == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./a"], "takes adapters and a destination"),
        (["./a", "./b", "./both", "--weights", "0.7"], "expected 2 finite numbers"),
        (["./a", "./both", "--weights", "x"], "expected numbers such as 0.7,0.3"),
        (["./a", "./both", "--combine", "linear", "--onto", "me/base"], "--combine linear combines adapters"),
        (["./a", "./both"], "adapter ./a: there is no adapter_config.json"),
    ],
)
def test_what_cannot_be_merged_is_named(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["convert", "merge-adapters", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
