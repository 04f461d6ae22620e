"""From a matrix and its place in a param to a `Piece`: the composition that all engines' layouts share."""

from __future__ import annotations

from rlctl.errors import ConfigError
from rlctl.models.matrices import Matrix
from rlctl.weights.layout import Box, Piece, Span
from rlctl.weights.transforms import Add, Transform


def piece(matrix: Matrix, box: Box, param: str, starts: tuple[int, ...], primary: bool = True, **more: object) -> Piece:
    """`box` of the matrix at `starts` of the param; leading param axes that the matrix lacks have length one.

    `axes` (keyword) maps each param axis to a matrix axis or None where the order differs, `gain` (keyword) is the
    number that the engine itself adds to the stored value (Megatron's zero-centred norm: 1).
    """
    lead = len(starts) - len(box)
    default = (None,) * lead + tuple(range(len(box)))
    axes: tuple[int | None, ...] = more.get("axes", default)  # type: ignore[assignment]
    shift = matrix.offset - float(more.get("gain", 0.0))  # type: ignore[arg-type]
    transforms: tuple[Transform, ...] = (Add(shift),) if shift else ()
    param_box = tuple(Span(s, 1 if a is None else box[a].count) for s, a in zip(starts, axes, strict=True))
    tensor_axes = tuple(None if a is None else matrix.axes[a] for a in axes)
    return Piece(matrix.tensor, tensor_box(matrix, box), param, param_box, tensor_axes, transforms, primary)


def tensor_box(matrix: Matrix, box: Box) -> Box:
    """Where `box` of the matrix lies in its tensor."""
    spans = [Span(start, 1) for start in matrix.tensor_starts]
    for span, axis in zip(box, matrix.axes, strict=True):
        step = matrix.tensor_steps[axis]
        spans[axis] = Span(matrix.tensor_starts[axis] + span.start * step, span.count, span.step * step)
    return tuple(spans)


def share(total: int, parts: int, index: int, what: str, flag: str) -> Span:
    """The `index`-th of `parts` equal shares; ConfigError names what does not divide."""
    if total % parts:
        raise ConfigError(f"{what} = {total} does not divide by {flag} = {parts}.", f"Choose another {flag}.")
    return Span(index * (total // parts), total // parts)


def on_axis(matrix: Matrix, axis: int, span: Span) -> Box:
    """The whole matrix but for `axis`, where it is `span`."""
    return tuple(span if i == axis else Span(0, n) for i, n in enumerate(matrix.shape))
