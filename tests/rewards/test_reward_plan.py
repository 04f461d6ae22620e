"""Rewards end to end: what is configured is checked, tried and scored in the scoring process."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlctl.data.prompt_rows import PromptDataset
from rlctl.data.prompts import open_prompts
from rlctl.errors import InputError, WaitTimeoutError, WorkerError
from rlctl.processes.child import MAIN
from rlctl.rewards import scoring_process
from rlctl.rewards.extraction import Extraction
from rlctl.rewards.prepare_rewards import mixed_rewards, prepare_rewards, require_known, tried_again
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rewards.reward_worker import GroupScores, RewardWorker, ScoreRequest, weighted_sum
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import RewardConfig, RewardTerm


def gym(task: str, **params: int) -> PromptDataset:
    return open_prompts(DataConfig(name=f"reasoning-gym:{task}", params=params, size=20), seed=3)


def jsonl(directory: Path, *records: dict) -> PromptDataset:
    path = directory / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return open_prompts(DataConfig(name=str(path)))


def reward(*names: str, extract: str = "auto", timeout_s: float = 60.0) -> RewardConfig:
    return RewardConfig(terms=tuple(RewardTerm(name=name) for name in names), extract=extract, timeout_s=timeout_s)


def score(plan: RewardPlan, source: PromptDataset, *completions: str, index: int = 0) -> GroupScores:
    """Scores `completions` as one group of row `index`."""
    worker = RewardWorker(plan, fetch=lambda handle: {"handle": list(completions)}[handle])
    try:
        (scores,) = worker.score([ScoreRequest(source[index], "handle")])
    finally:
        worker.close()
    return scores


def user_file(directory: Path, code: str, name: str = "mine.py") -> str:
    (directory / name).write_text(code)
    return f"{directory / name}:score"


# scoring


def test_chain_sum_is_right_when_the_last_number_is() -> None:
    source = gym("chain_sum", max_terms=2, max_digits=1)
    answer = source[0].answer
    plan = prepare_rewards(RewardConfig(), source)
    scores = score(plan, source, f"It is {answer}.", f"{answer} is 100", f"{answer}5", "", "no idea")
    assert scores.rewards == (1, 0, 0, 0, 0)
    assert scores.accuracies == scores.rewards
    assert plan.describe() == [
        "reward: task",
        "answer: the last number of the completion (the reference answers are numbers)",
        "accuracy: task",
    ]


def test_math_verify_runs_in_the_scoring_process(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "Half?", "answer": r"\frac{1}{2}"})
    plan = prepare_rewards(reward("math-verify"), source)
    assert plan.notes == ()
    assert score(plan, source, r"So \boxed{0.5}.", "2").rewards == (1, 0)


@pytest.mark.parametrize("names", [("dapo-math",), ("tagged-answer", "tagged-format", "tagged-integer")])
def test_scorers_with_a_form_of_their_own_find_the_reference_answer_right(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    source = jsonl(tmp_path, {"prompt": r"Write 7 as \boxed{}.", "answer": "7"})
    plan = prepare_rewards(reward(*names), source)
    assert plan.notes == ()
    assert plan.trials[0].scores == dict.fromkeys(names, 1)


def test_terms_are_weighted_and_accuracy_is_that_of_the_term_that_knows_the_answer(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "3 + 4?", "answer": "7"})
    name = user_file(tmp_path, "def score(completion, answer):\n    return len(completion) / 10\n")
    terms = (RewardTerm(name="exact-match", weight=2.0), RewardTerm(name=name, weight=-0.5))
    plan = prepare_rewards(RewardConfig(terms=terms), source)
    right, wrong = "= 7", "none"
    scores = score(plan, source, right, wrong)
    assert scores.terms == {"exact-match": (1, 0), "score": (len(right) / 10, 0.4)}
    assert scores.answered == (True, False)
    assert scores.rewards == pytest.approx((2 - 0.05 * len(right), -0.2))
    assert scores.accuracies == (1, 0)
    assert plan.describe()[0] == f"reward: 2 x exact-match + -0.5 x {name}"


def test_metrics_call_a_function_as_its_user_does_and_no_two_alike() -> None:
    def labels(*names: str) -> tuple[str, ...]:
        return RewardPlan(tuple(RewardTerm(name=name) for name in names), "full", None, None, None, 1.0).labels

    assert labels("exact-match", "/home/me/rewards.py:brief") == ("exact-match", "brief")
    assert labels("/a/one.py:f", "/b/two.py:f", "/b/two.py:g") == ("one.py:f", "two.py:f", "g")
    assert labels("/a/one.py:f", "/b/one.py:f") == ("/a/one.py:f", "/b/one.py:f")


def test_a_completion_without_an_answer_is_told_from_a_wrong_one() -> None:
    def answers(*texts: str, extraction: Extraction, reason: str | None, by: str | None) -> tuple[bool, ...] | None:
        return RewardPlan((), extraction, reason, None, by, 1.0).answers(texts)

    assert answers("so 3", "none", extraction="last-number", reason="auto", by="exact-match") == (True, False)
    # math-verify looks by itself where the user has named no way
    assert answers("so 3", "none", extraction="boxed", reason="auto", by="math-verify") == (True, False)
    assert answers("so 3", r"\boxed{3}", extraction="boxed", reason=None, by="math-verify") == (False, True)
    assert answers("x", extraction="full", reason=None, by="ifeval") is None
    assert answers("x", extraction="full", reason=None, by=None) is None


def test_a_weight_that_makes_a_reward_huge_is_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "3 + 4?", "answer": "7"})
    plan = prepare_rewards(RewardConfig(terms=(RewardTerm(name="exact-match", weight=1e300),)), source)
    with pytest.raises(InputError, match=r"is 1e\+300: 1e\+300 x 1 \(exact-match\)"):
        score(plan, source, "= 7")


def test_accuracy_without_a_term_for_it(tmp_path: Path) -> None:
    name = user_file(tmp_path, "def score(completion, answer):\n    return 0.25\n")
    with_answers = jsonl(tmp_path, {"prompt": "q", "answer": "yes"})
    scores = score(prepare_rewards(reward(name), with_answers), with_answers, "yes", "no")
    assert (scores.rewards, scores.accuracies, list(scores.terms)) == ((0.25, 0.25), None, ["score"])
    assert scores.answered is None
    without = jsonl(tmp_path, {"prompt": "q"})
    plan = prepare_rewards(reward(name), without)
    assert score(plan, without, "yes").accuracies is None
    assert "accuracy: none, no reward compares with an answer" in plan.describe()


def test_several_groups_keep_their_order_and_their_rows(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *({"prompt": f"3 + {n}?", "answer": str(3 + n)} for n in range(3)))
    texts = {"a": [str(source[1].answer), "x"], "b": ["x", "x", str(source[2].answer)]}
    worker = RewardWorker(prepare_rewards(reward("exact-match"), source), fetch=texts.__getitem__)
    try:
        worker.setup()
        for _ in range(2):
            first, second = worker.score([ScoreRequest(source[1], "a"), ScoreRequest(source[2], "b")])
            assert (first.rewards, second.rewards) == ((1, 0), (0, 0, 1))
        assert worker.score([]) == []
    finally:
        worker.close()
    worker.close()


def test_a_note_says_when_the_reference_answer_itself_is_not_found_right(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "Capital of France?", "answer": "Paris"})
    plan = prepare_rewards(reward("exact-match", extract="last-number"), source)
    assert len(plan.notes) == 1
    assert "exact-match calls the reference answers of 1 of the 1 rows wrong" in plan.notes[0]
    assert plan.notes[0] in plan.describe()


def test_rows_that_can_never_be_right_are_counted_and_shown(tmp_path: Path) -> None:
    answers = [*map(str, range(20)), "blue", "3:4", *["red"] * 10]
    source = jsonl(tmp_path, *({"prompt": "q", "answer": answer} for answer in answers))
    (note,) = prepare_rewards(reward("exact-match"), source).notes
    assert "the reference answers of 12 of the 32 rows wrong" in note
    assert [f"line {number}," in note for number in (20, 21, 22, 23, 24)] == [False, True, True, True, False]
    assert "'blue', has 0" in note
    assert prepare_rewards(reward("exact-match", extract="last-line"), source).notes == ()


def test_of_many_rows_some_are_tried_and_their_number_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.rewards.prepare_rewards.SAMPLED_ROWS", 50)
    source = jsonl(tmp_path, *({"prompt": "q", "answer": "x" if n % 2 else "1"} for n in range(199)))
    (note,) = prepare_rewards(reward("exact-match", extract="last-number"), source).notes
    assert re.search(r"of 2\d of the 50 rows tried of 199 wrong", note)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def score(completion): return float(completion.split()[0] != '')", ["IndexError", "The completion was ''"]),
        ("import re\ndef score(completion): return int(re.findall(r'[0-9]', completion + '1')[1])",
         ["IndexError", "The completion was ''"]),
        ("def score(completion): return float(1 / (len(completion) < 9000))", ["ZeroDivisionError", "It goes on"]),
        ("def score(completions): return [1.0]", ["returned a list of 1 for 5 completions"]),
        ("def score(completions): return [1.0 for one in set(completions)] + [0.0] * 9", ["returned a list of"]),
        ("def score(completions): return 1.0", ["returned 1.0"]),
    ],
)  # fmt: skip
def test_functions_are_tried_on_a_batch_of_what_models_write(tmp_path: Path, code: str, words: list[str]) -> None:
    source = jsonl(tmp_path, {"prompt": "q", "answer": "12 34"}, {"prompt": "q", "answer": "56 78"})
    with pytest.raises(InputError) as raised:
        prepare_rewards(reward(user_file(tmp_path, code)), source)
    assert all(word in str(raised.value) for word in ["mine.py:score", *words])


def test_a_function_that_never_varies_and_one_that_may_fail_are_told(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "q", "answer": "12"})
    name = user_file(tmp_path, "def score(completion): return 0.25")
    (note,) = prepare_rewards(reward(name), source).notes
    assert "score gives 0.25 to all trial completions" in note
    name = user_file(tmp_path, "def score(completion): return len(completion.split()[0])", "other.py")
    settings = reward(name).model_copy(update={"on_error": "zero"})
    (note,) = prepare_rewards(settings, source).notes
    assert "score fails on 1 of 4 trial completions" in note
    assert "IndexError" in note


def test_a_right_answer_is_an_answer(tmp_path: Path) -> None:
    """NeMo-RL's tagged answer needs no end tag."""
    source = jsonl(tmp_path, {"prompt": "q", "answer": "5"})
    scores = score(prepare_rewards(reward("tagged-answer"), source), source, "<answer>5", "<answer>6", "5")
    assert (scores.accuracies, scores.answered) == ((1, 0, 1), (True, False, True))


