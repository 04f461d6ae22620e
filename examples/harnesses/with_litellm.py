"""A loop on litellm solves a row with a calculator; the reward is 1 if its last answer contains the row's. The first
argument is a provider of litellm: openai (chat completions) or anthropic (messages)."""

import json
import os
import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "number"}, "second": {"type": "number"}},
            "required": ["first", "second"],
        },
    },
}
row = json.load(sys.stdin)
provider = sys.argv[1] if len(sys.argv) > 1 else "openai"
place = {"api_base": os.environ[f"{provider.upper()}_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
messages = [{"role": "user", "content": row["prompt"]}]
for _ in range(4):
    parts = litellm.completion(
        f"{provider}/{os.environ['OPENAI_MODEL']}", messages=messages, tools=[TOOL], stream=True, **place
    )
    answer = litellm.stream_chunk_builder(list(parts)).choices[0].message
    messages.append(answer.model_dump())
    for call in answer.tool_calls or ():
        try:
            result = str(sum(float(value) for value in json.loads(call.function.arguments).values()))
        except (ValueError, TypeError, AttributeError) as error:
            result = f"error: {error}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not answer.tool_calls:
        break
print(json.dumps({"reward": float(row["answer"] in (messages[-1].get("content") or ""))}))
