#!/usr/bin/env bash
# transformers 5.19.0 with tokenizers 0.23.3: a call with truncation changes the tokenizer.json that is saved later.
#
# Input: a tokenizer, saved; tokenizer("Hello world", truncation=True, max_length=4); the tokenizer, saved again.
# Guess, written down first: the arguments of a call hold for this call, and both files are equal.
# Behavior: the second file has a truncation to 4 tokens. AutoTokenizer resets it at each call, but
# tokenizers.Tokenizer.from_file, which servers and other languages use, cuts each text without a warning. padding="max_length"
# is kept in the same way. A call without these arguments before saving removes both.
# Output seen:
#   before: truncation None, padding None, Tokenizer 11 tokens, AutoTokenizer 11 tokens
#   after a call that truncates: truncation 4, padding None, Tokenizer 4 tokens, AutoTokenizer 11 tokens
#   after a call that pads: truncation None, padding {'Fixed': 16}, Tokenizer 16 tokens, AutoTokenizer 11 tokens
#   after a plain call: truncation None, padding None, Tokenizer 11 tokens, AutoTokenizer 11 tokens
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "transformers==5.19.0" "tokenizers==0.23.3" "jinja2==3.1.6"
"$place/venv/bin/python" - "$place" <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

directory = Path(sys.argv[1]) / "tokenizer"
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>")


def saved() -> tuple[object, object, int, int]:
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer.json"
    settings = json.loads(file.read_text())
    truncation, padding = settings["truncation"], settings["padding"]
    return (
        truncation and truncation["max_length"],
        padding and padding["strategy"],
        len(Tokenizer.from_file(str(file)).encode("Hello world").ids),
        len(AutoTokenizer.from_pretrained(directory)("Hello world")["input_ids"]),
    )


seen = {"before": saved()}
tokenizer("Hello world", truncation=True, max_length=4)
seen["after a call that truncates"] = saved()
tokenizer("Hello world", padding="max_length", max_length=16)
seen["after a call that pads"] = saved()
tokenizer("Hello world")
seen["after a plain call"] = saved()
for name, (truncation, padding, bare, auto) in seen.items():
    print(f"{name}: truncation {truncation}, padding {padding}, Tokenizer {bare} tokens, AutoTokenizer {auto} tokens")
assert list(seen.values()) == [
    (None, None, 11, 11),
    (4, None, 4, 11),
    (None, {"Fixed": 16}, 16, 11),
    (None, None, 11, 11),
]
PYTHON
