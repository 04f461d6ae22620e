"""Products with added adapters in an engine, against the trainer's layers and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.backends.lora_adapter import EVERY, Adapted, Rows
from rlctl.models.matrices import Role
from rlctl.weights.adapter_sites import Place, Site

INPUTS, RANK, TOKENS = 96, 8, 37


def layer_of(parts: list[tuple[Rows, float]], rows: int, dtype: torch.dtype) -> Adapted:
    generator = torch.Generator().manual_seed(len(parts))
    layer = Adapted()
    layer.adds = True
    layer.weight = torch.randn(rows, INPUTS, generator=generator).to(dtype)  # type: ignore[assignment]
    layer.lora_a = torch.randn(RANK * len(parts), INPUTS, generator=generator).to(dtype).requires_grad_()  # type: ignore[assignment]
    layer.lora_b = torch.randn(rows, RANK, generator=generator).to(dtype).requires_grad_()  # type: ignore[assignment]
    place = Place("p.weight", Role.Q, 0, (rows, INPUTS), ("t",))
    layer.sites = tuple((Site(place, RANK, 1.0, scale), some) for some, scale in parts)
    return layer


FUSED: list[tuple[Rows, float]] = [(slice(0, 32), 2.0), (slice(32, 48), 0.5), (slice(48, 64), 2.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [[(EVERY, 1.7)], FUSED], ids=["whole", "fused"])
def test_engine_and_trainer_round_added_adapters_alike(dtype: torch.dtype, parts: list[tuple[Rows, float]]) -> None:
    from rlctl.backends.vllm.weights.adapters import AddedProduct

    layer, x = (
        layer_of(parts, 64, dtype),
        torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(7)).to(dtype),
    )
    held = [
        (slice(0, 64) if some == EVERY else some, layer.lora_a[i * RANK : (i + 1) * RANK].detach(),
         layer.lora_b[some].detach(), scale)
        for i, (some, scale) in enumerate(parts)
    ]  # fmt: skip
    with torch.no_grad():
        engine = AddedProduct(F.linear, held)(x, layer.weight, None)
    trainer = layer.with_adapters(F.linear(x, layer.weight), layer.inner_product(x))
    # Of fused layers the trainer computes all A x in one product, whose sums have another order.
    differing, largest = (engine != trainer).float().mean(), (engine - trainer).abs().max() / trainer.abs().max()
    assert largest < 1e-6 if dtype == torch.float32 else differing < 0.01
    expected = reference(layer, x.double())
    error = (trainer.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 2 * 2**-8)  # W x, A x and the sum are rounded


def test_gradients_of_added_adapters_are_those_of_float64() -> None:
    """In bfloat16 a gradient is off by a few roundings of its largest element, 2^-8 each."""
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 3 * 2**-8)):
        layer, x = layer_of(FUSED, 64, dtype), torch.randn(TOKENS, INPUTS).to(dtype).requires_grad_()
        weights = torch.randn(TOKENS, 64).to(dtype)
        out = layer.with_adapters(F.linear(x, layer.weight), layer.inner_product(x))
        found = torch.autograd.grad(out, (x, layer.lora_a, layer.lora_b), weights)
        wide = layer_of(FUSED, 64, dtype)
        for name in ("weight", "lora_a", "lora_b"):
            setattr(wide, name, getattr(layer, name).detach().double().requires_grad_())
        x_wide = x.detach().double().requires_grad_()
        outputs = reference(wide, x_wide)
        wanted = torch.autograd.grad(outputs, (x_wide, wide.lora_a, wide.lora_b), weights.double())
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours.double() - theirs).abs().max() < limit * theirs.abs().max()


def reference(layer: Adapted, x: Tensor) -> Tensor:
    """x (W + scale B A)^T in float64, each part with its rows."""
    merged = layer.weight.double().clone()
    for i, (site, some) in enumerate(layer.sites):
        merged[some] += site.scale * layer.lora_b.double()[some] @ layer.lora_a.double()[i * RANK : (i + 1) * RANK]
    return x @ merged.T
