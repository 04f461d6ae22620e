"""The examples of docs/data_and_rewards.md: configurations resolve, templates fill in, functions score."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from rlctl.data.mixing import source_settings
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.templates import PromptTemplate
from rlctl.methods.configuration import resolve
from rlctl.rewards.user_function import UserBatchScorer, UserScorer, user_scorer

PAGE = (Path(__file__).parents[2] / "docs" / "data_and_rewards.md").read_text()
BLOCKS = [textwrap.dedent(block).strip("\n") for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE, re.MULTILINE)]
CONFIGURATIONS = [block for block in BLOCKS if block.startswith("data:")]
COLUMNS = {"prompt": "2 + 3?", "question": "Which?", "choices": ["a", "b"]}


def test_the_page_s_configurations_resolve_and_their_templates_fill_in(tmp_path: Path) -> None:
    assert len(CONFIGURATIONS) == 3
    texts = []
    for block in CONFIGURATIONS:
        (tmp_path / "mine.yaml").write_text(block)
        for one in source_settings(resolve(files=[tmp_path / "mine.yaml"], environment={}).config):
            if one.data.prompt_template:
                texts.append(PromptTemplate(one.data.prompt_template).render(COLUMNS, "row 0"))
    assert texts == [
        'Which?\nChoose from ["a", "b"], and write the letter in \\boxed{}.',
        "Which?\nA. a\nB. b\nWrite the letter in \\boxed{}.",
        "Answer in one word. 2 + 3?",
    ]


def test_the_page_s_functions_score(tmp_path: Path) -> None:
    short, varied = [block for block in BLOCKS if "\ndef " in block]
    (tmp_path / "one.py").write_text(short.partition("\nrlctl")[0])
    (tmp_path / "many.py").write_text(varied)
    row = PromptRow(0, "row 0", "2 + 3?", "5", {"level": 2})
    one, many = user_scorer(f"{tmp_path}/one.py:short"), user_scorer(f"{tmp_path}/many.py:varied")
    assert isinstance(one, UserScorer)
    assert one("It is 5", row) == pytest.approx(0.93)
    assert isinstance(many, UserBatchScorer)
    assert many.score_all(["a", "a"], [row, PromptRow(1, "row 1", "q", None, {"level": 1})]) == [0.5, None]
