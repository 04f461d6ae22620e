#!/usr/bin/env bash
# mistral-common 1.13.1: blanks at the end of an earlier answer are removed, newlines are kept.
#
# Input: chat requests of a user message, an answer and another user message, with the tokenizer tekken_240911.json of the
# package. The answers end with a blank, with a newline, or with a newline and an indentation, as cut programs do.
# Guess, written down first: an answer is encoded as it is, so the tokens of the first turn (prompt and sampled answer) are a
# prefix of the next prompt.
# Behavior: blanks at the end are removed, down to the last other character. The next prompt then lacks tokens that the model
# sampled, and a trainer that compares both, or reuses the cache of the first turn, sees another history.
# Output seen (text between [/INST] and </s>):
#   'Yes. ' becomes 'Yes.'
#   ' Yes.' becomes ' Yes.'
#   'Yes.\n' becomes 'Yes.\n'
#   'if x:\n    ' becomes 'if x:\n'
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "mistral-common==1.13.1"
"$place/venv/bin/python" - "$place" <<'PYTHON'
from pathlib import Path

import mistral_common
from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

tokenizer = MistralTokenizer.from_file(str(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"))


def encoded(answer: str) -> str:
    messages = [UserMessage(content="Hi"), AssistantMessage(content=answer), UserMessage(content="Go on")]
    text = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages)).text
    assert text is not None
    return text.split("[/INST]")[1].split("</s>")[0]


answers = ["Yes. ", " Yes.", "Yes.\n", "if x:\n    "]
seen = [encoded(answer) for answer in answers]
for answer, text in zip(answers, seen, strict=True):
    print(f"{answer!r} becomes {text!r}")
assert seen == ["Yes.", " Yes.", "Yes.\n", "if x:\n"]
PYTHON
