"""The rewards of NeMo-RL's environments of images, each against its published formula, written out here."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.prompt_rows import PromptRow
from rlctl.data.prompts import open_prompts
from rlctl.errors import InputError
from rlctl.rewards.prepare_rewards import prepare_rewards
from rlctl.rewards.tag_scorers import TAG_SCORERS
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import RewardConfig, RewardTerm


def score(name: str, completion: str, answer: object, **params: Any) -> float:
    return TAG_SCORERS[name](**params)(completion, PromptRow(0, "d.jsonl, line 1", "q", answer))


@pytest.mark.parametrize(
    ("completion", "thought", "answered"),
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        ("<answer>\n</answer> first, <think>\n\n</think> then", 1, 1),
        ("<think>a</think> b", 1, 0),
        ("<answer>b</answer>", 0, 1),
        ("</think><think> </answer><answer>", 0, 0),
        ("<THINK>a</THINK>", 0, 0),
        ("", 0, 0),
    ],
)
def test_format(completion: str, thought: int, answered: int) -> None:
    assert score("format", completion, "any") == 0.25 * thought + 0.75 * answered


def test_tags_have_other_names() -> None:
    renamed = "<why>a</why><out>b</out>"
    assert score("format", renamed, "", think_tag="why", answer_tag="out") == 1
    assert score("exact_alnum", renamed, "B", answer_tag="out") == 1
    assert score("math_expr", "<out>1/2</out>", "0.5", tag="out") == 1
    assert score("bbox_giou", "<out>0,0,1,1</out>", "0,0,1,1", answer_tag="out") == 1


@pytest.mark.parametrize(
    ("inside", "answer", "same"),
    [
        ("Yes.", "yes", 1), (" 4 ", "4", 1), ("\n3\n", 3, 1), ("-1.5", "15", 1), ("no", "yes", 0), ("", "yes", 0),
        ("Ä 1", "ä1", 1), ("2</answer><answer>3", "2answeranswer3", 1), ("2</answer><answer>3", "3", 0),
    ],
)  # fmt: skip
def test_exact_alnum_drops_all_but_letters_and_digits(inside: str, answer: object, same: int) -> None:
    """The tags are the first opening and the last closing one."""
    assert score("exact_alnum", f"so <answer>{inside}</answer>", answer) == same
    assert score("exact_alnum", inside, answer) == 0


@pytest.mark.parametrize(
    ("inside", "answer", "same"),
    [
        ("1/2", "0.5", 1), (r"\frac{2}{4}", r"\frac{1}{2}", 1), (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
        ("$x^2-1$", "(x-1)(x+1)", 1), ("41", "42", 0), ("", "42", 0), (r"\frac{", "42", 0), ("{{{", "}}}", 0),
    ],
)  # fmt: skip
def test_math_expr_compares_values(inside: str, answer: str, same: int) -> None:
    assert score("math_expr", f"<answer>{inside}</answer>", answer) == same
    assert score("math_expr", rf"\boxed{{{inside}}}", answer) == 0


def overlap(ours: list[int], theirs: list[int]) -> tuple[float, float]:
    """IoU and generalized IoU (arXiv 1902.09630) of boxes with whole corners, by counting the unit squares."""

    def squares(box: list[int]) -> set[tuple[int, int]]:
        return set(product(range(box[0], box[2]), range(box[1], box[3])))

    a, b = squares(ours), squares(theirs)
    around = [min(ours[0], theirs[0]), min(ours[1], theirs[1]), max(ours[2], theirs[2]), max(ours[3], theirs[3])]
    iou = len(a & b) / len(a | b)
    return iou, iou - len(squares(around) - a - b) / len(squares(around))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([0, 0, 4, 4], [0, 0, 4, 4]), ([0, 0, 4, 4], [0, 0, 4, 3]), ([0, 0, 4, 4], [2, 2, 6, 6]),
        ([0, 0, 2, 2], [5, 7, 9, 9]), ([1, 1, 3, 3], [0, 0, 9, 9]), ([0, 0, 2, 2], [2, 0, 4, 2]),
    ],
)  # fmt: skip
def test_bbox_giou_is_the_generalized_one_below_its_threshold(ours: list[int], theirs: list[int]) -> None:
    iou, giou = overlap(ours, theirs)
    completion = f"<think>there</think><answer>{ours}</answer>"
    for answer in (theirs, str(theirs), ",".join(map(str, theirs))):
        assert score("bbox_giou", completion, answer) == pytest.approx(giou, abs=1e-12)
        expected = iou if iou >= 0.5 else giou
        assert score("bbox_giou", completion, answer, giou_penalty_thres=0.5) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("inside", ["1, 2, 3", "1, 2, 3, 4, 5", "a, b, c, d", "", "nan, 0, 1, 1", "0 0 1 1", "[[]]"])
def test_bbox_giou_without_four_numbers_is_nothing(inside: str) -> None:
    assert score("bbox_giou", f"<answer>{inside}</answer>", "0,0,1,1") == 0
    assert score("bbox_giou", "[0, 0, 1, 1]", "0,0,1,1") == 0


@pytest.mark.parametrize(
    ("completion", "right", "reasoned"),
    [
        (r"<think>t</think> so \boxed{1/2}", 1, 1),
        (r"t</think>\boxed{7}, no: \boxed{0.5}", 1, 1),
        (r"\boxed{\frac{1}{2}} </think>", 1, 0),
        (r"</think> \boxed{3}", 0, 1),
        (r"</think> \boxed{0.5} or \boxed{0.5", 0, 1),
        ("</think> 0.5", 0, 0),
        ("<answer>0.5</answer>", 0, 0),
    ],
)
def test_geo3k_shares_the_reward_between_answer_and_form(completion: str, right: int, reasoned: int) -> None:
    assert score("geo3k", completion, "0.5") == pytest.approx(0.9 * right + 0.1 * reasoned)
    expected = 0.6 * right + 0.4 * reasoned
    assert score("geo3k", completion, "0.5", format_score=0.4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "answer", "half", "right"),
    [
        ("exact_alnum", "Yes", "<answer>no</answer>", "<answer>yes!</answer>"),
        ("math_expr", "0.5", "<answer>2</answer>", "<answer>1/2</answer>"),
        ("bbox_giou", [0, 0, 10, 10], "<answer>0,0,10,5</answer>", "<answer>0,0,10,6</answer>"),
        ("geo3k", "0.5", r"</think>\boxed{2}", r"\boxed{1/2}"),
    ],
)
def test_a_run_has_them_as_rewards_that_say_what_is_right(
    name: str, answer: Any, half: str, right: str, tmp_path: Path
) -> None:
    """bbox_giou is right above 0.5, geo3k where the box is. The reference answers of rows are right in their form."""
    import json

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q", "answer": answer}) + "\n")
    source = open_prompts(DataConfig(name=str(rows)))
    terms = (RewardTerm(name="format", weight=0.2), RewardTerm(name=name, weight=0.8))
    plan = prepare_rewards(RewardConfig(terms=terms), source)
    assert plan.accuracy_by == name
    assert not [note for note in plan.notes if "wrong" in note]
    _, scorer = plan.build()
    assert [plan.right(scorer(text, source[0])) for text in (half, right)] == [False, True]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("term", "said"),
    [
        (RewardTerm(name="bbox_giou", params={"threshold": 1}), "no argument 'threshold'"),
        (RewardTerm(name="bbox_giou", params={"giou_penalty_thres": "x"}), "giou_penalty_thres is 'x'"),
        (RewardTerm(name="exact-match", params={"tag": "x"}), "no argument 'tag'"),
    ],
)
def test_a_wrong_argument_is_named(term: RewardTerm, said: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "answer": "1,2,3,4"}\n')
    with pytest.raises(InputError, match=said):
        prepare_rewards(RewardConfig(terms=(term,)), open_prompts(DataConfig(name=str(rows))))
