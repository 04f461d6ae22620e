"""A sample as a conversation, for any form of prompt and completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class ChatMessage(NamedTuple):
    """One message: `system`, `user`, `assistant`, `tool`, or without roles `prompt` and `completion`."""

    role: str
    text: str


def conversation(sample: Mapping[str, Any]) -> list[ChatMessage]:
    """Return a sample's messages in order, the completion last."""
    if isinstance(whole := sample.get("messages"), list):
        return [_said(message) for message in whole]
    prompt, completion = sample.get("prompt"), as_text(sample.get("completion"))
    if isinstance(prompt, list | tuple):
        return [*map(_said, prompt), ChatMessage("assistant", completion)]
    return [ChatMessage("prompt", as_text(prompt)), ChatMessage("completion", completion)]


def _said(message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        return ChatMessage("prompt", as_text(message))
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    called = [f"{call.get('name')}({as_text(call.get('arguments'))})" for call in calls]
    texts = [as_text(message.get("reasoning_content")), as_text(message.get("content")), *called]
    return ChatMessage(str(message.get("role", "prompt")), "\n".join(filter(None, texts)))


def as_text(content: Any) -> str:
    """Return the text of a message's content: parts that are no text are named by their kind, other values are JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) and "type" in part for part in content):
        return "\n".join(str(part["text"]) if "text" in part else f"[{part['type']}]" for part in content)
    return json.dumps(content, ensure_ascii=False)
