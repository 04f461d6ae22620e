"""Rows as input of a chat template: prompts and texts give it the same, in every form that a file can have."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompts import open_prompts
from rlctl.data.row_types import PROMPTS, TextRows
from rlctl.data.texts import trained_texts
from rlctl.errors import InputError
from rlctl.jobs.given_prompts import read_prompts
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes
from rlctl.settings.data import DataConfig, ModelConfig

TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
TALK = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for name in ('reasoning_content', 'thinking') if m[name] %}<think>{{ m[name] }}</think>{% endfor %}"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tool(name: str) -> dict[str, Any]:
    properties = {name: {"type": "string"}}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def talk(thought: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", thought: "two and two"},
        {"role": "user", "content": "and 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "user", "content": "So?"},
    ]


ROWS = [
    {"prompt": talk("reasoning_content", {"a": 1}), "completion": "Five.", "tools": [tool("add"), tool("sub")]},
    {"prompt": talk("thinking", {"b": 2}), "completion": "Five.", "tools": [tool("mul")]},
]


def write(directory: Path, form: str) -> Path:
    """Write the rows in a form of file, with messages and tools as JSON texts in some."""
    encoded = [{key: v if isinstance(v, str) else json.dumps(v) for key, v in row.items()} for row in ROWS]
    kind, _, how = form.partition(" ")
    rows = encoded if how else ROWS
    if kind == "csv":
        (directory / "table").mkdir()
        with (directory / "table" / "train.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
        return directory / "table"
    path = directory / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def encoder_of(model: Path, template: str | None = TOOLS + TALK, **data: Any) -> PromptEncoder:
    settings = ModelConfig(chat_template=template)
    return PromptEncoder.build(load_tokenizer(model, settings), settings, DataConfig.model_validate(data), model)


@pytest.mark.parametrize("form", ["jsonl", "jsonl json", "parquet", "parquet json", "csv json"])
def test_tools_thoughts_and_calls_reach_the_template_in_prompts_and_texts(
    tiny_llama: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    encoder, name = encoder_of(tiny_llama), str(write(tmp_path, form))
    prompts, texts = (open_prompts(DataConfig(name=name), rows=kind) for kind in (PROMPTS, TextRows()))
    for index, row in enumerate(ROWS):
        expected: Any = encoder.tokenizer.apply_chat_template(
            row["prompt"], tools=row["tools"], chat_template=TOOLS + TALK, add_generation_prompt=True, return_dict=False
        )
        assert list(encoder.encode(prompts[index])) == expected
        text = trained_texts(encoder, texts[index])[0]
        assert text.tokens_T.tolist()[: text.prompt_tokens] == expected
        assert encoder.tokenizer.decode(expected) == encoder.text(prompts[index])
    if form == "jsonl":
        assert [encoder.encode(row) for row in read_prompts([], name, DataConfig())] == [
            encoder.encode(prompts[index]) for index in range(len(ROWS))
        ]


def test_a_tokenizer_s_template_for_tools_shows_those_of_a_row(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(tiny_llama, ModelConfig())
    tokenizer.chat_template = {"default": TALK, "tool_use": TOOLS + TALK}
    encoder = PromptEncoder.build(tokenizer, ModelConfig(), DataConfig(), tiny_llama)
    row = open_prompts(DataConfig(name=str(write(tmp_path, "jsonl"))))[0]
    asked = ROWS[0]
    expected = tokenizer.apply_chat_template(
        asked["prompt"], tools=asked["tools"], add_generation_prompt=True, return_dict=False
    )
    assert list(encoder.encode(row)) == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "[{'role': 'user', 'content': 'Hi'}]"}, "looks like a list of chat messages, but is not JSON"),
        ({"prompt": "Hi", "tools": "a hammer"}, "'tools' is not JSON"),
        ({"prompt": "Hi", "tools": ["[1]"]}, "'tools' is not a list of tools"),
        ({"prompt": "Hi", "tools": [tool("add")]}, "does not write the tools of the row"),
    ],
)
def test_what_a_template_cannot_take_is_named(tiny_llama: Path, tmp_path: Path, row: dict, words: str) -> None:
    (path := tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(InputError, match=f"line 1: .*{words}"):
        encoder_of(tiny_llama, TALK).encode(open_prompts(DataConfig(name=str(path)))[0])


def test_a_prompt_template_may_take_the_column_itself(tiny_llama: Path, tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_text('{"prompt": "Build it.", "tools": "a hammer"}')
    encoder = encoder_of(tiny_llama, TALK, prompt_template="With {tools}: {prompt}")
    assert "With a hammer: Build it." in encoder.text(open_prompts(DataConfig(name=str(path)))[0])


def test_an_environment_shows_the_tools_of_a_row_that_it_has(tiny_llama: Path, tmp_path: Path) -> None:
    functions = (f'def {name}() -> str:\n    """Do it."""\n    return ""\n' for name in ("add", "sub"))
    (code := tmp_path / "tools.py").write_text("\n\n".join(functions))
    rows = [{"prompt": "Hi", "tools": [tool("sub")]}, {"prompt": "Hi"}, {"prompt": "Hi", "tools": [tool("mul")]}]
    (path := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = [f"{code}:add", f"{code}:sub"]
    config = RlConfig.model_validate({"environment": {"tools": listed, "tool_format": "hermes"}})
    encoder, source = encoder_of(tiny_llama), open_prompts(DataConfig(name=str(path)))
    play = EnvironmentEpisodes.open(config, encoder, source[1])
    assert play is not None
    shown = play.showing_tools(encoder)
    texts = [str(encoder.tokenizer.decode(play.measured(source[index], shown))) for index in range(2)]
    assert ['"sub"' in text for text in texts] == [True, True]
    assert ['"add"' in text for text in texts] == [False, True]
    with pytest.raises(InputError, match=r"line 3: the field `tools` names 'mul', .* are add, sub"):
        play.measured(source[2], shown)
