"""Prompt templates: which columns they name, what stands for them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.data.prompts import open_prompts
from rlctl.data.templates import PromptTemplate, template_of
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig

ROW = {"prompt": "2 + 3?", "question": "Which?", "choices": ["a", "ü"], "level": 3, "nothing": None}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{prompt}\n", "2 + 3?\n"),
        ("{question} {level}: {choices} {question}", 'Which? 3: ["a", "ü"] Which?'),
        ("In \\boxed{answer} and {}, {0} {two words}: {prompt}", "In \\boxed{answer} and {}, {0} {two words}: 2 + 3?"),
        ("{% for c in choices %}{{ loop.index }}. {{ c }}\n{% endfor %}", "1. a\n2. ü\n"),
        ("{{ '{x}' }} {{ prompt }}", "{x} 2 + 3?"),
        ("{% if context is defined %}{{ context }}{% endif %}{{ prompt }}\n", "2 + 3?\n"),
    ],
)
def test_columns_stand_in_their_places(text: str, filled: str) -> None:
    assert PromptTemplate(text).render(ROW, "row 0") == filled


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{promt}", ["row 0: no column 'promt'", "Did you mean prompt", "choices, level"]),
        ("{nothing}", ["row 0: no column 'nothing'"]),
        ("{{ promt }}", ["row 0", "'promt' is undefined", "It can have choices"]),
        ("{{ level / 0 }}", ["row 0", "division by zero"]),
        ("{{ level.__class__.__mro__ }}", ["row 0", "unsafe"]),
    ],
)
def test_a_row_without_the_column_is_named_with_what_there_is(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        PromptTemplate(text).render(ROW, "row 0")
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Solve it.", ["has no place for the prompt", "{prompt}"]),
        ("{prompt} {answer}", ["names 'answer'", "reference answer"]),
        ("{{ prompt }} {{ solution }}", ["names 'solution'", "reference answer"]),
        ("{{ prompt", ["data.prompt_template, line 1"]),
    ],
)
def test_wrong_templates_are_refused_before_any_row(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        template_of(DataConfig(prompt_template=text, answer_field="solution"))
    for word in words:
        assert word in str(raised.value)


def test_a_file_without_a_prompt_field_is_put_together_by_the_template(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"question": q, "choices": ["x", "y"], "answer": "x"}) + "\n" for q in "ab"))
    template = "{question}? {choices}"
    source = open_prompts(DataConfig(name=str(path), prompt_template=template))
    assert [source[i].prompt for i in range(2)] == ['a? ["x", "y"]', 'b? ["x", "y"]']
    with pytest.raises(InputError, match=r"d\.jsonl, line 1: no column 'choises' .*Did you mean choices"):
        open_prompts(DataConfig(name=str(path), prompt_template="{question} {choises}"))


def test_the_prompt_s_own_field_has_its_name_in_a_template(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "a", "solution": "b"}\n')
    data = DataConfig(name=str(path), prompt_field="question", answer_field="solution", prompt_template="Q: {question}")
    row = open_prompts(data)[0]
    assert (row.prompt, row.answer, row.fields) == ("a", "b", {"question": "a", "solution": "b"})


@pytest.mark.parametrize(
    "filters", ["tojson", "tojson(indent=2)", "tojson(sort_keys=true)", "tojson(ensure_ascii=true)"]
)
def test_tojson_writes_what_it_writes_in_a_chat_template(filters: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    value, template = {"b": "1 < 2 & it's \u00e9", "a": [1, None, True]}, "{{ columns | " + filters + " }}"
    [expected], _ = render_jinja_template([[{"role": "user", "content": ""}]], chat_template=template, columns=value)
    assert PromptTemplate(template).render({"columns": value}, "line 1") == expected
