"""The matrices of hidden layers that Muon orthogonalizes, and where ranks hold their parts. Torch-free.

A matrix is one published projection: query, key, value, gate and up are separate even where an engine stores them as
one parameter, and so is each expert. Embedding, head, norms, biases and vision towers are no hidden matrices. Routers
are: Moonlight trains them with Muon (arXiv:2502.16982, section 3.4, compares the singular values of router weights),
and Megatron-Core's Muon takes every matrix but embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlctl.models.matrices import Matrix, Role
from rlctl.weights.layout import Box, Layout, ParamSpec, Piece, Span, View, meet, view_of

HIDDEN_ROLES = frozenset(
    {Role.Q, Role.K, Role.V, Role.O, Role.GATE, Role.UP, Role.DOWN, Role.ROUTER}
    | {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN, Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN}
    | {Role.MLA_Q, Role.MLA_Q_DOWN, Role.MLA_Q_UP, Role.MLA_KV_DOWN, Role.MLA_KV_UP, Role.MTP_PROJECTION}
    | {Role.EXPERT_STACK, Role.OTHER}
)
"""Roles of hidden matrices. Whether a tensor of a family without a file (`OTHER`) is one depends on its module."""
MATRIX = 2
STACKED = 3
"""The axes of a tensor that holds a matrix of every expert."""


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A block of a matrix in a param's memory."""

    matrix: int
    """The matrix's place in the list of all."""
    row: int
    column: int
    view: View
    """(rows, columns) of the block; the offset counts from the param."""


def hidden_matrices(matrices: Iterable[Matrix]) -> Iterator[Matrix]:
    """Yield the hidden matrices among `matrices`, each expert of a stack alone."""
    for matrix in matrices:
        if matrix.role not in HIDDEN_ROLES or matrix.layer is None:
            continue
        if len(matrix.shape) == STACKED and matrix.role is Role.EXPERT_STACK:
            stacked = matrix.axes[0]
            for expert in range(matrix.shape[0]):
                starts = list(matrix.tensor_starts)
                starts[stacked] += expert * matrix.tensor_steps[stacked]
                axes, shape = matrix.axes[1:], matrix.shape[1:]
                yield replace(matrix, expert=expert, shape=shape, axes=axes, tensor_starts=tuple(starts))
        elif len(matrix.shape) == MATRIX:
            yield matrix


def parts_of_params(layout: Layout, matrices: Sequence[Matrix]) -> dict[str, list[MatrixPart]]:
    """Return the parts of matrices in each parameter of a rank; parts name a matrix by its place in `matrices`."""
    by_tensor = dict[str, list[tuple[int, Matrix]]]()
    for place, matrix in enumerate(matrices):
        by_tensor.setdefault(matrix.tensor, []).append((place, matrix))
    parts = dict[str, list[MatrixPart]]()
    for piece in layout.pieces:
        in_piece = parts_of(piece, layout.params[piece.param], by_tensor.get(piece.tensor, ()))
        parts.setdefault(piece.param, []).extend(in_piece)
    return parts


def parts_of(piece: Piece, spec: ParamSpec, candidates: Iterable[tuple[int, Matrix]]) -> Iterator[MatrixPart]:
    """Yield the blocks of matrices of the piece's tensor, `candidates` by place, that the piece of a param holds."""
    for place, matrix in candidates:
        hits = {}
        for axis, (held, start, step) in enumerate(
            zip(piece.tensor_box, matrix.tensor_starts, matrix.tensor_steps, strict=True)
        ):
            count = matrix.shape[matrix.axes.index(axis)] if axis in matrix.axes else 1
            hits[axis] = meet(held, Span(start, count, step))
        if any(hit is None for hit in hits.values()):
            continue
        box: Box = tuple(
            span if axis is None else span.part(hits[axis][0], hits[axis][4], hits[axis][1])
            for span, axis in zip(piece.param_box, piece.axes, strict=True)
        )
        view, sides = view_of(spec, box), tuple(piece.axes.index(axis) for axis in matrix.axes)
        block = View(view.offset, tuple(view.shape[i] for i in sides), tuple(view.strides[i] for i in sides))
        row, column = (hits[axis][2] for axis in matrix.axes)
        yield MatrixPart(place, row, column, block)


def cost(shape: Sequence[int]) -> int:
    """Return multiply-adds of one Newton-Schulz step of an [r, c] matrix with r <= c: r*r*c twice, and r*r*r."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


def owners_of(matrices: Sequence[Matrix], holders: Callable[[Matrix], Sequence[int]]) -> list[int]:
    """Return the rank that orthogonalizes each matrix, one of its `holders`: the costliest first, each to the rank with
    the least work. Every rank makes the same list."""
    owners, work = [0] * len(matrices), dict[int, int]()
    for place in sorted(range(len(matrices)), key=lambda place: -cost(matrices[place].shape)):
        ranks = holders(matrices[place])
        owner = min(ranks, key=lambda rank: (work.get(rank, 0), rank))
        owners[place] = owner
        work[owner] = work.get(owner, 0) + cost(matrices[place].shape)
    return owners
