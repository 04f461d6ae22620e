"""Dropout of the inputs of adapters."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlctl.backends.lora_adapter import EVERY, Adapted, Dropout
from rlctl.models.matrices import Role
from rlctl.weights.adapter_sites import Place, Site

RATE = 0.25


def layer(dropout: Dropout, name: str = "q_proj") -> Adapted:
    made = Adapted()
    made.adds, made.dropped = True, dropout.of_layer(name, divided=False)
    generator = torch.Generator().manual_seed(3)
    made.lora_a = torch.randn(4, 32, generator=generator).requires_grad_()  # type: ignore[assignment]
    made.lora_b = torch.randn(16, 4, generator=generator).requires_grad_()  # type: ignore[assignment]
    made.sites = ((Site(Place("p.weight", Role.Q, 0, (16, 32), ("t",)), 4, 1.0, 0.5), EVERY),)
    return made


def test_a_layer_drops_the_input_of_its_adapter_alone_as_peft_does() -> None:
    """PEFT: result + lora_B(lora_A(dropout(x))) * scaling, with torch's inverted dropout."""
    dropout, generator = Dropout(RATE, seed=1, rank=0, tp=1), torch.Generator().manual_seed(4)
    ours, base = layer(dropout), torch.randn(16, 32, generator=generator)
    x = torch.randn(500, 32, generator=generator).requires_grad_()
    with dropout.training(step=2):
        factor = ours.dropped(torch.ones_like(x))  # type: ignore[misc]
        out = ours.with_adapters(F.linear(x, base), ours.inner_product(x))
    assert set(factor.unique().tolist()) == {0.0, torch.tensor(1 / (1 - RATE)).item()}
    assert abs((factor == 0).float().mean() - RATE) < 0.02
    expected = F.linear(x, base) + 0.5 * F.linear(F.linear(x * factor, ours.lora_a), ours.lora_b)
    assert torch.allclose(out, expected, atol=1e-5)
    weights = torch.randn(out.shape, generator=generator)
    leaves = (x, ours.lora_a, ours.lora_b)
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, weights), torch.autograd.grad(expected, leaves, weights), strict=True
    ):
        assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-5)


def test_masks_differ_by_layer_step_and_micro_batch_and_repeat() -> None:
    masks, ones = [], torch.ones(8, 64)
    for row, step, name, seed in ((0, 1, "a", 1), (1, 1, "a", 1), (0, 2, "a", 1), (0, 1, "b", 1), (0, 1, "a", 2)):
        for _ in range(2):
            dropout = Dropout(RATE, seed, rank=0, tp=1)
            dropout.row = row
            with dropout.training(step):
                masks.append(dropout.of_layer(name, divided=False)(ones))
    assert all(torch.equal(masks[i], masks[i + 1]) for i in range(0, 10, 2))
    assert all(not torch.equal(masks[i], masks[j]) for i in range(0, 10, 2) for j in range(i + 2, 10, 2))
    assert torch.equal(Dropout(RATE, 1, rank=0, tp=1).of_layer("a", divided=False)(ones), ones)


def test_tensor_parallel_ranks_share_masks_of_shared_inputs_alone() -> None:
    ones, masks = torch.ones(8, 64), {}
    for rank in range(4):
        dropout = Dropout(RATE, 1, rank=rank, tp=2)
        with dropout.training(0):
            masks[rank] = [dropout.of_layer("a", divided)(ones) for divided in (False, True)]
    assert torch.equal(masks[0][0], masks[1][0])
    assert not torch.equal(masks[0][0], masks[2][0])
    assert not torch.equal(masks[0][1], masks[1][1])
