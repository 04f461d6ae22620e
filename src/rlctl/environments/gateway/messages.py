"""Anthropic's messages: lists of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlctl.environments.gateway.chat import ROLES, image_part, tool_call, without_billing
from rlctl.environments.gateway.exchange import Answer, Event, Exchange, Question, RefusedError, limit, texts, wishes
from rlctl.environments.interface import MODEL, Message

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "api_error"}
"""Types of errors by status."""
UNREAD = ("thinking", "redacted_thinking")
"""Types of blocks that are not read: the tokens of a matched answer hold its thought."""
THINKS = ("enabled", "adaptive")
"""Types of `thinking` in a request that asks for thoughts."""


class AnthropicMessages:
    path = "/v1/messages"

    def question(self, body: Mapping[str, Any]) -> Question:
        messages: list[Message] = []
        if system := without_billing(body.get("system")):
            messages.append({"role": "system", "content": _joined(_blocks(system))})
        for message in body["messages"]:
            messages += _chat_messages(message)
        tools = [
            {"type": "function", "function": {"name": tool["name"], "description": tool.get("description") or "",
                                              "parameters": tool["input_schema"]}}
            for tool in body.get("tools") or ()
            if "input_schema" in tool  # server tools have none
        ]  # fmt: skip
        choice, output = body.get("tool_choice") or {}, body.get("output_config") or {}
        parallel = False if choice.get("disable_parallel_tool_use") else None
        kind = "required" if choice.get("type") == "any" else choice.get("type")
        form = output.get("format") or body.get("output_format")
        return Question(
            messages=messages,
            tools=tools,
            model=str(body.get("model") or MODEL),
            max_tokens=limit(body.get("max_tokens")),
            stop=texts(body.get("stop_sequences")),
            **wishes(kind, form, output.get("effort"), parallel=parallel),
        )

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        (answer,) = exchange.answers
        content: list[dict[str, Any]] = []
        if answer.thought and (exchange.body.get("thinking") or {}).get("type") in THINKS:
            block = {"type": "thinking", "thinking": answer.thought, "signature": f"thought_{exchange.number}"}
            content.append(block)
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text, "citations": None})
        for call in answer.calls:
            arguments = json.loads(call.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        return _message(exchange, content) | _end(answer)

    def events(self, exchange: Exchange) -> Iterator[Event]:
        for name, data in self._events(exchange):
            yield name, {"type": name, **data}

    def _events(self, exchange: Exchange) -> Iterator[Event]:
        whole = self.whole(exchange)
        begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield "message_start", {"message": begun | {"usage": whole["usage"] | {"output_tokens": 0}}}
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                empty, deltas = {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
            elif block["type"] == "thinking":
                empty = {"thinking": "", "signature": ""}
                deltas = [{"type": f"{name}_delta", name: block[name]} for name in ("thinking", "signature")]
            else:
                empty = {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            yield "content_block_start", {"index": index, "content_block": block | empty}
            for delta in deltas:
                yield "content_block_delta", {"index": index, "delta": delta}
            yield "content_block_stop", {"index": index}
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield "message_delta", {"delta": end, "usage": whole["usage"]}
        yield "message_stop", {}

    def error(self, refusal: RefusedError) -> dict[str, Any]:
        kind = KINDS.get(refusal.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def _blocks(content: Any) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or ()


def _chat_messages(message: Mapping[str, Any]) -> list[Message]:
    """Return a message in OpenAI's form. Results of tools come first, as messages of the role `tool`."""
    role = message["role"]
    if role not in ROLES:
        raise RefusedError(f"A message has the role {role!r:.40}. Roles are user, assistant and system.")
    results: list[Message] = []
    parts: list[Mapping[str, Any]] = []
    calls: list[dict[str, Any]] = []
    given = message["content"]
    for block in _blocks(without_billing(given) if role == "system" else given):
        kind = block["type"]
        if kind == "tool_result":
            content = _joined(_blocks(block.get("content")))
            results.append({"role": "tool", "content": content, "tool_call_id": block["tool_use_id"]})
        elif kind == "tool_use":
            calls.append(tool_call(block["id"], block["name"], json.dumps(block["input"])))
        elif kind not in UNREAD:
            parts.append(block)
    if not parts and results:
        return results
    turn: Message = {"role": role, "content": _joined(parts)}
    return [*results, turn | ({"tool_calls": calls} if calls else {})]


def _joined(blocks: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return blocks as a text, or as parts if there are images among them."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "text":
            parts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "image" and block["source"]["type"] == "base64":
            source = block["source"]
            parts.append(image_part(f"data:{source['media_type']};base64,{source['data']}"))
        else:
            raise RefusedError(
                f"A block has the type {block['type']!r:.40}. Blocks are texts, base64 images and tools."
            )
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _message(exchange: Exchange, content: list[dict[str, Any]]) -> dict[str, Any]:
    (answer,) = exchange.answers
    return {
        "id": f"msg_{exchange.number}",
        "type": "message",
        "role": "assistant",
        "model": exchange.body.get("model") or MODEL,
        "content": content,
        "usage": {
            "input_tokens": len(answer.prompt_tokens),
            "output_tokens": len(answer.tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _end(answer: Answer) -> dict[str, Any]:
    reason = "max_tokens" if answer.cut else "tool_use" if answer.calls else "end_turn"
    if answer.stop_text is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text if reason == "stop_sequence" else None}
