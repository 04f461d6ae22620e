"""How a chat template takes messages: the form of the calls that it writes, and messages that it leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlctl.data.image_sources import MARK
from rlctl.data.prompt_rows import Messages
from rlctl.errors import InputError

Render = Callable[[Messages], str]
_NAME, _ARGUMENTS = "rlctl_called", {"rlctl_key": "rlctl value", "whole": True}
"""A call that templates are tried on; its arguments look different in JSON and in Python."""


@dataclass(frozen=True)
class CallForm:
    """How a template takes the calls of a message. Published templates take the arguments as an object, as JSON text
    (OpenAI's form), or both; some write calls only if the content is null."""

    arguments: Literal["object", "text", "given"] = "object"
    """given: as the row has them."""
    null: bool = False
    """The empty content of a message with calls is null."""
    written: bool = True
    """Whether the template writes calls at all."""

    @classmethod
    def of(cls, render: Render) -> CallForm:
        """Return the form of a template, found by rendering a call."""
        text = json.dumps(_ARGUMENTS)
        for content in ("", None):
            by_object, by_text = (_written(render, arguments, content) for arguments in (_ARGUMENTS, text))
            takes_object = "rlctl_key" in by_object and str(_ARGUMENTS) not in by_object
            if takes_object or text in by_text:
                kind = "object" if text not in by_text else "given" if takes_object else "text"
                return cls(kind, content is None)
        return cls(written=False)

    def taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message whose calls and content have this form."""
        if not message.get("tool_calls"):
            return message
        empty = message["content"] in (None, "", [{"type": "text", "text": ""}])
        content = None if self.null and empty else message["content"]
        return {**message, "content": content, "tool_calls": [self._call(call) for call in message["tool_calls"]]}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if self.arguments == "given" or not isinstance(function, Mapping) or "arguments" not in function:
            return call
        encoded = function["arguments"]
        if self.arguments == "object":
            encoded = json.loads(encoded) if isinstance(encoded, str) else encoded
        else:
            encoded = encoded if isinstance(encoded, str) else json.dumps(encoded, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": encoded}}


def _written(render: Render, arguments: Any, content: str | None) -> str:
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    try:
        text = render(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
        )
    except InputError:
        return ""
    return text if _NAME in text else ""


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as an object."""
    encoded = function["arguments"]
    return json.loads(encoded) if isinstance(encoded, str) else encoded


def shape_of(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a message that may decide whether a template writes it."""
    return message["role"], bool(message["content"].strip()), message["content"].count(MARK), *sorted(message)


def unwritten(render: Render, messages: Messages) -> int | None:
    """Return the place of the first message whose calls, or content without calls, a template leaves out; None: none is
    left out. Contents and names of calls are replaced by marks."""
    marked = [_marked(message, place) for place, message in enumerate(messages)]
    try:
        text = render(marked)
    except InputError:  # the template reads what contents say
        return None
    for place, message in enumerate(messages):
        called = bool(message.get("tool_calls"))
        if (called or message["content"].replace(MARK, "").strip()) and _mark(place, called=called) not in text:
            return place
    return None


def _mark(place: int, *, called: bool) -> str:
    return f"rlctl{place}{'calls' if called else 'says'}"


def _marked(message: dict[str, Any], place: int) -> dict[str, Any]:
    content = message["content"]
    if content.replace(MARK, "").strip():
        content = MARK * content.count(MARK) + _mark(place, called=False)
    made_calls, name = message.get("tool_calls") or (), _mark(place, called=True)
    calls = [{**call, "function": {**call["function"], "name": name}} for call in made_calls]
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}
