"""The norm that gradients are clipped by."""

from __future__ import annotations

import pytest
import torch

from rlctl.backends.results import NORM_CHUNK, squared_norm


@pytest.mark.parametrize("size", [0, 7, 20 * NORM_CHUNK + 1])
def test_the_norm_of_many_elements_is_right_to_float32s_rounding(size: int) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert float(squared_norm(gradient)) == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)
