#!/usr/bin/env bash
# transformers 5.19.0 with tokenizers 0.23.3: one answer that begins with a blank empties the rest of the assistant mask.
#
# Input: a byte-level tokenizer with the post-processor ByteLevel() (default: trim_offsets=True), a chat template with
# {% generation %} around answers and their end token, and three turns whose second answer is " No".
# Guess, written down first, from the documentation: return_assistant_tokens_mask gives 1 to each token of each answer.
# Behavior: the blank belongs to no token's offsets, so the start of the second answer is taken for one that truncation has
# cut off. No token of the second answer, or of any later answer, has a 1. There is no warning. With
# trim_offsets=False, all answers have the mask.
# Output seen (marked tokens in brackets, Ġ is the blank):
#   trim_offsets=True:  <user>Hi<assistant>[Yes<end>]<user>Hi<assistant>ĠNo<end><user>Hi<assistant>Yes<end>
#   trim_offsets=False: <user>Hi<assistant>[Yes<end>]<user>Hi<assistant>[ĠNo<end>]<user>Hi<assistant>[Yes<end>]
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "transformers==5.19.0" "tokenizers==0.23.3" "jinja2==3.1.6"
"$place/venv/bin/python" - "$place" <<'PYTHON'
from itertools import groupby

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<end>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def marked(trim: bool) -> str:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel() if trim else processors.ByteLevel(trim_offsets=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.add_tokens(["<user>", "<assistant>", "<end>"], special_tokens=True)
    messages = []
    for answer in ("Yes", " No", "Yes"):
        messages += [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
    row = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = zip(tokenizer.convert_ids_to_tokens(row["input_ids"]), row["assistant_masks"], strict=True)
    parts = [("".join(token for token, _ in group), mask) for mask, group in groupby(tokens, key=lambda pair: pair[1])]
    return "".join(f"[{text}]" if mask else text for text, mask in parts)


trimmed, whole = marked(True), marked(False)
print(f"trim_offsets=True:  {trimmed}\ntrim_offsets=False: {whole}")
assert trimmed == "<user>Hi<assistant>[Yes<end>]<user>Hi<assistant>ĠNo<end><user>Hi<assistant>Yes<end>"
assert whole == "<user>Hi<assistant>[Yes<end>]<user>Hi<assistant>[ĠNo<end>]<user>Hi<assistant>[Yes<end>]"
PYTHON