BATCHED = """
calls = []
def score(prompts, completions, **columns):
    calls.append(len(completions))
    return [None if text == "skip" else float(len(set(completions)) + 10 * len(calls)) for text in completions]
"""


def test_a_function_of_many_is_called_once_a_step_with_all_groups(tmp_path: Path) -> None:
    """Also where another term makes rewards of its own, and one completion does not concern it."""
    source = jsonl(tmp_path, {"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "b"})
    name = user_file(tmp_path, BATCHED)
    plan = prepare_rewards(reward("exact-match", name), source)
    texts = {"x": ["a", "skip"], "y": ["b", "c"]}
    worker = RewardWorker(plan, fetch=texts.__getitem__)
    try:
        for step in (1, 2):
            first, second = worker.score([ScoreRequest(source[0], "x"), ScoreRequest(source[1], "y")])
            assert first.terms["score"] == (4 + 10 * step, None)
            assert (first.rewards, second.rewards) == ((5 + 10 * step, 0), (5 + 10 * step, 4 + 10 * step))
    finally:
        worker.close()


def test_a_row_that_no_reward_applies_to_is_named(tmp_path: Path) -> None:
    row, terms = jsonl(tmp_path, {"prompt": "q"})[0], reward("a.py:f", "b.py:f").terms
    assert weighted_sum(terms, {"a.py:f": None, "b.py:f": 2.0}, row) == 2
    with pytest.raises(InputError, match=r"No reward applies to .*data\.jsonl, line 1: a\.py:f, b\.py:f returned None"):
        weighted_sum(terms, {"a.py:f": None, "b.py:f": None}, row)


def test_each_source_is_scored_by_its_own_reward(tmp_path: Path) -> None:
    sums = jsonl(tmp_path, {"prompt": "1 + 1", "answer": "2"})
    (tmp_path / "words").mkdir()
    words = jsonl(tmp_path / "words", {"prompt": "Say b.", "answer": "b"})
    name = user_file(tmp_path, "def score(completion, answer):\n    return 10 * (answer in completion)\n")
    plan = mixed_rewards([("sums", reward("exact-match"), sums), ("words", reward(name), words)])
    rows = [replace(source[0], source=label) for label, source in (("sums", sums), ("words", words), ("sums", sums))]
    assert plan.scorers == ("exact-match", name)
    assert plan.describe()[0] == "sums: reward: exact-match"
    assert f"words: reward: {name}" in plan.describe()
    assert pickle.loads(pickle.dumps(plan)) == plan
    texts = {"0": ["It is 2"], "1": ["a or b", "a"], "2": ["3", "2"]}
    worker = RewardWorker(plan, fetch=texts.__getitem__)
    try:
        scores = worker.score([ScoreRequest(row, str(number)) for number, row in enumerate(rows)])
    finally:
        worker.close()
    assert [one.rewards for one in scores] == [(1,), (10, 0), (0, 1)]
    assert [list(one.terms) for one in scores] == [["exact-match"], ["score"], ["exact-match"]]
    assert scores[1].accuracies is None


# what the user can get wrong


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exact_match", ["'exact_match'", "Did you mean exact-match"]),
        ("bleu", ["'bleu'", "path/to/file.py:function"]),
        ("task", ["'task'", "data.jsonl"]),
        ("reward.py", ["does not name a function"]),
        ("nowhere/reward.py:score", ["there is no file nowhere/reward.py"]),
        ("math-verify", ["no", "--answer-field"]),
    ],
)
def test_wrong_rewards(tmp_path: Path, name: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        prepare_rewards(reward(name), jsonl(tmp_path, {"prompt": "q"}))
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q"}, ["line 2 has none", "Leave the row out"]),
        ({"prompt": "q", "answer": None}, ["line 2 has none"]),
        ({"prompt": "q", "answer": ["5", "6"]}, ["the reference answer of", "line 2 is a list", "reward function"]),
        ({"prompt": "q", "answer": {"a": 1}}, ["line 2 is an object"]),
    ],
)
def test_a_later_row_whose_answer_could_never_be_found_is_named(tmp_path: Path, row: dict, words: list[str]) -> None:
    source = jsonl(tmp_path, {"prompt": "q", "answer": "5"}, row)
    with pytest.raises(InputError) as raised:
        prepare_rewards(reward("exact-match"), source)
    assert all(word in str(raised.value) for word in words)
    prepare_rewards(reward(user_file(tmp_path, "def score(completion, answer): return 1")), source)


