"""Megatron's parallelism-independent checkpoint keys (torch_dist) as a layout.

A key holds a matrix fused at TP 1, with layers stacked (`decoder.layers.X`) or separate (`decoder.layers.7.X`), and
experts stacked along a further axis. Sources: sharded_state_dict of megatron/core/transformer/transformer_block.py,
mlp.py and moe/experts.py, 0.16 to 0.19, including `singleton_local_shards` (a key per expert, gate and up as `_w` and
`_v`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.weights.layout import Box, Layout, ParamSpec, Piece, Shape, Span, cut, whole
from rlctl.weights.megatron import MegatronWorld

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*mlp\.experts\.)local_experts\.(\d+)\.(.+)$")

# TransformerEngine's key -> the local layer spec's key, where they differ in a checkpoint: with latent attention, and
# without it (Megatron renames the local spec's norms there, in layers with experts too)
LATENT_KEYS = {
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
PLAIN_KEYS = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
NORM_KEYS = tuple({*LATENT_KEYS, *LATENT_KEYS.values(), *PLAIN_KEYS, *PLAIN_KEYS.values()})
_LINEAR = re.compile(
    r"(linear_(?:qkv|proj|fc1|fc2|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)|eh_proj)\.weight$"
)


@dataclass(frozen=True)
class KeyStyle:
    """Naming of a checkpoint's contents."""

    stacked: bool = True
    """Layers along a leading axis; else one key a layer."""
    singleton: bool = False
    """One key an expert, and gate and up apart."""


@dataclass(frozen=True)
class _Address:
    key: str
    lead: tuple[int, ...]
    sizes: tuple[int, ...]


def default_style(facts: ModelFacts) -> KeyStyle:
    """Return the style that Megatron writes for such a model: layers that differ are not stacked."""
    return KeyStyle(stacked=facts.moe is None or not facts.moe.dense_layers)


def style_of(keys: Collection[str]) -> KeyStyle:
    stacked = not any(_LAYER.match(key) for key in keys)
    halves = ("linear_fc1.weight_w", "linear_fc1.weight_v")
    return KeyStyle(stacked, singleton=any(key.endswith(halves) for key in keys))


def layout(
    facts: ModelFacts,
    dtype: str,
    style: KeyStyle | None = None,
    vocab_rows: int | None = None,
    holds: Callable[[str], bool] | None = None,
) -> Layout:
    """Return keys, global shapes and pieces of a model's checkpoint. `vocab_rows`: padded vocabulary; None: the
    model's. `holds` tests a key for existence and selects the norms' spelling; without it the layout has both
    spellings, so the checkpoint loads under either spec."""
    style = style or default_style(facts)
    world = MegatronWorld(facts, ParallelSpec(), "te", dtype, "sequential", weights_of(facts).zero_centered_norms)
    rank = world.layout(0)
    params: dict[str, ParamSpec] = {}
    pieces: list[Piece] = []
    for piece in rank.pieces:
        for suffix, box, source, shape in _parts(piece, rank.params[piece.param].shape, style):
            for number, name in enumerate(_spellings(piece.param, holds, facts, style)):
                address = _address(name + suffix, facts, style)
                params[address.key] = ParamSpec(address.sizes + shape, rank.params[piece.param].dtype)
                pieces.append(_at(address, replace(piece, tensor_box=source, param_box=box, primary=number == 0)))
    return _padded(Layout(0, params, tuple(pieces)), vocab_rows)


def extra_state_keys(facts: ModelFacts, style: KeyStyle | None = None) -> list[str]:
    """Keys of the `_extra_state` objects (empty without FP8) that a model asks for next to its linear layers."""
    style = style or default_style(facts)
    rank = MegatronWorld(facts, ParallelSpec(), "te", "bfloat16").layout(0)
    keys = []
    for name in rank.params:
        match = _LINEAR.search(name)
        if match:
            keys.append(_object_key(_address(name.removesuffix("weight") + "_extra_state", facts, style)))
    for layer in range(facts.layers):
        name = f"decoder.layers.{layer}.self_attention.core_attention._extra_state"
        keys.append(_object_key(_address(name, facts, style)))
    return keys


def _object_key(address: _Address) -> str:
    """Unique key of a sharded object: its position in the grid of shards (dist_checkpointing/mapping.py)."""
    offset, shape = address.lead or (0,), address.sizes or (1,)
    return f"{address.key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


def _spellings(name: str, holds: Callable[[str], bool] | None, facts: ModelFacts, style: KeyStyle) -> list[str]:
    """The names under which a param is in the checkpoint: TransformerEngine's, the local spec's, or both."""
    match = _LAYER.match(name)
    other = (LATENT_KEYS if facts.mla else PLAIN_KEYS).get(match[2]) if match else None
    if other is None:
        return [name]
    names = [name, f"decoder.layers.{match[1]}.{other}"]  # type: ignore[index]
    if holds is None:
        return names
    return [n for n in names if holds(_address(n, facts, style).key)][:1] or names[:1]


