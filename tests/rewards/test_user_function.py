"""Reward functions of many completions, in TRL's form: what they are given, and what they may return."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rlctl.data.prompt_records import row_from_record
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import Turn
from rlctl.errors import InputError
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rewards.reward_worker import RewardWorker, ScoreRequest
from rlctl.rewards.scoring_process import ScoringProcess, Work
from rlctl.rewards.user_function import UserBatchScorer, UserScorer, user_scorer
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import RewardTerm

ROWS = [
    PromptRow(0, "d.jsonl, line 1", "one?", "1", {"level": 3}),
    PromptRow(0, "d.jsonl, line 1", "one?", "1", {"level": 3}),
    PromptRow(1, "d.jsonl, line 2", "two?", "2", {"hint": "x"}),
]


def scorer(directory: Path, code: str) -> UserBatchScorer:
    (directory / "mine.py").write_text(code)
    found = user_scorer(f"{directory / 'mine.py'}:score")
    assert isinstance(found, UserBatchScorer)
    return found


def test_a_function_with_completions_gets_all_of_them_with_columns_by_name(tmp_path: Path) -> None:
    found = scorer(
        tmp_path,
        "def score(prompts, completions, answer, level, **columns):\n"
        "    assert prompts == ['one?', 'one?', 'two?'] and completions == ['a', 'bb', 'ccc']\n"
        "    assert answer == ['1', '1', '2'] and level == [3, 3, None] and columns == {'hint': [None, None, 'x']}\n"
        "    return [len(text) if n else None for text, n in zip(completions, level)]\n",
    )
    assert found.score_all(["a", "bb", "ccc"], ROWS) == [1, 2, None]


def test_chats_are_given_as_messages_and_arrays_are_lists(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    found = scorer(
        tmp_path,
        "import numpy\n"
        "def score(completions, *, prompts=None, unknown=7):\n"
        "    assert prompts == [[{'role': 'user', 'content': 'hi'}]] and unknown == 7\n"
        "    return numpy.array([len(completions[0][0]['content'])], dtype=numpy.float32)\n",
    )
    assert found.score_all(["abc"], [PromptRow(0, "row 0", chat, None)]) == [3]


def test_a_function_of_one_completion_stays_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completion, level=0, **row):\n    return level + len(completion)\n")
    found = user_scorer(f"{tmp_path / 'mine.py'}:score")
    assert isinstance(found, UserScorer)
    assert found("ab", ROWS[0]) == 5


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def score(completions): return [1.0]", ["returned a list of 1 for 3 completions", "list[float"]),
        ("def score(completions): return 1.0", ["returned 1.0 for 3 completions", "must return a list"]),
        ("def score(completions): return 'abc'", ["returned 'abc'"]),
        ("def score(completions): return [1, 'good', 1]", ["returned 'good' for d.jsonl, line 1", "finite number"]),
        ("def score(completions): return [1, 1, float('nan')]", ["returned nan for d.jsonl, line 2"]),
        ("def score(completions, solution): return []", ["needs solution, which 3 completions", "It can have level"]),
        ("def score(completions, completion_ids): return []", ["needs completion_ids, which rlctl does not give"]),
        ("def score(completions):\n    return completions[9]", ["raised IndexError", "3 completions", "line 2"]),
    ],
)  # fmt: skip
def test_wrong_functions_of_many_are_named(tmp_path: Path, code: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        scorer(tmp_path, code).score_all(["a", "b", "c"], ROWS)
    for word in ["mine.py:score", *words]:
        assert word in str(raised.value)


FUSSY = """
def one(completion):
    return float(completion)

def many(completions):
    return [float(text) for text in completions]
"""


@pytest.mark.parametrize("function", ["one", "many"])
def test_a_failure_names_row_and_completion_and_costs_that_completion_alone(tmp_path: Path, function: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FUSSY)
    plan = RewardPlan((RewardTerm(name=f"{file}:{function}"),), "full", None, None, None, 60.0)
    rows = [PromptRow(number, f"d.jsonl, line {number}", "q", "a") for number in range(4)]
    work = [Work(0, text, row) for text, row in zip(["1", "2", "three", "4"], rows, strict=True)]
    process = ScoringProcess(plan)
    dropped = process.score(work)
    process.plan = dataclasses.replace(plan, on_error="zero")
    zero = process.score(work)
    assert [score.value for score in dropped] == [1.0, 2.0, None, 4.0]
    assert [score.value for score in zero] == [1.0, 2.0, 0.0, 4.0]
    for told in (dropped[2].failure, zero[2].failure):
        assert told is not None
        for words in ("could not convert", "d.jsonl, line 2", "The completion was 'three'.", "mine.py, line"):
            assert words in told
    process.plan = dataclasses.replace(plan, on_error="stop")
    with pytest.raises(InputError, match=r"d.jsonl, line 2.*The completion was 'three'"):
        process.score(work)
    process.close()


def test_a_function_that_takes_turns_gets_all_of_an_episode(tmp_path: Path) -> None:
    code = "def score(completion, turns):\n    return sum(one['role'] == 'user' for one in turns)\n"
    (tmp_path / "mine.py").write_text(code)
    term = RewardTerm(name=f"{tmp_path / 'mine.py'}:score")
    plan = RewardPlan((term,), "full", None, None, None, timeout_s=20.0)
    episodes = [[Turn("user", "a", 1, None), Turn("assistant", "b", 1, 0.0), Turn("user", "c", 1, None)], []]
    with closing(RewardWorker(plan, lambda handle: handle)) as worker:  # type: ignore[arg-type,return-value]
        (found,) = worker.score([ScoreRequest(ROWS[0], ["b", "d"], episodes)])
    assert found.rewards == (2.0, 0.0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("numpy.bool_(True)", 1.0),
        ("numpy.array(0.25)", 0.25),
        ("decimal.Decimal('0.5')", 0.5),
        ("fractions.Fraction(1, 4)", 0.25),
        ("True", 1.0),
    ],
)
def test_numbers_of_other_libraries_are_rewards(tmp_path: Path, value: str, expected: float) -> None:
    file = tmp_path / "mine.py"
    imports = "import decimal, fractions, numpy\n"
    file.write_text(
        f"{imports}def one(completion): return {value}\ndef many(completions): return [{value}] * len(completions)\n"
    )
    one, many = (user_scorer(f"{file}:{name}") for name in ("one", "many"))
    assert one("a", ROWS[0]) == expected
    assert many.score_all(["a", "b"], ROWS[:2]) == [expected] * 2


@pytest.mark.parametrize("value", ["'1'", "1j", "None", "[1.0]", "decimal.Decimal('NaN')", "decimal.Decimal('1e400')"])
def test_what_is_no_finite_number_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import decimal\ndef one(completion): return {value}\n")
    with pytest.raises(InputError, match=r"returned .* for d\.jsonl, line 1.* finite number"):
        user_scorer(f"{file}:one")("a", ROWS[0])


ASYNC = """
import asyncio
running, most, loops = 0, 0, set()

