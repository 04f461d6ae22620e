"""The share of the optimizer's movement that reaches rounded weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlctl.backends.movement import SAMPLE, Movement


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def followed(weights: list[torch.Tensor], steps: int) -> tuple[Movement, list[list[np.ndarray]]]:
    """Take steps of a random walk; return what followed it, and every weight's history."""
    movement, histories = Movement(torch.bfloat16, "nearest"), [[one.numpy().copy()] for one in weights]
    for _ in range(steps):
        for number, weight in enumerate(weights):
            movement.before(number, weight)
        for number, weight in enumerate(weights):
            weight.add_(1e-3 * torch.randn_like(weight))
            movement.after(number, weight)
            histories[number].append(weight.numpy().copy())
    return movement, histories


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    torch.manual_seed(3)


def test_the_shares_are_those_of_all_elements_of_all_weights() -> None:
    """Each weight is small enough to be looked at whole; computed here by NumPy in float64, with torch's bfloat16."""
    weights = [torch.randn(SAMPLE), torch.randn(30, 7), torch.zeros(0), torch.randn(1)]
    movement, histories = followed(weights, 3)
    found = movement.total(torch.device("cpu"))

    def narrow(values: np.ndarray) -> np.ndarray:
        return torch.from_numpy(values).bfloat16().double().numpy()

    first, before, now = (np.concatenate([one[at].ravel() for one in histories]) for at in (0, -2, -1))
    moved = now.astype(np.float64) - first
    carried = ((narrow(now) - narrow(first)) * np.sign(moved)).sum() / np.abs(moved).sum()
    shares = (np.mean(narrow(now) != narrow(before)), np.mean(narrow(now) != narrow(first)), carried)
    assert tuple(vars(found).values()) == pytest.approx(shares, abs=1e-6)


def test_large_weights_count_by_their_size() -> None:
    """All elements of a large weight move past a bfloat16 neighbor, and none of a small one's."""
    large, small = torch.ones(64 * SAMPLE), torch.ones(SAMPLE)
    movement = Movement(torch.bfloat16, "nearest")
    for name, weight, step in (("large", large, 0.5), ("small", small, 1e-6)):
        movement.before(name, weight)
        weight.add_(step)
        movement.after(name, weight)
    found = movement.total(torch.device("cpu"))
    assert (found.changed_step, found.changed) == pytest.approx((64 / 65, 64 / 65))


def test_the_work_of_a_step_does_not_grow_by_many_operations_for_each_weight() -> None:
    counts = []
    for number in (4, 40):
        weights = [torch.randn(64) for _ in range(number)]
        with Operations() as operations:
            movement = Movement(torch.bfloat16, "nearest")
            for name, weight in enumerate(weights):
                movement.before(name, weight)
                movement.after(name, weight)
            movement.total(torch.device("cpu"))
        counts.append(operations.count)
    assert counts[1] - counts[0] == 2 * 36  # a copy before the step and one after it
