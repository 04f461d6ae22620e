"""Rows of large files, read when they are drawn: the same rows, orders and errors as where all are in memory."""

from __future__ import annotations

import json
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import rlctl.data.large_files as large_files
from rlctl.data.holdout import hold_out
from rlctl.data.prompt_rows import PromptDataset
from rlctl.data.prompts import CHECKED_ROWS, open_prompts
from rlctl.data.texts import text_from_record
from rlctl.errors import InputError, MachineError
from rlctl.rollouts import prompt_order
from rlctl.rollouts.prompt_order import PromptOrder
from rlctl.settings.data import DataConfig

ROWS = 2500


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every file as a large one."""
    monkeypatch.setattr(large_files, "WHOLE_BYTES", 0)


def opened(path: Path, **data: object) -> PromptDataset:
    return open_prompts(DataConfig(name=str(path), **data))


def both_ways(path: Path, monkeypatch: pytest.MonkeyPatch, **data: object) -> tuple[PromptDataset, PromptDataset]:
    """Return the rows as they are in memory, and as they are read from a large file."""
    whole = opened(path, **data)
    monkeypatch.setattr(large_files, "WHOLE_BYTES", 0)
    return whole, opened(path, **data)


def questions(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {row} ü?", "answer": str(row), "level": row % 7, **fields} for row in range(count)]


def json_lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=row % 2 == 0) + "\n" for row, record in enumerate(records))


def assert_equal(whole: PromptDataset, lazy: PromptDataset) -> None:
    assert lazy.checked <= CHECKED_ROWS < len(whole) == len(lazy)
    assert [lazy[index] for index in range(len(lazy))] == [whole[index] for index in range(len(whole))]
    assert lazy.fingerprint() == whole.fingerprint()


def test_json_lines_are_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    lines = json_lines(questions(ROWS)).splitlines(keepends=True)
    lines[40:40] = ["\n", "   \t\r\n", "\n"]  # blank lines are no rows, and count for the numbers of lines
    lines[1700:1700] = ["\n"] * 300
    lines = ["\n", *(line.replace("\n", "\r\n") if place % 5 == 0 else line for place, line in enumerate(lines))]
    path.write_text("".join(lines).rstrip("\n"), newline="")
    whole, lazy = both_ways(path, monkeypatch)
    assert_equal(whole, lazy)
    assert lazy[ROWS - 1].where == f"{path}, line {len(lines)}"


def test_lines_longer_than_a_block_and_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        rows = questions(400, long="x" * 20_000 * (number == 1), file=number)
        (tmp_path / f"train-{number}.jsonl").write_text(json_lines(rows))
    whole, lazy = both_ways(tmp_path, monkeypatch)
    assert_equal(whole, lazy)
    assert lazy[805].where == f"{tmp_path / 'train-2.jsonl'}, line 6"


def test_parquet_rows_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = questions(ROWS)
    columns = {
        "prompt": pyarrow.array([row["prompt"] for row in rows]).cast(pyarrow.binary()),
        "answer": pyarrow.array([row["answer"] for row in rows]).dictionary_encode(),
        "score": pyarrow.array([0.1 * row for row in range(ROWS)], pyarrow.float32()),
        "meta": [{"a": row, "b": None} if row % 3 else None for row in range(ROWS)],
        "tags": [["x"] * (row % 4) for row in range(ROWS)],
        "kind": pyarrow.chunked_array(  # whose dictionaries differ between the groups of rows
            [pyarrow.array([f"k{row}" for row in range(ROWS - 500)]).dictionary_encode(),
             pyarrow.array(["z"] * 500).dictionary_encode()]
        ).unify_dictionaries(),
    }  # fmt: skip
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=700)
    whole, lazy = both_ways(path, monkeypatch)
    assert_equal(whole, lazy)
    assert lazy[1234].where == f"{path}, row 1234"
    assert lazy[7].answer == "7"
    assert any("copied" in note for note in lazy.notes)


def test_parquet_files_of_a_folder_keep_their_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, kind in enumerate((pyarrow.int32(), pyarrow.string())):
        table = pyarrow.Table.from_pylist(questions(900))
        extra = pyarrow.array(range(900)).cast(kind)
        pyarrow.parquet.write_table(table.append_column("extra", extra), tmp_path / f"train-{number}.parquet")
    whole, lazy = both_ways(tmp_path, monkeypatch)
    assert_equal(whole, lazy)
    assert (lazy[899].fields["extra"], lazy[900].fields["extra"]) == (899, "0")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_size_keeps_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr("rlctl.data.prompts.LOOKED_AHEAD", 100)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text(json_lines(questions(ROWS)))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(questions(ROWS)), path)
    whole, lazy = both_ways(path, monkeypatch, size=1501)
    assert_equal(whole, lazy)


@pytest.mark.usefixtures("large")
def test_a_wrong_row_is_named_when_it_is_drawn_and_among_the_first_before(tmp_path: Path) -> None:
    lines = json_lines(questions(ROWS)).splitlines(keepends=True)
    path = tmp_path / "rows.jsonl"
    wrong = {1900: '{"prompt": "broken\n', 2000: '{"answer": "1"}\n', 2100: "[1]\n"}
    path.write_text("".join(wrong.get(place, line) for place, line in enumerate(lines)))
    dataset = opened(path)
    for place, message in zip(wrong, ("not JSON", "no field 'prompt'", "not a JSON object"), strict=True):
        with pytest.raises(InputError, match=rf"rows\.jsonl, line {place + 1}: {message}"):
            dataset[place]
    path.write_text("".join([*lines[:500], "{}\n", *lines[500:]]))
    with pytest.raises(InputError, match=r"rows\.jsonl, line 501: no field 'prompt'"):
        opened(path)
    path.write_text("\n \n")
    with pytest.raises(InputError, match="has no rows"):
        opened(path)


@pytest.mark.usefixtures("large")
def test_a_file_that_changes_during_a_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json_lines(questions(ROWS)))
    dataset = opened(path)
    path.write_text(json_lines(questions(ROWS - 1)))
    with pytest.raises(InputError, match=r"rows\.jsonl has changed since the run opened it"):
        dataset[2]


@pytest.mark.usefixtures("large")
def test_a_copy_without_room_says_where_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(questions(ROWS)), path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # bytes of a file, as on a full disk
    try:
        with pytest.raises(MachineError, match=r"cannot be copied to .*: File too large") as caught:
            opened(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "TMPDIR" in (caught.value.hint or "")


@pytest.mark.usefixtures("large")
def test_other_kinds_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(questions(ROWS)))
    assert opened(path).checked == ROWS


def test_a_large_file_stays_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record = json.dumps({"prompt": "What is it? " * 800, "answer": "1"}) + "\n"
    path.write_text(record * 7500)
    assert path.stat().st_size > large_files.WHOLE_BYTES
    tracemalloc.start()
    dataset = opened(path)
    order = PromptOrder(len(dataset), 0)
    assert [dataset[order.at(turn)].answer for turn in range(100)] == ["1"] * 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


@pytest.mark.parametrize("size", [999, 1000, 1001, 4321])
def test_an_order_in_parts_is_the_order_of_the_whole(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(prompt_order, "PART_ROWS", 100)
    order = PromptOrder(size, 5, number=2)
    for epoch in (0, 1):
        draws = np.random.PCG64(np.random.SeedSequence((5, epoch, 2))).random_raw(size)
        turns = range(epoch * size, (epoch + 1) * size)
        assert [order.at(turn) for turn in turns] == sorted(range(size), key=lambda row: (draws[row], row))
    assert PromptOrder(size, 5, number=2).at(size + 77) == order.at(size + 77)


def test_held_out_rows_that_are_not_compared_are_those_of_a_sort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.data.holdout.MOST_READ", 100)
    path = tmp_path / "rows.jsonl"
    path.write_text(json_lines(questions(ROWS)))
    train, held = hold_out(opened(path), 31, seed=3)
    assert held is not None
    draws = np.random.PCG64(np.random.SeedSequence((3, ROWS))).random_raw(ROWS)
    expected = sorted(sorted(range(ROWS), key=lambda row: draws[row])[:31])
    assert [held[index].answer for index in range(31)] == [str(row) for row in expected]
    assert len(train) == ROWS - 31
    assert not {train[index].answer for index in range(len(train))} & {held[index].answer for index in range(31)}
    assert any("were not compared" in note for note in train.notes)


def test_texts_for_training_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlctl.data.row_types import TextRows

    path = tmp_path / "rows.parquet"
    rows = [{"messages": [{"role": "user", "content": f"{row}?"}, {"role": "assistant", "content": "Yes."}]}
            for row in range(ROWS)]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    monkeypatch.setattr(large_files, "WHOLE_BYTES", 0)
    data = DataConfig(name=str(path))
    dataset = open_prompts(data, rows=TextRows())
    for index in (0, 1500, ROWS - 1):
        assert dataset[index] == text_from_record(rows[index], index, f"{path}, row {index}", data)