async def one(completion):
    global running, most
    loops.add(id(asyncio.get_running_loop()))
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.05)
    running -= 1
    return float(completion) + 100 * most + 1000 * len(loops)

async def many(completions):
    await asyncio.sleep(0)
    return [float(text) for text in completions]
"""


def test_async_functions_are_awaited_and_those_of_one_completion_at_the_same_time(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ASYNC)
    terms = tuple(RewardTerm(name=f"{file}:{name}") for name in ("one", "many"))
    plan = RewardPlan(terms, "full", None, None, None, 60.0)
    with closing(ScoringProcess(plan)) as process:
        for _ in range(2):  # in one event loop
            scores = process.score([Work(n, text, ROWS[0]) for n in range(2) for text in ("1", "2", "x")])
            assert [score.value for score in scores] == [1301.0, 1302.0, None, 1.0, 2.0, None]
    assert "could not convert" in str(scores[2].failure)


def test_a_list_of_the_wrong_length_is_no_completion_s_fault(tmp_path: Path) -> None:
    """Called with one completion after the other, the function would seem to be right."""
    file = tmp_path / "mine.py"
    file.write_text("def score(completions): return [1.0]\n")
    plan = RewardPlan((RewardTerm(name=f"{file}:score"),), "full", None, None, None, 60.0)
    with closing(ScoringProcess(plan)) as process:
        for score in process.score([Work(0, text, ROWS[0]) for text in "abc"]):
            assert score.value is None
            assert "returned a list of 1 for 3" in str(score.failure)


def test_an_async_call_that_hangs_costs_its_own_completion(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import asyncio\nasync def score(completion):\n    await asyncio.sleep(float(completion))\n    return 1\n"
    )
    plan = RewardPlan((RewardTerm(name=f"{file}:score"),), "full", None, None, None, 4.0)
    with closing(ScoringProcess(plan)) as process:
        scores = process.score([Work(0, text, ROWS[0]) for text in ("0", "60", "0")])
    assert [score.value for score in scores] == [1.0, None, 1.0]
    assert "took longer than 3 s to score d.jsonl, line 1" in str(scores[1].failure)


def test_compute_score_is_called_by_the_names_of_its_arguments(tmp_path: Path) -> None:
    """The form of verl's `default_compute_score`: a number, or a mapping whose `score` counts."""
    file = tmp_path / "mine.py"
    file.write_text("""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] == 3
    return float(solution_str == ground_truth)
def detailed(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {"score": 0.5 * (solution_str == ground_truth), "acc": True}
""")
    record = {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2 + 3?"}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": 3, "split": "train"},
    }  # fmt: skip
    row = row_from_record(record, 0, "train.parquet, row 1", DataConfig())
    assert row.answer == "5"
    for name, right in (("compute_score", 1.0), ("detailed", 0.5)):
        scorer = user_scorer(f"{file}:{name}")
        assert isinstance(scorer, UserScorer)
        assert [scorer(text, row) for text in ("5", "6")] == [right, 0.0]
    named = row_from_record(record | {"answer": "x"}, 0, "r", DataConfig(answer_field="reward_model.ground_truth"))
    assert named.answer == "5"
    with pytest.raises(InputError, match=r"no field 'reward_modle\.ground_truth'"):
        row_from_record(record, 0, "r", DataConfig(answer_field="reward_modle.ground_truth"))


@pytest.mark.parametrize(
    "code",
    ["import no_such_package.part\ndef score(completion): ...", "def score(completion):\n    import no_such_package"],
)
def test_a_missing_package_is_named_with_how_to_install_it(code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(InputError, match="No module named 'no_such_package'") as raised:
        user_scorer(f"{tmp_path / 'mine.py'}:score")("text", ROWS[0])  # type: ignore[operator]
    assert f"{sys.executable} -m pip install no_such_package." in (raised.value.hint or "")
