"""Tensors quantized by `training.quantization`, and their shared scales. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache

from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Matrix, Role
from rlctl.settings.training import QuantizationConfig

FUSED = {
    Role.Q: "qkv", Role.K: "qkv", Role.V: "qkv", Role.GATE: "fc1", Role.UP: "fc1",
    Role.EXPERT_GATE: "experts", Role.EXPERT_UP: "experts", Role.SHARED_GATE: "shared", Role.SHARED_UP: "shared",
}  # fmt: skip
"""Matrices that engines multiply at once, and that share the scale of a matrix therefore."""
DIVIDED_INPUTS = frozenset({Role.O, Role.DOWN, Role.SHARED_DOWN})
LINEAR = frozenset(
    {*FUSED, *DIVIDED_INPUTS, Role.EXPERT_DOWN, Role.OTHER, Role.MLA_Q, Role.MLA_Q_DOWN, Role.MLA_Q_UP}
    | {Role.MLA_KV_DOWN, Role.MLA_KV_UP}
)


def quantized_matrices(facts: ModelFacts, settings: QuantizationConfig) -> dict[str, Matrix]:
    """Tensor -> its matrix, of each tensor that is rounded."""
    return {} if settings.format == "none" else _chosen(facts, settings.tensors, settings.exclude)


@lru_cache(maxsize=8)
def _chosen(facts: ModelFacts, tensors: tuple[str, ...], exclude: tuple[str, ...]) -> dict[str, Matrix]:
    matrices = (matrix for matrix in weights_of(facts).matrices if is_linear(matrix))
    return {
        matrix.tensor: matrix
        for matrix in matrices
        if any(fnmatchcase(matrix.tensor, pattern) for pattern in tensors)
        and not any(fnmatchcase(matrix.tensor, pattern) for pattern in exclude)
    }


def is_linear(matrix: Matrix) -> bool:
    """Whether a matrix is a linear layer's; without a family file, one inside a layer except depthwise convolutions."""
    return (
        matrix.role in LINEAR
        and len(matrix.shape) > 1
        and min(matrix.shape) > 1
        and (matrix.role is not Role.OTHER or matrix.layer is not None)
    )


def scale_groups(matrices: dict[str, Matrix]) -> dict[str, int]:
    """Tensor -> number of its matrix's scale, possibly shared."""
    numbers: dict[object, int] = {}
    return {
        tensor: numbers.setdefault(
            (matrix.layer, matrix.expert, FUSED[matrix.role]) if matrix.role in FUSED else tensor, len(numbers)
        )
        for tensor, matrix in matrices.items()
    }


def quantization_problems(
    facts: ModelFacts, settings: QuantizationConfig, parallel: ParallelSpec, dtype: str
) -> Iterator[tuple[str, str]]:
    """Yield each key of `training.quantization` that does not go with the model or the layout, and why."""
    if settings.format == "none":
        return
    if dtype != "bfloat16":
        yield "format", f"weights are rounded from bfloat16, and model.dtype is {dtype}"
    matrices = quantized_matrices(facts, settings)
    if not matrices:
        yield "tensors", f"no linear layer of the model is among {', '.join(settings.tensors)}"
    for tensor, matrix in matrices.items():
        held = weights_of(facts).by_tensor[tensor]
        if len(held) > 1 or matrix.axes != (0, 1) or matrix.tensor_shape != matrix.shape:
            yield "tensors", f"{tensor} holds more than one matrix, or one with its inputs first"
            return
        parts = parallel.tp if matrix.role in DIVIDED_INPUTS else parallel.etp if matrix.role is Role.EXPERT_DOWN else 1
        if matrix.shape[1] % (settings.block * parts):
            has = f"each rank has {matrix.shape[1] / parts:g} of the inputs of {tensor}"
            yield "block", f"{has}, which are no whole blocks of {settings.block}"
            return
