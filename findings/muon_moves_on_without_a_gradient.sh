#!/usr/bin/env bash
# torch 2.13.0: torch.optim.Muon takes four hundred steps of full size after the last gradient.
#
# Input: a matrix [64, 32]; one step with a random gradient, then steps with a gradient of zeros, as a batch of RL gives
# whose rewards are all equal; Muon and AdamW, both without weight decay.
# Guess, written down first: a gradient of zeros gives no update.
# Behavior: the momentum shrinks by 0.95 in each step, but Muon normalizes it, so each step has the size of the one with a
# gradient. Steps fade only when the momentum is far below eps (1e-7). Until then the matrix moves 441 times as far as the
# gradient asked for, in its direction. AdamW's momentum moves it 5 times as far.
# Output seen (size of steps 1, 2, 100, 400 and 1000 after the one with a gradient, whose size is 1; then the distance in all):
#   Muon:  1.00, 1.00, 1.00, 1.23, 0.00; in all 441
#   AdamW: 0.67, 0.52, 0.00, 0.00, 0.00; in all 5
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "torch==2.13.0" "numpy<3"
"$place/venv/bin/python" - <<'PYTHON'
import sys

import torch


def sizes(kind):
    """Return the sizes of steps without a gradient, relative to the one with a gradient, and the whole distance."""
    matrix = torch.nn.Parameter(torch.zeros(64, 32))
    optimizer = kind([matrix], lr=1.0, weight_decay=0.0)
    matrix.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    first, place, found = matrix.detach().norm(), matrix.detach().clone(), []
    begin = place.clone()
    for _ in range(1000):
        matrix.grad = torch.zeros_like(matrix)
        optimizer.step()
        found.append(float((matrix.detach() - place).norm() / first))
        place = matrix.detach().clone()
    return found, float((place - begin).norm() / first)


ends = []
for name, kind in (("Muon: ", torch.optim.Muon), ("AdamW:", torch.optim.AdamW)):
    steps, distance = sizes(kind)
    shown = [steps[number - 1] for number in (1, 2, 100, 400, 1000)]
    print(name, ", ".join(f"{step:.2f}" for step in shown) + f"; in all {distance:.0f}")
    ends.append((shown, distance))
(muon, far), (adamw, near) = ends
sys.exit(not (min(muon[:4]) > 0.9 and muon[4] < 0.1 and far > 200 and adamw[2] < 0.01 and near < 10))
PYTHON