def test_no_reward_or_one_twice(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "q", "answer": "a"})
    with pytest.raises(InputError, match=r"No reward.*--reward"):
        prepare_rewards(RewardConfig(), source)
    with pytest.raises(InputError, match="'exact-match' is given twice"):
        prepare_rewards(reward("exact-match", "exact-match"), source)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def scores(completion, answer): return 1", ["no function 'score'", "Did you mean scores"]),
        ("score = 3", ["no function 'score'", "It has none"]),
        ("def score(completion)\n    return 1", ["mine.py, line 1", "expected ':'"]),
        ("import json\nimport no_such_package", ["ModuleNotFoundError", "mine.py, line 2"]),
        ("raise SystemExit(3)", ["SystemExit", "mine.py, line 1"]),
        ("def score(completion, level): return 1", ["needs level", "data.jsonl, line 1"]),
        ("def score(completion): return 1\n\0", ["null bytes"]),
        ("def score(completion, answer):\n    return helper(answer)\ndef helper(a):\n    return a[0] / 0", [
            "raised TypeError", "data.jsonl, line 1", "mine.py, line 4, in helper: return a[0] / 0"]),
        ("def score(completion, answer): return 'good'", ["returned 'good'", "data.jsonl, line 1", "number"]),
        ("def score(completion, answer): return float('nan')", ["returned nan", "finite"]),
        ("def score(completion, answer): return -1e308", ["returned -1e+308", "data.jsonl, line 1", "1e+30"]),
        ("def score(completion, answer): return 10 ** 400", ["returned 1000", "data.jsonl, line 1"]),
    ],
)  # fmt: skip
def test_wrong_functions_are_refused_before_the_run(tmp_path: Path, code: str, words: list[str]) -> None:
    name = user_file(tmp_path, code)
    with pytest.raises(InputError) as raised:
        prepare_rewards(reward(name), jsonl(tmp_path, {"prompt": "q", "answer": "a"}))
    for word in ["mine.py", *words]:
        assert word in str(raised.value)


