"""Data files: the same rows in JSON lines, JSON, CSV and Parquet, named alone or in a folder, are equal. The truth is
Python's own `json` and `csv`."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from rlctl.data.prompt_rows import PromptDataset, PromptRow
from rlctl.data.prompts import open_prompts, shows_images
from rlctl.data.row_types import PairRows, TextRows
from rlctl.data.texts import number_in
from rlctl.errors import InputError
from rlctl.rewards.prepare_rewards import prepare_rewards
from rlctl.rewards.scorers import ExactMatch, Scorer
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import RewardConfig, RewardTerm

ANSWERS = [
    "1957-03-25", "2024-01-01T00:00:00Z", "12:30", "007", "7.0", "1e3", "NA", "null", "None", "nan", "true", "False",
    "", " a ", "a,b", 'say "x"', "two\nlines", "two\r\nlines", "ä", "-inf", "0x10", "1_000",
]  # fmt: skip
RECORDS = [{"prompt": f"question {place}", "answer": answer, "level": "3"} for place, answer in enumerate(ANSWERS)]
NESTED = [
    {
        "prompt": "a",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None, "n": "007"}}}}],
        "extra_info": {"a": 1},
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        ],
    },
    {
        "prompt": "b",
        "tools": [{"type": "function", "function": {"name": "g", "parameters": {"y": [1, "2020-01-01"]}}}],
        "extra_info": {"b": [1, "z", {"c": None}]},
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "g", "arguments": {"b": "7"}}}]},
        ],
    },
]


def open_file(path: Path, **data: Any) -> PromptDataset:
    return open_prompts(DataConfig(name=str(path), **data))


def rows_of(path: Path, **data: Any) -> list[tuple[Any, Any, dict[str, Any]]]:
    return [(row.prompt, row.answer, row.fields) for row in open_file(path, **data)]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_json(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(records, indent=1))


def write_csv(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, [*records[0]], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(records)


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "train.jsonl": write_lines, "train.ndjson": write_lines, "lines.json": write_lines, "list.json": write_json,
    "data.csv": write_csv, "data.tsv": write_csv, "data.parquet": write_parquet,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_texts_stay_texts_in_every_kind_of_file_and_in_a_folder(name: str, tmp_path: Path) -> None:
    expected = [(one["prompt"], one["answer"], {"level": "3"}) for one in RECORDS]
    (tmp_path / "folder").mkdir()
    WRITERS[name](tmp_path / "folder" / name, RECORDS)
    assert rows_of(tmp_path / "folder" / name) == expected
    assert rows_of(tmp_path / "folder") == expected


def test_a_folder_has_its_files_in_order_and_its_splits(tmp_path: Path) -> None:
    for part in range(2):
        write_csv(tmp_path / f"train-{part}.csv", RECORDS[3 * part : 3 * part + 3])
    write_csv(tmp_path / "test.csv", RECORDS[9:12])
    assert [row[1] for row in rows_of(tmp_path)] == ANSWERS[:6]
    assert [row[1] for row in rows_of(tmp_path, split="test")] == ANSWERS[9:12]
    assert [row[1] for row in rows_of(tmp_path, size=4)] == ANSWERS[:4]
    with pytest.raises(InputError, match=r"no split 'tset'. Did you mean test"):
        open_file(tmp_path, split="tset")
    before = open_file(tmp_path).fingerprint()
    write_csv(tmp_path / "train-1.csv", RECORDS[4:7])
    assert open_file(tmp_path).fingerprint() != before


def test_a_folder_s_card_names_its_configurations(tmp_path: Path) -> None:
    (tmp_path / "hard").mkdir()
    write_lines(tmp_path / "easy.jsonl", RECORDS[:2])
    write_lines(tmp_path / "hard" / "part.jsonl", RECORDS[:1])
    configs = "configs:\n- config_name: easy\n  data_files: easy.jsonl\n- config_name: hard\n  data_files: hard/*"
    (tmp_path / "README.md").write_text(f"---\n{configs}\n---\n")
    assert rows_of(Path(f"{tmp_path}:hard")) == rows_of(tmp_path / "hard" / "part.jsonl")
    assert len(open_file(Path(f"{tmp_path}:easy"))) == 2


@pytest.mark.parametrize(("suffix", "opened"), [(".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_compressed_files(suffix: str, opened: Callable[..., Any], tmp_path: Path) -> None:
    write_csv(tmp_path / "plain.csv", RECORDS)
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / f"data.csv{suffix}"
    with opened(path, "wb") as file:
        file.write((tmp_path / "plain.csv").read_bytes())
    assert rows_of(path) == rows_of(tmp_path / "folder") == rows_of(tmp_path / "plain.csv")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"data\.csv\.\w+ is damaged"):
        open_file(path)


@pytest.mark.parametrize("how", ["parquet", "jsonl then parquet", "folder", "saved", "no arrow schema"])
def test_objects_with_unlike_keys_are_values_as_in_json_lines(how: str, tmp_path: Path) -> None:
    """`datasets` 5 gives their columns Arrow's JSON type, at any depth."""
    import datasets

    write_lines(tmp_path / "rows.jsonl", NESTED)
    expected = [PromptRow(0, "", "", None, dict(one)).tools for one in NESTED]
    made = datasets.Dataset.from_list(NESTED, on_mixed_types="use_json")
    if how == "jsonl then parquet":
        made = datasets.Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
    path = tmp_path / "folder"
    path.mkdir()
    if how == "saved":
        made.save_to_disk(path)
    elif how == "no arrow schema":  # as other writers of Parquet's JSON type have it
        pyarrow.parquet.write_table(made.data.table, path / "rows.parquet", store_schema=False)
    else:
        made.to_parquet(path / "rows.parquet")
    path = path if how in ("folder", "saved") else path / "rows.parquet"
    rows = [*open_file(path)]
    assert [row.tools for row in rows] == expected
    assert [row.fields["extra_info"] for row in rows] == [one["extra_info"] for one in NESTED]
    texts = [*open_prompts(DataConfig(name=str(path)), rows=TextRows())]
    assert [row.answer for row in texts] == [
        row.answer for row in open_prompts(DataConfig(name=str(tmp_path / "rows.jsonl")), rows=TextRows())
    ]


