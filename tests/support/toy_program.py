"""A program that asks the model, in the way that its argument names, and ends with its reward."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


def ask(path: str, **body: Any) -> Any:
    base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    asked = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        text = answer.read().decode()
    return json.loads(text.split("\n")[0].removeprefix("data: ")) if body.get("stream") else json.loads(text)


def chat(messages: list[Any], **body: Any) -> Any:
    found = ask("/v1/chat/completions", model=os.environ["OPENAI_MODEL"], messages=messages, logprobs=True, **body)
    choice = found["choices"][-1]
    messages.append(choice.get("message") or choice["delta"])
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    if not body.get("stream"):
        assert found["usage"]["completion_tokens"] == sum(len(one["token_ids"]) for one in found["choices"])
    return found


def main(how: str) -> None:
    row = json.load(sys.stdin)
    messages = [{"role": "user", "content": f"Answer {row['prompt']}"}]
    extra: dict[str, Any] = {"stream": True} if how == "stream" else {"tools": [TOOL]} if how == "tools" else {}
    if how == "fail":
        raise SystemExit("nothing works")
    if how == "ids":
        first = ask("/inference/v1/generate", token_ids=[1, 2, 3], sampling_params={"max_tokens": 4})["choices"][0]
        longer = [1, 2, 3, *first["token_ids"], 5, 6]
        second = ask("/inference/v1/generate", token_ids=longer)["choices"][0]
        assert len(second["logprobs"]["content"]) == len(second["token_ids"])
        ask("/inference/v1/generate", token_ids=[7, 8, 9])
    elif how == "endless":
        code = ""
        while code != "context_length_exceeded":
            try:
                chat(messages)
                messages.append({"role": "user", "content": "More."})
            except HTTPError as error:
                code = json.load(error)["error"]["code"]
    elif how == "look":
        look = [{"type": "image_url", "image_url": {"url": url}} for url in row["images"]]
        messages = [{"role": "user", "content": [*look, {"type": "text", "text": "What is it?"}]}]
        first = chat(messages, n=2)
        ask("/inference/v1/generate", token_ids=[*first["prompt_token_ids"], 40, 41])
        messages.append({"role": "user", "content": [*look[:1], {"type": "text", "text": "Again?"}]})
        chat(messages)
    elif how == "several":
        first, second = chat(messages, n=2, stop=["e", "a"])["choices"]
        assert not {*"ea"}.intersection(first["message"]["content"] + second["message"]["content"])
        messages.append({"role": "user", "content": "Again."})
        chat(messages)
    elif how == "recalls":
        called = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"place": "here"}'}}
        example = [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": "a cup"},
            {"role": "assistant", "content": "A cup."},
        ]
        messages[:0] = [{"role": "user", "content": "What is here?"}, *example]
        chat(messages, tools=[TOOL])
        messages.append({"role": "user", "content": "Again."})
        chat(messages, tools=[TOOL])
    elif how == "harness":
        question = list(messages)
        first = chat(messages)["choices"][0]
        asked_again = chat(list(question), stream=True)["choices"][0]
        assert asked_again["token_ids"] == first["token_ids"]
        parts = [[*messages, {"role": "user", "content": task}] for task in ("Do this.", "Do that.")]
        with ThreadPoolExecutor(2) as threads:  # two agents that share a beginning
            list(threads.map(chat, parts))
        edited = [
            *question,
            {"role": "assistant", "content": "I say another thing."},
            {"role": "user", "content": "So?"},
        ]
        chat(edited, tools=[TOOL], tool_choice="required")
        schema = {"type": "json_schema", "json_schema": {"name": "title", "schema": {"type": "object"}}}
        chat([{"role": "user", "content": "Name it."}], response_format=schema)
        ask("/v1/chat/completions", model="small", messages=[{"role": "user", "content": "A title?"}])
        ask("/v1/chat/completions", model=os.environ["OPENAI_MODEL"], messages=question, max_tokens=1)
    else:
        chat(messages, **extra)
        messages.append({"role": "user", "content": "Again."})
        chat(messages, **extra)
        del messages[1]  # what follows is another conversation
        chat(messages, max_tokens=2)
    print("It is over.")
    print(json.dumps({"reward": 0.25 * len(messages), "asked": 3}))


main(sys.argv[1])