def test_a_misspelt_file_suggests_its_neighbor(tmp_path: Path) -> None:
    user_file(tmp_path, "def score(completion): return 1", "reward.py")
    with pytest.raises(InputError, match=r"Did you mean reward\.py"):
        prepare_rewards(reward(f"{tmp_path}/rewrad.py:score"), jsonl(tmp_path, {"prompt": "q"}))


def test_a_function_gets_the_row_and_may_import_its_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper_of_mine.py").write_text("FACTOR = 10\n")
    user_file(
        tmp_path,
        "from helper_of_mine import FACTOR\nimport numpy\n"
        "def score(completion: str, answer, prompt: str, **row) -> float:\n"
        "    print('noise on stdout')\n"
        "    return numpy.float32(FACTOR * row['level'] + (prompt == 'q?') + len(answer) + len(completion))\n",
    )
    monkeypatch.chdir(tmp_path)
    source = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "q?"}], "answer": ["a", "b"], "level": 3})
    plan = prepare_rewards(reward("mine.py:score"), source)
    monkeypatch.chdir("/")
    assert score(plan, source, "abcd").rewards == (37,)


def test_a_function_that_raises_in_the_run_names_the_row(tmp_path: Path) -> None:
    code = "def score(completion, answer):\n    assert completion != 'bad', 'cannot read this'\n    return 1\n"
    source = jsonl(tmp_path, {"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "b"})
    plan = dataclasses.replace(prepare_rewards(reward(user_file(tmp_path, code)), source), on_error="stop")
    with pytest.raises(InputError, match=r"AssertionError: cannot read this \(scoring .*line 2; mine\.py, line 2"):
        score(plan, source, "good", "bad", index=1)


# scorers that hang or die


def test_a_function_out_of_time_is_named_with_its_row(tmp_path: Path) -> None:
    code = (
        "import time\ndef score(completion, answer):\n    time.sleep(60 if completion == 'slow' else 0)\n    return 1\n"
    )
    source = jsonl(tmp_path, {"prompt": "q", "answer": "a"})
    plan = prepare_rewards(reward(user_file(tmp_path, code), timeout_s=4.0), source)
    why = r"reward\.timeout_s = 4 s: scorer .*mine\.py:score was at .*line 1.*1 of"
    with pytest.raises(WaitTimeoutError, match=why):
        score(replace(plan, on_error="stop"), source, "quick", "slow")
    scores = score(plan, source, "quick", "slow", "quick")
    assert scores.rewards == (1, None, 1)
    assert re.search(why, scores.dropped[0])


@pytest.mark.slow
@pytest.mark.guard
def test_slow_expressions_cost_their_own_scores_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a busy machine: CPU time is what counts, and math-verify's own alarm of 5 s is off."""
    monkeypatch.setattr(scoring_process, "SLOW_S", 1.0)
    source = jsonl(tmp_path, {"prompt": r"Write it in \boxed{}.", "answer": "5"})
    plan = prepare_rewards(reward("math-verify", timeout_s=120.0), source)
    slow, right = r"\boxed{10^{10^{10}}}", r"\boxed{5}"
    scores = score(plan, source, *[slow] * 2, *[right] * 2)
    assert scores.rewards == (0, 0, 1, 1)
    assert scores.failures == 2
    with pytest.raises(WaitTimeoutError, match=r"reward\.timeout_s = 1 s: scorer math-verify was at .*line 1"):
        score(replace(plan, timeout_s=1.0, on_error="stop"), source, *[slow] * 2)


def test_much_to_score_is_dealt_to_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_process, "WORK_A_PROCESS", 8)
    monkeypatch.setattr(scoring_process.os, "sched_getaffinity", lambda _: range(2))
    source = gym("chain_sum", max_terms=2, max_digits=1)
    with closing(scoring_process.ScoringProcess(prepare_rewards(RewardConfig(), source))) as process:
        work = [scoring_process.Work(0, str(source[0].answer if n % 3 else "x"), source[0]) for n in range(64)]
        assert [one.value for one in process.score(work)] == [float(n % 3 > 0) for n in range(64)]
        assert all(lane.starting_s for lane in process.lanes)  # on a busy machine one may have ended since


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ("os._exit(9)", r"\(exit code 9\) while scoring .*line 1, with 1 of 3 scores done\. Its output .* worker\.$"),
        ("os.kill(os.getpid(), 9)", r"\(signal 9\) while scoring .*line 1, with 1 of 3 .* lack of memory \(`dmesg`\)"),
    ],
)
def test_a_function_that_ends_the_process_is_named(tmp_path: Path, ends: str, told: str) -> None:
    code = f"import os\ndef score(completion, answer):\n    return {ends} if completion == 'end' else 1\n"
    source = jsonl(tmp_path, {"prompt": "q", "answer": "a"})
    plan = prepare_rewards(reward(user_file(tmp_path, code)), source)
    with pytest.raises(WorkerError, match=rf"mine\.py:score ended its process {told}"):
        score(plan, source, "fine", "end", "fine")


