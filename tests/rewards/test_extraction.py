"""Answers taken out of completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.data.prompts import open_prompts
from rlctl.rewards.extraction import as_number, choose_extraction, extract, written_as
from rlctl.settings.data import DataConfig


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
        ("The answer is .5", "0.5"),
        ("x=-.5", "-0.5"),
        ("5-.3", "0.3"),
        ("so...5", "5"),
        ("version 1.2.3", "3"),
        ("There are $10{,}000$ beads.", "10000"),
        (r"10\,000\,000", "10000000"),
        (r"58,\!500", "58500"),
        ("1\u202f000", "1000"),
        ("10'000 or 10_000", "10000"),
        ("1,00,000", "100000"),
        (r"in 2024\,100", "100"),
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
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{}", ""),
        ("boxed 7", None),
        (r"\boxed{a \boxed{b} c} }", "b"),
        (r"\boxed{a {\boxed{b} c}", "b"),
        (r"{\boxed{1}} {", "1"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"so $\boxed 5$.", "5"),
        (r"\(\boxed 42\)", "42"),
        (r"\boxed\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{7}, no: \boxed 8.", "8"),
        (r"\boxed 8, no: \boxed{7}", "7"),
        (r"in \boxed notation", None),
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
    assert as_number("1,00,000") == as_number("$100{,}000$") == as_number(r"100\,000") == 100_000
    assert as_number(".5") == as_number("0.50")
    for text in ("seven", "", None, "nan", "inf", "3 4", "2,3", "1,2345", "1_0", "4210_5", "."):
        assert as_number(text) is None


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>6</think>\n\n7", "7"),
        ("<think>6, no: 7", None),
        ("6</think>7", "7"),
        ("7 <think>or 8?", "7"),
        ("[THINK]6[/THINK]7", "7"),
        ("<|channel|>analysis<|message|>6<|end|><|start|>assistant<|channel|>final<|message|>7", "7"),
        ("<|channel|>analysis<|message|>6", None),
    ],
)
def test_thoughts_hold_no_answer(completion: str, answer: str | None) -> None:
    for how in ("last-number", "last-line", "full"):
        assert extract(completion, how) == answer


def test_a_thought_may_begin_in_the_prompt_and_end_with_the_tags_of_an_answer() -> None:
    assert extract("6, no: 7", "last-number", opened=True) is None
    assert extract("6</think>7", "last-number", opened=True) == "7"
    assert extract(written_as("7", "boxed", opened=True), "boxed", opened=True) == "7"
    assert extract("<think>6\n<answer>7</answer>", "answer-tag") == "7"
    assert extract("<think><answer>6</answer></think>", "answer-tag") is None


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


@pytest.mark.parametrize(
    ("answers", "how", "reason"),
    [
        (["N/A", *map(str, range(9))], "last-number", "9 of the 10 reference answers are numbers"),
        (["blue", "a\nb", "red"], "last-line", "2 of the 3 reference answers are single lines"),
        (["a\nb", "c\nd", "red"], "full", "2 of the 3 reference answers have several lines"),
        (["2,3", "4,5"], "last-line", "the reference answers are single lines"),
    ],
)
def test_one_odd_row_does_not_change_how_all_are_compared(
    tmp_path: Path, answers: list[str], how: str, reason: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "q", "answer": answer}) for answer in answers))
    assert choose_extraction(open_prompts(DataConfig(name=str(file)))) == (how, reason)
