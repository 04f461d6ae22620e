"""Calls of tools in the formats of different models."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from rlctl.environments.tools import FORMATS, Call, format_of, read_calls, refusal, typed, without_call
from support.chat_formats import CALLS, SPECIAL, write_of_formats

ADD = [Call("add", {"a": 2, "b": 3})]
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TEXT: dict[str, Any] = {"type": "string"}
SEND = {
    "name": "send_it",
    "description": "Send.",
    "parameters": {
        "type": "object",
        "properties": {
            "text": TEXT,
            "code": TEXT,
            "urgent": {"type": "boolean"},
            "number": {"type": "integer"},
            "share": {"type": "number"},
            "places": {"type": "array", "items": {"type": "integer"}},
            "words": {"type": "array", "items": TEXT},
            "options": {"type": "object"},
            "note": {"type": "string", "nullable": True},
            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "unit": {"type": "string", "enum": ["1", "2"]},
        },
        "required": [],
    },
}
SCHEMAS = {"send_it": SEND}
GIVEN: dict[str, dict[str, Any]] = {
    "words": {"text": "hello", "code": "A1"},
    "a number as text": {"text": "42", "code": "01234"},
    "a boolean as text": {"text": "true", "code": "False"},
    "null as text": {"text": "null", "code": "None"},
    "JSON as text": {"text": '{"a": [1]}', "code": "[1, 2]"},
    "brackets": {"text": "see [1] } and {", "code": "1; 2"},
    "quotes": {"text": "say \"x\" and 'y'", "code": "a\\b \\n"},
    "lines": {"text": "def f(x):\n    return [x]\n", "code": "  two  "},
    "no text": {"text": "", "code": "é 漢"},
    "tags": {"text": "<b>&amp;</b> 1 < 2"},
    "the end of a thought": {"text": "</think> and [/THINK]"},
    "other calls": {"text": "<tool_call> and </tool_call>"},
    "values": {"urgent": True, "number": -7, "share": 2.5, "either": None},
    "more values": {"urgent": False, "number": 12345678901234567890, "share": 3, "note": None, "unit": "2"},
    "lists": {"places": [1, 2, 3], "words": ["a", "b [c]", "7"]},
    "objects": {"options": {"a": [1, {"b": None}], "c": "x"}, "places": []},
    "nothing": {},
}
FLAT = {name: one for name, one in GIVEN.items() if name not in ("lists", "objects")}
"""Arguments that the short template of Gemma 4 can write."""


def rendered(template: str, *messages: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template(conversations=[list(messages)], chat_template=template)[0][0]


def answer(template: str, *arguments: dict[str, Any]) -> str:
    """Return what a template writes for an answer that calls the tool with each of `arguments`."""
    calls = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": "send_it", "arguments": one}}
        for i, one in enumerate(arguments)
    ]
    written = rendered(template, {"role": "assistant", "content": "", "tool_calls": calls})
    text = written.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    return text.removesuffix("<|call|>")  # the token that ends the turn is no part of its text


def calls_in(text: str, form: str) -> list[Call]:
    return [typed(one, SCHEMAS) for one in read_calls(text, form)]


@pytest.mark.parametrize("family", CALLS)
def test_what_a_template_writes_is_read_back(family: str) -> None:
    form = family.split()[0]
    for name, arguments in (FLAT if form == "gemma4" else GIVEN).items():
        for text in (answer(CALLS[family], arguments), answer(CALLS[family], arguments, {"number": 1})):
            found = calls_in(text, form)
            assert found[:1] == [Call("send_it", arguments)], (name, text)
            assert found[1:] in ([], [Call("send_it", {"number": 1})]), (name, text)
            assert [refusal(one, SCHEMAS) for one in found] == [None] * len(found), (name, text)
    assert read_calls("There is nothing to call: {1}, [2] and <3>.", form) == []
    assert without_call("I send. " + answer(CALLS[family], {}), form).strip() in (
        "I send.",
        "I send. <|start|>assistant",
    )


def test_all_formats_are_tried() -> None:
    from rlctl.settings.rewards import EnvironmentConfig

    assert {family.split()[0] for family in CALLS} == set(FORMATS)
    for form in FORMATS:
        EnvironmentConfig(tool_format=form)  # pyright: ignore[reportArgumentType] - as a name of the configuration


@pytest.mark.parametrize("family", CALLS)
def test_the_format_of_a_template_is_found(family: str) -> None:
    def render(messages: Any) -> str:
        return rendered(CALLS[family], *messages)

    assert format_of(render, ["<|im_end|>", *SPECIAL]) == family.split()[0]


@pytest.mark.parametrize(
    ("told", "form"),
    [
        ("Write a JSON object within <tool_call></tool_call> tags.", "hermes"),  # SmolLM3
        ("Respond only with <|tool_call|> followed by a JSON list.", "granite"),
        ('Write calls as functools[{"name": ...}].', "phi4"),
        ("Call what you like.", None),
    ],
)
def test_a_template_that_writes_no_calls_may_tell_of_them(told: str, form: str | None) -> None:
    assert format_of(lambda messages: told + "".join(one["content"] for one in messages), []) == form


VLLM = {
    "hermes": "hermes", "llama": "llama3_json", "mistral of lists": "mistral", "deepseek": "deepseek_v3",
    "deepseek-v3.2": "deepseek_v32", "qwen3-coder": "qwen3_coder", "glm": "glm45", "kimi-k2": "kimi_k2",
    "minimax-m2": "minimax_m2", "seed-oss": "seed_oss", "gemma4": "gemma4", "granite": "granite",
}  # fmt: skip
"""vLLM's parsers; of Mistral's it takes only the form for which the tokenizer has no `[ARGS]`."""
TO_READ = {name: GIVEN[name] for name in GIVEN if name not in ("the end of a thought", "other calls", "lines", "lists")}
"""Arguments that vLLM reads as they are written."""


def test_vllm_reads_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    tags = r"</?[\w:]*tool_calls?>|<[|\uff5c][\w\u2581]+[|\uff5c]>"
    marks = {mark for template in CALLS.values() for mark in re.findall(tags, template)}
    write_of_formats(tmp_path, (*SPECIAL, "[TOOL_CALLS]", "<|python_tag|>", *sorted(marks.difference(SPECIAL))))
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    properties = {**SEND["parameters"]["properties"], "note": {"type": ["string", "null"]}}
    tool = {"type": "function", "function": {**SEND, "parameters": {**SEND["parameters"], "properties": properties}}}
    asked = {"messages": [{"role": "user", "content": "x"}], "model": "m", "tools": [tool], "tool_choice": "auto"}
    request: Any = ChatCompletionRequest.model_validate(asked)
    compared = 0
    for family, parser in VLLM.items():
        for name, arguments in TO_READ.items():
            in_python = family in ("qwen3-coder", "seed-oss") and None in arguments.values()
            if in_python or (name == "objects" and family in ("gemma4", "seed-oss")):
                continue  # Python's None and objects, which vLLM takes for texts
            text = answer(CALLS[family], arguments)
            found = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools).extract_tool_calls(
                text, request
            )
            theirs = [Call(one.function.name, json.loads(one.function.arguments)) for one in found.tool_calls]
            assert calls_in(text, family.split()[0]) == theirs, (family, name, text)
            compared += 1
    assert compared > 130


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False),
        ("007", {"type": "integer"}, 7),
        ("1e3", {"type": "number"}, 1000.0),
        ("NaN", {"type": "number"}, "NaN"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("42", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 42),
        ('"42"', {"type": "string"}, '"42"'),
        ("two", {"type": "integer"}, "two"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("02139", {"description": "A zip code."}, "02139"),
        ("None", {}, "None"),
        ("TRUE", {}, "TRUE"),
    ],
)
def test_the_schema_says_what_an_unquoted_value_is(text: str, schema: dict[str, Any], value: Any) -> None:
    """As vLLM's `coerce_to_schema_type` does."""
    from vllm.tool_parsers.utils import coerce_to_schema_type, extract_types_from_schema

    schemas = {"set_it": {"parameters": {"properties": {"x": schema}}}}
    called = f"<tool_call>set_it\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    (found,) = (typed(one, schemas).arguments["x"] for one in read_calls(called, "glm"))
    theirs = coerce_to_schema_type(text, extract_types_from_schema(schema))
    assert (found, type(found)) == (value, type(value))
    assert found == theirs


