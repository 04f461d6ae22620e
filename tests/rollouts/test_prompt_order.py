"""The order of prompts: whole epochs, and a pure function of the position."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.data.prompt_records import difficulties
from rlctl.data.prompts import open_prompts
from rlctl.errors import InputError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts.prompt_order import PassRateOrder, PromptOrder, PromptStream
from rlctl.settings.data import DataConfig
from support.groups import group


def rows(order: PromptOrder, first: int, count: int) -> list[int]:
    return [order.at(position) for position in range(first, first + count)]


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**32), shuffle=st.booleans())
def test_every_epoch_holds_every_prompt_once(size: int, seed: int, shuffle: bool) -> None:
    drawn = rows(PromptOrder(size, seed, shuffle), 0, 3 * size)
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_position_can_be_asked_for_at_any_time() -> None:
    whole = rows(PromptOrder(50, seed=7), 0, 160)
    order = PromptOrder(50, seed=7)
    assert [order.at(position) for position in reversed(range(160))] == whole[::-1]


def test_seeds_and_epochs_differ() -> None:
    first = PromptOrder(100, seed=0)
    assert rows(first, 0, 100) != rows(PromptOrder(100, seed=1), 0, 100)
    assert rows(first, 0, 100) != rows(first, 100, 100)


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint of an older version must resume: these numbers are part of the format of a run."""
    assert rows(PromptOrder(6, seed=42), 0, 6) == [4, 1, 3, 0, 2, 5]


def test_without_shuffling_prompts_come_in_file_order() -> None:
    assert rows(PromptOrder(3, seed=9, shuffle=False), 4, 4) == [1, 2, 0, 1]


def test_an_empty_order_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptOrder(0, seed=0)


def test_sources_of_one_run_are_not_shuffled_alike() -> None:
    assert rows(PromptOrder(50, seed=3, number=1), 0, 50) != rows(PromptOrder(50, seed=3), 0, 50)


# by difficulty


def file(directory: Path, *records: dict, name: str = "d.jsonl") -> str:
    (directory / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(directory / name)


def test_easy_prompts_come_first_in_every_epoch_and_equal_ones_are_shuffled(tmp_path: Path) -> None:
    levels = [3, "Level 1", 2.5, "level-1", 3, 1]
    name = file(tmp_path, *({"prompt": "q", "about": {"level": level}} for level in levels))
    data = DataConfig(name=name, order="difficulty", difficulty_field="about.level")
    drawn = [rows(PromptOrder.of(open_prompts(data), data, seed), 0, 12) for seed in range(4)]
    for order in drawn:
        for epoch in (order[:6], order[6:]):
            assert [set(epoch[:3]), epoch[3], set(epoch[4:])] == [{1, 3, 5}, 2, {0, 4}]
    assert len({tuple(order) for order in drawn}) > 1
    plain = data.model_copy(update={"shuffle": False})
    assert rows(PromptOrder.of(open_prompts(plain), plain, 0), 0, 6) == [1, 3, 5, 2, 0, 4]


def test_a_decimal_of_a_parquet_file_is_a_difficulty(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "level": [Decimal("3.50"), Decimal("1.25")]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    data = DataConfig(name=str(tmp_path / "d.parquet"), order="difficulty", difficulty_field="level")
    assert difficulties(open_prompts(data), data).tolist() == [3.5, 1.25]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, ["needs the field", "data.difficulty_field"]),
        ({"difficulty_field": "levle"}, ["line 1", "no field 'levle'", "Did you mean level"]),
        ({"difficulty_field": "level"}, ["line 2", "'level' (data.difficulty_field) is 'hard', which is not a number"]),
        ({"difficulty_field": "level.x"}, ["no field 'level.x'"]),
    ],
)
def test_a_difficulty_that_is_none_is_named(tmp_path: Path, data: dict, words: list[str]) -> None:
    name = file(tmp_path, {"prompt": "q", "level": 1}, {"prompt": "q", "level": "hard"})
    config = DataConfig(name=name, order="difficulty", **data)
    with pytest.raises(InputError) as raised:
        difficulties(open_prompts(config), config)
    for word in words:
        assert word in str(raised.value)


# by pass rate


def pass_rates(order: PassRateOrder, rates: dict[int, float]) -> None:
    for row, rate in rates.items():
        order.observe(group(row, [1.0] * round(4 * rate) + [0.0] * round(4 * (1 - rate)), [1] * 4))


