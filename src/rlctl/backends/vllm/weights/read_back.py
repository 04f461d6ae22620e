"""Read back the weights that a running vLLM model uses, as fingerprints or values, and poison them. Poisoning is
separate from `write.py`, so that it covers what writing misses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rlctl.backends.vllm.weights.locate import StoredMatrices, StoredMatrix, base_product, stored_matrices
from rlctl.backends.vllm.weights.reload import abandon
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.errors import VerificationError
from rlctl.weights.readings import Reading

READ_COLUMNS = 256
"""Columns of a repacked matrix that are read back at once."""
ROTARY_TABLE = "cos_sin_cache"
ROUNDED = (torch.bfloat16, torch.float16)
"""Dtypes of layers whose first call rounds their float32 table."""
Expected = dict[tuple[str, torch.dtype], int]
_recorded: WeakKeyDictionary[torch.nn.Module, Expected] = WeakKeyDictionary()


# Weights


def read(matrices: list[StoredMatrix]) -> Iterator[Reading]:
    """Fingerprints of what products and look-ups really use."""
    for matrix in matrices:
        if matrix.packed:
            yield from _read_packed(matrix)
        if not matrix.packed or matrix.lookup:
            stored = matrix.stored()
            for part in matrix.parts:
                box = matrix.box(part, stored)
                value = fingerprint(box, part.shape, part.start)
                yield Reading(part.tensor, part.shape, part.start, tuple(box.shape), value, matrix.name)


def unread(every: StoredMatrices) -> list[Reading]:
    """One reading for each tensor of a matrix of unknown storage and for each unknown parameter, with the reason."""
    tensors = {part.tensor: matrix for matrix in every.unknown_storage for part in matrix.parts}
    reasons = {name: f"{matrix.full_name} {matrix.why_unknown}" for name, matrix in tensors.items()}
    reasons |= {name: every.unreadable[name] for name in every.unknown}
    return [Reading(name, (), (), (), 0, name, unreadable=reason) for name, reason in reasons.items()]


def _read_packed(matrix: StoredMatrix) -> Iterator[Reading]:
    """Multiply the identity: each output is one weight times one, plus zeros, hence exact."""
    sums = [0] * len(matrix.parts)
    for first, columns in _products(matrix):
        for index, part in enumerate(matrix.parts):
            box = columns[:, part.row : part.row + part.rows].t()
            start = (part.start[0], part.start[1] + first)
            sums[index] += fingerprint(box, part.shape, start)
    for part, value in zip(matrix.parts, sums, strict=True):
        extent = (part.rows, matrix.columns)
        yield Reading(part.tensor, part.shape, part.start, extent, value & ((1 << 64) - 1), f"{matrix.path} (repacked)")


def _products(matrix: StoredMatrix) -> Iterator[tuple[int, torch.Tensor]]:
    """(first column, the matrix's columns from there on as rows [c, N]) of a repacked matrix."""
    module, weight = matrix.module, getattr(matrix.module, matrix.parameter)
    for first in range(0, matrix.columns, READ_COLUMNS):
        width = min(READ_COLUMNS, matrix.columns - first)
        eye = torch.zeros(width, matrix.columns, dtype=weight.dtype)
        eye[:, first : first + width].fill_diagonal_(1.0)
        yield first, base_product(module)(eye, weight, None)


def values(matrices: list[StoredMatrix], tensor: str) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
    """Every copy of `tensor` that the engine computes with: (matrix, start of the box, values as float32)."""
    for matrix in matrices:
        parts = [part for part in matrix.parts if part.tensor == tensor]
        if parts and (not matrix.packed or matrix.lookup):
            stored = matrix.stored()
            for part in parts:
                yield matrix.name, part.start, matrix.box(part, stored).float().cpu().numpy()
        if parts and matrix.packed:
            whole = torch.cat([columns for _, columns in _products(matrix)]).t()
            for part in parts:
                yield f"{matrix.path} (repacked)", part.start, matrix.box(part, whole).float().numpy()


def read_stored(buffers: Mapping[str, torch.Tensor]) -> Iterator[Reading]:
    """Fingerprints of buffers that hold published tensors."""
    for name, buffer in buffers.items():
        shape = tuple(buffer.shape)
        yield Reading(name, shape, (0,) * len(shape), shape, _fingerprint(buffer), name)


# The other buffers: no refit sends them, and every refit must leave them as they were


def record_buffers(model: torch.nn.Module) -> Expected:
    """Record the buffers' expected fingerprints at the engine's start; only the first call counts. Rotary tables are
    recomputed from the configuration; other buffers do not depend on weights. Raises VerificationError for a wrong
    table."""
    if model not in _recorded:
        fingerprints = {(name, buffer.dtype): _fingerprint(buffer) for name, buffer in _buffers(model)}
        for name, table, computed in _rotary_tables(model):
            _require_right(name, table, computed)
            for dtype in (computed.dtype, *(ROUNDED if computed.dtype == torch.float32 else ())):
                fingerprints[name, dtype] = _fingerprint(computed.to(dtype))
        _recorded[model] = fingerprints
    return _recorded[model]


def _require_right(name: str, table: torch.Tensor, computed: torch.Tensor) -> None:
    if _fingerprint(table) == _fingerprint(computed):
        return
    by = "another shape" if table.shape != computed.shape else f"off by up to {(table - computed).abs().max():.1e}"
    raise VerificationError(
        f"{name}, a table of cosines and sines that no refit sends, has been wrong since the engine's process began: "
        f"computed again it is different ({by}).",
        "Run again. If it happens again, the vector functions of this machine's torch are at fault: report it.",
    )


def read_buffers(model: torch.nn.Module, stored: Collection[str] = ()) -> Iterator[Reading]:
    """Return the value and the expected value of each buffer outside `stored`."""
    expected = record_buffers(model)
    for name, buffer in _buffers(model):
        if name in stored:
            continue
        shape = tuple(buffer.shape)
        value, recorded = _fingerprint(buffer), expected.get((name, buffer.dtype), 0)
        yield Reading(name, shape, (0,) * len(shape), shape, value, name, expected=recorded)


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer is not None and buffer.numel())