def test_other_ways_of_writing_a_call_are_read() -> None:
    def adds(text: str, form: str) -> bool:
        return [typed(one, {}) for one in read_calls(text, form)] == ADD

    named = '"name": "add"'
    assert read_calls(f"I think.\n{HERMES}\n{HERMES}", "hermes") == ADD * 2
    assert adds(HERMES.removesuffix("\n</tool_call>"), "hermes")  # a stop text may end it
    for around in ("{}", "<|python_tag|>{}", "I call {}.", "<|python_start|>{}<|python_end|>", "{{1}} {} or so"):
        assert adds(around.replace("{}", "{" + named + ', "parameters": {"a": 2, "b": 3}}'), "llama"), around
    assert adds('{"parameters": {"a": 2, "b": 3}, ' + named + "}", "llama")
    both = '{"name": "add", "parameters": {"a": 2, "b": 3}}'
    assert read_calls(f"{both}; {both}", "llama") == ADD * 2
    assert read_calls('{"name": "Ada", "born": 1815}', "llama") == []
    assert adds('[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}', "mistral")
    assert adds('[TOOL_CALLS]add{"a": 2, "b": 3}', "mistral")
    assert adds('[TOOL_CALLS]{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 3}"}', "mistral")
    assert adds('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}', "gpt-oss")
    assert read_calls("[add(a=2, b=3), add(a=2, b=3)]", "pythonic") == ADD * 2
    assert read_calls("[math.add(a=(1, -2), b=null)]", "pythonic") == [Call("math.add", {"a": [1, -2], "b": None})]
    text = '<|tool_call>call:add{a:[true,{b:null}],c:<|"|>x: "}", {d:1}<|"|>}<tool_call|>'
    assert read_calls(text, "gemma4") == [Call("add", {"a": [True, {"b": None}], "c": 'x: "}", {d:1}'})]


