"""A CPU engine that computes with the operations of `backends.exact`, as the policy does under `checks.exact`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlctl.backends import exact
from rlctl.backends.exact import attended
from rlctl.backends.vllm import cpu
from rlctl.errors import ConfigError


def install() -> None:
    """Replace the operations of this process's layers; to be called before the model is made."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    cpu.keep_parameters_plain()
    utils.check_cpu_sgl_kernel = lambda *sizes: False
    utils.cpu_unquantized_gemm = lambda layer, x, weight, bias: exact.product(x, weight, bias)
    RMSNorm.forward_native = RMSNorm.forward_cpu = _norm  # type: ignore[method-assign]
    SiluAndMul.forward_native = SiluAndMul.forward_cpu = staticmethod(_activate)  # type: ignore[method-assign]
    RotaryEmbedding.forward_cpu = _rotate  # type: ignore[method-assign]
    Sampler.compute_logprobs = staticmethod(exact.log_softmax)  # type: ignore[method-assign]
    TopKTopPSampler.forward_cpu = _sampling(TopKTopPSampler.forward_cpu)  # type: ignore[method-assign]
    CPUAttentionBackendImpl.do_kv_cache_update = _keep  # type: ignore[method-assign]
    CPUAttentionBackendImpl.forward = _attend  # type: ignore[method-assign]


OPERATIONS = frozenset((
    "VocabParallelEmbedding", "ParallelLMHead", "QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear",
    "ColumnParallelLinear", "ReplicatedLinear", "RMSNorm", "SiluAndMul", "RotaryEmbedding", "Llama3RotaryEmbedding",
    "LinearScalingRotaryEmbedding", "Attention", "LogitsProcessor", "Sampler", "ApplyRotaryEmb",
))  # fmt: skip
"""Classes of vLLM's layers that compute with the operations above, or move rows alone."""


def require(model: torch.nn.Module) -> None:
    """Raise ConfigError for a layer of another class."""
    for name, module in model.named_modules():
        if not list(module.children()) and type(module).__name__ not in OPERATIONS:
            raise ConfigError(
                f"checks.exact: the engine's layer {name} ({type(module).__name__}) has no operation that is equal to "
                "the policy's.",
                "Leave checks.exact out.",
            )


def _norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return exact.rms_norm(x, self.weight, self.variance_epsilon)
    total = x + residual
    return exact.rms_norm(total, self.weight, self.variance_epsilon), total


def _activate(x: Tensor) -> Tensor:
    return exact.swiglu(*x.chunk(2, -1))


def _rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    cos, sin = self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten())[:, None].chunk(2, -1)

    def rotated(x: Tensor) -> Tensor:
        return exact.rotated(x.view(len(cos), -1, self.head_size), cos, sin).view(x.shape)

    return rotated(query), None if key is None else rotated(key)


def _sampling(usual: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Wrap `TopKTopPSampler.forward_cpu`, which computes log-probs beside `Sampler.compute_logprobs`."""

    def forward_cpu(self: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        mode = self.logprobs_mode
        if mode != "processed_logprobs":
            return usual(self, *args)
        self.logprobs_mode = "processed_logits"
        try:
            sampled, logits = usual(self, *args)
        finally:
            self.logprobs_mode = mode
        return sampled, None if logits is None else exact.log_softmax(logits)

    return forward_cpu


def _keep(self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys [T, h, d] and values into blocks [blocks, h, block, 2 d] of the cache."""
    tokens = slot_mapping >= 0
    slots, size = slot_mapping[tokens].long(), kv_cache.shape[2]
    kv_cache[slots // size, :, slots % size] = torch.cat([key, value], -1)[: len(slot_mapping)][tokens]


def _attend(
    self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
    output: Tensor, *scales: Any, **further: Any,
) -> Tensor:  # fmt: skip
    """`CPUAttentionBackendImpl.forward` for causal attention of a decoder."""
    if attn_metadata is None:  # vLLM warms up
        return output
    window = self.sliding_window if self.sliding_window > 0 else None
    lengths, starts = attn_metadata.seq_lens.tolist(), attn_metadata.query_start_loc.tolist()
    for requests, count in _batches(lengths, starts):
        ends_B = torch.tensor([lengths[request] for request in requests])
        blocks = -(-int(ends_B.max()) // kv_cache.shape[2])
        keys, values = _cached(kv_cache, attn_metadata.block_table[requests, :blocks])
        places_K = torch.arange(keys.shape[2])
        known_BK = places_K < ends_B[:, None]
        positions_BQ = ends_B[:, None] - count + torch.arange(count)
        visible = places_K <= positions_BQ[:, :, None]
        if window is not None:
            visible &= positions_BQ[:, :, None] - places_K < window
        unknown = ~known_BK[:, None, :, None]
        rows = torch.cat([torch.arange(starts[request], starts[request] + count) for request in requests])
        q = query[rows].view(len(requests), count, *query.shape[1:]).transpose(1, 2)
        out = attended(
            q,
            _for_each_query_head(keys.masked_fill(unknown, 0.0), q.shape[1]),
            _for_each_query_head(values.masked_fill(unknown, 0.0), q.shape[1]),
            visible[:, None],
            self.scale,
        )
        output[rows] = out.transpose(1, 2).reshape(len(rows), *output.shape[1:])
    return output


def _batches(lengths: list[int], starts: list[int]) -> Iterator[tuple[list[int], int]]:
    """Yield requests that have one new token together, the others alone, each with its number of new tokens."""
    counts = [end - start for start, end in pairwise(starts)][: len(lengths)]
    if decoded := [request for request, count in enumerate(counts) if count == 1]:
        yield decoded, 1
    yield from (([request], count) for request, count in enumerate(counts) if count > 1)


def _cached(kv_cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, h, K, d] of the blocks `table` [B, blocks] of the cache."""
    blocks = kv_cache[table.long()].transpose(1, 2)  # [B, h, blocks, block, 2 d]
    keys, values = blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1]).chunk(2, -1)
    return keys, values


def _for_each_query_head(x_BhKd: Tensor, heads: int) -> Tensor:
    return x_BhKd.repeat_interleave(heads // x_BhKd.shape[1], 1)
