"""The command line itself: help, errors, exit codes, and the one object of --json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlctl import __version__, cli
from rlctl.commands import output
from rlctl.commands.output import JsonMode
from rlctl.errors import ConfigError, MachineError, NoPlanError, RlctlError, VerificationError, WorkerError

RLCTL = Path(sys.executable).with_name("rlctl")


@pytest.fixture(autouse=True)
def fresh_json_mode() -> Iterator[None]:
    JsonMode.wanted = JsonMode.printed = False
    yield
    JsonMode.wanted = JsonMode.printed = False


def rlctl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command as a user does."""
    import os

    command = [str(RLCTL)] if RLCTL.exists() else [sys.executable, "-m", "rlctl"]
    env = os.environ | environment
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, env=env)


def paths_below(path: list[str], command: Any) -> Iterator[list[str]]:
    """The path of a command and of all its subcommands: ["train"], ["train", "grpo"], ..."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from paths_below([*path, name], child)


def test_version_names_the_engines_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    done = rlctl("--version", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["rlctl"]) == (0, __version__)
    assert {name: found[name] for name in ("torch", "megatron-core", "ray", "transformers")} == {
        name: metadata.version(name) for name in ("torch", "megatron-core", "ray", "transformers")
    }
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name} {version}" for name, version in found.items()]


def test_json_before_a_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--json", "presets", "ls"]) == 2
    assert "applies to --version" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_help_shows_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path in paths_below([name], cli.load_command(name)):
        assert cli.run([*path, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"  rlctl {' '.join(path)}" in text.partition("Examples:")[2], text


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(text.count(f"  {name} ") and text.count(summary) == 1 for name, (_, summary) in cli.COMMANDS.items())
    assert all(f"\n{heading}:\n" in text for heading in cli.GROUPS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "Did you mean `rlctl train`"),
        (["config", "show", "--preset", "laptpo"], "`laptop`"),
        (["config", "show", "--set", "run.stepps=3"], "`run.steps`"),
        (["config", "show", "--set", "run.steps=none-at-all"], "`run.steps` = 'none-at-all' (--set)"),
        (["config", "show", "--config", "absent.yaml"], "absent.yaml"),
        (["config", "show", "--colour"], "--colour"),
        (["train", "grpo", "--backend", "megatorn"], "megatorn"),
    ],
)
def test_wrong_input_exits_2_with_one_message(arguments: list[str], named: str) -> None:
    done = rlctl(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_finds_no_space_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rlctl", "presets", "ls", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 1
    assert "rlctl: the output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlctl.config.presets.preset_names", interrupted)
    assert cli.run(["presets", "ls"]) == 130
    assert capsys.readouterr().err == "rlctl: interrupted\n"
    assert cli.run(["presets", "ls", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"] == {
        "kind": "InterruptionError", "message": "interrupted", "hint": None, "exit_code": 130,
    }  # fmt: skip


def test_debug_shows_the_traceback() -> None:
    done = rlctl("config", "show", "--set", "a.b=1", RLCTL_DEBUG="1")
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RlctlError("x"), 1),
        (WorkerError("x"), 1),
        (ConfigError("x"), 2),
        (MachineError("x"), 3),
        (NoPlanError("x"), 4),
        (VerificationError("x"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(cli, "load_command", fail)
    assert cli.run(["doctor"]) == code
    assert capsys.readouterr().out == ""


def test_json_errors_are_one_object_on_stdout() -> None:
    done = rlctl("config", "show", "--set", "run.stepps=3", "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "ConfigError"
    assert "run.stepps" in error["message"]
    assert error["exit_code"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--json", "--stepz"), "--stepz"),
        (("plan", "--top", "x", "--json"), "--top"),
        (("presets", "--json"), "--json"),
    ],
)
def test_a_wrong_command_line_is_an_object_too(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.JsonMode, "printed", False)
    assert cli.run(list(arguments)) == 2
    said = capsys.readouterr()
    assert words in json.loads(said.out)["error"]["message"]
    assert said.err.startswith("rlctl: ")


def test_json_is_printed_once_when_a_check_fails() -> None:
    done = rlctl("doctor", "--json", "--quick", "--gpu", "h100", "--gpus-per-node", "4096")
    assert done.returncode == 3
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["gpus"]["status"] == "fail"
    assert checks["gpus"]["fix"]
    assert set(checks["python"]) == {"name", "status", "detail", "fix"}


def test_the_environment_that_make_venv_makes_passes_the_quick_checks() -> None:
    done = rlctl("doctor", "--json", "--quick")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    installed = ("python", "engines", "packages", "torch-companions", "transformer-engine", "vllm-platform")
    failed = {name for name, check in checks.items() if check["status"] == "fail"}
    assert not failed.intersection(installed)
    assert done.returncode == (3 if failed else 0)  # a small or full machine has failures too


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [("h100", 3, "no NVIDIA GPU was found, but each node needs 1"), ("h10", 2, "no such device")],
)
def test_a_gpu_that_is_named_is_looked_for(kind: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlctl.commands.doctor import wanted
    from rlctl.doctor.gpus import check_gpus
    from rlctl.errors import InputError
    from rlctl.methods.configuration import resolve

    config = resolve(sets=[f"cluster.gpu={kind}"], environment={}).config
    if code == 2:
        with pytest.raises(InputError, match=words):
            wanted(config)
        return
    asked = wanted(config)
    found = check_gpus((), asked.gpus_per_node, asked.gpu)
    assert (found.status, words in found.detail) == ("fail", True)


def test_output_of_any_encoding() -> None:
    shown = rlctl("config", "schema", "gr\u00fcn", PYTHONIOENCODING="ascii")
    assert shown.returncode == 2
    assert "there is no section `gr\\xfcn`" in shown.stderr


def test_what_a_file_system_refuses_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def read_a_directory(name: str) -> None:
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights").read_text()

    monkeypatch.setattr(cli, "load_command", read_a_directory)
    assert cli.run(["doctor"]) == 1
    assert f"rlctl: {tmp_path / 'weights'}: Is a directory." in capsys.readouterr().err


def test_presets_are_listed_shown_and_copied(tmp_path: Path) -> None:
    listed = json.loads(rlctl("presets", "ls", "--json").stdout)["presets"]
    assert [preset["name"] for preset in listed][:3] == ["laptop", "1gpu", "1node"]
    shown = json.loads(rlctl("presets", "show", "8nodes", "--json").stdout)["values"]
    assert shown["cluster.nodes"] == {"value": 8, "origin": "preset 8nodes"}
    assert shown["optimizer.lr"] == {"value": 1e-6, "origin": "preset 1node"}
    copy = tmp_path / "mine.yaml"
    assert rlctl("presets", "cp", "laptop", str(copy)).returncode == 0
    assert rlctl("presets", "cp", "laptop", str(copy)).returncode == 2
    assert json.loads(rlctl("config", "show", "--preset", str(copy), "--json").stdout)["run"]["steps"] == 20


def test_shown_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    first = rlctl("config", "show", "--preset", "2nodes").stdout
    (tmp_path / "c.yaml").write_text(first)
    assert rlctl("config", "show", "--config", str(tmp_path / "c.yaml")).stdout == first


def test_schema_lists_every_key() -> None:
    from rlctl.methods.configuration import schema

    text = rlctl("config", "schema").stdout
    assert all(f"  {key.partition('.')[2]}: " in text for key in schema().keys)
    assert json.loads(rlctl("config", "schema", "run", "--json").stdout)["properties"]["steps"]["default"] == 100


def test_missing_engine_is_the_machines_lack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_absent_engine(name: str) -> None:
        import an_engine_that_is_not_here  # noqa: F401

    monkeypatch.setattr(cli, "load_command", import_absent_engine)
    assert cli.run(["doctor"]) == 3
    assert "`an_engine_that_is_not_here` is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2> >(exec true)"])
def test_messages_that_cannot_be_written_change_no_exit_code(stderr: str) -> None:
    command = f"{sys.executable} -m rlctl presets ls --colour {stderr}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize("asked", [["presets", "ls", "--json"], ["presets", "show", "laptop"]])
def test_a_reader_that_has_seen_enough_ends_a_command_silently(asked: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rlctl", *asked]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
