"""Each scorer by itself, on real tasks and answers."""

from __future__ import annotations

import json

import pytest

from rlctl.data.prompt_rows import PromptDataset, PromptRow
from rlctl.data.prompts import open_gym
from rlctl.errors import InputError, MachineError
from rlctl.rewards.extraction import choose_extraction, vote
from rlctl.rewards.scorers import DapoMath, ExactMatch, IfEval, MathVerify, Tagged, TaskScorer
from rlctl.rewards.tag_scorers import TAG_SCORERS
from rlctl.settings.data import DataConfig


def gym(task: str, **params: int) -> PromptDataset:
    return open_gym(f"reasoning-gym:{task}", DataConfig(params=params, size=20), seed=3)


def task_scorer(source: PromptDataset) -> TaskScorer:
    assert source.task is not None
    return TaskScorer(source.task, choose_extraction(source)[0])


def row(answer: object) -> PromptRow:
    return PromptRow(0, "d.jsonl, line 1", "q", answer)


@pytest.mark.parametrize(
    "task",
    [
        "chain_sum",
        "basic_arithmetic",
        "gcd",
        "gsm_symbolic",
        "decimal_arithmetic",
        "countdown",
        "caesar_cipher",
        "mini_sudoku",
        "leg_counting",
        "number_format",
    ],
)
def test_a_task_finds_its_own_answers_right(task: str) -> None:
    source = gym(task)
    scorer = task_scorer(source)
    for index in range(5):
        assert scorer(str(source[index].answer), source[index]) == 1
        assert scorer("I do not know", source[index]) < 0.1
        assert scorer("", source[index]) == 0


def test_a_number_among_words_is_found() -> None:
    source = gym("chain_sum", max_terms=2, max_digits=1)
    scorer, answer = task_scorer(source), source[0].answer
    assert scorer(f"First 12, so it is {answer}.", source[0]) == 1
    assert scorer(f"{answer}, or 100?", source[0]) == 0


def test_part_credit_for_containing_the_reference_is_kept_for_texts() -> None:
    import reasoning_gym

    source = gym("caesar_cipher")
    longer = source[0].answer + " AND MORE"
    theirs = reasoning_gym.create_dataset("caesar_cipher", seed=3, size=20)
    expected = theirs.score_answer(longer, theirs[0])
    assert 0 < expected < 1
    assert task_scorer(source)(longer, source[0]) == expected


@pytest.mark.parametrize("task", ["chain_sum", "gcd"])
def test_part_credit_for_containing_the_reference_is_dropped_for_numbers(task: str) -> None:
    source = gym(task)
    assert task_scorer(source)(f"{source[0].answer}7", source[0]) == 0


def test_other_part_credit_for_numbers_is_kept() -> None:
    """rectangle_count gives part of the credit to a number that is near."""
    source = gym("rectangle_count")
    assert 0 < task_scorer(source)(str(int(source[0].answer) + 1), source[0]) < 1


def test_a_task_without_reference_answers_scores_by_its_own_rules() -> None:
    source = gym("graph_color", num_colors=3)
    example = json.dumps(source[0].fields["metadata"]["possible_answer"])
    assert task_scorer(source)(example, source[0]) == 1
    assert task_scorer(source)("{}", source[0]) < 1


