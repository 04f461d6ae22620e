"""Answers taken out of completions."""

from __future__ import annotations

import pytest

from rlctl.config.schema import DataConfig
from rlctl.data.prompts import open_prompts
from rlctl.envs.extraction import as_number, choose_extraction, extract, written_as


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("The answer is 7.", "7"),
        ("5 - 9 = -4", "-4"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("x = \N{MINUS SIGN}4", "-4"),
        ("**-12**", "-12"),
        ("$1,234,567.50 in all", "1234567.50"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("+5", "5"),
        ("about 6.02e23", "6.02e23"),
        ("step 2: 17\n", "17"),
        ("v2", "2"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(completion: str, number: str | None) -> None:
    assert extract(completion, "last-number") == number


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{}", ""),
        ("boxed 7", None),
        (r"\boxed{a \boxed{b} c} }", "b"),
        (r"\boxed{a {\boxed{b} c}", "b"),
        (r"{\boxed{1}} {", "1"),
    ],
)
def test_boxed(completion: str, answer: str | None) -> None:
    assert extract(completion, "boxed") == answer


def test_boxes_that_never_close_take_one_look() -> None:
    """Where each box were looked at to the end of the text, this would take an hour."""
    assert extract(r"\boxed{" * 100_000, "boxed") is None


def test_the_other_ways() -> None:
    text = "<answer>a</answer> no,\n<ANSWER> b\nc </ANSWER>\nlast line  \n\n"
    assert extract(text, "answer-tag") == "b\nc"
    assert extract("<answer>open", "answer-tag") is None
    assert extract(text, "last-line") == "last line"
    assert extract(" \n", "last-line") is None
    assert extract(" a\nb ", "full") == "a\nb"
    assert extract("  ", "full") is None
    with pytest.raises(ValueError, match="middle"):
        extract("a", "middle")


@pytest.mark.parametrize("how", ["last-number", "last-line", "boxed", "answer-tag", "full"])
def test_what_is_written_is_extracted(how: str) -> None:
    assert extract(written_as("-42", how), how) == "-42"


def test_as_number() -> None:
    assert as_number("1,000.0") == as_number(1000)
    assert as_number(" 7 ") == 7
    for text in ("seven", "", None, "nan", "inf", "3 4"):
        assert as_number(text) is None


@pytest.mark.parametrize(
    ("task", "how"),
    [
        ("chain_sum", "last-number"),
        ("gsm_symbolic", "last-number"),
        ("decimal_arithmetic", "last-number"),
        ("caesar_cipher", "last-line"),
        ("countdown", "last-line"),
        ("mini_sudoku", "full"),
        ("graph_color", "full"),
    ],
)
def test_the_choice_follows_the_task_s_answers(task: str, how: str) -> None:
    chosen, reason = choose_extraction(open_prompts(DataConfig(name=f"reasoning-gym:{task}", size=20)))
    assert chosen == how
    assert reason


@pytest.mark.parametrize(
    ("data", "how"),
    [
        ({"system_prompt": "Give the result in <answer> tags."}, "answer-tag"),
        ({"prompt_suffix": r" Put it in \boxed{}."}, "boxed"),
    ],
)
def test_the_choice_follows_what_the_prompts_ask_for(data: dict[str, str], how: str) -> None:
    source = open_prompts(DataConfig(name="reasoning-gym:chain_sum", **data))
    assert choose_extraction(source)[0] == how
