"""What rlctl computes in fewer passes than torch and Megatron do: values and gradients are those of the formulas. And
what it leaves out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlctl.backends.megatron import cpu, lean

cpu.install()

from megatron.core.fusions import fused_bias_swiglu  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.transformer.moe import experts  # noqa: E402

from rlctl.backends.megatron.modules import LeanRMSNorm, rms_norm  # noqa: E402

EPS = 1e-5


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def swiglu(y: Tensor) -> Tensor:
    gate, linear = y.chunk(2, -1)
    return gate * torch.sigmoid(gate) * linear


def gradients(function: object, *inputs: Tensor, upstream: Tensor) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    out = function(*leaves)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


@pytest.mark.parametrize("shape", [(7, 48), (5, 2, 48), (1, 48)])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e3])
def test_norms_and_their_gradients_are_those_of_the_formula(shape: tuple[int, ...], scale: float) -> None:
    """Also in rows of zeros, and where some weights are zero."""
    made = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(shape, generator=made) for _ in range(2))
    x, weight = x * scale, torch.randn(shape[-1], generator=made)
    x[0, ..., :], weight[3] = 0.0, 0.0
    ours = gradients(lambda x, w: rms_norm(x, w, EPS), x, weight, upstream=upstream)
    exact = gradients(normed, x.double(), weight.double(), upstream=upstream)
    assert ours[0].grad_fn is None
    for got, wanted in zip(ours, exact, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-6 * float(wanted.abs().max()))


def test_a_norm_keeps_its_input_and_one_number_a_row() -> None:
    kept: list[Tensor] = []
    x, weight = torch.randn(6, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        LeanRMSNorm.apply(x, weight, EPS)
    assert sorted(one.numel() for one in kept) == [6, 32, 6 * 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_swiglu_is_that_of_the_formula(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    y, upstream = 3 * torch.randn(9, 32, generator=made), torch.randn(9, 16, generator=made)
    y, upstream = y.to(dtype), upstream.to(dtype)
    exact = gradients(swiglu, y.double(), upstream=upstream.double())
    ours = gradients(lambda y: fused_bias_swiglu.bias_swiglu_impl(y, None), y, upstream=upstream)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for got, wanted in zip(ours, exact, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    weighted = fused_bias_swiglu.weighted_bias_swiglu_impl
    weights = torch.rand(9, 1, generator=made)
    ours = gradients(lambda y, w: weighted(y, None, w), y, weights, upstream=upstream)
    exact = gradients(lambda y, w: swiglu(y) * w, y.double(), weights.double(), upstream=upstream.double())
    for got, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=5 * tolerance)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """The definition: the channels c and c + d / 2 of a head are a complex number, which turns by the angle."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("passed", [0, 4])  # channels that do not turn
@pytest.mark.parametrize("mscale", [1.0, 1.3])
def test_rotary_embeddings_and_their_gradients_are_those_of_the_definition(passed: int, mscale: float) -> None:
    made = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 1, 3, 2 * (16 + passed), generator=made)
    x, upstream = whole.chunk(2, -1)  # keys are views of a wider tensor
    angles = torch.randn(5, 1, 1, 8, generator=made)
    freqs = torch.cat([angles, angles], -1)

    def exact(x: Tensor) -> Tensor:
        return torch.cat([rotated(x[..., :16], angles.double()) * mscale, x[..., 16:]], -1)

    ours = gradients(
        lambda x: rope_utils._apply_rotary_pos_emb_bshd(x, freqs, mscale=mscale), x, upstream=upstream.contiguous()
    )
    for got, wanted in zip(ours, gradients(exact, x.double(), upstream=upstream), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])  # the output layer has the same weight
def test_an_embedding_adds_its_gradient_to_the_buffer(shared: bool) -> None:
    """Ids may repeat, and the buffer keeps what it had."""
    made = torch.Generator().manual_seed(0)
    weight, ids = torch.randn(9, 4, generator=made).requires_grad_(), torch.tensor([[3, 0, 3, 8]])
    upstream, before = torch.randn(1, 4, 4, generator=made), torch.randn(9, 4, generator=made)
    (usual,) = torch.autograd.grad(torch.nn.functional.embedding(ids, weight), weight, upstream)
    weight.main_grad = before.clone()  # type: ignore[attr-defined]
    if shared:
        weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    out = lean.look_up(ids, weight)
    assert torch.equal(out, weight[ids])
    out.backward(upstream)
    torch.testing.assert_close(weight.main_grad - before, usual)  # type: ignore[attr-defined]
    assert (weight.grad is None) == shared
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert not getattr(weight, "zero_out_wgrad", False)


def test_no_weights_are_drawn_that_loading_overwrites() -> None:
    """Megatron's own initialization also marks the dimension that tensor parallelism splits, by which gradient norms
    count each element once."""
    asked: list[Tensor] = []
    weight, unmarked = torch.full((4, 3), 7.0), torch.full((4, 3), 7.0)
    with cpu.no_weights_drawn():
        layers._initialize_affine_weight_cpu(weight, 8, 3, 4, 0, asked.append, stride=2, rank=1, world_size=2)
        experts._initialize_affine_weight_cpu(
            unmarked, 4, 6, 3, partition_dim=1, init_method=asked.append, skip_set_tensor_parallel_attributes=True
        )
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 2)
    assert not hasattr(unmarked, "tensor_model_parallel")
    assert asked == []
    assert torch.equal(weight, unmarked)