@pytest.mark.parametrize("task", ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"])
def test_a_task_without_answers_gives_nothing_for_none(task: str) -> None:
    """reasoning-gym 0.1.25: the answers are None, and some of the scorers pay for an empty text."""
    source = gym(task)
    assert [source[index].answer for index in range(3)] == [None] * 3
    scorer = task_scorer(source)
    assert [scorer(text, source[0]) for text in ("", "<think>\nI do not know", "  \n")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("reference", "answer", "score"),
    [("0.5", r"50\%", 1), (r"50\%", "0.5", 1), ("50", r"50\%", 1), (r"50\%", "50", 1), (r"50\%", "5", 0)],
)
def test_a_percentage_is_read_with_the_antlr_of_omegaconf(reference: str, answer: str, score: float) -> None:
    """The values of math-verify 0.9.0 with antlr 4.13.2; with antlr 4.9.3 it raises for each percentage."""
    assert MathVerify(None)(rf"\boxed{{{answer}}}", row(reference)) == score


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("Paris", "I think:\n  Paris ", 1),
        ("New York", "New  York", 1),
        ("Paris", "paris", 0),
        ("Paris", "Paris, France", 0),
        ("42.0", "42", 1),
        (42, "042.00", 1),
        ("1,000", "1000", 1),
        ("42", "43", 0),
        ("42", "", 0),
        ("2,3", "23", 0),
        ("23", "2,3", 0),
        ("2,3", "2,3", 1),
        ("10{,}000", "10000", 1),
        ("10000", r"$10\,000$", 1),
        ("4210_5", "42105", 0),
    ],
)
def test_exact_match(answer: object, completion: str, score: float) -> None:
    assert ExactMatch("last-line")(completion, row(answer)) == score


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        (r"\frac{1}{2}", r"So \boxed{0.5}.", 1),
        (r"\frac{1}{2}", "The answer is $1/2$.", 1),
        (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}", 1),
        (r"\boxed{7}", "It is 7", 1),
        (12, "= 12", 1),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{3}}", 0),
        (r"\frac{1}{2}", r"\boxed{\frac{", 0),
        (r"\frac{1}{2}", "", 0),
        (r"\{1, 2\}", r"$\{2, 1\}$", 1),
        (r"\{1, 2\}", r"$\{2\}$", 0),
        (r"x^2 + 2x + 1", r"$(x + 1)^2$", 1),
        # the forms in which models write the answers of gsm8k, MATH and AIME
        ("1234", "The answer is 1,234.", 1),
        ("1,234", r"\boxed{1234}", 1),
        ("1000000", r"\boxed{1{,}000{,}000}", 1),
        ("1000000", r"\boxed{1\,000\,000}", 1),
        ("1000000", "1\u202f000\u202f000", 1),
        ("58500", r"\boxed{58,\!500}", 1),
        ("-3", "The result is −3.", 1),  # noqa: RUF001 - the minus of typography
        ("-3", r"\boxed{−3}", 1),  # noqa: RUF001
        ("-6", r"\boxed{6}", 0),
        ("70", r"\boxed{070}", 1),
        ("18", "**Answer: 18 dollars**", 1),
        ("18", r"\boxed{\$18}", 1),
        (r"\$18", r"\boxed{18}", 1),
        ("18", "It is $18.00.", 1),
        ("18", "#### 18", 1),
        ("5", r"\boxed{5\text{ cm}}", 1),
        ("10", r"\boxed{10\%}", 1),
        (r"\Gamma(5)", r"\boxed{\Gamma(5)}", 1),
        ("90", r"\boxed{90^\circ}", 1),
        ("2.5", r"\boxed{\frac{5}{2}}", 1),
        ("2.5", r"\boxed{2\frac{1}{2}}", 1),
        ("3", r"\boxed{x = 3}", 1),
        ("3", r"\[ \boxed{3}. \]", 1),
        ("9", r"\boxed{9}, since 3^2 = 9 and 4^2 = 16", 1),
        ("42", "First 6 x 7. <answer>42</answer>", 1),
        ("42", "<answer>43</answer> and not 42", 0),
        (r"\text{(C)}", r"\boxed{C}", 1),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", 1),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", 1),
        (r"\left[0, 3\right)", r"\boxed{[0,3)}", 1),
        ("(0, 3)", r"\boxed{[0,3)}", 0),
        (r"4210_{5}", r"\boxed{4210_5}", 1),
        ("3", "3.1", 0),
        ("0.33", r"\frac{1}{3}", 0),
        ("7", "7, or perhaps 8", 0),
        # the last box decides, and what is thought is no answer
        ("7", "<think>\n\\boxed{6}? No.\n</think>\n\nThe answer is \\boxed{7}.", 1),
        ("7", "<think>\n3 + 4 = \\boxed{7}. But wait, maybe", 0),
        ("7", "<think>7</think> I do not know.", 0),
        ("7", r"\boxed{6}, \boxed{7}", 1),
        ("6", r"\boxed{6}, \boxed{7}", 0),
        ("5", r"I write \boxed{}. It is 5.", 1),
        ("5", r"\boxed{5", 0),
        ("5", r"It is $\boxed 5$.", 1),
        ("7", r"\fbox{7}", 1),
        ("0.5", r"\boxed{.5}", 1),
        ("5", "The answer is .5", 0),
        ("23", r"\boxed{2,3}", 0),
        ("2,3", r"\boxed{23}", 0),
        ("100000", r"\boxed{1e5}", 1),
    ],
)
def test_math_verify_compares_expressions_not_texts(answer: object, completion: str, score: float) -> None:
    assert MathVerify(None)(completion, row(answer)) == score