def test_prompts_that_are_solved_always_or_never_come_last_from_the_second_epoch_on() -> None:
    order = PassRateOrder(5, seed=0)
    plain = rows(PromptOrder(5, seed=0), 0, 15)
    assert rows(order, 0, 5) == plain[:5]
    pass_rates(order, {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.75, 4: 0.25})
    second = rows(order, 5, 5)
    assert [second[0], set(second[1:3]), set(second[3:])] == [1, {3, 4}, {0, 2}]
    pass_rates(order, dict.fromkeys(range(5), 0.5))
    assert rows(order, 5, 5) == second  # it was fixed
    assert rows(order, 10, 5) == plain[10:]  # all alike


def test_the_reward_stands_for_accuracy_only_where_there_is_none() -> None:
    order = PassRateOrder(1, seed=0)
    order.observe(group(0, [-3.0, 0.5, 7.0, 0.0], [1] * 4))
    assert order.state()["rates"] == [(0, 1.5 / 4)]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 9), seed=st.integers(0, 99), steps=st.integers(1, 12), draw=st.data())
def test_an_order_by_pass_rates_resumes_exactly_and_keeps_epochs_whole(
    size: int, seed: int, steps: int, draw: Any
) -> None:
    """Batches of three, some across the end of an epoch; another order takes over with what a checkpoint holds."""
    order, taken = PassRateOrder(size, seed), []
    cut = draw.draw(st.integers(0, steps))
    other = None
    behind = draw.draw(st.integers(0, 6))  # positions that were asked for and are not trained on yet
    for step in range(steps):
        if step == cut:
            other, since = PassRateOrder(size, seed), max(0, 3 * step - behind)
            other.restore(json.loads(json.dumps(order.state(since))))
            assert rows(other, since, 3 * step - since) == taken[since:]
        batch = rows(order, 3 * step, 3)
        taken += batch
        rates = draw.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=3, max_size=3))
        for one in filter(None, (order, other)):
            assert rows(one, 3 * step, 3) == batch
            for row, rate in zip(batch, rates, strict=True):
                pass_rates(one, {row: rate})
    for epoch in range(len(taken) // size):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))


# streams


def stream(tiny_llama: Path, steps: int = 6, **data: Any) -> PromptStream:
    config = RlConfig.model_validate({"data": data, "batch": {"prompts": 4}, "run": {"steps": steps, "seed": 3}})
    return PromptStream.open_rollouts(config, tiny_llama)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    sums = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(5)]
    words = [{"question": f"w{i}", "answer": f"w{i}"} for i in range(7)]
    return file(tmp_path, *sums, name="sums.jsonl"), file(tmp_path, *words, name="words.jsonl")


def test_one_source_has_the_order_of_its_own(tiny_llama: Path, files: tuple[str, str]) -> None:
    made = stream(tiny_llama, name=files[0])
    order = PromptOrder(5, seed=3)
    assert [made.prompt_at(position).index for position in range(12)] == rows(order, 0, 12)
    assert made.prompt_at(0).source == ""
    assert made.describe() == [f"data: {files[0]} (5 prompts)"]
    assert made.fingerprint() == made.datasets[0].prompts.fingerprint()
    assert made.state() == {}


def test_one_pass_over_two_files_has_each_row_once_also_after_rows_are_dropped(
    tiny_llama: Path, tmp_path: Path
) -> None:
    records = [
        [{"prompt": "long " * 99 if n == 3 else f"{part} {n}"} for n in range(9 - 6 * part)] for part in range(2)
    ]
    names = [file(tmp_path, *rows, name=f"{part}.jsonl") for part, rows in enumerate(records)]
    made = stream(tiny_llama, sources=[{"name": name} for name in names], too_long="drop")
    made.leave_out_long(60, seed=3)
    drawn = [str(made.prompt_at(position).prompt) for position in range(11)]
    assert sorted(drawn) == sorted(row["prompt"] for rows in records for row in rows if len(row["prompt"]) < 9)


def test_a_source_of_one_row_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    made = stream(tiny_llama, name=file(tmp_path, {"prompt": "a"}))
    assert [note.endswith("has one row, on which every step trains") for note in made.notes()] == [True]


