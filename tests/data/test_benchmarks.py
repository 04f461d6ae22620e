"""Public data sets by a short name: rows with the fields that the hub has, in files, since tests reach no hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.benchmarks import BENCHMARKS
from rlctl.errors import InputError
from rlctl.jobs.tasks import open_task
from rlctl.methods.rl.rl_config import RlConfig

GPQA = {
    "Question": "Which gas is lightest?", "Correct Answer": "Hydrogen\n", "Incorrect Answer 1": "Neon",
    "Incorrect Answer 2": "Xenon", "Incorrect Answer 3": "Argon", "Subdomain": "Chemistry",
}  # fmt: skip
MMLU = {
    "question": "2 + 2?",
    "options": ["3", "5", "4", "6", "7"],
    "answer": "C",
    "answer_index": 2,
    "category": "math",
}
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    # a row, a completion that is right, one that is wrong
    "gsm8k": ({"question": "6 x 7?", "answer": "6 x 7 = <<6*7=42>>42\n#### 42"}, r"So \boxed{42}.", r"\boxed{41}"),
    "math-500": (
        {"problem": "1/2?", "solution": "...", "answer": r"\frac{1}{2}", "level": 1}, r"\boxed{0.5}", r"\boxed{2}",
    ),
    "aime24": ({"id": 1, "problem": "p", "solution": "s", "answer": "033"}, r"\boxed{33}", r"\boxed{30}"),
    "aime25": ({"problem": "p", "answer": "70", "id": "0"}, r"The answer is \boxed{070}.", r"\boxed{-70}"),
    "mmlu-pro": (MMLU, "Answer: C", "Answer: D"),
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("untried")


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def judged(task: Any, completion: str) -> float:
    (scorer,) = task.rewards.build()
    return scorer(completion, task.prompts[0])


@pytest.mark.parametrize("name", ROWS)
def test_rows_as_the_hub_has_them_are_asked_and_judged(name: str, tmp_path: Path) -> None:
    row, right, wrong = ROWS[name]
    task = open_task(f"{name}:{write(tmp_path / 'rows.jsonl', row)}", RlConfig(), None)
    assert (judged(task, right), judged(task, wrong), judged(task, "")) == (1, 0, 0)


def test_every_short_name_is_tested_here() -> None:
    assert {*ROWS, "gpqa-diamond", "ifeval"} == set(BENCHMARKS)


def test_ifeval_is_judged_by_its_instructions(tmp_path: Path) -> None:
    row = {"key": 1000, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    task = open_task(f"ifeval:{write(tmp_path / 'rows.jsonl', row)}", RlConfig(), None)
    assert (task.rewards.scorers, task.rewards.accuracy_by, task.prompts[0].answer) == (("ifeval",), "ifeval", None)
    with pytest.raises(InputError, match=r"which .* lacks"):
        open_task(f"ifeval:{write(tmp_path / 'other.jsonl', {'prompt': 'Write.'})}", RlConfig(), None)


def test_the_right_option_of_gpqa_stands_at_different_places(tmp_path: Path) -> None:
    path = write(tmp_path / "gpqa.jsonl", *[GPQA] * 40)
    task = open_task(f"gpqa-diamond:{path}", RlConfig(), None)
    letters = {row.answer for row in task.prompts}
    assert letters == {"A", "B", "C", "D"}
    for row in task.prompts:
        assert f"{row.answer}) Hydrogen" in row.question
        assert row.question.startswith("Which gas is lightest?\n\nA) ")
    again = open_task(f"gpqa-diamond:{path}", RlConfig(), None)
    assert [row.prompt for row in again.prompts] == [row.prompt for row in task.prompts]
    assert judged(task, f"**Answer: {task.prompts[0].answer}**") == 1


def test_the_prompt_says_how_to_answer_unless_the_user_says_it(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", MMLU)

    def text(**data: str) -> str:
        task = open_task(f"mmlu-pro:{path}", RlConfig.model_validate({"data": data}), None)
        before, after = (task.data.prompt_template or "").split("{prompt}")
        return before + task.prompts[0].question + after + (task.data.prompt_suffix or "")

    assert "`Answer: LETTER`" in text()
    assert "2 + 2?\n\nA) 3\nB) 5" in text()
    own = text(prompt_template="Q: {prompt}", prompt_suffix=" Be brief.")
    assert own.startswith("Q: 2 + 2?")
    assert own.endswith(" Be brief.")


def test_a_hub_out_of_reach_is_a_sentence_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match="--task gpqa-diamond: Dataset 'Idavidrein/gpqa:gpqa_diamond'") as caught:
        open_task("gpqa-diamond", RlConfig(), None)
    assert "--task gpqa-diamond:FILE" in (caught.value.hint or "")


def test_a_file_that_lacks_a_field_is_named_with_the_task(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"problem": "x", "answer": "1"})
    with pytest.raises(InputError, match=r"--task gsm8k:.*no field 'question'") as caught:
        open_task(f"gsm8k:{path}", RlConfig(), None)
    assert "with the fields of openai/gsm8k, such as `question`" in (caught.value.hint or "")


def test_rows_keep_their_number(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *[{"question": f"{n}?", "answer": f"#### {n}"} for n in range(5)])
    task = open_task(f"gsm8k:{path}", RlConfig(), 3)
    assert [row.index for row in task.prompts] == list(task.rows)
