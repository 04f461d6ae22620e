"""Buffers of a running vLLM model: no refit sends them, and every refit must leave them as they were.

Rotary tables follow from the model's configuration and are computed again to compare with. The others (scales of the
attention's cache, Gemma's embedding factor, which experts a rank holds) depend on no weight: what they held before the
first refit is what they must hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch

from rlctl.backends.vllm.messages import Reading
from rlctl.checkpoints.fingerprints import fingerprint

ROTARY_TABLE = "cos_sin_cache"
ROUNDED = (torch.bfloat16, torch.float16)
"""To which the first call of a layer rounds its float32 table, where it computes in them."""
Expected = dict[tuple[str, torch.dtype], int]
_recorded: WeakKeyDictionary[torch.nn.Module, Expected] = WeakKeyDictionary()


def record(model: torch.nn.Module) -> Expected:
    """Fingerprints that the buffers must have; to be called before the first refit, the first call counts."""
    if model not in _recorded:
        found = {(name, buffer.dtype): _fingerprint(buffer) for name, buffer in _buffers(model)}
        for name, table in _rotary_tables(model):
            for dtype in (table.dtype, *(ROUNDED if table.dtype == torch.float32 else ())):
                found[name, dtype] = _fingerprint(table.to(dtype))
        _recorded[model] = found
    return _recorded[model]


def read(model: torch.nn.Module) -> Iterator[Reading]:
    """What each buffer holds, and what it must hold."""
    expected = record(model)
    for name, buffer in _buffers(model):
        shape = tuple(buffer.shape)
        value, wanted = _fingerprint(buffer), expected.get((name, buffer.dtype), 0)
        yield Reading(name, shape, (0,) * len(shape), shape, value, name, expected=wanted)


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer is not None and buffer.numel())


def _rotary_tables(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tables that the configuration of each rotary embedding implies."""
    for path, module in model.named_modules():
        table = getattr(module, ROTARY_TABLE, None)
        if isinstance(table, torch.Tensor) and hasattr(module, "_compute_cos_sin_cache"):
            with table.device:
                yield f"{path}.{ROTARY_TABLE}", module._compute_cos_sin_cache().to(table.dtype)


def _fingerprint(buffer: torch.Tensor) -> int:
    return fingerprint(buffer, tuple(buffer.shape))
