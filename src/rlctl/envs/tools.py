"""Tools: functions that the model may call, the formats in which models of different templates write a call, and what a
call comes to.

A call is broken where its text cannot be parsed, names no tool, or has arguments that the tool's schema refuses. The
model is told so, as it is told what a tool raised; neither ends an episode.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.data.turns import THOUGHT
from rlctl.envs.environment import Message
from rlctl.errors import InputError, first_line

INSTRUCTIONS = """You can call these functions:
{schemas}
To call one, write its name and its arguments as JSON, and stop there:
<tool_call>
{{"name": "<name>", "arguments": {{"<argument>": <value>}}}}
</tool_call>"""
"""System message for a template that has no place for tools."""


@dataclass(frozen=True)
class Call:
    """One call that the model wrote."""

    name: str
    arguments: dict[str, Any]


class BrokenCallError(Exception):
    """The text of a call cannot be read."""


@dataclass(frozen=True)
class Format:
    """A way of writing calls."""

    opening: str
    """Regular expression of what begins a call: where it is found, the text is meant as one."""
    calls: Callable[[str], list[Call]]
    """The calls in a text. Raises BrokenCallError, or what the parser of the arguments raises."""


def _json_calls(pattern: str) -> Callable[[str], list[Call]]:
    """Return the parser of calls that `pattern` finds: as one JSON value (`call`), or as `name` and `arguments`."""

    def calls(text: str) -> list[Call]:
        found: list[Call] = []
        for match in re.finditer(pattern, text, re.DOTALL):
            parts = match.groupdict()
            value = json.loads(parts["call"]) if "call" in parts else parts
            for one in value if isinstance(value, list) else [value]:
                arguments = one.get("arguments", one.get("parameters", {}))
                found.append(Call(one["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
        return found

    return calls


def _tagged_calls(call: str, argument: str) -> Callable[[str], list[Call]]:
    """Return the parser of calls whose arguments have tags of their own. A value that is not JSON is a text."""

    def calls(text: str) -> list[Call]:
        return [
            Call(match["name"].strip(), {one["key"].strip(): _value(one["value"]) for one in _all(argument, match[0])})
            for match in _all(call, text)
        ]

    return calls


def _all(pattern: str, text: str) -> Iterator[re.Match[str]]:
    return re.finditer(pattern, text, re.DOTALL)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _python_calls(text: str) -> list[Call]:
    """Return the calls of a Python list, `[add(a=2, b=3)]`; nothing of it is run."""
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List):
        raise BrokenCallError("it is not a list of calls")
    found = []
    for one in tree.elts:
        if not isinstance(one, ast.Call) or not isinstance(one.func, ast.Name) or one.args:
            raise BrokenCallError("each call needs a name and named arguments")
        found.append(Call(one.func.id, {str(given.arg): ast.literal_eval(given.value) for given in one.keywords}))
    return found


def _gemma_calls(text: str) -> list[Call]:
    """Return the calls of Gemma 4: `call:add{a:2,note:<|"|>a text<|"|>}`."""
    found = []
    for match in _all(r"<\|tool_call>call:(?P<name>[\w.-]+)(?P<given>\{.*?\})\s*(?:<tool_call\|>|\Z)", text):
        parts = match["given"].split('<|"|>')  # every second one is a text
        parts[::2] = [re.sub(r"([{,]\s*)([\w.-]+)(\s*:)", r'\1"\2"\3', part) for part in parts[::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        found.append(Call(match["name"], json.loads("".join(parts))))
    return found


DEEPSEEK = "<\uff5ctool▁{}\uff5c>"
"""The form of its special tokens, with fullwidth bars."""
FORMATS: dict[str, Format] = {
    "hermes": Format("<tool_call>", _json_calls(r"<tool_call>\s*(?P<call>\{.*?\})\s*(?:</tool_call>|\Z)")),
    "llama": Format(
        r"\A\s*(?:<\|python_tag\|>)?\s*\{\s*\"(?:name|type)\"",
        _json_calls(r"\A\s*(?:<\|python_tag\|>)?\s*(?P<call>\{.*\})\s*\Z"),
    ),
    "mistral": Format(
        r"\[TOOL_CALLS\]",
        lambda text: (
            _json_calls(r"\[TOOL_CALLS\]\s*(?P<call>\[.*\])")(text)
            or _json_calls(r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[ARGS\])?\s*(?P<arguments>\{[^\[]*\})")(text)
        ),
    ),
    "deepseek": Format(
        DEEPSEEK.format("call▁begin"),
        _json_calls(
            DEEPSEEK.format("call▁begin")
            + rf"(?:function{DEEPSEEK.format('sep')})?(?P<name>[\w.-]+)(?:{DEEPSEEK.format('sep')}|\s*```json)\s*"
            + r"(?P<arguments>\{.*?\})\s*(?:```)?\s*"
            + DEEPSEEK.format("call▁end")
        ),
    ),
    "gpt-oss": Format(
        r"to=functions\.", _json_calls(r"to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>(?P<arguments>\{.*?\})\s*\Z")
    ),
    "qwen3-coder": Format(
        "<function=",
        _tagged_calls(
            r"<function=(?P<name>[^>]+)>.*?(?:</function>|\Z)",
            r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>",
        ),
    ),
    "glm": Format(
        "<tool_call>",
        _tagged_calls(
            r"<tool_call>(?P<name>[^<\n]+).*?(?:</tool_call>|\Z)",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
    ),
    "gemma4": Format(r"<\|tool_call>", _gemma_calls),
    "pythonic": Format(r"\A\s*\[\s*\w+\(", _python_calls),
}
"""How models write calls, by the name of the format: the first that reads what a template writes is the template's."""