def test_objects_lose_nulls_of_other_rows_keys_but_no_null_of_json(tmp_path: Path) -> None:
    tools = [[{"name": "f", "a": 1}], [{"name": "g", "b": {"c": None}}]]
    table = pyarrow.Table.from_pylist([{"prompt": "q", "tools": one, "kept": one[0]} for one in tools])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    first, second = open_file(tmp_path / "d.parquet")
    assert (first.tools, second.tools) == (tools[0], [{"name": "g", "b": {}}])
    assert first.fields["kept"] == {"name": "f", "a": 1, "b": None}
    pairs = pyarrow.array([[("x", 1), ("y", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["q"], "scores": pairs}), tmp_path / "m.parquet")
    assert open_file(tmp_path / "m.parquet")[0].fields == {"scores": {"x": 1, "y": 2}}


def test_texts_without_the_type_of_text_and_narrow_numbers_are_as_in_json(tmp_path: Path) -> None:
    image = b"\x89PNG\r\n"
    columns = {
        "prompt": pyarrow.array([b"What?"], pyarrow.binary()),
        "answer": pyarrow.array(["é 5".encode()], pyarrow.large_binary()),
        "choices": pyarrow.array([[b"a", None]], pyarrow.list_(pyarrow.binary())),
        "packed": pyarrow.array([image], pyarrow.binary()),
        "score": pyarrow.array([0.1], pyarrow.float32()),
        "half": pyarrow.array([np.float16(2.55)], pyarrow.float16()),
        "held": pyarrow.array([{"box": [1.1, float("inf")], "none": None}]).cast(
            pyarrow.struct({"box": pyarrow.list_(pyarrow.float32()), "none": pyarrow.float32()})
        ),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "d.parquet")
    (row,) = open_file(tmp_path / "d.parquet")
    assert (row.prompt, row.answer, row.fields["choices"], row.fields["packed"]) == ("What?", "é 5", ["a", None], image)
    assert (row.fields["score"], row.fields["half"]) == (0.1, 2.55)
    assert row.fields["held"] == {"box": [1.1, float("inf")], "none": None}
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["q"], "answer": columns["score"]}), tmp_path / "n.parquet")
    assert ExactMatch("full")("0.1", open_file(tmp_path / "n.parquet")[0]) == 1


