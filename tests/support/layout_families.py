"""Tiny facts of every family, and layouts executed with numpy: what torch-free tests of plans are made of."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rlctl.models.facts import MlaFacts, ModelFacts, MoeFacts
from rlctl.models.families import weights_of
from rlctl.weights import hf
from rlctl.weights.layout import Box, Layout, View, coverage, view_of
from rlctl.weights.transfer_plan import Shard, SingleWorld, World, receive_plan
from rlctl.weights.transforms import Add, Cast
from rlctl.weights.vllm import VllmWorld

SIZES = {
    "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 24, "vocab": 50,
    "max_length": 64,
}  # fmt: skip
MOE = MoeFacts(4, 2, 8)
LATENT = {"kv_heads": 4, "head_dim": 12, "mla": MlaFacts(8, 8, 8, 4, 8)}
BIASED = replace(MOE, expert_bias=True, score="sigmoid")
DEEPSEEK_MOE = replace(MOE, shared_expert_intermediate=8, dense_layers=(0,), expert_bias=True, score="sigmoid")
FAMILIES: dict[str, ModelFacts] = {
    "llama": ModelFacts("llama", **SIZES),
    "llama-tied": ModelFacts("llama", **SIZES, tied_embeddings=True),
    "qwen2": ModelFacts("qwen2", **SIZES, qkv_bias=True),
    "qwen3": ModelFacts("qwen3", **SIZES, qk_norm=True),
    "qwen3_moe": ModelFacts("qwen3_moe", **SIZES, qk_norm=True, moe=MOE),
    "mistral": ModelFacts("mistral", **SIZES),
    "mixtral": ModelFacts("mixtral", **SIZES, moe=MOE),
    "deepseek_v3": ModelFacts("deepseek_v3", **(SIZES | LATENT), moe=DEEPSEEK_MOE, mtp_layers=1),
    "moonlight": ModelFacts("deepseek_v3", **(SIZES | LATENT | {"mla": MlaFacts(None, 8, 8, 4, 8)}), moe=DEEPSEEK_MOE),
    "gemma3": ModelFacts("gemma3", **SIZES, qk_norm=True, tied_embeddings=True),
    "gpt_oss": ModelFacts("gpt_oss", **SIZES, qkv_bias=True, moe=MOE),
    "phi3": ModelFacts("phi3", **SIZES),
    "glm4": ModelFacts("glm4", **SIZES, qkv_bias=True),
    "glm4_moe": ModelFacts("glm4_moe", **SIZES, qkv_bias=True, qk_norm=True, moe=DEEPSEEK_MOE, mtp_layers=1),
    "olmo2": ModelFacts("olmo2", **SIZES, qk_norm=True, wide_qk_norm=True),
    "minimax_m2": ModelFacts("minimax_m2", **SIZES, qk_norm=True, wide_qk_norm=True, moe=BIASED),
}

Memory = list[dict[str, np.ndarray]]


def numbered(facts: ModelFacts) -> dict[str, np.ndarray]:
    """The tensors of a model, every element a different whole number."""
    tensors, first = {}, 1
    for name, shape in weights_of(facts).tensors.items():
        count = int(np.prod(shape))
        tensors[name] = np.arange(first, first + count, dtype=np.float64).reshape(shape)
        first += count
    return tensors


def published(facts: ModelFacts) -> SingleWorld:
    """One rank with every published tensor, whole."""
    return SingleWorld(hf.layout(facts, "float64"))


def scatter(tensors: dict[str, np.ndarray], source: World, world: World | VllmWorld) -> Memory:
    """What every rank of `world` holds when `source` (one rank, whole tensors) fills it."""
    return [run(source, [tensors], world, rank) for rank in range(world.size)]


def gather(memory: Memory, world: World | VllmWorld, target: World) -> dict[str, np.ndarray]:
    """The tensors again, from the ranks of `world`."""
    return run(world, memory, target, 0)


class Sending:
    """An engine's ranks as a source: those that hold the same part of a tensor are holders of one shard."""

    def __init__(self, world: VllmWorld) -> None:
        self.size, self.layout = world.size, cache(world.layout)

    def shards(self, tensor: str) -> list[Shard]:
        found: dict[tuple, list[int]] = {}
        for layout in map(self.layout, range(self.size)):
            for piece in layout.by_tensor.get(tensor, ()):
                found.setdefault((piece.tensor_box, piece, layout.params[piece.param]), []).append(layout.rank)
        once = {box: (ranks, piece, spec) for (box, piece, spec), ranks in reversed(found.items())}
        return [Shard(ranks, ((piece, spec),)) for ranks, piece, spec in once.values()]


def run(source: World | VllmWorld, memory: Memory, destination: World | VllmWorld, rank: int) -> dict[str, np.ndarray]:
    """Execute one destination rank's proven plan with numpy."""
    source = Sending(source) if isinstance(source, VllmWorld) else source
    plan = receive_plan(source, destination.layout(rank)).prove()
    params = {name: np.full(spec.shape, np.nan) for name, spec in plan.layout.params.items()}
    for fill in plan.fills:
        view(params[fill.param], view_of(plan.layout.params[fill.param], fill.box))[...] = fill.value
    for copy in plan.copies:
        values = view(memory[copy.source_rank][copy.source_param], copy.source_view)
        for transform in copy.transforms:
            assert isinstance(transform, Add | Cast), transform
            values = values + transform.value if isinstance(transform, Add) else values
        target = view(params[copy.destination_param], copy.destination_view)
        assert np.isnan(target).all(), f"{copy.destination_param} is written twice"
        target[...] = values
    assert not any(np.isnan(value).any() for value in params.values())
    return params


def view(memory: np.ndarray, place: View) -> np.ndarray:
    """A plan's view of a contiguous array."""
    assert memory.flags.c_contiguous
    flat = memory.reshape(-1)[place.offset :]
    return as_strided(flat, place.shape, tuple(step * memory.itemsize for step in place.strides))


def problems(layout: Layout) -> list[str]:
    """Which params pieces and fills do not cover exactly once."""
    boxes: dict[str, list[Box]] = {name: [] for name in layout.params}
    for name, box in (*((p.param, p.param_box) for p in layout.pieces), *((f.param, f.box) for f in layout.fills)):
        boxes.setdefault(name, []).append(box)
    return [line for name, own in boxes.items() for line in coverage(name, layout.params.get(name), own)]
