"""`rlctl init`: what it writes can be trained on as it is, and nothing of the user's is overwritten."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl import cli
from rlctl.methods.configuration import resolve
from support.commands import rlctl

ARROWS = '{"problem": "2 + 3?", "solution": "5"}\n' * 4


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_run_has_all_that_a_dry_run_asks_for(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rlctl(capsys, "init", "mine", "--preset", "laptop", "--model", str(tiny_llama))[0] == 0
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
        "questions.jsonl", "rewards.py", "run.yaml",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path / "mine")
    dry = ("train", "grpo", "--preset", "run.yaml", "--dry-run", "--json")
    code, out, err = rlctl(capsys, *dry, "--completion", "No idea.")
    assert code == 0, err
    [first] = json.loads(out)["first_look"]["prompts"]
    rows = Path("questions.jsonl").read_text().splitlines()
    assert len(set(rows)) == len(rows)  # some are held out
    answer = json.loads(rows[0])["answer"]
    assert [(trial["completion"], trial["reward"]) for trial in first["trials"]] == [(answer, 1.0), ("No idea.", 0.0)]


@pytest.mark.parametrize("name", ["sums.csv", "sums.json"])
def test_data_in_other_forms_can_run(name: str, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"problem": f"{n} + 3?", "solution": f"{n + 3}"} for n in range(4)]
    texts = {"sums.csv": "problem,solution\n" + "".join(f"{n} + 3?,{n + 3}\n" for n in range(4)), "sums.json": rows}
    Path(name).write_text(texts[name] if name.endswith("csv") else json.dumps(rows))
    assert (
        rlctl(capsys, "init", "a", "-p", "laptop", "-m", str(tiny_llama), "--data", name, "--reward", "exact-match")[0]
        == 0
    )
    code, out, err = rlctl(capsys, "train", "grpo", "--preset", "a/run.yaml", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["config"]["data.prompt_field"]["value"] == "problem"


def test_a_file_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sums.xlsx").write_text("x")
    code, _, err = rlctl(capsys, "init", "a", "-p", "laptop", "-m", "m", "--data", "sums.xlsx")
    assert (code, "sums.xlsx: unknown kind of data file" in err) == (2, True)


def test_data_of_ones_own_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sums.jsonl").write_text(ARROWS)
    assert rlctl(capsys, "init", "a/b", "-p", "1gpu", "-m", "x/y", "--data", "sums.jsonl", "--reward", "math-verify",
                 "--json")[0] == 0  # fmt: skip
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["run.yaml"]
    config = resolve(str(tmp_path / "a" / "b" / "run.yaml"), environment={}).config
    assert (config.model.name, config.cluster.gpus_per_node) == ("x/y", 1)
    assert (config.data.name, config.data.prompt_field, config.data.answer_field) == (
        str(tmp_path / "sums.jsonl"), "problem", "solution",
    )  # fmt: skip
    assert [term.name for term in config.reward.terms] == ["math-verify"]
    assert not config.validation.wanted


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("mine",), "mine/run.yaml exists already."),
        (("sums.jsonl",), "sums.jsonl is a file."),
        (("sums.jsonl/new",), "sums.jsonl is a file."),
        (("new", "--preset", "1gpu"), "names no model"),
        (("new", "--preset", "lapto"), "Did you mean `laptop`?"),
        (("new", "--data", "sums.jsonl", "--prompt-field", "text"), "no field 'text'"),
        (("new", "--data", "absent.jsonl"), "absent.jsonl does not exist"),
    ],
)
def test_what_is_there_or_wrong_is_refused(
    more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sums.jsonl").write_text(ARROWS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.yaml").write_text("mine: 1\n")
    code, out, err = rlctl(capsys, "init", *more)
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["run.yaml"]
    assert (tmp_path / "mine" / "run.yaml").read_text() == "mine: 1\n"


def test_a_person_is_asked_for_what_no_flag_says(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "rlctl", "init", "mine", "--preset", "laptop"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, cwd=tmp_path)
    os.close(child)
    seen = ""
    for question, answer in (("Model", "some/model"), ("Data", ""), ("Reward", "exact-match")):
        while question not in seen.rpartition("\n")[2]:
            assert select.select([parent], [], [], 60)[0], seen
            seen += os.read(parent, 4096).decode()
        os.write(parent, f"{answer}\n".encode())
        seen += "\n"
    assert process.wait(60) == 0
    os.close(parent)
    config = resolve(str(tmp_path / "mine" / "run.yaml"), environment={}).config
    assert (config.model.name, config.reward.terms[0].name) == ("some/model", "exact-match")
    assert "Preset" not in seen
    assert "init" in cli.COMMANDS
