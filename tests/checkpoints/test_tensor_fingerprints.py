"""Fingerprints: boxes add up, and every rearrangement that refit could get wrong changes them."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.weights.readings import combine


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def slow_fingerprint(tensor: torch.Tensor) -> int:
    """The definition in Python integers: no chunks, no torch arithmetic."""

    def mix(index: int, seed: int) -> int:
        x = (index + 1) * seed % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31 | 1

    flat = tensor.reshape(-1, tensor.shape[-1])
    bits = flat.contiguous().view(torch.int32)
    total = 0
    for row, column in itertools.product(range(flat.shape[0]), range(flat.shape[1])):
        value = 0 if flat[row, column] == 0 else int(bits[row, column])
        total += value * mix(column, 0x9E3779B97F4A7C15) * mix(row, 0xD1B54A32D192ED03)
    return total % 2**64


@pytest.mark.parametrize("shape", [(7,), (5, 9), (3, 4, 6)])
def test_fingerprint_equals_its_definition(shape: tuple[int, ...]) -> None:
    tensor = random_tensor(*shape)
    assert fingerprint(tensor, shape) == slow_fingerprint(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8])
def test_boxes_of_any_sharding_add_up(dtype: torch.dtype) -> None:
    tensor = (random_tensor(8, 6, 10) * 100).to(dtype)
    boxes = [
        fingerprint(tensor[i : i + 4, j : j + 3, k : k + 5], tensor.shape, (i, j, k))
        for i, j, k in itertools.product((0, 4), (0, 3), (0, 5))
    ]
    assert combine(boxes) == fingerprint(tensor, tensor.shape)


def test_interleaved_boxes_add_up() -> None:
    tensor = random_tensor(6, 8, 10)
    boxes = [
        fingerprint(tensor[i::3, j::2, k::5], tensor.shape, (i, j, k), (3, 2, 5))
        for i, j, k in itertools.product(range(3), range(2), range(5))
    ]
    assert combine(boxes) == fingerprint(tensor, tensor.shape)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(40, 64)
    whole = fingerprint(tensor, tensor.shape)
    monkeypatch.setattr("rlctl.checkpoints.tensor_fingerprints.CPU_CHUNK", 128)
    assert fingerprint(tensor, tensor.shape) == whole


def test_strides_do_not_show() -> None:
    stored = random_tensor(12, 20)
    assert fingerprint(stored.t(), (20, 12)) == fingerprint(stored.t().contiguous(), (20, 12))


def rearranged(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = tensor.clone()
    rows[[3, 5]] = rows[[5, 3]]
    columns = tensor[:, torch.arange(tensor.shape[1]).roll(1)]
    interleaved = tensor.reshape(2, -1, tensor.shape[1]).transpose(0, 1).reshape(tensor.shape)
    bit = tensor.clone()
    bit.view(torch.int32)[7, 7] ^= 1
    one_pair = tensor.clone()
    one_pair[0, 1], one_pair[1, 0] = tensor[1, 0], tensor[0, 1]
    return {
        "transposed": tensor.t(),
        "two rows swapped": rows,
        "columns rolled": columns,
        "halves interleaved": interleaved,
        "halves swapped": tensor.roll(tensor.shape[0] // 2, 0),
        "lowest bit of one element": bit,
        "two elements swapped": one_pair,
        "sign": -tensor,
        "scaled by two": 2 * tensor,
        "zeros": torch.zeros_like(tensor),
    }


@pytest.mark.parametrize("planted", sorted(rearranged(torch.randn(16, 16))))
def test_planted_rearrangements_change_it(planted: str) -> None:
    tensor = random_tensor(16, 16)
    assert fingerprint(rearranged(tensor)[planted], (16, 16)) != fingerprint(tensor, (16, 16))


def test_box_in_the_wrong_place_changes_it() -> None:
    tensor = random_tensor(8, 8)
    assert fingerprint(tensor[:4], (8, 8), (0, 0)) != fingerprint(tensor[:4], (8, 8), (4, 0))


def test_both_zeros_count_as_one() -> None:
    assert fingerprint(torch.tensor([0.0, 1.0]), (2,)) == fingerprint(torch.tensor([-0.0, 1.0]), (2,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_negative_zeros_of_narrow_dtypes_count_as_zeros_and_nothing_else_does(dtype: torch.dtype) -> None:
    values = random_tensor(6, 32).to(dtype)
    bits = values.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    bits[2, :8] = torch.tensor(-0.0).to(dtype).view(bits.dtype)
    whole = fingerprint(values, values.shape)
    bits[2, :8] = 0
    assert fingerprint(values, values.shape) == whole
    bits[2, 3] = 1
    assert fingerprint(values, values.shape) != whole
