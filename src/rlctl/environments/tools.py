"""Tools: functions for the model, call formats of templates, and call results. A call is broken if it cannot be parsed,
names no tool, or violates the tool's schema. The model reads the error, as with a tool's exception."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlctl.environments.interface import Message
from rlctl.errors import InputError, first_line

INSTRUCTIONS = """You can call these functions:
{schemas}
To call one, write its name and its arguments as JSON, and stop there:
<tool_call>
{{"name": "<name>", "arguments": {{"<argument>": <value>}}}}
</tool_call>"""
"""System message for a template that has no place for tools."""
CALL = "<tool_call>\n{}\n</tool_call>"
"""A call as INSTRUCTIONS describes it."""


@dataclass(frozen=True)
class Call:
    """One tool call of the model."""

    name: str
    arguments: dict[str, Any]
    broken: str | None = None
    """Why the call is unreadable; None: it is readable."""


class BrokenCallError(Exception):
    """The text of a call is unreadable."""


class Unquoted(str):
    """The value of an argument in a format without quotes. `typed` reads it with the tool's schema."""


Reader = Callable[[str, re.Match[str]], tuple[list[Call], int]]
"""Read the calls after an opening; return them and the end position. Raises one of UNREADABLE."""
UNREADABLE = (
    BrokenCallError, ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A way of writing calls."""

    opening: str
    """Regular expression that begins a call."""
    read: Reader
    marked: bool = True
    """Whether only calls have this opening."""


def _call(name: Any, arguments: Any) -> Call:
    if isinstance(name, str) and name.strip() and isinstance(arguments, dict):
        return Call(name.strip(), arguments)
    return Call(name if isinstance(name, str) else "", {}, "it has no name, or no arguments")


def _decoded(text: str, start: int) -> tuple[Any, int]:
    return json.JSONDecoder().raw_decode(text, _matched(r"\s*", text, start).end())


def _matched(pattern: str, text: str, start: int) -> re.Match[str]:
    if match := re.compile(pattern, re.DOTALL).match(text, start):
        return match
    rest = text[start:].removesuffix(CUT)
    raise BrokenCallError(f"it goes on with {rest[:20]!r}" if rest.strip() else "it has no end")


def _from_json(value: Any) -> Call:
    try:
        arguments = next((value[key] for key in ("arguments", "parameters") if key in value), {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return _call(value.get("name", value.get("tool_name")), arguments)
    except UNREADABLE as error:
        return Call("", {}, first_line(error))


def _json_calls(closing: str = "", *, lines: bool = False) -> Reader:
    """Return the reader of a JSON object or list, or with `lines` of several."""

    def read(text: str, opening: re.Match[str]) -> tuple[list[Call], int]:
        value, end = _decoded(text, opening.end())
        values = value if isinstance(value, list) else [value]
        while lines and re.compile(r"\s*\{").match(text, end):
            value, end = _decoded(text, end)
            values.append(value)
        return [_from_json(item) for item in values], _matched(closing, text, end).end()

    return read


def _named_calls(head: str, closing: str = "") -> Reader:
    def read(text: str, opening: re.Match[str]) -> tuple[list[Call], int]:
        match = _matched(head, text, opening.end())
        arguments, end = _decoded(text, match.end())
        return [_call(match["name"], arguments)], _matched(closing, text, end).end()

    return read


def _mistral_calls(text: str, opening: re.Match[str]) -> tuple[list[Call], int]:
    """Read a JSON list, or a name and arguments. Newer models write an id between these."""
    by_name = _named_calls(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?")
    is_list = re.compile(r"\s*[\[{]").match(text, opening.end())
    return (_json_calls() if is_list else by_name)(text, opening)


def _tagged_calls(head: str, argument: str, closing: str) -> Reader:
    argument_pattern = re.compile(argument, re.DOTALL)

    def read(text: str, opening: re.Match[str]) -> tuple[list[Call], int]:
        name = _matched(head, text, opening.end())
        arguments, end = {}, name.end()
        while match := argument_pattern.match(text, end):
            kind = str if match.groupdict().get("string") == "true" else Unquoted
            arguments[match["key"].strip()] = kind(match["value"])
            end = match.end()
        return [_call(name["name"], arguments)], _matched(closing, text, end).end()

    return read


def _invoked(prefix: str, wrapper: str) -> Format:
    return Format(
        rf'(?:<{wrapper}>\s*)?<{prefix}invoke name="',
        _tagged_calls(
            r'(?P<name>[^"<]+)"\s*>',
            rf'\s*<{prefix}parameter name="(?P<key>[^"<]+)"(?:\s+string="(?P<string>true|false)")?\s*>'
            rf"(?P<value>(?:(?!<{prefix}parameter name=).)*?)</{prefix}parameter>",
            rf"\s*(?:</{prefix}invoke>|\Z)",
        ),
    )


def _llama_calls(text: str, opening: re.Match[str]) -> tuple[list[Call], int]:
    try:
        value, end = _decoded(text, opening.start())
    except ValueError:
        if re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"').match(text, opening.start()):
            raise
        return [], opening.end()
    called = ("name" in value and value.keys() & {"arguments", "parameters"}) or value.get("type") == "function"
    return [_from_json(value)] if called else [], end


class _JsonNames(ast.NodeTransformer):
    """Maps `null`, `true` and `false` as in JSON."""

    NAMES: ClassVar = {"null": None, "true": True, "false": False}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.NAMES[node.id]) if node.id in self.NAMES else node


def _python_calls(text: str, opening: re.Match[str]) -> tuple[list[Call], int]:
    """Read a list of calls in Python, `[add(a=2, b=3)]`, without running it."""
    ended = re.compile(r"<\|(?:python_end|tool_call_end)\|>|\Z").search(text, opening.end())
    assert ended is not None  # a text has an end
    tree = ast.parse(text[opening.end() : ended.start()].strip().removesuffix(CUT), mode="eval").body
    if not isinstance(tree, ast.List):
        raise BrokenCallError("it is not a list of calls")
    return [_python_call(element) for element in tree.elts], ended.end()


def _python_call(tree: ast.expr) -> Call:
    name = ast.unparse(tree.func) if isinstance(tree, ast.Call) else ""
    if not isinstance(tree, ast.Call) or tree.args or not re.fullmatch(r"[\w.]+", name):
        return Call(name, {}, "each call needs a name and named arguments")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in tree.keywords}
        return Call(name, json.loads(json.dumps(arguments)))  # tuples are lists, as in JSON
    except UNREADABLE as error:
        return Call(name, {}, first_line(error))


def _gemma_calls(text: str, opening: re.Match[str]) -> tuple[list[Call], int]:
    name = _matched(r"[\w.-]+", text, opening.end())
    written, end = "", name.end()
    for number, part in enumerate(text[name.end() :].split('<|"|>')):  # every second part is a text
        code, ended, _ = ("", "", "") if number % 2 else part.partition("<tool_call|>")
        written += json.dumps(part) if number % 2 else _gemma_json(code)
        end += len(code + ended if ended else part) + len('<|"|>') * (number > 0)
        if ended:
            break
    return [_call(name[0], json.loads(written))], end


def _gemma_json(code: str) -> str:
    """Return the part of a call between texts as JSON: quote names, and write null for None."""
    quoted = re.sub(r"([{,]\s*)([\w.-]+)(\s*:)", r'\1"\2"\3', code)
    return re.sub(r"([:,\[]\s*)None\b", r"\1null", quoted)


DEEPSEEK = "<\uff5ctool▁{}\uff5c>"
"""The form of DeepSeek's special tokens, with fullwidth bars."""
PARAMETERS = r"\s*<parameter=(?P<key>[^>]+)>{blank}(?P<value>(?:(?!<parameter=).)*?){blank}</parameter>"
FUNCTION_ENDS = r"\s*(?:</function>|\Z)"
FORMATS: dict[str, Format] = {
    "mistral": Format(r"\[TOOL_CALLS\]", _mistral_calls),
    "deepseek": Format(
        rf"(?:{DEEPSEEK.format('calls▁begin')}\s*)?{DEEPSEEK.format('call▁begin')}",
        _named_calls(
            rf"(?:function{DEEPSEEK.format('sep')})?(?P<name>[\w.-]+)(?:{DEEPSEEK.format('sep')}|\s*```json)",
            rf"\s*(?:```)?\s*(?:{DEEPSEEK.format('call▁end')}|\Z)",
        ),
    ),
    "deepseek-v3.2": _invoked("\uff5cDSML\uff5c", "\uff5cDSML\uff5c(?:function_calls|tool_calls)"),
    "gpt-oss": Format(
        r"to=functions\.",
        _named_calls(r"(?P<name>[\w.-]+)[^{]*?<\|message\|>", r"\s*(?:<\|call\|>|<\|end\|>|\Z)"),
    ),
    "kimi-k2": Format(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
        _named_calls(
            r"\s*(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            r"\s*(?:<\|tool_call_end\|>|\Z)",
        ),
    ),
    "minimax-m1": Format("<tool_calls>", _json_calls(r"\s*(?:</tool_calls>|\Z)", lines=True)),
    "minimax-m2": _invoked("", "minimax:tool_call"),
    "seed-oss": Format(
        r"<seed:tool_call>\s*<function=",
        _tagged_calls(r"(?P<name>[^>\n]+)>", PARAMETERS.format(blank=""), FUNCTION_ENDS),
    ),
    "qwen3-coder": Format(
        r"(?:<tool_call>\s*)?<function=",
        _tagged_calls(r"(?P<name>[^>\n]+)>", PARAMETERS.format(blank=r"\n?"), FUNCTION_ENDS),
    ),
    "hermes": Format("<tool_call>", _json_calls(r"\s*(?:</tool_call>|\Z)")),
    "glm": Format(
        "<tool_call>",
        _tagged_calls(
            r"\s*(?P<name>[^<{\s]+)",
            r"\s*<arg_key>(?P<key>[^<]+)</arg_key>\s*"
            r"<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>",
            r"\s*(?:</tool_call>|\Z)",
        ),
    ),
    "gemma4": Format(r"<\|tool_call>call:", _gemma_calls),
    "granite": Format(r"<\|tool_call\|>", _json_calls(r"(?!\s*<\|/tool_call\|>)")),
    "phi4": Format(r"functools(?=\[)|<\|tool_call\|>", _json_calls(r"(?:\s*<\|/tool_call\|>)?")),
    "nemotron-v2": Format("<TOOLCALL>", _json_calls(r"\s*(?:</TOOLCALL>|\Z)")),
    "cohere": Format(r"<\|START_ACTION\|>", _json_calls(r"\s*(?:<\|END_ACTION\|>|\Z)")),
    "pythonic": Format(
        r"(?:<\|(?:python_start|tool_call_start)\|>|\A)\s*(?=\[\s*[A-Za-z_][\w.]*\()", _python_calls, marked=False
    ),
    "llama": Format(r"\{", _llama_calls, marked=False),
}
"""Call formats by name; the first that reads a template's call is used. vLLM's parsers cost 9 s and 530 MB to import,
misread some calls of published templates in 0.32 (Mistral Small 3.2's `[CALL_ID]`, lists of Seed-OSS, texts with
`</think>` or `<tool_call>`), and hide unreadable calls. The tests compare with them."""
CUT = "<\0"
"""Stands for the rest of a turn that a limit cut, so that the end of the text closes no call or name."""
THOUGHT_BEGINS = re.compile(r"\s*(?:<(?:\w+:)?think>|\[THINK\]|<\|channel>)")
THOUGHT_ENDS = re.compile(r"</(?:\w+:)?think>|\[/THINK\]|<channel\|>")


def _scanned(text: str, form: str) -> Iterator[tuple[int, int, list[Call]]]:
    place, opening_pattern = 0, re.compile(FORMATS[form].opening)
    while opening := opening_pattern.search(text, place):
        try:
            calls, end = FORMATS[form].read(text, opening)
        except UNREADABLE as error:
            calls, end = [Call("", {}, first_line(error))], opening.end()
        if calls:
            yield opening.start(), end, calls
        place = max(end, opening.start() + 1)


def _parted(text: str, form: str) -> tuple[str, str]:
    """Return a turn's thought with its end, and the answer with calls. An end of thought inside a call's argument is
    text."""
    whole = () if THOUGHT_BEGINS.match(text) else _scanned(text, form)
    spans = [(start, end) for start, end, calls in whole if not any(call.broken for call in calls)]
    for ended in THOUGHT_ENDS.finditer(text):
        if not any(start <= ended.start() < end for start, end in spans):
            return text[: ended.end()], text[ended.end() :]
    return "", text


def read_calls(text: str, form: str, *, cut: bool = False) -> list[Call]:
    """Return the calls of a turn. `cut`: a limit ended it, so a call without a closing mark is broken."""
    _, answer = _parted(text + CUT * cut, form)
    return [call for _, _, calls in _scanned(answer, form) for call in calls]


def without_call(text: str, form: str) -> str:
    thought, answer = _parted(text, form)
    return thought + answer[: next((start for start, _, _ in _scanned(answer, form)), None)]


def typed(call: Call, schemas: Mapping[str, Mapping[str, Any]]) -> Call:
    """Return a call with arguments in the types of the tool's schema, which formats without quotes need."""
    schema = schemas.get(call.name, {}).get("parameters", {})
    properties = schema.get("properties", {})
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    values = {
        name: _typed(value, {**properties.get(name, {}), **definitions}) if isinstance(value, Unquoted) else value
        for name, value in call.arguments.items()
    }
    return replace(call, arguments=values)


WORDS = {"true": True, "1": True, "false": False, "0": False, "null": None, "none": None}
TYPES = {"type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"}
"""Keys of a schema that say what a value is. Without them `007` and `None` stay texts."""


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the first reading of a text that its schema allows: JSON, Python literal, number, word or text; otherwise
    the first, for the message."""
    readings = []
    loose = (ast.literal_eval, int, lambda word: WORDS[word.lower()]) if TYPES & schema.keys() else ()
    for read in (json.loads, *loose):
        with contextlib.suppress(*UNREADABLE):
            readings.append(json.loads(json.dumps(read(text.strip()), allow_nan=False)))
    readings = [*(value for value in readings if not isinstance(value, str)), str(text)]
    return next((value for value in readings if _allows(schema, value)), readings[0])


def _allows(schema: Mapping[str, Any], value: Any) -> bool:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import UnknownType
    from referencing.exceptions import Unresolvable

    if value is None and schema.get("nullable"):
        return True
    try:
        return Draft202012Validator(schema).is_valid(value)
    except (UnknownType, Unresolvable, *UNREADABLE):  # of an invalid schema
        return False


def schema_of(function: Callable[..., Any], tool_name: str) -> dict[str, Any]:
    """Return a tool's JSON schema; `named` names it in messages. Raises InputError for missing hints or docstring."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError) as error:
        raise InputError(
            f"Tool {tool_name} has no schema: {first_line(error).rstrip('.!')}.",
            "A tool has a type hint for each argument, and a docstring with an `Args:` section that describes each.",
        ) from error
    schema["function"].pop("return", None)  # call formats have no place for it
    return schema


def refusal(call: Call, schemas: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the reason that a call cannot be made, or None."""
    import jsonschema

    if call.broken:
        return f"the call cannot be read: {call.broken}"
    if call.name not in schemas:
        return f"there is no function {call.name!r}; the functions are {', '.join(schemas)}"
    call = typed(call, schemas)
    try:
        schema = {"additionalProperties": False, **schemas[call.name]["parameters"]}
        absent = {name for name in schema["properties"] if call.arguments.get(name) is None}
        nulls = {name: {} for name in absent if schema["properties"][name].get("nullable")}
        jsonschema.validate(call.arguments, schema | {"properties": schema["properties"] | nulls})
    except jsonschema.ValidationError as error:
        return f"the arguments of {call.name} are wrong: {error.message}"
    return None


def listed(schemas: Mapping[str, Mapping[str, Any]]) -> str:
    return "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas.values())


def as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


SAMPLE = Call("look_up", {"number": 7})
SAMPLE_SCHEMA = {"look_up": {"parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}}}


def format_of(render: Callable[[Sequence[Message]], str], ends: Sequence[str]) -> str | None:
    """Return the format of a template from a rendered call, or from its instructions; None: unknown. `ends`: texts of
    special tokens."""
    user = {"role": "user", "content": "?"}
    failure, visible = None, False
    for arguments in (SAMPLE.arguments, json.dumps(SAMPLE.arguments)):  # some templates accept only text
        function = {"name": SAMPLE.name, "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        try:
            written = render([user, {"role": "assistant", "content": "", "tool_calls": [call]}])
        except InputError as error:
            failure = failure or error
            continue
        visible = visible or SAMPLE.name in written
        if name := _format_read(written, render([user, {"role": "assistant", "content": "#"}]), ends):
            return name
    if visible:  # in an unknown format
        return None
    instructions = render([user])
    marked = (name for name, form in FORMATS.items() if form.marked and re.search(form.opening, instructions))
    name = next(marked, None)
    if name is None and failure is not None:
        raise failure
    return name


def _format_read(written: str, answered: str, ends: Sequence[str]) -> str | None:
    begin = next((i for i, (a, b) in enumerate(zip(written, answered, strict=False)) if a != b), 0)
    text = written[max(0, begin - 1) :] if written[begin - 1 : begin] in ("<", "[", "{") else written[begin:]
    texts = [text]
    while ended := next((end for end in ends if texts[-1].rstrip().endswith(end)), None):
        texts.append(texts[-1].rstrip().removesuffix(ended))
    for name, form in FORMATS.items():
        for text in texts:
            calls = [typed(call, SAMPLE_SCHEMA) for call in read_calls(text, name)]
            if calls == [SAMPLE] and (form.marked or not without_call(text, name).strip()):
                return name
    return None
