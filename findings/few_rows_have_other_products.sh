#!/usr/bin/env bash
# torch 2.13.0 (CPU build with MKL 2024.2, x86-64, one thread): the first rows of a product depend on how many rows follow.
#
# Input: x [64, 512] and a weight [256, 512] in float32; F.linear of the first n rows of x, for n from 1 to 64.
# Guess, written down first: only n = 1 differs from the rows of the whole product, since a product with one row is another routine (gemv).
# Behavior: n = 1, 2 and 3 differ, all n from 4 on have the bits of the whole product; columns do not matter: the first 37
# columns, or columns in another order, are bitwise equal. With two threads up to 11 rows differ, depending on how they
# are divided. Decoding one to three sequences therefore has other bits than prefill, and eight others.
# Output seen:
#   other bits than among 64 rows: n = 1, 2, 3
#   part of the columns equal: True, permuted columns equal: True
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "torch==2.13.0" "numpy<3"
"$place/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
numbers = torch.Generator().manual_seed(0)
x, weight = torch.randn(64, 512, generator=numbers), torch.randn(256, 512, generator=numbers)
whole = F.linear(x, weight)
others = [n for n in range(1, 65) if not torch.equal(F.linear(x[:n], weight), whole[:n])]
order = torch.randperm(256, generator=numbers)
part = torch.equal(F.linear(x, weight[:37]), whole[:, :37])
permuted = torch.equal(F.linear(x, weight[order]), whole[:, order])
print("other bits than among 64 rows: n =", ", ".join(map(str, others)))
print(f"part of the columns equal: {part}, permuted columns equal: {permuted}")
assert others == [1, 2, 3]
assert part
assert permuted
PYTHON
