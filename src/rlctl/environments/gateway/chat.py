"""OpenAI's chat completions, with vLLM's fields of token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlctl.environments.gateway.exchange import (
    RESPONSE_FORMAT,
    Answer,
    Event,
    Exchange,
    Question,
    RefusedError,
    finish_of,
    limit,
    openai_error,
    refuse_unread,
    texts,
    wishes,
)
from rlctl.environments.interface import MODEL, Message

ROLES = ("system", "user", "assistant", "tool")
UNREAD = (
    "functions", "function_call", "logit_bias", "top_logprobs", "audio", "prediction", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "continue_final_message", "prompt_logprobs",
)  # fmt: skip
"""Fields of OpenAI and vLLM that would change the answer, and that programs rely on."""
UNPARSED = "unparsed"
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""What Claude Code writes in front of its system prompt for Anthropic's servers. In many versions (2.1.36 to 2.1.177 at
least) it has a hash of the request, so that no request would continue another. vLLM leaves it out too."""
MOST_SAMPLES = 128
"""Largest `n`, as at OpenAI."""


class ChatCompletions:
    path = "/v1/chat/completions"

    def question(self, body: Mapping[str, Any]) -> Question:
        refuse_unread(body, *UNREAD)
        form, effort = body.get(RESPONSE_FORMAT), body.get("reasoning_effort")
        return Question(
            messages=[chat_message(message) for message in body["messages"]],
            tools=[tool for tool in body.get("tools") or () if tool["function"]["name"]],
            **sampling(body),
            **wishes(body.get("tool_choice"), form, effort, parallel=body.get("parallel_tool_calls")),
        )

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = [
            _choice(index, answer, exchange.body) | {"message": answer.message()}
            for index, answer in enumerate(exchange.answers)
        ]
        return {**_head(exchange), "object": "chat.completion", "choices": choices, "usage": usage(exchange.answers)}

    def events(self, exchange: Exchange) -> Iterator[Event]:
        head = {**_head(exchange), "object": "chat.completion.chunk", "usage": None}
        for index, answer in enumerate(exchange.answers):
            message = answer.message()
            calls = [call | {"index": at} for at, call in enumerate(message.get("tool_calls", ()))]
            delta = message | ({"tool_calls": calls} if calls else {})
            choice = _choice(index, answer, exchange.body)
            yield "", head | {"choices": [choice | {"delta": delta, "finish_reason": None}]}
            end = {"index": index, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
            yield "", head | {"choices": [end]}
        if (exchange.body.get("stream_options") or {}).get("include_usage"):  # other clients expect a choice
            yield "", head | {"choices": [], "usage": usage(exchange.answers)}

    def error(self, refusal: RefusedError) -> dict[str, Any]:
        return openai_error(refusal)


def sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Question that requests of OpenAI's older forms share."""
    samples = 1 if body.get("n") is None else body["n"]
    newer = body.get("max_completion_tokens")
    if not isinstance(samples, int) or not 1 <= samples <= MOST_SAMPLES:
        raise RefusedError(f"n is {samples!r:.40}, and has to be a number from 1 to {MOST_SAMPLES}.")
    return {
        "model": str(body.get("model") or MODEL),
        "max_tokens": limit(body.get("max_tokens") if newer is None else newer),
        "stop": texts(body.get("stop")),
        "stop_token_ids": tuple(map(int, body.get("stop_token_ids") or ())),
        "samples": samples,
        "seed": body.get("seed"),
    }


def chat_message(message: Mapping[str, Any]) -> Message:
    """Return a message of a request. Raises RefusedError for a role or an image that no template may see."""
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    if role not in ROLES:
        raise RefusedError(f"A message has the role {role!r:.40}. Roles are {', '.join(ROLES)}.")
    content = message.get("content")
    if role == "system":
        content = without_billing(content)
    if not isinstance(content, str | None):
        content = [chat_part(part) for part in content]
        if all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
    result: Message = {"role": role, "content": content or ""}
    if calls := message.get("tool_calls"):
        functions = (call["function"] for call in calls)
        listed = [
            tool_call(call.get("id"), f["name"], f.get("arguments")) for call, f in zip(calls, functions, strict=True)
        ]
        result["tool_calls"] = listed
    return result | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def tool_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of a conversation. Arguments that are no JSON object, which clients send back to have the model
    mend them, become the one value of an object: templates write nothing else."""
    try:
        read = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except ValueError:
        read = None
    if not isinstance(read, Mapping):
        arguments = json.dumps({UNPARSED: arguments})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def without_billing(content: Any) -> Any:
    """Return a system prompt, a text or a list of parts, without what Claude Code tells Anthropic's servers."""
    if isinstance(content, str):
        return BILLING.sub("", content)
    parts = [
        {**part, "text": BILLING.sub("", part["text"])} if isinstance(part, Mapping) and "text" in part else part
        for part in content or ()
    ]
    return [part for part in parts if not isinstance(part, Mapping) or part.get("text") != ""]


def chat_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part["type"] in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part["text"]}
    if part["type"] == "refusal":
        return {"type": "text", "text": part["refusal"]}
    if part["type"] in ("image_url", "input_image"):
        image = part["image_url"]
        return image_part(image if isinstance(image, str) else image["url"])
    raise RefusedError(f"A message has a part of the type {part['type']!r:.40}. Parts are texts and images.")


def image_part(url: str) -> dict[str, Any]:
    """Return an image part. Raises RefusedError for anything but a data URL: a client names no files or addresses."""
    if not url.startswith("data:image/"):
        raise RefusedError("An image has to be a data URL (data:image/png;base64,...).")
    return {"type": "image_url", "image_url": {"url": url}}


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    read, written = len(answers[0].prompt_tokens), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def token_logprobs(answer: Answer) -> list[dict[str, Any]]:
    """Return log-probs in OpenAI's form with token ids, like a vLLM server with `return_tokens_as_token_ids`."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]


def _head(exchange: Exchange) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{exchange.number}",
        "created": exchange.created,
        "model": exchange.body.get("model") or MODEL,
        "prompt_token_ids": list(exchange.answers[0].prompt_tokens),
    }


def _choice(index: int, answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": finish_of(answer),
        "token_ids": list(answer.tokens),
        "logprobs": {"content": token_logprobs(answer), "refusal": None} if body.get("logprobs") else None,
    }
