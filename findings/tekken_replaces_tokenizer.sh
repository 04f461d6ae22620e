#!/usr/bin/env bash
# transformers 5.19.0 with mistral-common 1.13.1: tekken.json replaces tokenizer.json and the chat template next to it.
#
# Input: a directory with config.json (model type mistral), tokenizer.json and chat_template.jinja, and the same directory
# with one of mistral-common's tekken.json files added, as repositories of Mistral's models have it.
# Guess, written down first: tokenizer.json and chat_template.jinja are used in both cases.
# Behavior: with tekken.json, AutoTokenizer returns MistralCommonBackend, whose chat_template is None. apply_chat_template
# ignores chat_template.jinja and the vocabulary of tokenizer.json, without a warning.
# Output seen:
#   without tekken.json: TokenizersBackend, own template True, '[OWN]Hi'
#   with tekken.json: MistralCommonBackend, own template False, '<s>[INST]Hi[/INST]'
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "transformers==5.19.0" "mistral-common==1.13.1" "tokenizers==0.23.3" "jinja2==3.1.6"
cat >"$place/look.py" <<'PYTHON'
import shutil
import sys
from pathlib import Path

import mistral_common
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, MistralConfig, PreTrainedTokenizerFast

place = Path(sys.argv[1])
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", bos_token="<s>")
made.chat_template = "{% for m in messages %}[OWN]{{ m['content'] }}{% endfor %}"
made.save_pretrained(place)
MistralConfig().save_pretrained(place)


def seen() -> str:
    tokenizer = AutoTokenizer.from_pretrained(place)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False)
    own = tokenizer.chat_template is not None
    return f"{type(tokenizer).__name__}, own template {own}, {tokenizer.decode(ids)!r}"


without = seen()
shutil.copy(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json", place / "tekken.json")
both = seen()
print(f"without tekken.json: {without}\nwith tekken.json: {both}")
assert without == "TokenizersBackend, own template True, '[OWN]Hi'"
assert both == "MistralCommonBackend, own template False, '<s>[INST]Hi[/INST]'"
PYTHON
"$place/venv/bin/python" "$place/look.py" "$place/model" 2>"$place/errors" || { cat "$place/errors" >&2; exit 1; }
