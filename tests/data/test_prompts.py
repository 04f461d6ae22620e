"""Prompt sources: real reasoning-gym tasks, files, and a dataset saved by `datasets`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlctl.data.prompt_rows import PromptDataset
from rlctl.data.prompts import open_prompts, shows_images
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def open_file(path: Path, **data: object) -> PromptDataset:
    return open_prompts(DataConfig(name=str(path), **data))


# reasoning-gym


def test_a_gym_task_gives_the_questions_of_the_package() -> None:
    import reasoning_gym

    params = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    source = open_prompts(DataConfig(name="reasoning-gym:chain_sum", params=params, size=20), seed=5)
    theirs = reasoning_gym.create_dataset("chain_sum", seed=5, size=20, **params)
    assert len(source) == 20
    for index in range(20):
        assert source[index].prompt == theirs[index]["question"]
        assert source[index].answer == theirs[index]["answer"]
        assert source[index].fields["metadata"] == theirs[index]["metadata"]


@pytest.mark.long
def test_gym_questions_follow_the_run_seed_unless_given_their_own() -> None:
    def first(run_seed: int, **params: int) -> str:
        return open_prompts(DataConfig(name="reasoning-gym:chain_sum", params=params), seed=run_seed)[0].prompt

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert first(1, seed=9) == first(2, seed=9)


def test_gym_parameters_may_stand_in_the_name() -> None:
    source = open_prompts(DataConfig(name="reasoning-gym:chain_sum:max_terms=2,max_digits=1", params={"max_terms": 5}))
    assert source.fingerprint()["params"]["max_terms"] == 2
    assert source[0].fields["metadata"]["num_terms"] == 2


def test_tasks_that_draw_are_there_although_what_they_draw_with_comes_later() -> None:
    params = {"grid_size_x": 3, "grid_size_y": 3, "filled_cells": 3}
    row = open_prompts(DataConfig(name="reasoning-gym:game_of_life", params=params))[0]
    assert len(json.loads(row.answer)) == 3


@pytest.mark.long
def test_gym_fingerprint_tells_parameters_and_seeds_apart() -> None:
    def fingerprint(seed: int, **params: int) -> dict:
        return open_prompts(DataConfig(name="reasoning-gym:gcd", params=params), seed=seed).fingerprint()

    assert fingerprint(0) == fingerprint(0)
    assert fingerprint(0) != fingerprint(1)
    assert fingerprint(0) != fingerprint(0, max_value=50)
    json.dumps(fingerprint(0))


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("reasoning-gym:chain_som", {}, ["'chain_som'", "chain_sum"]),
        ("reasoning-gym:xyzzy", {}, ["'xyzzy'", "Some are"]),
        ("reasoning-gym:chain_sum", {"max_term": 2}, ["'max_term'", "Did you mean max_terms"]),
        ("reasoning-gym:chain_sum", {"zz": 2}, ["'zz'", "It has min_terms"]),
        ("reasoning-gym:chain_sum", {"max_terms": 1}, ["max_terms must be >= min_terms", "max_terms=1"]),
        ("reasoning-gym:chain_sum", {"max_terms": "many"}, ["refuses its parameters", "many"]),
        ("reasoning-gym:chain_sum", {"size": 0}, ["size must be positive"]),
        ("reasoning-gym:chain_sum:max_terms", {}, ["'max_terms' is not key=value"]),
        ("reasoning-gym:chain_sum:max_terms=[", {}, ["refuses its parameters", "["]),
    ],
)
def test_wrong_gym_names_and_parameters(name: str, params: dict, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        open_prompts(DataConfig(name=name, params=params))
    for word in words:
        assert word in str(raised.value)


# files


def test_jsonl_rows_keep_their_other_fields(tmp_path: Path) -> None:
    records = [{"prompt": "1+1?", "answer": "2", "level": 3}, {"prompt": [{"role": "user", "content": "hi"}]}]
    source = open_file(write_jsonl(tmp_path / "d.jsonl", records))
    assert len(source) == 2
    assert (source[0].prompt, source[0].answer, source[0].fields) == ("1+1?", "2", {"level": 3})
    assert source[1].prompt == [{"role": "user", "content": "hi"}]
    assert source[1].question == "hi"
    assert source[1].answer is None


def test_jsonl_fields_can_be_named_and_size_limits(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": f"q{i}", "solution": i} for i in range(9)])
    source = open_file(path, prompt_field="question", answer_field="solution", size=4)
    assert [row.answer for row in (source[i] for i in range(len(source)))] == [0, 1, 2, 3]


def test_messages_are_the_prompt_where_nobody_names_another(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": said, "answer": "5"}])
    assert open_file(path)[0].prompt == said
    assert open_file(path, prompt_template="Q: {prompt}")[0].prompt == said
    own = write_jsonl(tmp_path / "own.jsonl", [{"messages": said, "prompt": "4 + 5?"}])
    assert open_file(own)[0].prompt == "4 + 5?"
    made = write_jsonl(tmp_path / "made.jsonl", [{"messages": said, "question": "6 + 7?"}])
    assert open_file(made, prompt_template="Q: {question}")[0].prompt == "Q: 6 + 7?"


def test_answers_in_the_form_of_gsm8k_are_cut_to_the_final_number(tmp_path: Path) -> None:
    numbers = ["72", "-3", "1,450,000", "$18", "3.5", ".5", "2/3", "10%"]
    rows = [{"prompt": "q", "answer": f"First 48/2 = 24.\n#### {number}"} for number in numbers]
    assert [row.answer for row in open_file(write_jsonl(tmp_path / "d.jsonl", rows))] == numbers


@pytest.mark.parametrize(
    "answer",
    [
        "# Bread\n#### Dough\nMix.\n#### Oven\nBake at 230 degrees.",
        "Steps\n#### 1. Mix\nflour",
        "#### 1\nMix.\n#### 2",
        "One\n#### 1\ntwo\n#### 2",
        "code:\n#### yes",
        "72",
    ],
)
def test_other_answers_with_the_mark_of_a_heading_stay_whole(answer: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "q", "answer": answer}])
    assert open_file(path)[0].answer == answer
    assert open_file(path, answer_pattern="(.*)")[0].answer == answer


def test_jsonl_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}])
    before = open_file(path).fingerprint()
    assert open_file(path).fingerprint() == before
    write_jsonl(path, [{"prompt": "b"}])
    assert open_file(path).fingerprint() != before


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "a"}', "", '{"question": "b"}'], ["line 3", "'prompt'", "--prompt-field question"]),
        (['{"promt": "a"}'], ["line 1", "'prompt'", "Did you mean promt? Then add --prompt-field promt."]),
        (['{"messages": [], "id": 1}'], ["line 1", "'messages'", "empty"]),
        (['{"question": "a", "id": 1}'], ["Then add --prompt-field question", "Its fields are question, id"]),
        (['{"text": "a"}'], ["Its fields are text; name the right one with --prompt-field NAME."]),
        (["[", '  {"prompt": "a"}', "]"], ["line 1", "not JSON", "jq -c '.[]'"]),
        (['{"prompt": [{"from": "human", "value": "q"}]}'], ["chat messages", "this one has from, value"]),
        (['{"prompt": [{"role": "assistant", "content": "a"}]}'], ["line 1", "ends with an assistant message"]),
        (['{"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}'], ["type 'audio'", "texts and images"]),
        (['{"prompt": "a", "videos": ["a.mp4"]}'], ["line 1: field 'videos' holds videos, and prompts are texts"]),
        (['{"prompt": "a"}', '{"prompt": "b"'], ["line 2", "not JSON"]),
        (['["prompt"]'], ["line 1", "not a JSON object"]),
        (["[" * 100_000], ["line 1", "not JSON"]),
        (['{"prompt": "  "}'], ["line 1", "'prompt'", "empty"]),
        (['{"prompt": null}'], ["line 1", "'prompt'", "empty"]),
        (['{"prompt": 7}'], ["line 1", "'prompt'", "of type int"]),
        (['{"prompt": []}'], ["line 1", "'prompt'", "empty"]),
        (['{"prompt": [{"role": "user"}]}'], ["line 1", "'prompt'", "chat messages"]),
        ([""], ["no rows"]),
    ],
)
def test_wrong_jsonl_names_file_line_and_field(tmp_path: Path, lines: list[str], words: list[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InputError) as raised:
        open_file(path)
    for word in ["data.jsonl", *words]:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "q"}\n{"prompt": "q\x00"}\n', ["line 2", "Invalid control character"]),
        (b'{"prompt": "q", "answer": %b}' % (b"9" * 10_000), ["line 1", "not JSON"]),
        (b'{"prompt": "q", "answer": %b}' % (b"[" * 200_000), ["line 1", "not JSON"]),
        ('{"prompt": "q"}\n'.encode("utf-16"), ["line 1", "not JSON in UTF-8", "iconv"]),
    ],
    ids=lambda value: None if isinstance(value, bytes) else "-".join(value),
)
def test_odd_content_names_file_and_line(tmp_path: Path, content: bytes, words: list[str]) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(InputError) as raised:
        open_file(tmp_path / "data.jsonl")
    for word in ["data.jsonl", *words]:
        assert word in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_byte_order_mark_and_windows_line_ends_are_read_over(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "q"}\r\n{"prompt": "r"}\r\n')
    assert [row.prompt for row in open_file(tmp_path / "data.jsonl")] == ["q", "r"]


def test_a_named_answer_field_must_exist(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "solutions": "b"}])
    with pytest.raises(InputError, match=r"no field 'solution' \(--answer-field\)\. Did you mean solutions"):
        open_file(path, answer_field="solution")


def test_a_file_that_does_not_exist_suggests_its_neighbors(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(InputError, match=r"trian\.jsonl does not exist\. Did you mean train\.jsonl"):
        open_file(tmp_path / "trian.jsonl")


@pytest.mark.parametrize(
    ("name", "words"),
    [("d.xlsx", r"Known are \.jsonl"), ("d.jsonl.zip", r"also with \.gz"), ("d.txt", "Known are")],
)
def test_other_kinds_of_file_are_refused_with_a_way_on(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_text("prompt\na\n")
    with pytest.raises(InputError, match=f"unknown kind of data file.*{words}"):
        open_file(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "words"),
    [("q.csv", r"Data file q\.csv does not exist"), ("./nowhere", "there is no such file or directory")],
)
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.data.prompts._loaded", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(InputError, match=words):
        open_prompts(DataConfig(name=name))


def test_a_message_in_parts_of_text_is_one_text_and_empty_images_are_none(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": [{"role": "user", "content": parts}], "images": []}])
    assert open_file(path)[0].prompt == [{"role": "user", "content": "ab"}]


def test_parameters_of_a_task_do_not_fit_a_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}])
    with pytest.raises(InputError, match=r"data\.params \(max_terms\)"):
        open_file(path, params={"max_terms": 2})


def test_no_data_says_what_to_give() -> None:
    with pytest.raises(InputError, match="--data"):
        open_prompts(DataConfig())


def test_parquet_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    messages = [[{"role": "user", "content": f"q{i}"}] for i in range(5)]
    table = pyarrow.table({"prompt": messages, "answer": [str(i) for i in range(5)], "level": list(range(5))})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    source = open_file(path, size=4)
    assert len(source) == 4
    assert source[3].prompt == messages[3]
    assert (source[3].answer, source[3].fields, source[3].question) == ("3", {"level": 3}, "q3")


def test_wrong_parquet_names_row_and_field(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), path)
    with pytest.raises(InputError, match=r"d\.parquet, row 1: field 'prompt' is empty"):
        open_file(path)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(InputError, match="no rows"):
        open_file(path)
    path.write_text("not parquet")
    with pytest.raises(InputError, match=r"d\.parquet is not a parquet file"):
        open_file(path)


# Hugging Face datasets


@pytest.fixture(scope="module")
def saved_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import datasets

    root = tmp_path_factory.mktemp("datasets")
    rows = {"prompt": ["1+1?", "2+2?", "3+3?"], "answer": ["2", "4", "6"], "level": [1, 2, 3]}
    splits = {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows).select([2])}
    datasets.DatasetDict(splits).save_to_disk(root / "splits")
    splits["train"].save_to_disk(root / "one")
    return root


def test_a_saved_dataset(saved_dataset: Path) -> None:
    source = open_file(saved_dataset / "splits", split="test")
    assert [len(source), source[0].prompt, source[0].answer] == [1, "3+3?", "6"]
    whole = open_file(saved_dataset / "one")
    assert len(whole) == 3
    assert whole[1].fields == {"level": 2}
    assert whole.fingerprint() == open_file(saved_dataset / "one").fingerprint()
    with pytest.raises(IndexError):
        whole[3]


def test_a_directory_of_data_files_loads_as_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [{"prompt": "a", "answer": "b"}])
    assert open_file(tmp_path / "data")[0].answer == "b"


def test_wrong_splits_and_fields_of_a_dataset(saved_dataset: Path) -> None:
    with pytest.raises(InputError, match=r"no split 'tset'\. Did you mean test"):
        open_file(saved_dataset / "splits", split="tset")
    with pytest.raises(InputError, match=r"no field 'question' \(--prompt-field\)"):
        open_file(saved_dataset / "one", prompt_field="question")


def test_a_dataset_with_images_in_another_column_is_refused(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "picture": [datasets.Image()]})
    datasets.Dataset.from_dict({"prompt": ["q"], "picture": [[]]}, features=features).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match=r"column 'picture' holds images.*named 'image' or 'images'"):
        open_file(tmp_path / "d")


def test_a_dataset_out_of_reach_is_said_clearly() -> None:
    with pytest.raises(
        InputError, match=r"'openai/gsm8k:main' \(split 'train'\): no file or .* the hub cannot be reached"
    ):
        open_prompts(DataConfig(name="openai/gsm8k:main"))


def test_prompts_import_nothing_heavy() -> None:
    code = (
        "import sys; import rlctl.data.prompts, rlctl.rollouts.prompt_order, rlctl.data.chat;"
        "import rlctl.rewards.reward_worker, rlctl.rewards.prepare_rewards;"
        "heavy = {'torch', 'transformers', 'datasets', 'reasoning_gym', 'math_verify', 'ray', 'pyarrow'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["notes.md", "rows.csv", "./absent"])
def test_a_file_of_another_kind_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("# Notes")
    monkeypatch.setattr("rlctl.data.prompts._loaded", lambda *_: pytest.fail("asked the hub"))
    assert not shows_images(DataConfig(name=name))
    with pytest.raises(InputError, match=r"unknown kind of data file|no such file|does not exist"):
        open_prompts(DataConfig(name=name))