def _rotary_tables(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, table, the table that the configuration implies) of each rotary embedding."""
    for path, module in model.named_modules():
        table, compute = getattr(module, ROTARY_TABLE, None), getattr(module, "_compute_cos_sin_cache", None)
        if isinstance(table, torch.Tensor) and callable(compute):
            with table.device:
                computed = compute()
                assert isinstance(computed, torch.Tensor)
                yield f"{path}.{ROTARY_TABLE}", table, computed.to(table.dtype)


def _fingerprint(buffer: torch.Tensor) -> int:
    return fingerprint(buffer, tuple(buffer.shape))


# Spoiling: a refit that compares equal afterwards wrote every weight


def poison(model: torch.nn.Module, stored: Mapping[str, torch.Tensor]) -> int:
    """Fill weights and `stored` buffers, which refits send, with NaN; return the number of tensors."""
    abandon(model)  # parameters of an interrupted reload are not in place
    every = stored_matrices(model)
    readable = {matrix.full_name for matrix in every.found}
    for matrix in every.found:
        if matrix.packed:
            _poison_packed(matrix)
        elif matrix.parts:  # the zeros that other ranks add to one rank's bias are no weights
            matrix.kept().fill_(float("nan"))
    for matrix in every.unknown_storage:
        if matrix.derived:  # no parameter in every version of vLLM
            _poison_latent_halves(matrix)
    params = model.named_parameters()
    unknown = [parameter for name, parameter in params if name not in readable and parameter.is_floating_point()]
    for parameter in unknown:
        parameter.data.fill_(float("nan"))
    floating = [buffer for buffer in stored.values() if buffer.is_floating_point()]
    for buffer in floating:
        buffer.fill_(float("nan"))
    return len(every.found) + len(unknown) + len(floating)


def _poison_latent_halves(matrix: StoredMatrix) -> None:
    for name in ("W_UK_T", "W_UV"):
        made = getattr(matrix.module, name, None)
        if isinstance(made, torch.Tensor):
            made.data.fill_(float("nan"))


def _poison_packed(matrix: StoredMatrix) -> None:
    module, kept = matrix.module, getattr(matrix.module, matrix.parameter)
    if kept.numel():
        kept.data.fill_(float("nan"))
    else:
        rows = max(part.row + part.rows for part in matrix.parts)
        spoiled = torch.full((rows, matrix.columns), float("nan"), dtype=kept.dtype)
        module.register_parameter(matrix.parameter, torch.nn.Parameter(spoiled, requires_grad=False))
    module.quant_method.process_weights_after_loading(module)