def read_calls(text: str, form: str) -> list[Call]:
    """Return the calls in a text; none where it is not meant as one. Raises BrokenCallError."""
    text = text.rpartition(THOUGHT)[2]  # a thought about a call is none
    if not re.search(FORMATS[form].opening, text):
        return []
    try:
        found = FORMATS[form].calls(text)
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError) as error:
        raise BrokenCallError(first_line(error)) from error
    if not found or not all(isinstance(one.arguments, dict) and isinstance(one.name, str) for one in found):
        raise BrokenCallError("it has no name, or no arguments")
    return found


def without_call(text: str, form: str) -> str:
    """Return what a text says in front of its calls."""
    thought, ends, answer = text.rpartition(THOUGHT)
    return thought + ends + re.split(FORMATS[form].opening, answer, maxsplit=1)[0]


def schema_of(function: Callable[..., Any], named: str) -> dict[str, Any]:
    """Return the JSON schema of a tool, which `named` names for a message. Raises InputError where its hints or its
    docstring do not say all."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError) as error:
        raise InputError(
            f"Tool {named}: {first_line(error)}",
            "A tool has a type hint for each argument, and a docstring with an `Args:` section that describes each.",
        ) from error
    schema["function"].pop("return", None)  # which the format of calls does not know
    return schema


def refusal(call: Call, schemas: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return why a call cannot be made; None: it can."""
    import jsonschema

    if call.name not in schemas:
        return f"there is no function {call.name!r}; the functions are {', '.join(schemas)}"
    try:
        schema = {"additionalProperties": False, **schemas[call.name]["parameters"]}
        absent = {name for name in schema["properties"] if call.arguments.get(name) is None}
        nulls = {name: {} for name in absent if schema["properties"][name].get("nullable")}
        jsonschema.validate(call.arguments, schema | {"properties": schema["properties"] | nulls})
    except jsonschema.ValidationError as error:
        return f"the arguments of {call.name} are wrong: {error.message}"
    return None


def listed(schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return schemas as a system prompt shows them, one a line."""
    return "\n".join(json.dumps(one["function"], ensure_ascii=False) for one in schemas.values())


def as_text(result: Any) -> str:
    """Return what a tool returned as the model reads it."""
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def format_of(render: Callable[[Sequence[Message]], str], ends: Sequence[str]) -> str | None:
    """Return the format of a template, which `render` renders, by reading the call that it writes; None: it writes no
    call. `ends`: texts of its special tokens."""
    user = {"role": "user", "content": "?"}
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"number": 7}}}
    written = render([user, {"role": "assistant", "content": "", "tool_calls": [call]}])
    answered = render([user, {"role": "assistant", "content": "#"}])
    begin = next((i for i, (a, b) in enumerate(zip(written, answered, strict=False)) if a != b), 0)
    text = written[max(0, begin - 1) :] if written[begin - 1 : begin] in ("<", "[", "{") else written[begin:]
    texts = [text]
    while ended := next((end for end in ends if texts[-1].rstrip().endswith(end)), None):
        texts.append(texts[-1].rstrip().removesuffix(ended))
    for name in FORMATS:
        for text in texts:
            with contextlib.suppress(BrokenCallError):  # it is not this one
                if read_calls(text, name) == [Call("look_up", {"number": 7})]:
                    return name
    return None