def test_a_thought_about_a_call_is_none() -> None:
    for thought in (f"<think>I could {HERMES}.</think>\n", f"I could {HERMES}.</think>\n"):
        assert read_calls(f"{thought}There is nothing to call.", "hermes") == []
        assert read_calls(f"{thought}{HERMES}", "hermes") == ADD
        assert without_call(f"{thought}Now {HERMES}", "hermes") == f"{thought}Now "
    assert read_calls(f"I begin with <tool_call> and then</think>{HERMES}", "hermes") == ADD


def test_an_argument_that_may_be_absent_may_be_null() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer", "nullable": True}}
    schemas = {"add": {"parameters": {"type": "object", "properties": properties, "required": ["a", "b"]}}}
    assert refusal(Call("add", {"a": 1, "b": None}), schemas) is None
    assert refusal(Call("add", {"a": None, "b": 1}), schemas) is not None
    assert refusal(Call("add", {"a": 1, "b": "x"}), schemas) is not None


BROKEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2,\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 2',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 2',
    "deepseek": "<\uff5ctool▁call▁begin\uff5c>add",
    "deepseek-v3.2": '<\uff5cDSML\uff5cinvoke name="add">\n<\uff5cDSML\uff5cparameter name="a">2\n',
    "gpt-oss": 'to=functions.add<|message|>{"a": 2',
    "qwen3-coder": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</tool_call>",
    "kimi-k2": "<|tool_call_begin|>functions.add:0{}<|tool_call_end|>",
    "minimax-m2": '<invoke name="add"><parameter name="a">2</invoke>',
    "gemma4": "<|tool_call>call:add{a:2",
    "pythonic": "[add(a=open('/etc/passwd'))]",
}


@pytest.mark.parametrize("form", BROKEN)
def test_a_call_that_cannot_be_read_is_told_from_a_text_and_from_a_good_call(form: str) -> None:
    (found,) = read_calls(BROKEN[form], form)
    assert found.broken
    assert (refusal(found, SCHEMAS) or "").startswith("the call cannot be read: ")
    good = answer(CALLS[form], {"number": 1})
    ended = {"pythonic": good.removesuffix("]<|python_end|>") + ", ", "gpt-oss": f"{good}<|call|>"}.get(form, good)
    both = ended + BROKEN[form].removeprefix("[" if form == "pythonic" else "")
    first, *others = calls_in(both, form)
    assert first == Call("send_it", {"number": 1})
    assert others
    assert all(one.broken for one in others)


@pytest.mark.parametrize("family", CALLS)
def test_a_call_that_a_limit_has_cut_is_not_made_with_the_arguments_so_far(family: str) -> None:
    form, whole = family.split()[0], {"number": 1, "urgent": True}
    text = answer(CALLS[family], whole)
    for end in range(len(text)):
        calls = [typed(one, SCHEMAS) for one in read_calls(text[:end], form, cut=True)]
        assert all(one.broken or one.arguments == whole for one in calls), text[:end]
    assert calls_in(text, form) == [Call("send_it", whole)]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"arguments": {"a": 2}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": [2]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {}}}\n</tool_call>'),
        ("mistral", "[TOOL_CALLS]"),
        ("phi4", 'functools["add"]'),
        ("pythonic", "[add(2, 3)]"),
        ("qwen3-coder", "<function=add>\nwith a = 2\n</function>"),
    ],
)
def test_a_call_without_a_name_or_arguments_is_broken(form: str, text: str) -> None:
    assert all(one.broken for one in read_calls(text, form))
    assert read_calls(text, form)
