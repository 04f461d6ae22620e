#!/usr/bin/env bash
# datasets 5.2.0 with pyarrow 26.0.1: integers of JSON lines lose digits if another row has a decimal or a larger integer.
#
# Input: JSON lines with the answer 9007199254740993 (2^53 + 1), alone, next to an answer 0.5, next to the text "x", and next
# to the answer 123456789012345678901; read with load_dataset("json").
# Guess, written down first: all digits are kept as Python integers, or the file is refused.
# Behavior: the column becomes float64 for all rows, also inside of lists and mappings, without a warning: 9007199254740993
# becomes 9007199254740992.0, and 123456789012345678901 becomes 123456789012345683968. Texts in a column do not matter: it
# then gets the type Json and keeps all digits. A reward that compares a right answer with this reference is 0.
# Output seen:
#   alone: int64 9007199254740993
#   next to 0.5: float64 9007199254740992.0
#   next to 'x': Json 9007199254740993
#   next to 123456789012345678901: float64 9007199254740992.0, and 123456789012345683968
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "datasets==5.2.0" "pyarrow==26.0.1"
HF_HOME="$place/hub" "$place/venv/bin/python" - "$place" <<'PYTHON'
import json
import sys
from pathlib import Path

from datasets import disable_progress_bars, load_dataset

disable_progress_bars()
ANSWER, LARGE = 2**53 + 1, 123456789012345678901


def read(name, *answers):
    file = Path(sys.argv[1]) / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in answers))
    table = load_dataset("json", data_files=str(file), split="train")
    kind = table.features["answer"]
    return getattr(kind, "dtype", None) or type(kind).__name__, list(table["answer"])


alone, decimal, text, large = read("a", ANSWER), read("b", ANSWER, 0.5), read("c", ANSWER, "x"), read("d", ANSWER, LARGE)
print(f"alone: {alone[0]} {alone[1][0]}")
print(f"next to 0.5: {decimal[0]} {decimal[1][0]}")
print(f"next to 'x': {text[0]} {text[1][0]}")
print(f"next to {LARGE}: {large[0]} {large[1][0]}, and {int(large[1][1])}")
assert alone == ("int64", [ANSWER])
assert decimal == ("float64", [2.0**53, 0.5])
assert text[1][0] == ANSWER
assert large == ("float64", [2.0**53, float(LARGE)])
PYTHON
