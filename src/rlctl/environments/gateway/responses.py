"""OpenAI's responses: lists of items, with function tools and namespaces of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlctl.environments.gateway.chat import chat_message, tool_call, without_billing
from rlctl.environments.gateway.exchange import (
    Answer,
    Event,
    Exchange,
    Question,
    RefusedError,
    limit,
    openai_error,
    refuse_unread,
    wishes,
)
from rlctl.environments.interface import MODEL, Message

BETWEEN = "__"
"""Between a namespace and a function in the name that the model reads."""
UNREAD = ("reasoning", "item_reference", "compaction")
"""Types of items without text for the model; the tokens of a matched answer still hold its thought."""


class Responses:
    path = "/v1/responses"

    def question(self, body: Mapping[str, Any]) -> Question:
        if body.get("previous_response_id") or body.get("conversation"):
            raise RefusedError("previous_response_id and conversation are not kept here: send all items in `input`.")
        refuse_unread(body, "background", "prompt", "top_logprobs")
        messages: list[Message] = []
        if instructions := without_billing(str(body.get("instructions") or "")):
            messages.append({"role": "system", "content": instructions})
        given = body["input"]
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            _append(messages, item)
        form, effort = ((body.get(name) or {}).get(key) for name, key in (("text", "format"), ("reasoning", "effort")))
        return Question(
            messages=messages,
            tools=[tool for tool, _ in _tools(body)],
            model=str(body.get("model") or MODEL),
            max_tokens=limit(body.get("max_output_tokens")),
            **wishes(body.get("tool_choice"), form, effort, parallel=body.get("parallel_tool_calls")),
        )

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        (answer,) = exchange.answers
        return _response(exchange, "incomplete" if answer.cut else "completed", _items(exchange, answer))

    def events(self, exchange: Exchange) -> Iterator[Event]:
        for number, (name, data) in enumerate(self._events(exchange)):
            yield name, {"type": name, "sequence_number": number, **data}

    def _events(self, exchange: Exchange) -> Iterator[Event]:
        begun = _response(exchange, "in_progress", [])
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        whole = self.whole(exchange)
        for index, item in enumerate(whole["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            added = item | empty | {"status": "in_progress"}
            yield "response.output_item.added", {"output_index": index, "item": added}
            if item["type"] == "message":
                (part,) = item["content"]
                place |= {"content_index": 0}
                yield "response.content_part.added", place | {"part": part | {"text": ""}}
                yield "response.output_text.delta", place | {"delta": part["text"], "logprobs": []}
                yield "response.output_text.done", place | {"text": part["text"], "logprobs": []}
                yield "response.content_part.done", place | {"part": part}
            elif item["type"] == "reasoning":
                place, (part,) = place | {"content_index": 0}, item["content"]
                yield "response.reasoning_text.delta", place | {"delta": part["text"]}
                yield "response.reasoning_text.done", place | {"text": part["text"]}
            else:
                yield "response.function_call_arguments.delta", place | {"delta": item["arguments"]}
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield "response.function_call_arguments.done", place | done
            yield "response.output_item.done", {"output_index": index, "item": item}
        yield f"response.{whole['status']}", {"response": whole}

    def error(self, refusal: RefusedError) -> dict[str, Any]:
        return openai_error(refusal)


def _append(messages: list[Message], item: Mapping[str, Any]) -> None:
    """Append an item. Items of one answer, a text and its calls, become one message."""
    kind = item.get("type", "message")
    if kind in UNREAD:
        return
    last = messages[-1] if messages else None
    if kind == "message":
        message = chat_message(item)
        if message["role"] == "assistant" and last is not None and _only_calls(last):
            messages[-1] = {**last, "content": message["content"]}
        else:
            messages.append(message)
    elif kind == "function_call":
        name = BETWEEN.join(filter(None, (item.get("namespace"), item["name"])))
        call = tool_call(item["call_id"], name, item["arguments"])
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}
    elif kind == "function_call_output":
        output = item["output"]
        messages.append(chat_message({"role": "tool", "content": output, "tool_call_id": item["call_id"]}))
    else:
        raise RefusedError(f"An item has the type {kind!r:.40}. Types are message, function_call and its output.")


def _only_calls(message: Message) -> bool:
    return message["role"] == "assistant" and not message["content"] and bool(message.get("tool_calls"))


def _tools(body: Mapping[str, Any]) -> list[tuple[dict[str, Any], tuple[str | None, str]]]:
    """Return the function tools in the form of chat completions, each with its namespace and name. Tools without a
    schema, such as web_search, are left out: nothing here can run them."""
    result: list[tuple[dict[str, Any], tuple[str | None, str]]] = []
    for tool in body.get("tools") or ():
        namespace = tool["name"] if tool["type"] == "namespace" else None
        for function in tool["tools"] if namespace else [tool]:
            if function["type"] != "function":
                continue
            name = BETWEEN.join(filter(None, (namespace, function["name"])))
            described = {"name": name, "description": function.get("description") or ""}
            schema = {"parameters": function.get("parameters") or {"type": "object", "properties": {}}}
            result.append(({"type": "function", "function": described | schema}, (namespace, function["name"])))
    return result


def _items(exchange: Exchange, answer: Answer) -> list[dict[str, Any]]:
    names = {tool["function"]["name"]: name for tool, name in _tools(exchange.body)}
    status = "incomplete" if answer.cut else "completed"
    items: list[dict[str, Any]] = []
    if answer.thought:
        content = [{"type": "reasoning_text", "text": answer.thought}]
        head = {"id": f"rs_{exchange.number}", "type": "reasoning", "status": status, "summary": []}
        items.append({**head, "content": content, "encrypted_content": f"thought_{exchange.number}"})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{exchange.number}", "type": "message", "role": "assistant", "status": status}
        items.append({**head, "content": [part]})
    for call in answer.calls:
        namespace, name = names.get(call.name, (None, call.name))
        item = {"id": f"fc_{call.id}", "type": "function_call", "status": status, "call_id": call.id, "name": name}
        items.append({**item, "arguments": call.arguments} | ({"namespace": namespace} if namespace else {}))
    return items


def _response(exchange: Exchange, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    body = exchange.body
    return {
        "id": f"resp_{exchange.number}",
        "object": "response",
        "created_at": exchange.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": body.get("model") or MODEL,
        "output": items,
        "parallel_tool_calls": bool(body.get("parallel_tool_calls", True)),
        "temperature": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": None if status == "in_progress" else _usage(exchange),
    }


def _usage(exchange: Exchange) -> dict[str, Any]:
    (answer,) = exchange.answers
    read, written = len(answer.prompt_tokens), len(answer.tokens)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
