"""Rounding float32 to bfloat16 and float16: without bias, by a rule that is the same in every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.weights import rounding
from rlctl.weights.rounding import narrow_into, narrowed

BITS = {torch.bfloat16: rounding.bfloat16_bits, torch.float16: rounding.float16_bits}
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in BITS]
SPECIAL = (0.0, -0.0, 1e-45, 1e-40, 6e-8, 65504.0, 65519.9, 65520.0, 1e38, float("inf"), -float("inf"), float("nan"))
PATTERNS = (0x7FFFFFFF, -1, 0x7FC00000, 0x38800000, 0x387FFFFF)
"""Values that are not numbers as GPUs and processors write them, and the ends of float16's even grid."""


def samples(*sizes: float, count: int = 1 << 18) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.cat([size * torch.randn(count, generator=generator) for size in sizes])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_implementation_gives_the_same_bits(dtype: torch.dtype) -> None:
    values = torch.cat([samples(1e-8, 1e-6, 1e-4, 0.02, 1.0, 3e4, 1e5, count=10_000), torch.tensor(SPECIAL)])
    values = torch.cat([values, torch.tensor(PATTERNS, dtype=torch.int32).view(torch.float32)])
    usual = narrowed(values, dtype)
    assert torch.equal(usual.view(torch.int16), BITS[dtype](values.view(torch.int32)))
    strided = torch.empty(2 * len(values), dtype=dtype)[::2]
    narrow_into(strided, torch.stack([values, values], 1)[:, 0])
    assert torch.equal(usual.view(torch.int16), strided.contiguous().view(torch.int16))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_kernel_gives_the_same_bits(dtype: torch.dtype) -> None:
    values = torch.cat([samples(1e-8, 1e-6, 1e-4, 0.02, 3e4, count=10_000), torch.tensor(SPECIAL)])
    found = rounding._compiled(dtype)(values.view(torch.int32))
    assert torch.equal(found, narrowed(values, dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("there", ["meta", "cpu"])
@pytest.mark.parametrize("step", [1, 2])
def test_the_loop_is_given_host_memory_alone(
    dtype: torch.dtype, there: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is not on the processor, here on torch's meta device, has an address that the loop must not use."""
    used, memory = list[str](), rounding._memory

    def watched(values: Tensor, kind: Any) -> Any:
        used.append(values.device.type)
        assert values.device.type == "cpu"
        return memory(values, kind)

    monkeypatch.setattr(rounding, "_memory", watched)
    target = torch.empty(32, dtype=dtype, device=there)[::step]
    narrow_into(target, samples(0.02, count=len(target)))
    assert used == ["cpu", "cpu"]


def test_several_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = samples(0.02, count=10_001)
    one = narrowed(values, torch.bfloat16)
    monkeypatch.setattr(rounding, "THREADED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(narrowed(values, torch.bfloat16), one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_on_the_grid_stays_and_others_take_a_neighbor(dtype: torch.dtype) -> None:
    values = samples(1e-6, 1e-4, 0.02, 10.0)
    grid = values.to(dtype)
    assert torch.equal(narrowed(grid.float(), dtype), grid)
    found = narrowed(values, dtype).float()
    ends = torch.where(values > grid.float(), 6e4, -6e4).to(dtype)
    other = torch.nextafter(grid, ends).float()
    assert bool(((found == grid.float()) | (found == other)).all())
    assert torch.equal(narrowed(-values, dtype), -found.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_or_infinite_stays_so(dtype: torch.dtype) -> None:
    values = torch.tensor(PATTERNS[:3], dtype=torch.int32).view(torch.float32)
    assert bool(narrowed(values, dtype).isnan().all())
    assert narrowed(torch.tensor([float("inf"), -float("inf")]), dtype).tolist() == [float("inf"), -float("inf")]
    assert bool(narrowed(torch.tensor([65519.0]), dtype).isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3e-6, 2e-5, 0.03])
def test_the_mean_is_kept(dtype: torch.dtype, size: float) -> None:
    """Both the mean and the mean size: within four standard errors of what rounding at random would give."""
    values = samples(size, count=1 << 20)
    error = (narrowed(values, dtype).float() - values).double()
    bound = 4 * float(error.std()) / len(values) ** 0.5
    assert abs(float(error.mean())) < bound
    assert abs(float((error * values.sign()).mean())) < 2.5 * bound  # cells, not weights, are what is evenly spread


def test_small_steps_arrive_without_bias_and_are_lost_to_nearest() -> None:
    """Published weights lie on bfloat16's grid, and a few steps of reinforcement learning move them by about 1e-5."""
    published = samples(0.03, count=1 << 20).bfloat16().float()
    moves = samples(1e-5, count=1 << 20).flip(0)
    masters = published + moves
    carried = {
        how: float(
            ((narrowed(masters, torch.bfloat16, how).float() - published) * moves.sign()).sum() / moves.abs().sum()
        )
        for how in ("nearest", "unbiased")
    }
    assert carried["nearest"] < 0.25
    assert abs(carried["unbiased"] - 1) < 0.03


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_moves_changes_once(dtype: torch.dtype) -> None:
    """From one number of the grid to the next, a weight passes one threshold, and thresholds differ."""
    low = samples(0.03, count=500).abs().to(dtype)
    high = torch.nextafter(low, torch.full_like(low, 1.0)).float()
    path = torch.stack([torch.lerp(low.float(), high, share) for share in torch.linspace(0, 1, 65)])
    found = narrowed(path, dtype).float()
    assert bool((found.diff(dim=0) >= 0).all())
    assert bool(((found == low.float()) | (found == high)).all())
    stays = (found == low.float()).double().mean(0)
    assert float(stays.std()) > 0.2


def test_memory_can_be_given_back_afterwards() -> None:
    """As those of weights that wait in host memory."""
    values = samples(0.03, count=100)
    found = narrowed(values, torch.bfloat16)
    for tensor in (values, found):
        tensor.untyped_storage().resize_(0)
    assert not len(narrowed(torch.empty(0), torch.float16))