@pytest.mark.parametrize(
    ("reference", "answer", "score"),
    [
        ("1.5", "1 1/2", 1),
        ("1", "1 1/2", 0),
        (r"\frac{11}{2}", "1 1/2", 0),
        ("11/2", "1 1/2", 0),
        ("-1.5", "-1 1/2", 1),
        ("1.5", r"1\ 1/2", 1),
        ("1.5", r"1\,1/2", 1),
        ("1.5", r"1\frac{1}{2}", 1),
        ("1 1/2", "3/2", 1),
        ("2 3/4", r"\frac{11}{4}", 1),
        ("12", "3(4)", 1),
        ("7", "3(4)", 0),
        ("12", "(3)(4)", 1),
        ("12", r"3\left(4\right)", 1),
        ("12", "3 (4)", 1),
        ("60", "3(4)(5)", 1),
        ("12", "(3)4", 1),
        ("1", "2(1/2)", 1),
        ("1", r"2(\frac{1}{2})", 1),
        ("17", "5 + 3(4)", 1),
        ("3", r"\log_2(8)", 1),
        ("5", "2 3", 0),
        ("2, 3", "2 3", 1),
        ("10000", "10 000", 1),
        ("0.0000003", "0.0000004", 0),
        ("0.0000004", r"4 \times 10^{-7}", 1),
        ("3e-7", "4e-7", 0),
        ("0", "0.0000004", 0),
        (r"\frac{1}{3000000}", "0.000000333333", 1),
        ("(0.0000003, 1)", "(0.0000004, 1)", 0),
        ("x = 0.0000003", "x = 0.0000004", 0),
        ("1/3", "0.333333", 1),
        ("1/81", "0.012346", 1),
        ("2.5", "2.5000001", 1),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0),
        (r"\frac{1}{2004!}", r"\frac{1}{2004!}", 1),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", 0),
        (r"\frac{2}{2^{100}}", r"\frac{1}{2^{99}}", 1),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}", 0),
        (r"10\%", "0.1", 1),
        (r"0.05\%", "0.0005", 1),
    ],
)
def test_numbers_have_their_values_in_arithmetic(reference: str, answer: str, score: float) -> None:
    """The expected values are those of the expressions in arithmetic, and 4 digits of numbers below 0.001."""
    for form in (r"\boxed{%s}", "<answer>%s</answer>"):
        assert MathVerify(None)(form % answer, row(reference)) == score
    assert TAG_SCORERS["math_expr"]()(f"<answer>{answer}</answer>", row(reference)) == score


@pytest.mark.parametrize(
    "form", ["**%s**", "__%s__", "`%s`", "*Answer:* ***%s***", "Answer: _%s_.", "2*3*4 + 49 = *%s*"]
)
def test_marks_of_markdown_around_an_answer_do_not_matter(form: str) -> None:
    assert MathVerify(None)(form % "73", row("73")) == 1
    assert MathVerify(None)(form % "72", row("73")) == 0


@pytest.mark.parametrize("end", [r"So \boxed{8", r"\boxed{", r"\boxed{\frac{1}{2}", r"\fbox{8"])
def test_a_last_box_that_is_cut_holds_no_answer(end: str) -> None:
    """As `last_boxed_only_string` of the MATH data set."""
    assert MathVerify(None)(rf"First \boxed{{7}}. {end}", row("7")) == 0
    assert MathVerify("boxed")(rf"First \boxed{{7}}. {end}", row("7")) == 0


