"""Reading prompts from records of files and datasets: their questions, answers, messages and difficulty."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from rlctl.data.image_rows import PART_TYPES, is_refcoco, part_image, with_images
from rlctl.data.image_sources import IMAGES, MARK
from rlctl.data.prompt_rows import Messages, PromptDataset, PromptRow, from_json
from rlctl.data.refcoco import ADDED, refcoco_record
from rlctl.data.templates import ANSWER, PROMPT, missing_column, template_of
from rlctl.errors import InputError, suggest
from rlctl.settings.data import DataConfig

MOST_CHARACTERS = 1_000_000
"""Characters of a prompt beyond which a row is refused: some 250,000 tokens, and seconds for a tokenizer."""
MESSAGES = "messages"
"""Field of chat messages, by the name that most published datasets give it."""
GYM = "responses_create_params"
"""NeMo Gym's field of the model's input."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Message fields of thoughts, for templates that write these before the content."""
GRADED = "reward_model.ground_truth"
"""Reference answer fields of rows with grading information, next to `data_source` and `extra_info`."""
USUAL_NAMES = {
    "--prompt-field": ("question", "problem", "query", "instruction", "input"),
    "--answer-field": ("answer", "solution", "final_answer", "ground_truth", "expected_answer", "target", "label"),
}
"""Common field names of prompts and answers, for suggestions."""
_LIKE_MESSAGES = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:")
_NUMBERS = re.compile(r"(?:(?<!\w)-)?\d+(?:\.\d+)?")  # the level of `level-3` is 3
_FINAL_NUMBER = re.compile(r"[-+]?\$?(?=[.\d])[\d.,/]*\d%?")
OTHER_MEDIA = {"video": "a video", "videos": "videos", "audio": "sound"}