def test_other_ends_of_lines_stay_in_texts(tmp_path: Path) -> None:
    """`str.splitlines` ends lines at these characters; JSON lines and CSV do not."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    for name in ("d.jsonl", "d.json", "d.csv"):
        record = {"prompt": text, "answer": text}
        if name == "d.csv":
            write_csv(tmp_path / name, [record])
        else:
            (tmp_path / name).write_text(json.dumps(record, ensure_ascii=False) + "\n")
        (row,) = open_file(tmp_path / name)
        assert (row.prompt, row.answer) == (text, text)
        assert ExactMatch("last-line")(f"So it is\n{text}", row) == 1


def test_a_long_cell_and_one_object_in_json(tmp_path: Path) -> None:
    write_csv(tmp_path / "long.csv", [{"prompt": "q", "answer": "x" * 200_000}])
    assert open_file(tmp_path / "long.csv")[0].answer == "x" * 200_000
    (tmp_path / "one.json").write_text('{\n "prompt": "q", "answer": "\\ud83d\\ude00"}')
    assert rows_of(tmp_path / "one.json") == [("q", "\N{GRINNING FACE}", {})]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("d.csv", 'prompt,answer\n"a\nb",1\n\nc\n', [r"d\.csv, line 5: 1 cells, and the header has 2 \(prom"]),
        ("d.csv", "prompt;answer\na;1\n", ["no field 'prompt'", "prompt;answer"]),
        ("d.csv", 'prompt,answer\na,1\nb,"2\n', [r"line 3: not CSV \(unexpected end of data\)"]),
        ("d.csv", "prompt,prompt\na,1\n", ["two columns are named 'prompt'"]),
        ("d.csv", "prompt,answer\n", ["no rows"]),
        ("d.csv", "", ["no rows"]),
        ("d.json", '[{"prompt": "a"},', [r"d\.json: not JSON", "list of objects"]),
        ("d.json", '[{"prompt": "a"}, 7]', [r"d\.json, row 1: not a JSON object"]),
        ("d.json", '[{"prompt": "\\ud83d"}]', [r"d\.json, row 0: not JSON"]),
        ("d.json", '{"prompt": "a"}\n{"prompt": 7}', ["line 2: field 'prompt' is of type int"]),
        ("d.json", "[]", ["no rows"]),
    ],
)
def test_wrong_files_name_file_line_and_cause(name: str, text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    for word in words:
        with pytest.raises(InputError, match=word):
            open_file(tmp_path / name)


def test_a_csv_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes("prompt\nä\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"d\.csv: not text in UTF-8.*iconv"):
        open_file(tmp_path / "d.csv")


def test_a_folder_of_archives_is_not_read_by_other_rules(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.writestr("d.csv", "prompt,answer\na,NA\n")
    with pytest.raises(InputError, match=r"train\.zip: files of this kind are not read"):
        open_file(tmp_path)


def test_a_folder_of_images_with_metadata(tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "shown" / "red.png")
    write_csv(tmp_path / "metadata.csv", [{"file_name": "shown/red.png", "prompt": "What?", "answer": "NA"}])
    (row,) = open_file(tmp_path)
    assert row.answer == "NA"
    assert row.images[0].size() == (8, 8)
    assert shows_images(DataConfig(name=str(tmp_path)))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("scorer", ["exact-match", "tagged-answer", "math-verify"])
def test_truth_values_are_answered_as_in_json(scorer: str, kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "Is 2 even?", "answer": True}, {"prompt": "Is 3 even?", "answer": False}]
    WRITERS[{"jsonl": "train.jsonl", "parquet": "data.parquet"}[kind]](tmp_path / f"d.{kind}", rows)
    source = open_file(tmp_path / f"d.{kind}")
    assert [row.answer for row in source] == [True, False]  # as reward functions get them
    plan = prepare_rewards(RewardConfig(terms=(RewardTerm(name=scorer),), extract="answer-tag"), source)
    score = cast(Scorer, plan.build()[0])
    for text, expected in (("true", [1, 0]), ("false", [0, 1])):
        assert [score(f"<answer>{text}</answer>", row) for row in source] == expected


def test_a_missing_answer_behind_the_checked_rows_is_no_text(tmp_path: Path) -> None:
    import datasets

    rows = {"prompt": ["q"] * 1001, "answer": ["a"] * 1000 + [None]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match="row 1000: there is no reference answer"):
        ExactMatch("full")("None", open_file(tmp_path / "saved")[1000])


def test_numbers_and_labels_of_csv(tmp_path: Path) -> None:
    from rlctl.methods.kto import LabelRows

    labels = ["true", "False", "1", "0"]
    write_csv(tmp_path / "d.csv", [{"prompt": "q", "completion": "a", "label": label} for label in labels])
    rows = open_prompts(DataConfig(name=str(tmp_path / "d.csv")), rows=LabelRows())
    assert [row.fields["label"] for row in rows] == [True, False, True, False]
    assert [number_in(text) for text in ("-1.5", "", "many", 3)] == [-1.5, None, "many", 3]
    fields = {"response1": "a", "response2": "b", "overall_preference": "-2", "context": "q"}
    write_csv(tmp_path / "p.csv", [fields])
    assert open_prompts(DataConfig(name=str(tmp_path / "p.csv")), rows=PairRows())[0].answer == ("a", "b")