@pytest.mark.long
def test_a_completion_that_a_parser_gets_lost_in_counts_as_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """countdown's own scorer evaluates the expression; this one does not end within the age of the universe."""
    monkeypatch.setattr(scoring_process, "BUILT_IN_LIMIT_S", 4.0)
    source = gym("countdown")
    plan = prepare_rewards(RewardConfig(), source)
    right = source[0].answer
    scores = score(plan, source, right, "9**9**9**9", right)
    assert scores.accuracies == (1, 0, 1)
    assert scores.failures == 1
    assert "scorer task failed on a completion of reasoning-gym:countdown, question 0" in caplog.text


def test_a_scoring_process_that_something_kills_costs_no_reward() -> None:
    source = gym("chain_sum", max_terms=2, max_digits=1)
    process = scoring_process.ScoringProcess(prepare_rewards(RewardConfig(), source))
    process.start()
    for child in psutil.Process(process.lanes[0].server.process.pid).children(recursive=True):
        child.kill()  # as the kernel does where memory is short
    scores = process.score([scoring_process.Work(0, str(source[0].answer), source[0])] * 2)
    process.close()
    assert scores == [scoring_process.Score(1.0)] * 2


def test_a_completion_on_which_the_process_dies_twice_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = "; from rlctl.rewards.scorers import TaskScorer as T; score = T.__call__"
    ends += "; T.__call__ = lambda self, c, row: __import__('os')._exit(9) if c == 'end' else score(self, c, row)"
    monkeypatch.setattr("rlctl.processes.child.MAIN", MAIN.replace("; main()", f"{ends}; main()"))
    source = gym("chain_sum", max_terms=2, max_digits=1)
    scores = score(prepare_rewards(RewardConfig(), source), source, str(source[0].answer), "end", str(source[0].answer))
    assert scores.rewards == (1, 0, 1)
    assert scores.failures == 1