def test_a_mixed_number_in_a_text_has_its_value() -> None:
    for form in ("The answer is $%s$.", "It takes %s"):
        assert MathVerify(None)(form % "1 1/2", row("1.5")) == 1
        assert MathVerify(None)(form % "3(4)", row("12")) == 1


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (r"11.\overline{36}", "11"),
        (r"0.\overline{3}", "0"),
        (r"2^{\mathrm{10}}", "2"),
        (r"7 \operatorname{mod} 3", "3"),
        (r"11.\dot{3}", "11"),
        (r"3 \bmod 7", "7"),
    ],
)
def test_a_number_in_an_answer_that_latex_cannot_read_is_not_the_answer(answer: str, part: str) -> None:
    """NeMo-RL reads references by math-verify's LaTeX target alone, for which none of these is its number."""
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    assert not verify(parse(rf"\boxed{{{answer}}}", extraction_config=[LatexExtractionConfig()]), parse(part))
    for form in (r"\boxed{%s}", "The answer is $%s$.", "<answer>%s</answer>"):
        assert MathVerify(None)(form % part, row(answer)) == 0
    for form in (r"\boxed{%s}", "<answer>%s</answer>"):
        assert MathVerify(None)(form % answer, row(answer)) == 1
        assert MathVerify(None)(form % answer, row(part)) == 0


def test_math_verify_in_prompts_that_begin_a_thought() -> None:
    scorer = MathVerify(None, opened=True)
    assert scorer(r"3 + 4 = \boxed{7}. But wait", row("7")) == 0
    assert scorer(r"\boxed{6}? No.</think>\boxed{7}", row("7")) == 1


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("12", "So the sum is 12.\nAnswer: 12", 1),
        ("12", "The answer is 12.", 0),
        ("12", "Answer: 11\nNo. answer : $12$ units", 1),
        ("12", "Answer: x = 12", 1),
        ("1000", "Answer: 1,000 dollars", 1),
        (r"\frac{1}{2}", r"Answer: $\frac12$", 1),
        (r"\frac{1}{2}", "Answer: 1/2", 0),
        (r"\sqrt{3}", r"Answer: \boxed{\sqrt3}", 1),
        ("45", r"Answer: 45^\circ", 1),
        ("4", "Answer: 4" + " and so on" * 40, 0),
        ("4", "." * 400 + "Answer: \\text{4}", 1),
    ],
)
def test_dapo_compares_texts_that_are_written_alike(answer: str, completion: str, score: float) -> None:
    assert DapoMath()(completion, row(answer)) == score


@pytest.mark.parametrize(
    ("completion", "scores"),
    [
        ("<think>2 + 3</think>\n<answer>5</answer>", (1, 1, 1)),
        ("<think>a\nb</think>\n<answer> 5 </answer>\n", (1, 1, 1)),
        ("<think></think>\n<answer>6</answer>", (0, 1, 1)),
        ("<think>2 + 3</think>\n<answer>five</answer>", (0, 0, 1)),
        ("<think>2 + 3</think> <answer>5</answer>", (1, 1, 0)),
        ("So <think>2</think>\n<answer>5</answer>", (1, 1, 0)),
        ("<think>2</think>\n<answer>5</answer>.", (1, 1, 0)),
        ("<think>no <answer>4</answer></think>\n<answer>5</answer>", (1, 1, 0)),
        ("5", (1, 1, 0)),
        ("<answer>5.0</answer>", (0, 0, 0)),
        ("The answer is 5", (0, 0, 0)),
    ],
)
def test_the_three_rewards_of_tagged_answers(completion: str, scores: tuple[float, ...]) -> None:
    """Those of NeMo-RL's math_multi_reward: the text behind the last tag, up to its end or that of the completion."""
    assert tuple(Tagged(what)(completion, row("5")) for what in ("answer", "integer", "format")) == scores


