"""What a chat template writes between two turns, on templates of the kinds that published models have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.turns import TurnEncoder, with_tools
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig, ModelConfig

BEGIN, END = "<|im_start|>", "<|im_end|>"
TOOLS = "{% if tools %}" + BEGIN + "system\n{% for t in tools %}{{ t | tojson }}{% endfor %}" + END + "\n{% endif %}"
GENERATION = "{% if add_generation_prompt %}" + BEGIN + "assistant\n{% endif %}"


def each(said: str) -> str:
    return "{% for m in messages %}" + said + "{% endfor %}"


PLAIN = each(BEGIN + "{{ m.role }}\n{{ m.content }}" + END + "\n") + GENERATION
WITH_TOOLS = (
    TOOLS
    + each(
        "{% if m.role == 'tool' %}"
        + BEGIN
        + "user\n<tool_response>{{ m.content }}</tool_response>"
        + END
        + "\n{% else %}"
        + BEGIN
        + "{{ m.role }}\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
        + "{% if c.id | length != 9 %}{{ raise_exception('Mistral wants 9 letters') }}{% endif %}"
        + "</tool_call>{% endfor %}{% if m.tool_calls %}<|endoftext|>{% endif %}"
        + END
        + "\n{% endif %}"
    )
    + GENERATION
)
THOUGHTS_GO = (
    each(
        "{% set said = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content %}"
        + BEGIN
        + "{{ m.role }}\n{{ said }}"
        + END
        + "\n"
    )
    + GENERATION
    + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"
)
MESSAGE = BEGIN + "{{ m.role }}\n{{ m.content }}" + END + "\n"
NO_TOOL_ROLE = (
    each("{% if m.role == 'tool' %}{{ raise_exception('roles must alternate') }}{% endif %}" + MESSAGE) + GENERATION
)
DROPS_TOOLS = each("{% if m.role != 'tool' %}" + MESSAGE + "{% endif %}") + GENERATION
COUNTS = each(BEGIN + "{{ m.role }}\n{{ messages[0].content | length }} {{ m.content }}" + END + "\n") + GENERATION
USER = [{"role": "user", "content": "Go on."}]
RESULT = [{"role": "tool", "content": "5"}]
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def encoder(directory: Path, template: str, tools: bool = False) -> TurnEncoder:
    model = ModelConfig(chat_template=template)
    made = PromptEncoder.build(load_tokenizer(directory, model), model, DataConfig(), directory)
    shown, knows = with_tools(made, [SCHEMA] if tools else [], "Call it.")
    return TurnEncoder.build(shown, tools=tools and knows)


def text(turns: TurnEncoder, last: int | None, messages: list[dict[str, Any]]) -> str:
    return str(turns.encoder.tokenizer.decode(turns.between(last, messages)))


def end_of(turns: TurnEncoder) -> int:
    found = turns.encoder.closing_token()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("template", "opens"), [(PLAIN, ""), (WITH_TOOLS, ""), (THOUGHTS_GO, "<think>\n\n</think>\n\n"), (NO_TOOL_ROLE, "")]
)
def test_behind_a_turn_comes_what_the_template_writes(tiny_llama: Path, template: str, opens: str) -> None:
    turns = encoder(tiny_llama, template)
    behind = f"\n{BEGIN}user\nGo on.{END}\n{BEGIN}assistant\n{opens}"
    assert text(turns, end_of(turns), USER) == behind
    assert text(turns, 17, USER) == END + behind  # a turn that was cut is closed first
    tokenizer = turns.encoder.tokenizer
    whole = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}, *USER]
    rendered = tokenizer.apply_chat_template(whole, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert str(rendered).endswith(f"5{END}{behind}")


def test_results_of_tools_have_their_role_where_the_template_has_one(tiny_llama: Path) -> None:
    turns = encoder(tiny_llama, WITH_TOOLS, tools=True)
    assert (turns.tool_role, turns.note) == ("tool", None)
    said = text(turns, end_of(turns), RESULT)  # the call has an end of its own, which was sampled before
    assert said == f"\n{BEGIN}user\n<tool_response>5</tool_response>{END}\n{BEGIN}assistant\n"
    assert text(turns, None, RESULT) == f"{END}{said}"


@pytest.mark.parametrize(("template", "why"), [(NO_TOOL_ROLE, "alternate"), (DROPS_TOOLS, "leaves out what a message")])
def test_else_they_are_the_user_s(tiny_llama: Path, template: str, why: str) -> None:
    turns = encoder(tiny_llama, TOOLS + template, tools=True)
    assert turns.tool_role == "user"
    assert turns.note
    assert why in turns.note


def test_a_template_for_tools_is_taken_where_there_are_some(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama, ModelConfig())
    tokenizer.chat_template = {"default": PLAIN, "tool_use": WITH_TOOLS}
    made = PromptEncoder.build(tokenizer, ModelConfig(), DataConfig(), tiny_llama)
    assert made.template == PLAIN
    shown, knows = with_tools(made, [SCHEMA], "Call it.")
    assert (shown.template, knows) == (WITH_TOOLS, True)


def test_a_template_may_have_the_name_of_smollm3_for_tools(tiny_llama: Path) -> None:
    turns = encoder(tiny_llama, TOOLS.replace("tools", "xml_tools") + PLAIN, tools=True)
    assert '"name": "add"' in turns.encoder.render(USER)
    assert turns.encoder.system_prompt is None


def test_a_role_that_the_template_leaves_out_is_refused(tiny_llama: Path) -> None:
    turns = encoder(tiny_llama, DROPS_TOOLS)
    with pytest.raises(InputError, match="of the role 'tool' behind an answer: it leaves out"):
        turns.between(None, RESULT)


def test_a_template_without_a_place_for_tools_gets_a_system_prompt(tiny_llama: Path) -> None:
    turns = encoder(tiny_llama, PLAIN, tools=True)
    row = PromptRow(0, "row 1", [{"role": "system", "content": "Be brief."}, *USER], None)
    for prompt, system in ((row.prompt, "Be brief.\n\nCall it."), ("Go on.", "Call it.")):
        messages = turns.encoder.messages(replace(row, prompt=prompt))
        assert [one["content"] for one in messages] == [system, "Go on."]
    assert turns.tool_role == "user"


def test_a_template_that_depends_on_the_history_is_refused_and_raw_texts_are_not(tiny_llama: Path) -> None:
    with pytest.raises(InputError, match="depends on earlier messages"):
        encoder(tiny_llama, COUNTS)
    model = ModelConfig(chat_template=COUNTS)
    made = PromptEncoder.build(load_tokenizer(tiny_llama, model), model, DataConfig(), tiny_llama)
    raw = TurnEncoder.build(made, raw=True)
    assert text(raw, None, [{"role": "environment", "content": "\nup <state>\n"}]) == "\nup <state>\n"


def test_a_turn_is_read_without_the_token_that_ended_it(tiny_llama: Path) -> None:
    turns = encoder(tiny_llama, PLAIN)
    ids = turns.encoder.tokenizer.encode("a <tool_call>", add_special_tokens=False)
    assert turns.text_of([*ids, end_of(turns)]) == turns.text_of(ids) == turns.encoder.tokenizer.decode(ids)
