"""Changed elements are found by their bytes."""

from __future__ import annotations

import pytest
import torch

from rlctl.transport.changed_elements import BLOCK, differing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("count", [0, 5, BLOCK, BLOCK + 3, 3 * BLOCK - 1])
def test_exactly_the_elements_with_other_bytes_are_found(dtype: torch.dtype, count: int) -> None:
    sent = (torch.arange(count) % 200).to(dtype)
    values, places = sent.clone(), torch.arange(0, count, 97)
    values[places] = (sent[places].float() + 1).to(dtype)
    assert torch.equal(differing(values, sent), places)
    assert not len(differing(sent, sent.clone()))


def test_zeros_of_either_sign_differ_and_equal_not_a_numbers_do_not() -> None:
    nan = float("nan")
    found = differing(torch.tensor([0.0, nan, 1.0]), torch.tensor([-0.0, nan, 1.0]))
    assert found.tolist() == [0]
