"""Prompts held out of training, and what a run validates on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.holdout import columns_of_prompts, hold_out, open_validation, validation_data
from rlctl.data.prompt_rows import PromptDataset
from rlctl.data.prompts import open_prompts
from rlctl.errors import ConfigError, InputError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.settings.data import DataConfig


@pytest.fixture
def source(tmp_path: Path) -> PromptDataset:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": "1"}) + "\n" for n in range(20)))
    return open_prompts(DataConfig(name=str(path)))


def prompts(source: PromptDataset | None) -> list[Any]:
    assert source is not None
    return [source[index].prompt for index in range(len(source))]


@pytest.mark.parametrize("count", [1, 5, 19])
def test_training_and_validation_share_no_prompt_and_lose_none(source: PromptDataset, count: int) -> None:
    train, held = hold_out(source, count, seed=3)
    assert (len(train), len(held or [])) == (20 - count, count)
    assert sorted(prompts(train) + prompts(held)) == sorted(prompts(source))
    with pytest.raises(IndexError):
        train[len(train)]


def test_what_is_left_to_train_on_is_counted_anew(source: PromptDataset) -> None:
    """Whoever finds a prompt again by its number, as an order by pass rates does, finds that prompt."""
    train, held = hold_out(source, 7, seed=3)
    assert held is not None
    assert [train[index].index for index in range(len(train))] == list(range(13))
    assert [held[index].index for index in range(len(held))] == list(range(7))


def test_the_seed_chooses_what_is_held_out(source: PromptDataset) -> None:
    one, again, other = (prompts(hold_out(source, 5, seed)[1]) for seed in (3, 3, 4))
    assert one == again != other


def test_a_resume_knows_that_another_part_is_held_out(source: PromptDataset) -> None:
    fingerprints = [hold_out(source, count, 3)[0].fingerprint() for count in (0, 4, 5)]
    assert fingerprints[0] == source.fingerprint()
    assert len({json.dumps(one, sort_keys=True) for one in fingerprints}) == 3


def test_holding_out_everything_is_refused(source: PromptDataset) -> None:
    with pytest.raises(InputError, match=r"leaves nothing to train on: .* has 20 prompts"):
        hold_out(source, 20, 0)


def write(path: Path, rows: list[dict[str, Any]]) -> PromptDataset:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_prompts(DataConfig(name=str(path)))


REPEATS = {
    "each four times": [{"prompt": f"q{n % 8}", "answer": "1"} for n in range(32)],
    "by white space": [
        {"prompt": " " * (n % 2) + "q" + (" ", "\n", "\t\r\n")[n % 3] + f"{n % 8}\n"} for n in range(32)
    ],
    "messages": [{"messages": [{"role": "user", "content": f"q{n % 8}"}], "answer": f"{n}"} for n in range(32)],
    "text and messages": [
        {"prompt": f"q{n % 8}" if n < 16 else [{"role": "user", "content": f"q{n % 8} "}]} for n in range(32)
    ],
    "some twice": [{"prompt": f"q{min(n, n % 20)}"} for n in range(32)],
}


def read(source: PromptDataset | None) -> list[str]:
    return ["".join(source[index].question.split()) for index in range(len(source))] if source else []


@pytest.mark.parametrize("name", REPEATS)
@pytest.mark.parametrize("count", [1, 7, 8])
def test_rows_with_an_equal_prompt_are_on_one_side(name: str, count: int, tmp_path: Path) -> None:
    source = write(tmp_path / "d.jsonl", REPEATS[name])
    train, held = hold_out(source, count, seed=3)
    assert not {*read(train)} & {*read(held)}
    assert len(held or ()) == count
    left_out = 32 - count - len(train)
    assert bool(train.notes) == bool(left_out)
    assert left_out < 4
    assert train.fingerprint()["prompts"] < 32


def test_prompts_that_differ_in_images_columns_or_rows_of_an_environment_are_apart(tmp_path: Path) -> None:
    shown = [{"prompt": "What?", "image": f"{n % 4}.png", "level": n, "answer": "1"} for n in range(16)]
    source = write(tmp_path / "d.jsonl", shown)
    train, held = hold_out(source, 4, 0)
    assert not {one.images for one in train} & {one.images for one in held or ()}
    for columns, settings in ((["level"], {"prompt_template": "{prompt} {level}"}), (None, {})):
        asked = RlConfig.model_validate(
            {"data": {"name": "d.jsonl", **settings}, "environment": {} if settings else {"name": "guess-number"}}
        )
        assert columns_of_prompts(asked, asked.data) == ({"prompt", "level"} if columns else None)
        train, held = hold_out(source, 4, 0, columns_of_prompts(asked, asked.data))
        assert (len(train), train.notes) == (12, ())


def test_held_out_prompts_that_are_trained_are_counted_where_most_rows_have_one_prompt(tmp_path: Path) -> None:
    source = write(tmp_path / "d.jsonl", [{"prompt": "Write a haiku."}] * 30 + [{"prompt": "2"}, {"prompt": "3"}])
    train, held = hold_out(source, 8, 0)
    assert (len(train), len(held or ())) == (24, 8)
    assert train.notes == ("6 held-out rows have a prompt that is trained, because most rows have the same",)


def config(trained: dict[str, Any], **validation: Any) -> RlConfig:
    return RlConfig.model_validate({"data": trained, "validation": {"every": 1, **validation}})


def test_a_gym_task_is_validated_on_questions_of_other_seeds() -> None:
    for data in (
        {"name": "reasoning-gym:chain_sum", "params": {"max_terms": 2, "seed": 5}},
        {"name": "reasoning-gym:chain_sum:max_terms=2,seed=5"},
    ):
        asked = config(data)
        trained = open_prompts(asked.data).fingerprint()["params"]
        validated = open_validation(asked, None)[0].fingerprint()["params"]
        assert validated["max_terms"] == trained["max_terms"] == 2
        assert validated["seed"] >= trained["seed"] + trained["size"]


def test_a_file_needs_other_prompts_or_a_part_of_its_own(source: PromptDataset) -> None:
    asked = config({"name": source.label})
    with pytest.raises(ConfigError, match="`validation` has no prompts"):
        open_validation(asked, None)
    held = hold_out(source, 5, 0)[1]
    assert open_validation(asked, held)[0] is held
    with pytest.raises(
        ConfigError, match=r"validation\.data\.split = 'test' has no effect: the prompts of validation are"
    ):
        open_validation(config({"name": source.label}, data={"split": "test"}), held)


def test_the_format_of_validation_is_that_of_training_where_nothing_else_is_set() -> None:
    asked = config(
        {"name": "reasoning-gym:chain_sum", "params": {"max_terms": 2}, "system_prompt": "s", "prompt_field": "q"},
        data={"name": "owner/set", "split": "test", "prompt_suffix": " now"},
    )
    data = validation_data(asked.data, asked.validation.data)
    assert (data.name, data.split, data.params) == ("owner/set", "test", {})
    assert (data.system_prompt, data.prompt_field, data.prompt_suffix) == ("s", "q", " now")