def test_several_sources_take_turns_each_with_its_own_order_and_words(tiny_llama: Path, files: tuple[str, str]) -> None:
    sums, words = files
    made = stream(
        tiny_llama,
        sources=[
            {"name": sums, "weight": 2, "prompt_template": "Add: {prompt}"},
            {"name": words, "prompt_field": "question", "system_prompt": "Repeat.", "order": "as-written"},
        ],
    )
    drawn = [made.prompt_at(position) for position in range(21)]
    assert [row.source for row in drawn] == [sums, sums, words] * 7
    assert [row.index for row in drawn if row.source == words] == list(range(7))
    assert [row.index for row in drawn if row.source == sums][:10] == rows(PromptOrder(5, seed=3), 0, 10)
    texts = [made.encoder.tokenizer.decode(made.tokens(row)) for row in drawn[1:3]]
    assert f"user\nAdd: {drawn[1].prompt}<" in texts[0]
    assert "system\nRepeat." in texts[1]
    assert made.describe() == [
        f"data: {sums} (5 prompts, 66.7% of the prompts)",
        f"data: {words} (7 prompts, 33.3% of the prompts)",
    ]
    assert made.fingerprint().keys() == {sums, words}
    assert len(made.lengths()) == 5 + 7


def test_a_prompt_of_any_source_that_is_too_long_is_named_before_the_run(
    tiny_llama: Path, tmp_path: Path, files: tuple[str, str]
) -> None:
    long = file(tmp_path, {"prompt": "q"}, {"prompt": "long " * 99}, name="long.jsonl")
    made = stream(tiny_llama, sources=[{"name": files[0], "weight": 3}, {"name": long}])
    made.limit = 60
    with pytest.raises(InputError, match=r"long\.jsonl, line 2: the prompt has"):
        made.require_fit()


def test_prompts_that_are_too_long_are_left_out_and_counted(tiny_llama: Path, tmp_path: Path) -> None:
    records = [{"prompt": "long " * 99 if n in (1, 4) else f"short {n}"} for n in range(6)]
    made = stream(tiny_llama, name=file(tmp_path, *records), too_long="drop")
    before = made.fingerprint()
    made.leave_out_long(60, seed=3)
    made.limit = 60
    made.require_fit()
    drawn = []
    for epoch in range(3):
        drawn = [made.prompt_at(4 * epoch + place) for place in range(4)]
        assert sorted(str(row.prompt) for row in drawn) == ["short 0", "short 2", "short 3", "short 5"]
    assert [row.index for row in drawn] == rows(PromptOrder(4, seed=3), 8, 4)
    assert len(made.notes()) == 1
    assert made.notes()[0].startswith("2 of 6 prompts of ")
    assert made.fingerprint() == before | {"left_out": 2}
    with pytest.raises(InputError, match=r"Every prompt of .* is longer than 3 tokens"):
        made.leave_out_long(3, seed=3)


def test_a_prompt_that_is_too_long_loses_its_beginning(tiny_llama: Path, tmp_path: Path) -> None:
    made = stream(tiny_llama, name=file(tmp_path, {"prompt": "q"}, {"prompt": "long " * 99}), too_long="cut")
    whole = [made.tokens(made.datasets[0].prompts[index]) for index in range(2)]
    made.limit, made.room = 60, 48
    made.require_fit()
    assert [made.tokens(made.datasets[0].prompts[index]) for index in range(2)] == [whole[0], whole[1][-48:]]
    assert made.notes() == [
        f"1 prompt keeps its last 48 tokens (data.too_long=cut), the first in {made.datasets[0].prompts[1].where}"
    ]


def test_the_state_of_a_stream_is_that_of_its_pass_rate_orders(tiny_llama: Path, files: tuple[str, str]) -> None:
    sources = [
        {"name": files[0], "order": "pass-rate", "weight": 1},
        {"name": files[1], "prompt_field": "question", "weight": 1},
    ]
    made, again = stream(tiny_llama, sources=sources), stream(tiny_llama, sources=sources)
    for position in range(12):
        row = made.prompt_at(position)
        made.observe([replace(group(position, [row.index / 5] * 2, [1, 1]), prompt=row)])
    again.restore(json.loads(json.dumps(made.state(10))))
    (kept,) = made.state(10).values()
    assert list(kept["orders"]) == [str(max(map(int, made.state()[files[0]]["orders"])))]
    assert made.state().keys() == {files[0]}
    later = [made.prompt_at(position) for position in range(10, 40)]
    assert [again.prompt_at(position) for position in range(10, 40)] == later
    with pytest.raises(ValueError, match="each prompt once"):
        again.restore({files[0]: {"rates": [], "orders": {"1": [0, 0, 1, 2, 3]}}})
