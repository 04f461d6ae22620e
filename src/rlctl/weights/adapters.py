"""The layout of a policy's adapters (`training.lora`), derived from its weights' layout. Plain data.

A of a published tensor X [O, I] is the tensor `X.lora_a` [r, I], and B is `X.lora_b` [O, r]. A rank holds the columns
of A and the rows of B that belong to its part of X; tensors that a model computes as one matrix share A, which then
has the first one's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rlctl.weights.layout import Layout, ParamSpec, Piece, Span
from rlctl.weights.transfer_plan import Shard, World

A, B = ".lora_a", ".lora_b"


class AdapterRow(NamedTuple):
    """The adapter of one published tensor."""

    tensor: str
    a: str
    """Name of A: of the first tensor that shares it."""
    rank: int
    scale: float

    @property
    def b(self) -> str:
        return self.tensor + B


def a_param(name: str, param: str) -> str:
    """Return the name of A in a rank whose `param` has the tensor: a parameter of several tensors has several A."""
    return f"{name} in {param}"


def adapter_table(
    rows: Iterable[AdapterRow], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype, shape) of each A and B, by the `shapes` of the adapted tensors."""
    table: dict[str, tuple[int, ...]] = {}
    for row in rows:
        outputs, inputs = shapes[row.tensor]
        table[row.a] = (row.rank, inputs)
        table[row.b] = (outputs, row.rank)
    return [(name, dtype, shape) for name, shape in table.items()]


@dataclass(frozen=True)
class AdapterWorld:
    """All ranks of a policy, with the adapters `rows` in place of the weights."""

    weights: World
    rows: tuple[AdapterRow, ...]
    dtype: str

    @property
    def size(self) -> int:
        return self.weights.size

    @cached_property
    def _by_name(self) -> dict[str, AdapterRow]:
        names = {row.b: row for row in self.rows}
        return names | {row.a: row for row in self.rows if row.a == row.tensor + A}

    def layout(self, rank: int) -> Layout:
        weights, params = self.weights.layout(rank), dict[str, ParamSpec]()
        pieces = dict[Piece, None]()
        for name, row in self._by_name.items():
            for piece in weights.by_tensor.get(row.tensor, ()):
                part, spec = self._part(name, row, piece, weights.params[piece.param])
                params[part.param] = spec
                pieces[part] = None
        return Layout(rank, params, tuple(pieces))

    def shards(self, tensor: str) -> Sequence[Shard]:
        row = self._by_name.get(tensor)
        if row is None:
            return ()
        ranks_of: dict[tuple[tuple[Piece, ParamSpec], ...], set[int]] = {}
        for shard in self.weights.shards(row.tensor):
            parts = tuple(dict.fromkeys(self._part(tensor, row, piece, spec) for piece, spec in shard.pieces))
            ranks_of.setdefault(parts, set()).update(shard.ranks)
        return [Shard(sorted(ranks), parts) for parts, ranks in ranks_of.items()]

    def _part(self, name: str, row: AdapterRow, piece: Piece, spec: ParamSpec) -> tuple[Piece, ParamSpec]:
        """Return the part of A or B that belongs to a part of the weight."""
        assert piece.axes == (0, 1), piece  # adapters sit on matrices
        every, (outputs, inputs) = Span(0, row.rank), spec.shape
        if name.endswith(B):
            box, at, shape = (piece.tensor_box[0], every), (piece.param_box[0], every), (outputs, row.rank)
        else:
            box, at, shape = (every, piece.tensor_box[1]), (every, piece.param_box[1]), (row.rank, inputs)
        param = piece.param + B if name.endswith(B) else a_param(name, piece.param)
        return Piece(name, box, param, at, (0, 1)), ParamSpec(shape, self.dtype)
