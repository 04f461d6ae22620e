"""What a model's buffers must hold, whatever precision its layers compute in."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from rlctl.errors import VerificationError


class Rotary(torch.nn.Module):
    """Has its table as vLLM's rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)
        self.register_buffer("scale", torch.tensor(0.3))

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return torch.arange(1, 65, dtype=torch.float32).reshape(8, 8).cos()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()


@pytest.fixture(scope="module")
def read_back() -> ModuleType:
    """The module, which imports vLLM."""
    from rlctl.backends.vllm.weights import read_back

    return read_back


def differing(read_back: ModuleType, model: Model) -> list[str]:
    return [reading.tensor for reading in read_back.read_buffers(model) if reading.value != reading.expected]


def test_a_table_that_a_layer_rounds_to_its_precision_is_unchanged(read_back: ModuleType) -> None:
    model = Model()
    read_back.record_buffers(model)
    assert differing(read_back, model) == []
    model.rotary.cos_sin_cache = model.rotary.cos_sin_cache.to(torch.bfloat16)
    assert differing(read_back, model) == []
    model.rotary.cos_sin_cache[3, 2] *= -1
    assert differing(read_back, model) == ["rotary.cos_sin_cache"]


def test_no_other_buffer_may_be_rounded(read_back: ModuleType) -> None:
    model = Model()
    read_back.record_buffers(model)
    model.rotary.scale = model.rotary.scale.to(torch.bfloat16)
    assert differing(read_back, model) == ["rotary.scale"]


def test_a_table_that_was_wrong_from_the_start_is_told_from_one_that_has_changed(read_back: ModuleType) -> None:
    model = Model()
    model.rotary.cos_sin_cache[0, 0] += 2.0**-13  # as the first parallel cosine of a process can be off
    with pytest.raises(VerificationError, match=r"rotary\.cos_sin_cache.* wrong since .* process began.* 1\.2e-04"):
        read_back.record_buffers(model)
    model = Model()
    read_back.record_buffers(model)
    model.rotary.cos_sin_cache[0, 0] += 2.0**-13
    assert differing(read_back, model) == ["rotary.cos_sin_cache"]