def test_math_verify_keeps_to_the_extraction_that_is_asked_for() -> None:
    scorer = MathVerify("answer-tag")
    assert scorer(r"<answer>\frac{2}{4}</answer> or \boxed{3}", row("1/2")) == 1
    assert scorer(r"\boxed{1/2}", row("1/2")) == 0


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("B", "B"), ("**(B)**", "B"), ("Answer: B.", "B"), ("ANSWER: $B$", "B"), ("**Answer:** B", "B"),
        ("**Answer: B) 12 m/s**", "B"), ("Answer: 'B'", "B"), ("B) 12", "B"), ("B. The cat", "B"), (r"\boxed{B}", "B"),
        (r"$\boxed{\text{(B)}}$", "B"), (r"\boxed{B. 12}", "B"), ("<answer>(B) the cat</answer>", "B"),
        ("Final Answer:\n\nB", "B"), ("The answer is (B).", "B"), ("The correct answer is **B**.", "B"),
        ("The answer is option B", "B"), ("So the correct choice is\n(B)", "B"), ("I choose B", "B"),
        (r"The answer is $\mathbf{B}$", "B"), ("(B), because A is wrong", "B"), ("It is a B", "B"),
        ("The answer is B, not C.", "B"), ("Correct answer: B\n\nExplanation: option C is wrong.", "B"),
        ("I think A is wrong. The answer is (B), since I've checked (C).", "B"), ("Answer: A, no. Answer: B", "B"),
        ("The answer is A because it is green", "A"), ("My answer: (I)", "I"), ("The answer is I.", "I"),
        ("Option J is right", "J"), ("The answer is: A person walks", None), ("Answer: I don't know", None),
        ("I do not know", None), ("The answer is Alice", None), ("b", None), ("The answer is 5", None), ("", None),
    ],
)  # fmt: skip
def test_the_letter_of_an_option_is_found(completion: str, letter: str | None) -> None:
    for option in "ABIJ":
        assert ExactMatch("choice")(completion, row(option)) == (option == letter)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (r"\boxed{1{,}000}", r"\boxed{1000.0}", True),
        (r"\boxed{\dfrac{1}{2}}", r"\boxed{ \frac{1}{2} }", True),
        (r"\boxed{−3}", r"\boxed{-3}", True),  # noqa: RUF001
        (r"\boxed{3}", r"\boxed{-3}", False),
        (r"\boxed{1e9999999}", r"\boxed{10e9999998}", True),  # beyond what Decimal computes with by default
        (r"\boxed{1e9999999}", r"\boxed{1e9999998}", False),
        (r"\boxed{-0.0}", r"\boxed{0}", True),
    ],
)
def test_votes_are_counted_by_value(one: str, other: str, alike: bool) -> None:
    assert (vote(one, "boxed") == vote(other, "boxed")) == alike


@pytest.fixture
def if_eval(monkeypatch: pytest.MonkeyPatch) -> IfEval:
    pytest.importorskip("if_verifiable", reason="needs the ifeval extra")
    import nltk.data

    monkeypatch.setattr(nltk.data, "find", lambda *_: None)  # what is judged here counts no sentences
    return IfEval()


@pytest.mark.parametrize(
    ("instructions", "completion", "score"),
    [
        ([("punctuation:no_comma", {})], "Without any.", 1),
        ([("punctuation:no_comma", {})], "With one, here.", 0),
        ([("length_constraints:number_words", {"relation": "at least", "num_words": 4})], "One two three four.", 1),
        ([("length_constraints:number_words", {"relation": "at least", "num_words": 5})], "One two three four.", 0),
        ([("detectable_format:json_format", {})], '```json\n{"a": 1}\n```', 1),
        ([("detectable_format:number_bullet_lists", {"num_bullets": 2})], "* a\n* b", 1),
        ([("startend:quotation", {})], '"quoted"', 1),
        ([("keywords:existence", {"keywords": ["sun", "moon"]})], "The Sun and the moon.", 1),
        ([("keywords:forbidden_words", {"forbidden_words": ["sun"]})], "The sun.", 0),
        ([("punctuation:no_comma", {}), ("startend:quotation", {})], '"one, two"', 0.5),
        ([("punctuation:no_comma", {})], "", 0),
    ],
)
def test_instructions_are_followed_or_not(
    if_eval: IfEval, instructions: list[tuple[str, dict]], completion: str, score: float
) -> None:
    unset = {"num_words": None, "keywords": None}  # the hub's rows have every argument of every instruction
    names, arguments = [name for name, _ in instructions], [unset | given for _, given in instructions]
    fields = {"instruction_id_list": names, "kwargs": arguments}
    assert if_eval(completion, PromptRow(0, "row 0", "Write.", None, fields)) == score


def test_an_instruction_that_nobody_knows_is_named(if_eval: IfEval) -> None:
    fields = {"instruction_id_list": ["length_constraints:no_such"], "kwargs": [{}]}
    with pytest.raises(InputError, match="no instruction 'length_constraints:no_such'"):
        if_eval("x", PromptRow(0, "row 0", "Write.", None, fields))


def test_what_ifeval_lacks_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "if_verifiable.common", None)
    with pytest.raises(MachineError, match="needs a package that is not installed") as caught:
        IfEval()
    assert "ifeval extra" in (caught.value.hint or "")
