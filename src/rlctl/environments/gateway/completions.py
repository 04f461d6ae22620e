"""Requests that continue a text or token ids: OpenAI's completions, and vLLM's `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlctl.environments.gateway.chat import sampling, token_logprobs, usage
from rlctl.environments.gateway.exchange import (
    Answer,
    Event,
    Exchange,
    Question,
    RefusedError,
    openai_error,
    refuse_unread,
)
from rlctl.environments.interface import MODEL


class Completions:
    path = "/v1/completions"

    def question(self, body: Mapping[str, Any]) -> Question:
        refuse_unread(body, "echo", "suffix", "logit_bias", "structured_outputs", "prompt_logprobs")
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return Question(text=prompt, **sampling(body))
        if not prompt or not all(isinstance(token, int) for token in prompt):
            raise RefusedError("prompt has to be one text, or one list of token ids.")
        return Question(tokens=tuple(prompt), **sampling(body))

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = [_choice(index, answer, exchange.body) for index, answer in enumerate(exchange.answers)]
        return _head(exchange) | {"choices": choices, "usage": usage(exchange.answers)}

    def events(self, exchange: Exchange) -> Iterator[Event]:
        for index, answer in enumerate(exchange.answers):
            yield "", _head(exchange) | {"choices": [_choice(index, answer, exchange.body)]}
        if (exchange.body.get("stream_options") or {}).get("include_usage"):
            yield "", _head(exchange) | {"choices": [], "usage": usage(exchange.answers)}

    def error(self, refusal: RefusedError) -> dict[str, Any]:
        return openai_error(refusal)


class Generate:
    """vLLM's `/inference/v1/generate`, which takes and returns token ids."""

    path = "/inference/v1/generate"

    def question(self, body: Mapping[str, Any]) -> Question:
        parameters = body.get("sampling_params") or {}
        if body.get("stream") or parameters.get("n", 1) != 1:
            raise RefusedError("stream has to be false and n has to be 1.")
        return Question(tokens=tuple(map(int, body["token_ids"])), **sampling(parameters))

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        (answer,) = exchange.answers
        choice = {
            "index": 0,
            "finish_reason": "length" if answer.cut else "stop",
            "token_ids": list(answer.tokens),
            "logprobs": {"content": token_logprobs(answer)},
        }
        return {"request_id": exchange.body.get("request_id", ""), "choices": [choice]}

    def events(self, exchange: Exchange) -> Iterator[Event]:
        yield "", self.whole(exchange)

    def error(self, refusal: RefusedError) -> dict[str, Any]:
        return openai_error(refusal)


def _head(exchange: Exchange) -> dict[str, Any]:
    return {
        "id": f"cmpl-{exchange.number}",
        "object": "text_completion",
        "created": exchange.created,
        "model": exchange.body.get("model") or MODEL,
    }


def _choice(index: int, answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = None
    if body.get("logprobs") is not None:
        names = [f"token_id:{token}" for token in answer.tokens]
        logprobs = {
            "tokens": names, "token_logprobs": list(answer.logprobs), "text_offset": None, "top_logprobs": None
        }  # fmt: skip
    return {
        "index": index,
        "text": answer.text,
        "finish_reason": "length" if answer.cut else "stop",
        "logprobs": logprobs,
        "token_ids": list(answer.tokens),
        "prompt_token_ids": list(answer.prompt_tokens),
    }
