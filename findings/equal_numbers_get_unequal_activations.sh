#!/usr/bin/env bash
# torch 2.13.0 (CPU build, x86-64, one thread): an activation gives equal numbers of one tensor unequal results.
#
# Input: 400 values between 0 and 4; for each a tensor of 45 copies of it; an elementwise function of that tensor.
# Guess, written down first: a function of each element alone maps equal inputs to equal outputs, wherever they stand.
# Behavior: sigmoid, silu, tanh-gelu, softplus, mish, pow, exp2 and sinh of float32 return two different results for some values: the
# last elements, which fill no vector, take another implementation than the others. exp, log, tanh, erf, sin, cos and gelu do
# not. In bfloat16 rsqrt does it. So a row's activations depend on its length and place, and an engine that computes a
# token alone has other bits than a trainer that computes it inside a batch.
# Output seen (values of 400 with two results, processor with AVX-512; the counts vary with the processor):
#   float32: sigmoid 6, silu 6, gelu-tanh 22, softplus 29, mish 44, pow 212, exp2 24, sinh 110
#   bfloat16: rsqrt 93
#   none: exp, log, tanh, erf, sin, cos, gelu
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
VALUES = (torch.rand(400, generator=torch.Generator().manual_seed(0)) * 4 + 0.01).tolist()


def unequal(function, dtype) -> int:
    return sum(len(function(torch.full((45,), value, dtype=dtype)).unique()) > 1 for value in VALUES)


depends = {
    "sigmoid": torch.sigmoid, "silu": F.silu, "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus,
    "mish": F.mish, "pow": lambda x: x.pow(1.7), "exp2": torch.exp2, "sinh": torch.sinh,
}
even = {name: getattr(torch, name) for name in ("exp", "log", "tanh", "erf", "sin", "cos")} | {"gelu": F.gelu}
counts = {name: unequal(function, torch.float32) for name, function in depends.items()}
print("float32:", ", ".join(f"{name} {count}" for name, count in counts.items()))
narrow = unequal(torch.rsqrt, torch.bfloat16)
print("bfloat16: rsqrt", narrow)
same = {name: unequal(function, torch.float32) for name, function in even.items()}
print("none:", ", ".join(name for name, count in same.items() if count == 0))
assert all(counts.values()), counts
assert narrow, narrow
assert not any(same.values()), same
PYTHON
