"""Which sampled answer does a request continue?

Clients send an answer back with other bytes: keys in another order, `1e4` as 10000, no content instead of an empty one,
parts instead of a text. Messages are therefore compared by normalized content, and equal answers by the ids of calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from rlctl.environments.interface import Message

T = TypeVar("T")
MARKS = ("cache_control", "citations", "annotations")
"""Keys of parts that change from request to request without changing the content."""
EXACT = 2**53
"""Largest whole number that a float has exactly."""


class Answers(Generic[T]):
    """The answers of an episode by normalized conversation. T: the caller's record of an answer."""

    def __init__(self) -> None:
        self._answers: dict[bytes, list[tuple[frozenset[str], T]]] = {}

    def add(self, before: bytes, answer: Message, record: T) -> None:
        """Keep an answer to a conversation with the digest `before`."""
        self._answers.setdefault(_next(before, answer), []).append((_ids(answer), record))

    def continued(self, messages: Sequence[Message], digests: Sequence[bytes]) -> tuple[int, T | None]:
        """Return the number of leading messages that end with a known answer, at most all but the last message, and the
        answer's record; (0, None) without one."""
        for count in range(len(messages) - 1, 0, -1):
            if records := self._answers.get(digests[count]):
                ids = _ids(messages[count - 1])
                same = (record for answer_ids, record in reversed(records) if answer_ids & ids)
                return count, next(same, records[-1][1])
        return 0, None


def conversation_digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the digests of the tools with the first 0, 1, ... messages."""
    digests = [_digest(normalized([without_marks(tool) for tool in tools]))]
    for message in messages:
        digests.append(_next(digests[-1], message))
    return digests


def normalized_message(message: Message) -> tuple[Any, ...]:
    """Return a message without differences that do not change its content."""
    role = {"developer": "system"}.get(message["role"], message["role"])
    calls = [
        (call["function"]["name"], _arguments(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return (role, _content(message.get("content")), calls)


def normalized(value: Any) -> Any:
    """Return JSON data with one spelling: sorted keys, and whole numbers without a fraction."""
    if isinstance(value, Mapping):
        return {"object": sorted((str(key), normalized(item)) for key, item in value.items())} if value else {}
    if isinstance(value, list | tuple):
        return [normalized(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return value


def without_marks(value: Any) -> Any:
    """Return JSON data without marks of caching and citations."""
    if isinstance(value, Mapping):
        return {key: without_marks(item) for key, item in value.items() if key not in MARKS}
    return [without_marks(item) for item in value] if isinstance(value, list | tuple) else value


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return arguments.strip()
    return normalized(arguments or {})


def _content(content: Any) -> Any:
    parts: list[Any] = []
    for part in [content or ""] if isinstance(content, str | None) else content:
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            parts.append(normalized(without_marks(part)))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += text
        else:
            parts.append(text)
    lines = [part.replace("\r\n", "\n").strip() if isinstance(part, str) else part for part in parts]
    return [part for part in lines if part != ""]


def _ids(message: Message) -> frozenset[str]:
    return frozenset(str(call.get("id")) for call in message.get("tool_calls") or () if call.get("id"))


def _next(before: bytes, message: Message) -> bytes:
    return _digest(normalized_message(message), before)


def _digest(value: Any, before: bytes = b"") -> bytes:
    return hashlib.blake2b(before + json.dumps(value).encode(), digest_size=16).digest()
