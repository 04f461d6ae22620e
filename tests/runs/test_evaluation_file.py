"""The file of an evaluation: it goes on after a kill, and mixes no samples of different settings."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import InputError
from rlctl.runs.evaluation_file import SampleFile

SETTINGS = {"temperature": 0.0, "stop": ()}


def sample(row: int, number: int = 0, **more: Any) -> dict[str, Any]:
    record = {"task": "t", "model": "m", "row": row, "sample": number, "right": True, "score": 1.0, "answer_given": "7"}
    return record | more


def written(path: Path) -> None:
    with SampleFile(path) as file:
        file.begin("t", "m", SETTINGS)
        file.add([sample(0), sample(4, 1)])


def test_samples_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    written(path)
    with SampleFile(path) as file:
        file.begin("t", "m", SETTINGS)
        assert set(file.samples("t", "m")) == {(0, 0), (4, 1)}
        assert file.samples("t", "other") == {}
        file.begin("t", "other", SETTINGS | {"temperature": 1.0})  # another model may have other settings
        file.add([sample(2, model="other")])
    with SampleFile(path) as file:
        assert set(file.samples("t", "other")) == {(2, 0)}


def test_a_line_that_a_kill_cut_off_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    written(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"task": "t", "mod')
    with SampleFile(path) as file:
        assert len(file.samples("t", "m")) == 2
        file.add([sample(9)])
    assert path.read_bytes().startswith(whole)
    with SampleFile(path) as file:
        assert set(file.samples("t", "m")) == {(0, 0), (4, 1), (9, 0)}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    written(path)
    with SampleFile(path) as file, pytest.raises(InputError, match=r"another `temperature`: 0.0 then, 0.5 now"):
        file.begin("t", "m", SETTINGS | {"temperature": 0.5})
    with SampleFile(path) as file, pytest.raises(InputError, match="another `top_p`: None then, None now"):
        file.begin("t", "m", SETTINGS | {"top_p": None})  # of another version of rlctl, which did not write it


@pytest.mark.parametrize(
    "content",
    ["no json\n", "no line", "{}\nno json", '{"step": 0}\n', '{"task": "t", "model": "m", "row": 1, "sample": 0}\n'],
)
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="line 1 is not a sample of an evaluation"):
        SampleFile(path)
    assert path.read_text() == content


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with SampleFile(path), pytest.raises(InputError, match="another process is writing it"):
        SampleFile(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        SampleFile(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        SampleFile(tmp_path / "absent" / "s.jsonl")


def test_an_answer_for_which_json_has_no_word_is_written_as_a_text(tmp_path: Path) -> None:
    with SampleFile(tmp_path / "s.jsonl") as file:
        file.begin("t", "m", SETTINGS)
        file.add([sample(0, answer=Decimal("3.50"))])
    with SampleFile(tmp_path / "s.jsonl") as file:
        assert file.samples("t", "m")[0, 0]["answer"] == "3.50"


def test_without_a_path_samples_are_in_memory(tmp_path: Path) -> None:
    with SampleFile(None) as file:
        file.begin("t", "m", SETTINGS)
        file.add([sample(1)])
        assert set(file.samples("t", "m")) == {(1, 0)}