def _address(name: str, facts: ModelFacts, style: KeyStyle) -> _Address:
    lead: list[int] = []
    sizes: list[int] = []
    match = _LAYER.match(name)
    if match and style.stacked:
        name, lead, sizes = f"decoder.layers.{match[2]}", [int(match[1])], [facts.layers]
    expert = _EXPERT.match(name)
    if expert:
        assert facts.moe is not None
        if style.singleton:
            return _Address(f"{expert[1]}experts.{expert[2]}.{expert[3]}", tuple(lead), tuple(sizes))
        name = f"{expert[1]}experts.{expert[3]}"
        lead, sizes = [*lead, int(expert[2])], [*sizes, facts.moe.experts]
    return _Address(name, tuple(lead), tuple(sizes))


def _at(address: _Address, piece: Piece) -> Piece:
    lead = tuple(Span(index, 1) for index in address.lead)
    axes = (None,) * len(lead) + piece.axes
    return replace(piece, param=address.key, param_box=lead + piece.param_box, axes=axes)


def _parts(piece: Piece, shape: Shape, style: KeyStyle) -> list[tuple[str, Box, Box, Shape]]:
    """(suffix of the key, box in it, box in the tensor, its shape): gate and up lie apart in the singleton style."""
    if not (style.singleton and "linear_fc1.weight" in piece.param):
        return [("", piece.param_box, piece.tensor_box, shape)]
    half = shape[0] // 2
    upper = piece.param_box[0].start >= half
    rows = piece.param_box[0]
    box = (Span(rows.start - half * upper, rows.count), *piece.param_box[1:])
    return [("_v" if upper else "_w", box, piece.tensor_box, (half, *shape[1:]))]


def _padded(plain: Layout, vocab_rows: int | None) -> Layout:
    """The layout of a checkpoint whose embeddings have `vocab_rows` rows; further rows are read by nobody."""
    if vocab_rows is None:
        return plain
    params = {
        key: replace(spec, shape=(vocab_rows, *spec.shape[1:])) if key in VOCAB_KEYS else spec
        for key, spec in plain.params.items()
    }
    return Layout(0, params, plain.pieces)


VOCAB_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class StoredBlock:
    """A contiguous block of a key, stored as one item."""

    key: str
    box: Box

    @property
    def name(self) -> str:
        return f"{self.key}@{','.join(str(span.start) for span in self.box)}"


def chunk_of(spec: ParamSpec, key: str, lead: int, limit_bytes: int) -> list[StoredBlock]:
    """The stored blocks of a key: one for each index of its `lead` axes, cut further above `limit_bytes`."""
    from itertools import product

    inner = ParamSpec(spec.shape[lead:], spec.dtype)
    rows = inner.shape[0] if inner.shape else 1
    step = max(1, min(rows, limit_bytes // max(1, inner.bytes // max(1, rows))))
    heads = product(*(range(n) for n in spec.shape[:lead]))
    rest = whole(inner.shape[1:])
    parts = [(Span(first, min(step, rows - first)), *rest) for first in range(0, rows, step)] if inner.shape else [()]
    return [StoredBlock(key, (*(Span(i, 1) for i in head), *part)) for head in heads for part in parts]


def lead_axes(key: str, facts: ModelFacts, style: KeyStyle) -> int:
    """How many leading axes of a key count layers and experts."""
    layers = key.startswith("decoder.layers.") and style.stacked
    return int(layers) + int(".mlp.experts.experts." in key and not style.singleton)


def chunked(plain: Layout, chunks: list[StoredBlock]) -> Layout:
    """The layout whose params are the blocks of `chunks` instead of whole keys."""
    by_key: dict[str, dict[int, list[Piece]]] = {}
    # pieces of stacked keys by their first index, so that a block compares with its pieces only
    for piece in plain.pieces:
        first = piece.param_box[0] if piece.param_box else Span(0, 0)  # a single number
        by_key.setdefault(piece.param, {}).setdefault(first.start if first.count == 1 else -1, []).append(piece)
    params: dict[str, ParamSpec] = {}
    pieces: list[Piece] = []
    for chunk in chunks:
        params[chunk.name] = ParamSpec(tuple(span.count for span in chunk.box), plain.params[chunk.key].dtype)
        index, first = by_key.get(chunk.key, {}), chunk.box[0] if chunk.box else Span(0, 0)
        near = [p for i in range(first.start, first.start + first.count) for p in index.get(i, ())] if index else []
        for piece in near + index.get(-1, []):
            part = cut(piece, chunk.name, chunk.box)
            if part is not None:
                pieces.append(part)
    return Layout(0, params, tuple(pieces))
