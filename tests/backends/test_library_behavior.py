"""Behavior of torch, transformers and Ray that rlctl relies on or works around: rows of docs/library_surprises.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.batching.packed_rows import build_row
from rlctl.backends.dtensor.mixed_precision import mixed_precision
from rlctl.checkpoints.hf.transformers_model import computed_buffers
from rlctl.data.rollouts import RolloutColumns


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def test_packed_rows_are_apart_without_a_cache_alone(model: Qwen3ForCausalLM) -> None:
    """transformers 5.19: with `use_cache` left out, position ids that begin again do not part two texts."""
    first, second = torch.arange(1, 9)[None], torch.arange(20, 26)[None]
    ids = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(8), torch.arange(6)])[None]
    with torch.no_grad():
        alone = model(second).logits[0]
        apart = model(ids, position_ids=positions, use_cache=False).logits[0, 8:]
        together = model(ids, position_ids=positions).logits[0, 8:]
    torch.testing.assert_close(apart, alone, rtol=1e-4, atol=1e-4)
    assert (together - alone).abs().max() > 0.1


def test_rotary_frequencies_are_kept_in_float32(model: Qwen3ForCausalLM) -> None:
    """transformers 5.19: `.to(bfloat16)` rounds them; the buffers that a policy computes again are float32."""
    assert all(values.dtype == torch.float32 for values in computed_buffers(model).values())
    rounded = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    assert rounded.model.rotary_emb.inv_freq.dtype == torch.bfloat16


def test_gradients_are_reduced_in_float32() -> None:
    """gloo adds bfloat16 in another order at each position: 256 and three ones give 256 or 260."""
    assert mixed_precision(torch.bfloat16, "nearest").reduce_dtype == torch.float32


def test_rows_do_not_write_into_columns_of_the_object_store() -> None:
    """`torch.from_numpy` of an array out of Ray's store is writable, and writing changes the store for everyone."""
    tokens, mask = np.arange(8, dtype=np.int32), np.array([False, False, True, True] * 2)
    tokens[4:6] = tokens[:2]  # the prompt of both
    columns = RolloutColumns(
        tokens, np.array([0, 4, 8], np.int32), mask, np.full(8, -0.5, np.float32), np.zeros(8, np.int32)
    )
    before = [one.copy() for one in (columns.tokens_T, columns.loss_mask_T, columns.logprobs_T)]
    micro = tuple(WeightedSequence(7, index, 2, 4, 1.0, 0.25) for index in range(2))
    row = build_row(micro, {7: columns}, share=True, multiple=8, device=torch.device("cpu"))
    for values in (row.tokens_T, row.targets_R, row.positions_kT, *row.columns_R.values()):
        values.add_(1) if values.dtype != torch.bool else values.logical_not_()
    for one, other in zip(before, (columns.tokens_T, columns.loss_mask_T, columns.logprobs_T), strict=True):
        np.testing.assert_array_equal(one, other)


def test_bfloat16_sums_of_torch_s_kernels_stop_at_256() -> None:
    """torch 2.13 on CPUs; `backends/cpu_sums.py` computes these gradients in another way."""
    weight, bias = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True), torch.zeros(4, dtype=torch.bfloat16)
    F.embedding(torch.zeros(1000, dtype=torch.long), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad[0, 0] == 256
    ones = torch.ones(1000, 4, dtype=torch.bfloat16)
    F.layer_norm(ones, (4,), None, bias.requires_grad_()).sum().backward()
    assert bias.grad is not None
    assert bias.grad[0] < 1000
