"""Calls of tools in the formats of different models."""

from __future__ import annotations

import pytest

from rlctl.envs.tools import FORMATS, BrokenCallError, Call, read_calls, refusal, without_call

ADD = [Call("add", {"a": 2, "b": 3})]
BAR = "\uff5c"
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 2, "b": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}}]',
    "deepseek": f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>add\n```json\n"
    f'{{"a": 2, "b": 3}}\n```<{BAR}tool▁call▁end{BAR}>',
    "gpt-oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}',
    "qwen3-coder": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "gemma4": "<|tool_call>call:add{a:2,b:3}<tool_call|><|tool_response>",
    "pythonic": "[add(a=2, b=3)]",
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_is_read(form: str) -> None:
    assert read_calls(WRITTEN[form], form) == ADD
    assert read_calls("There is nothing to call.", form) == []


def test_other_ways_of_writing_a_call_are_read() -> None:
    assert read_calls(f"I think.\n{WRITTEN['hermes']}\n{WRITTEN['hermes']}", "hermes") == ADD * 2
    assert read_calls(WRITTEN["hermes"].removesuffix("\n</tool_call>"), "hermes") == ADD  # a stop text may end it
    assert read_calls(f"<|python_tag|>{WRITTEN['llama']}", "llama") == ADD
    assert read_calls('[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}', "mistral") == ADD
    own = f'<{BAR}tool▁call▁begin{BAR}>add<{BAR}tool▁sep{BAR}>{{"a": 2, "b": 3}}<{BAR}tool▁call▁end{BAR}>'
    assert read_calls(own, "deepseek") == ADD
    text = WRITTEN["qwen3-coder"].replace("\n2\n", "\ntwo words\n")
    assert read_calls(text, "qwen3-coder") == [Call("add", {"a": "two words", "b": 3})]
    assert read_calls("[add(a=2, b=3), add(a=2, b=3)]", "pythonic") == ADD * 2
    text = '<|tool_call>call:add{a:[true,{b:null}],c:<|"|>x: "}", {d:1}<|"|>}<tool_call|>'
    assert read_calls(text, "gemma4") == [Call("add", {"a": [True, {"b": None}], "c": 'x: "}", {d:1}'})]


def test_a_thought_about_a_call_is_none() -> None:
    thought = f"<think>I could {WRITTEN['hermes']}.</think>\n"
    assert read_calls(f"{thought}There is nothing to call.", "hermes") == []
    assert read_calls(f"{thought}{WRITTEN['hermes']}", "hermes") == ADD
    assert without_call(f"{thought}Now {WRITTEN['hermes']}", "hermes") == f"{thought}Now "


def test_an_argument_that_may_be_absent_may_be_null() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer", "nullable": True}}
    schemas = {"add": {"parameters": {"type": "object", "properties": properties, "required": ["a", "b"]}}}
    assert refusal(Call("add", {"a": 1, "b": None}), schemas) is None
    assert refusal(Call("add", {"a": None, "b": 1}), schemas) is not None
    assert refusal(Call("add", {"a": 1, "b": "x"}), schemas) is not None


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 2,\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"a": 2}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": [2]}\n</tool_call>'),
        ("llama", '{"name": "add", "parameters": {"a": 2'),
        ("pythonic", "[add(a=open('/etc/passwd'))]"),
        ("pythonic", "[add(2, 3)]"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_from_a_text(form: str, text: str) -> None:
    with pytest.raises(BrokenCallError):
        read_calls(text, form)