def row_from_record(record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
    """Return the row that a record of a file or dataset makes; InputError naming row and field where it makes none."""
    record = refcoco_record(record, index, where, data)
    require_fields(record, data, where)
    if name := next((name for name in OTHER_MEDIA if record.get(name)), None):  # without it there is no answer
        raise InputError(
            f"{where}: field {name!r} holds {OTHER_MEDIA[name]}, and prompts are texts and images.",
            "rlctl does not train on sound or video. To train on the text, leave that field out.",
        )
    fields = {name: value for name, value in record.items() if name not in (PROMPT, ANSWER)}
    answer = _answer_in(record, data.answer_field)
    answer = _final_number(answer) if data.answer_pattern is None else matched(answer, data)
    template, name = template_of(data), prompt_field_in(record, data.prompt_field)
    if not has_field(record.keys(), data.prompt_field) and template is not None and PROMPT not in template.names:
        return with_images(PromptRow(index, where, template.render(fields, where), answer, fields), record, data)
    value = _asked_in_gym(record[name], where) if name == GYM else value_of(record, name)
    return with_images(PromptRow(index, where, checked_prompt(value, name, where), answer, fields), record, data)


def _answer_in(record: Mapping[str, Any], path: str) -> Any:
    """Return the reference answer in field `path`, or `outer.inner`. Without a configured field and without `answer`,
    rows with `reward_model` have it there."""
    return value_of(record, GRADED if path == ANSWER and record.get(ANSWER) is None else path)


def value_of(record: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field, or of a field of a field with a dot between; None: there is none."""
    if path in record:
        return record[path]
    outer, _, inner = path.partition(".")
    value = record.get(outer)
    return value.get(inner) if inner and isinstance(value, Mapping) else None


def has_field(present: Collection[str], path: str) -> bool:
    """Return whether there is a field of this name, or one that may hold it, with a dot between."""
    return path in present or ("." in path and path.partition(".")[0] in present)


def matched(answer: Any, data: DataConfig) -> Any:
    """Return the part of an answer that `data.answer_pattern` takes out of its text; else the answer as it is."""
    if data.answer_pattern is None or not isinstance(answer, str):
        return answer
    match = re.search(data.answer_pattern, answer, re.DOTALL)
    return (match[1] or "" if match else answer).strip()


def _final_number(answer: Any) -> Any:
    """Return the number after the only `####` of a worked solution, as in GSM8K; any other answer as it is: in Markdown
    the mark begins a heading."""
    solution, mark, number = answer.partition("\n#### ") if isinstance(answer, str) else ("", "", "")
    alone = mark and "####" not in solution + number and _FINAL_NUMBER.fullmatch(number.strip())
    return number.strip() if alone else answer


def decoded_messages(value: Any, field_name: str, where: str) -> Any:
    """Return chat messages from a JSON list in a text; other values unchanged. Raises InputError for other list
    notations."""
    if not isinstance(value, str) or not _LIKE_MESSAGES.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: field {field_name!r} looks like a list of chat messages, but is not JSON ({error}).",
            "Write it with json.dumps, or as a list in a JSON or Parquet file.",
        ) from error


def _asked_in_gym(params: Any, where: str) -> Any:
    try:
        params = from_json(params)
    except ValueError as error:
        raise InputError(f"{where}: the field {GYM!r} is not JSON ({error}).") from error
    turns = params.get("input") if isinstance(params, Mapping) else None
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return turns
    messages = []
    for message in turns:
        if not isinstance(message, Mapping) or "role" not in message:
            continue  # calls of tools have no role
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            content = [part | {"type": "text"} if part.get("type") == "input_text" else part for part in content]
        messages.append({"role": message["role"], "content": content})
    return messages


def prompt_field_in(present: Collection[str], path: str) -> str:
    """Return the prompt's field: `messages` or NeMo Gym's if none is named and there is no `prompt`."""
    others = [layout for layout in (MESSAGES, GYM) if layout in present]
    return others[0] if path == PROMPT and PROMPT not in present and others else path


def require_fields(present: Iterable[str], data: DataConfig, where: str) -> None:
    """Raise InputError unless prompt, answer and template fields are in `present`. Only a named answer is required, and
    a prompt unless a template builds it."""
    names, template = list(present), template_of(data)
    names += ADDED if is_refcoco(names) else ()
    if template is None or PROMPT in template.names:
        _require_field(prompt_field_in(names, data.prompt_field), "--prompt-field", names, where)
    if data.answer_field != ANSWER:
        _require_field(data.answer_field, "--answer-field", names, where)
    # A Jinja template may test for a column, so a missing one shows only when the template is rendered.
    for name in sorted(template.names - {PROMPT, *names}) if template and not template.jinja else ():
        raise missing_column(name, names, where)


def _require_field(name: str, flag: str, present: Sequence[str], where: str) -> None:
    if has_field(present, name):
        return
    usual = [other for other in USUAL_NAMES[flag] if other in present]
    meant = (difflib.get_close_matches(name, present, n=1, cutoff=0.55) or usual)[:1]
    listed = f"Its fields are {', '.join(present) or 'none'}"
    hint = f"{listed}; name the right one with {flag} NAME."
    if meant:
        hint = f"Did you mean {meant[0]}? Then add {flag} {meant[0]}. {listed}."
    raise InputError(f"{where}: no field {name!r} ({flag}).", hint)


def checked_prompt(value: Any, field_name: str, where: str) -> str | Messages:
    """Return the prompt, if it is a text or a list of chat messages that is not empty."""
    value = decoded_messages(value, field_name, where)
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        raise InputError(
            f"{where}: field {field_name!r} holds {len(value):,} characters; a prompt has at most {MOST_CHARACTERS:,}.",
            "Leave the row out, or name another field with --prompt-field NAME.",
        )
    if isinstance(value, str) and value.strip():
        return value
    if not value or isinstance(value, str) or not isinstance(value, Sequence):
        description = (
            "empty" if value is None or isinstance(value, str | Sequence) else f"of type {type(value).__name__}"
        )
        raise InputError(
            f"{where}: field {field_name!r} is {description}.", "It must be a text or a list of chat messages."
        )
    messages = checked_messages(value, field_name, where)
    if messages[-1]["role"] == "assistant":  # a chat template would begin another answer after it
        raise InputError(
            f"{where}: field {field_name!r} ends with an assistant message, which the policy should write.",
            "Leave that message out; reference answers go into a separate field (--answer-field).",
        )
    return messages


def checked_messages(value: Any, field_name: str, where: str) -> Messages:
    """Return chat messages with texts, thoughts and tool calls. Raises InputError naming row and field."""
    value = decoded_messages(value, field_name, where)
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InputError(
            f"{where}: field {field_name!r} is not a list of chat messages.", "It has at least one message."
        )
    return [_message(message, field_name, where) | _calls(message, where) for message in value]


def _calls(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message's OpenAI calls, with arguments as an object or as its JSON text. Raises InputError for other
    forms."""
    fields: dict[str, Any] = {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
    if not (listed := _listed_calls(message)):
        return fields
    try:
        listed = from_json(listed)
        names = [{"id": call["id"]} if call.get("id") else {} for call in listed]
        functions = [call.get("function", call) for call in listed]
        arguments = [(function["name"], function.get("arguments") or {}) for function in functions]
        parsed = [(name, raw, dict(from_json(raw))) for name, raw in arguments]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: `tool_calls` of a message is not a list of calls.",
            'A call is {"type": "function", "function": {"name": ..., "arguments": {...}}}.',
        ) from error
    functions = [{"name": name, "arguments": raw if isinstance(raw, str) else read} for name, raw, read in parsed]
    calls = [{"type": "function", "function": function} | name for function, name in zip(functions, names, strict=True)]
    return fields | {"tool_calls": calls}


def _listed_calls(message: Mapping[str, Any]) -> Any:
    """Return a message's calls: `tool_calls`, or the only one in OpenAI's older form."""
    older = message.get("function_call")
    return message.get("tool_calls") or ([older] if isinstance(older, Mapping) else older)


def _message(value: Any, field_name: str, where: str) -> dict[str, Any]:
    """Return a chat message with its thought and images; its content may be given as a list of parts."""
    role, content = (value.get("role"), value.get("content")) if isinstance(value, Mapping) else (None, None)
    images: list[Any] = []
    if isinstance(content, Sequence) and not isinstance(content, str) and all(isinstance(p, Mapping) for p in content):
        for part in content:
            kind = part.get("type")
            if kind not in PART_TYPES and (kind != "text" or not isinstance(part.get("text"), str)):
                raise InputError(
                    f"{where}: a message of field {field_name!r} has a part of type {kind!r}.",
                    "Prompts are texts and images: rlctl does not train on sound or video.",
                )
        images = [part_image(part) for part in content if part["type"] in PART_TYPES]
        content = "".join(MARK if part["type"] in PART_TYPES else part["text"] for part in content)
    elif isinstance(value, Mapping):
        images = [*(value.get(IMAGES) or ())] if MARK in str(content) else []  # a message that was read before
    if content is None and isinstance(value, Mapping) and _listed_calls(value):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        has = f"; this one has {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
        raise InputError(
            f"{where}: field {field_name!r} is a list, but not of chat messages.",
            f"A message is an object with the texts `role` and `content`{has}.",
        )
    thoughts = {key: value[key] for key in THOUGHTS if value.get(key) is not None}
    return {"role": role, "content": content, **thoughts, **({IMAGES: images} if images else {})}


def difficulties(dataset: PromptDataset, data: DataConfig) -> np.ndarray:
    """Return how difficult each row is, float64 [rows]. Raises InputError for a row without a number."""
    path = data.difficulty_field
    if path is None:
        raise InputError(
            "data.order = difficulty needs the field of a row's difficulty.",
            "Name it with --set data.difficulty_field=...",
        )
    rows = (dataset[index] for index in range(len(dataset)))
    return np.fromiter((_difficulty(row, path) for row in rows), np.float64, len(dataset))


def _difficulty(row: PromptRow, path: str) -> float:
    """Return the number at `path`, `field` or `field.key`; the only number of a text such as `Level 3`."""
    value: Any = row.fields
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            names = [*value] if isinstance(value, Mapping) else []
            hint = suggest(name, names) or f"There are {', '.join(names) or 'no fields'}."
            raise InputError(f"{row.where}: no field {path!r} (data.difficulty_field).", hint)
        value = value[name]
    numbers = _NUMBERS.findall(value) if isinstance(value, str) else [value]
    number = numbers[0] if len(numbers) == 1 and not isinstance(value, bool) else None
    if isinstance(number, str | Real | Decimal) and math.isfinite(float(number)):
        return float(number)
    raise InputError(
        f"{row.where}: field {path!r} (data.difficulty_field) is {value!r:.60}, which is not a number.",
        "A difficulty is a number, or a text with one number in it.",
    )
