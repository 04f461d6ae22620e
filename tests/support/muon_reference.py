"""Muon in float64 on transformers' modules in one process, written from the papers: Jordan et al. 2024
(kellerjordan.github.io/posts/muon) and Liu et al. 2025 (arXiv:2502.16982, algorithm and section 2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlctl.backends import muon
from support.parallel_cases import Piece, run_case
from support.reference_policy import Optim

MOMENTUM = 0.95


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """X <- aX + b(XX^T)X + c(XX^T)^2 X, from the matrix over its Frobenius norm."""
    x = matrix.double()
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def published(name: str, value: Tensor) -> Iterator[Tensor]:
    """Views of the published matrices in a parameter: gate and up of each expert are apart."""
    if value.dim() == 2:
        yield value
        return
    for expert in value:
        yield from expert.chunk(2) if "gate_up" in name else [expert]


class Float64Muon:
    """M <- 0.95 M + G; W <- W - lr (0.2 sqrt(max(r, c)) orthogonal(G + 0.95 M) + decay W)."""

    def __init__(self, model: Any, optim: Optim) -> None:
        self._optim = optim
        self._named = {n: p for n, p in model.named_parameters() if ".layers." in n and p.dim() > 1}
        self._means = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self._named.items()}

    def takes(self, parameter: Any) -> bool:
        return any(parameter is other for other in self._named.values())

    @torch.no_grad()
    def step(self) -> None:
        optim = self._optim
        for name, parameter in self._named.items():
            gradient, mean = parameter.grad.double(), self._means[name]
            mean.mul_(MOMENTUM).add_(gradient)
            ahead = gradient + MOMENTUM * mean
            for weight, direction in zip(published(name, parameter), published(name, ahead), strict=True):
                update = 0.2 * max(weight.shape) ** 0.5 * orthogonal(direction)
                weight.copy_(weight.double() - optim.lr * (update + optim.weight_decay * weight.double()))


def run_in_rounds(rank: int, elements: int, *arguments: Any) -> tuple[int, Piece]:
    """`run_case` where a rank orthogonalizes `elements` at once (or one matrix), with the most rounds of a step."""
    usual, rounds, planned = muon.MUON_ROUND_ELEMENTS, list[int](), muon.Divided.rounds

    def counted(divided: muon.Divided) -> list[int]:
        numbers = planned(divided)
        rounds.append(max(numbers, default=-1) + 1)
        return numbers

    muon.MUON_ROUND_ELEMENTS, muon.Divided.rounds = elements, counted
    try:
        piece = run_case(rank, *arguments)
    finally:
        muon.MUON_ROUND_ELEMENTS, muon.Divided.rounds = usual, planned
    return max(rounds), piece