def test_a_reward_model_of_the_hub_is_looked_for_when_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run on a machine without it, or without a network, plans nevertheless."""
    monkeypatch.setattr("rlctl.rewards.prepare_rewards.reward_model", lambda name: pytest.fail(f"looked for {name}"))
    require_known(reward("model:org/reward"))
    with pytest.raises(InputError, match="no such directory"):
        require_known(reward("model:./nowhere"))


def test_a_function_has_the_variables_of_the_shell_where_the_cluster_lacks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a running Ray cluster starts has the variables of `ray start`, which this test stands in for."""
    monkeypatch.setenv("JUDGE_KEY", "abc")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    source = jsonl(tmp_path, {"prompt": "q", "answer": "a"})
    code = (
        "import os\n"
        "def score(completion, **row):\n"
        "    return float((os.environ.get('JUDGE_KEY'), os.environ.get('SLURM_JOB_ID')) == ('abc', '7'))"
    )
    plan = prepare_rewards(reward(user_file(tmp_path, code)), source)
    assert plan.trials[0].reward == 1.0
    assert "JUDGE_KEY" not in repr(plan)
    monkeypatch.delenv("JUDGE_KEY")
    assert score(pickle.loads(pickle.dumps(plan)), source, "x").rewards == (1.0,)
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # of the job that the cluster runs in
    assert score(plan, source, "x").rewards == (0.0,)


def test_a_plan_knows_of_functions_that_compare_completions(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "q", "answer": "a"})
    alone = user_file(tmp_path, "async def score(completion, **row): return float(len(completion))", "alone.py")
    together = user_file(tmp_path, "def score(completions, **columns): return [*map(len, completions)]", "together.py")
    assert not prepare_rewards(reward(alone), source).compares
    assert prepare_rewards(reward(alone, together), source).compares


def test_a_trial_elsewhere_says_which_scores_are_others_there(tmp_path: Path) -> None:
    """A file stands in for a program that one of two machines has."""
    program = tmp_path / "answer-checker"
    code = (
        "from pathlib import Path\n"
        f"def score(completion, **row): return float(Path({str(program)!r}).exists()) + len(completion) / 1000"
    )
    program.touch()
    source = jsonl(tmp_path, {"prompt": "q", "answer": "1"})
    plan = prepare_rewards(reward(user_file(tmp_path, code)), source)
    assert tried_again(plan) == []
    program.unlink()
    [note] = tried_again(plan)
    assert "score gives 0.001 to '1'" in note
    assert "and gave 1.001 where rlctl was started" in note
