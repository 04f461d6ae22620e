#!/usr/bin/env bash
# transformers 5.19.0 with tokenizers 0.23.3: the assistant mask leaves out most tokens of an emoji at the end of an answer.
#
# Input: a byte-level tokenizer without merges, a chat template with {% generation %} around the content of answers, and the
# answer "ok 😀", whose emoji is four tokens. The same with the end token inside the block.
# Guess, written down first, from the documentation: return_assistant_tokens_mask gives 1 to all four tokens.
# Behavior: the mask ends at the first token of the last character, so three of the four tokens have a 0. Where the end token
# is inside the block, all four have a 1. The same holds for each last character of several tokens, such as rare Chinese
# characters.
# Output seen (masks of o, k, blank, four bytes of the emoji, end token):
#   block around the content:           [1, 1, 1, 1, 0, 0, 0, 0]
#   block around content and end token: [1, 1, 1, 1, 1, 1, 1, 1]
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "transformers==5.19.0" "tokenizers==0.23.3" "jinja2==3.1.6"
"$place/venv/bin/python" - "$place" <<'PYTHON'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
tokenizer.add_tokens(["<assistant>", "<end>"], special_tokens=True)


def mask(block: str) -> list[int]:
    template = "{% for m in messages %}<assistant>" + block + "{% endfor %}"
    row = tokenizer.apply_chat_template(
        [{"role": "assistant", "content": "ok 😀"}],
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert tokenizer.decode(row["input_ids"]) == "<assistant>ok 😀<end>"
    return row["assistant_masks"][1:]


content = mask("{% generation %}{{ m['content'] }}{% endgeneration %}<end>")
both = mask("{% generation %}{{ m['content'] }}<end>{% endgeneration %}")
print(f"block around the content:           {content}\nblock around content and end token: {both}")
assert content == [1, 1, 1, 1, 0, 0, 0, 0]
assert both == [1] * 8
PYTHON
