"""The grid of NVFP4 against the definition of its formats in float64, and against vLLM's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.checkpoints.nvfp4 import rounded

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [mantissa * 2.0**-9 for mantissa in range(8)]
    + [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
)[:-1]
"""Its last pattern is not a number."""


def nearest(values: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest numbers of an ascending grid, of two the one with the even pattern; and which are close to a tie."""
    above = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    middle = (low + high) / 2
    even = np.where((above - 1) % 2 == 0, low, high)
    found = np.where(values < middle, low, np.where(values > middle, high, even))
    return found, np.abs(values - middle) < 1e-5 * (high - low)


def by_definition(values: Tensor, largest: float, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of a matrix on the grid, and which of them float32's own rounding may decide."""
    blocks = values.double().numpy().reshape(-1, block)
    of_matrix = largest / (6 * 448)
    scale, close = nearest(np.abs(blocks).max(1, keepdims=True) / 6 / of_matrix, E4M3)
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.where(scale > 0, np.abs(blocks) / (scale * of_matrix), 0)
    found, near = nearest(sizes, E2M1)
    whole = np.copysign(found * scale * of_matrix, blocks)
    return whole.reshape(values.shape), (near | close).reshape(values.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("size", [1e-3, 1.0, 40.0])
def test_numbers_are_those_of_the_definition(dtype: torch.dtype, block: int, size: float) -> None:
    values = (size * torch.randn(128, 256, generator=torch.Generator().manual_seed(0))).to(dtype)
    values[3, :32], values[4, :32] = 0, values[4, :32] * 1e-6  # a block of zeros, and one whose scale is zero
    largest = values.abs().max()
    expected, undecided = by_definition(values, float(largest), block)
    found = rounded(values, largest, block)
    assert found.dtype == dtype
    exact = torch.from_numpy(expected)
    off = (found.double() - exact).abs() > exact.abs() * (2e-7 if dtype == torch.float32 else 2**-8)
    assert not (off & ~torch.from_numpy(undecided)).any()
    assert undecided.mean() < 0.02  # bfloat16's own few bits make ties
    assert (found[3:5, :32] == 0).all()


def test_ties_go_to_the_even_number() -> None:
    sizes = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.75, -5.0] + [0.0] * 6)
    found = rounded(sizes[None], torch.tensor(6.0 * 448), 16)  # the scales of matrix and block are 1
    assert found[0, :10].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1, -4]


def test_numbers_on_the_grid_stay_and_so_does_the_largest() -> None:
    for seed in range(20):
        values = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
        once = rounded(values, values.abs().max(), 16)
        assert once.abs().max() == values.abs().max()
        assert torch.equal(rounded(once, once.abs().max(), 16), once)


def test_numbers_are_those_of_vllm() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    values = (0.02 * torch.randn(256, 512, generator=torch.Generator().manual_seed(1))).bfloat16()
    largest = values.abs().max().float()
    theirs = utils.ref_nvfp4_quant_dequant(values, (6 * 448 / largest).reshape(1), 16)
    differing = rounded(values, largest, 16) != theirs
    assert differing.float().mean() < 0.01  # ties, which the order of float32's operations decides


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert (rounded(torch.zeros(2, 32), torch.tensor(0.0), 16) == 0).all()
