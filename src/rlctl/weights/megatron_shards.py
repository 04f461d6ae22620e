"""The part of one matrix that one Megatron rank holds: shapes and pieces of each way of dividing it."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.errors import InputError
from rlctl.models.matrices import FLOAT32_ROLES, Matrix
from rlctl.weights.layout import Fill, ParamSpec, Piece, Shape, Span, meet, whole
from rlctl.weights.megatron_names import Kind, Slot
from rlctl.weights.megatron_parallel import Coordinates, MegatronSetting
from rlctl.weights.pieces import on_axis, piece, share


@dataclass(frozen=True, slots=True)
class Place:
    """One param of a rank and the parts of one matrix in it."""

    param: str
    spec: ParamSpec
    pieces: tuple[Piece, ...]
    fills: tuple[Fill, ...] = ()

    def renamed(self, tensor: str, param: str) -> Place:
        """The same part of a matrix of the same kind: its boxes are shared, not made again."""
        if param == self.param and all(p.tensor == tensor for p in self.pieces):
            return self
        return Place(
            param,
            self.spec,
            tuple(p.renamed(tensor, param) for p in self.pieces),
            tuple(Fill(param, fill.box, fill.value) for fill in self.fills),
        )


def place(setting: MegatronSetting, matrix: Matrix, target: Slot, name: str, at: Coordinates, primary: bool) -> Place:
    """Where the rank at `at` holds its part of `matrix` in the param `name`."""
    parallel = setting.parallel
    parts, index = (parallel.expert_tp, at.etp) if matrix.expert is not None else (parallel.tp, at.tp)
    dtype = "float32" if matrix.role in FLOAT32_ROLES else setting.dtype
    gain = float(setting.zero_centered_norms) if target.norm else 0.0
    if target.kind is Kind.VOCAB:
        return _vocab(setting, matrix, name, dtype, index, primary)
    if target.kind is Kind.QKV:
        return _qkv(setting, matrix, target.part, name, dtype, index)
    flag = "etp" if matrix.expert is not None else "tp"
    if matrix.expert is not None and setting.experts == "legacy_grouped":
        return _stacked_expert(setting, matrix, target, name, dtype, share_of(matrix, target, parts, index, flag))
    if target.kind is Kind.REPLICATED:
        own = piece(matrix, whole(matrix.shape), name, (0,) * len(matrix.shape), primary, gain=gain)
        return Place(name, ParamSpec(matrix.shape, dtype), (own,))
    axis, span = share_of(matrix, target, parts, index, flag)
    shape = list(matrix.shape)
    starts = [0] * len(shape)
    shape[axis] = span.count * (2 if target.kind is Kind.GATED else 1)
    starts[axis] = span.count * target.part if target.kind is Kind.GATED else 0
    own = piece(matrix, on_axis(matrix, axis, span), name, tuple(starts), primary)
    return Place(name, ParamSpec(tuple(shape), dtype), (own,))


def share_of(matrix: Matrix, target: Slot, parts: int, index: int, flag: str) -> tuple[int, Span]:
    """The divided axis of a matrix and the rank's share of it."""
    axis = 1 if target.kind is Kind.ROW else 0
    return axis, share(matrix.shape[axis], parts, index, f"Axis {axis} of {matrix.tensor}", flag)


def _vocab(setting: MegatronSetting, matrix: Matrix, name: str, dtype: str, index: int, primary: bool) -> Place:
    vocab, hidden = matrix.shape
    rows = setting.parallel.padded_vocab(vocab) // setting.parallel.tp
    start = index * rows
    held = max(0, min(rows, vocab - start))
    spec = ParamSpec((rows, hidden), dtype)
    own = (piece(matrix, (Span(start, held), Span(0, hidden)), name, (0, 0), primary),) if held else ()
    fills = (Fill(name, (Span(held, rows - held), Span(0, hidden))),) if held < rows else ()
    return Place(name, spec, own, fills)


def _qkv(setting: MegatronSetting, matrix: Matrix, part: int, name: str, dtype: str, index: int) -> Place:
    """Rows of a group: its queries, its key, its value; groups follow one another, ranks take equal shares of rows."""
    facts = setting.facts
    own_rows = facts.heads // facts.kv_heads * facts.head_dim
    group_rows = own_rows + 2 * facts.head_dim
    size, lead = ((own_rows, 0), (facts.head_dim, own_rows), (facts.head_dim, own_rows + facts.head_dim))[part]
    mine = share(facts.kv_heads * group_rows, setting.parallel.tp, index, "Rows of the fused QKV matrix", "tp")
    if facts.heads % setting.parallel.tp:
        share(facts.heads, setting.parallel.tp, index, "Number of attention heads", "tp")
    pieces = []
    for group in range(mine.start // group_rows, -(-(mine.start + mine.count) // group_rows)):
        hit = meet(Span(group * group_rows + lead, size), mine)
        if hit:
            first, _, to, _, count = hit
            box = on_axis(matrix, 0, Span(group * size + first, count))
            pieces.append(piece(matrix, box, name, (to,) + (0,) * (len(matrix.shape) - 1)))
    shape: Shape = (mine.count, *matrix.shape[1:])
    return Place(name, ParamSpec(shape, dtype), tuple(pieces))


def _stacked_expert(
    setting: MegatronSetting, matrix: Matrix, target: Slot, name: str, dtype: str, shared: tuple[int, Span]
) -> Place:
    """GroupedMLP: all experts of the rank in one weight, each transposed to (in, out)."""
    if len(matrix.shape) != 2 or target.kind is Kind.REPLICATED:
        raise InputError(f"Megatron's GroupedMLP has no biases, but the model has {matrix.tensor}.")
    axis, span = shared
    experts = setting.facts.moe.experts // setting.parallel.ep  # type: ignore[union-attr]
    out, inner = (span.count if i == axis else n for i, n in enumerate(matrix.shape))
    columns = out * (2 if target.kind is Kind.GATED else 1)
    shape = (experts, inner, columns)
    memory = (inner, experts * columns) if target.kind is Kind.GATED else (experts * inner, columns)
    starts = (matrix.expert % experts, 0, out * target.part)  # type: ignore[operator]
    own = piece(matrix, on_axis(matrix, axis, span), name, starts, axes=(None, 1, 0))
    return Place(name, ParamSpec(shape, dtype, memory_shape=memory), (own,))
