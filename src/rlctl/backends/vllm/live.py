"""Where the parts of each published tensor live inside a running vLLM model, found by walking its modules.

Runs in the engine's worker process. It serves three purposes: to read back what the engine really computes with, to
write boxes straight into parameters, and to say which tensors it cannot do that for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlctl.backends.vllm.messages import Reading
from rlctl.checkpoints.fingerprints import fingerprint

# Columns of a prepacked matrix that are read back at once.
READ_COLUMNS = 256


@dataclass(frozen=True)
class Part:
    """A box of one published tensor inside a module's weight or bias."""

    tensor: str
    shape: tuple[int, ...]
    """Shape of the whole published tensor."""
    start: tuple[int, ...]
    """Where the box begins in it."""
    row: int
    """First row of the module's own matrix (or element of its vector) that holds the box."""
    rows: int


@dataclass(frozen=True)
class Site:
    """One parameter of one module, and the parts it holds, from its first row on."""

    path: str
    module: torch.nn.Module
    parameter: str
    parts: tuple[Part, ...]
    columns: int
    """Width of the module's matrix; 1 for a vector."""
    packed: bool
    """The engine computes with a repacked copy that only the module's own product can read."""
    lookup: bool = False
    """Rows are looked up in the parameter itself (besides a repacked copy used for products)."""
    output: bool = False
    """The output embedding."""


def sites(model: torch.nn.Module) -> tuple[list[Site], list[str]]:
    """The parameters that rlctl can read and write itself, and the paths of those that it cannot."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found = [site for path, module in model.named_modules() for site in _sites_of(path, module, fused)]
    if getattr(model.config, "tie_word_embeddings", False):
        found = _name_after_input_embedding(found)
    covered = {f"{site.path}.{site.parameter}" for site in found}
    return found, [name for name, _ in model.named_parameters() if name not in covered]


def _name_after_input_embedding(found: list[Site]) -> list[Site]:
    """With tied embeddings the output module computes with a copy of the input embedding's published tensor."""
    (name,) = {site.parts[0].tensor for site in found if site.lookup}
    return [
        replace(site, parts=tuple(replace(part, tensor=name) for part in site.parts)) if site.output else site
        for site in found
    ]


def _sites_of(path: str, module: torch.nn.Module, fused: dict[str, list[str]]) -> Iterator[Site]:
    kind = {base.__name__ for base in type(module).__mro__}
    if "VocabParallelEmbedding" in kind:
        yield _embedding(path, module, output="ParallelLMHead" in kind)
    elif "LinearBase" in kind:
        yield from _linear(path, module, kind, fused)
    elif any("Norm" in name for name in kind) and list(module.parameters(recurse=False)):
        yield from _whole(path, module)


def _whole(path: str, module: torch.nn.Module) -> Iterator[Site]:
    """A module whose parameters are stored as published and on every rank (norms)."""
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(parameter.shape)
        part = Part(f"{path}.{name}", shape, (0,) * len(shape), 0, shape[0])
        yield Site(path, module, name, (part,), 1 if len(shape) == 1 else shape[1], packed=False)


def _embedding(path: str, module: torch.nn.Module, output: bool) -> Site:
    indices, width = module.shard_indices, module.embedding_dim
    shape = (module.org_vocab_size, width)
    rows = indices.org_vocab_end_index - indices.org_vocab_start_index
    part = Part(f"{path}.weight", shape, (indices.org_vocab_start_index, 0), 0, rows)
    return Site(path, module, "weight", (part,), width, packed=_is_packed(module), lookup=not output, output=output)


def _linear(path: str, module: torch.nn.Module, kind: set[str], fused: dict[str, list[str]]) -> Iterator[Site]:
    parent, _, leaf = path.rpartition(".")
    names = [f"{parent}.{name}" if parent else name for name in fused.get(leaf, [leaf])]
    tp = 1 if getattr(module, "disable_tp", False) else getattr(module, "tp_size", 1)
    rank = getattr(module, "tp_rank", 0) if tp > 1 else 0
    if "RowParallelLinear" in kind:
        width = module.input_size // tp
        part = Part(f"{path}.weight", (module.output_size, module.input_size), (0, rank * width), 0, module.output_size)
        blocks = [(path, module.output_size, 0, module.output_size)]
        yield Site(path, module, "weight", (part,), width, packed=_is_packed(module))
    else:
        blocks = _output_blocks(module, kind, names, tp, rank)
        if blocks is None:
            return
        width, row, parts = module.input_size, 0, []
        for name, full, first, rows in blocks:
            parts.append(Part(f"{name}.weight", (full, width), (first, 0), row, rows))
            row += rows
        yield Site(path, module, "weight", tuple(parts), width, packed=_is_packed(module))
    if getattr(module, "bias", None) is not None:
        row, parts = 0, []
        for name, full, first, rows in blocks:
            parts.append(Part(f"{name}.bias", (full,), (first,), row, rows))
            row += rows
        yield Site(path, module, "bias", tuple(parts), 1, packed=False)


def _output_blocks(
    module: torch.nn.Module, kind: set[str], names: list[str], tp: int, rank: int
) -> list[tuple[str, int, int, int]] | None:
    """(published module, its full output size, first row here, rows here) of each part of a column-parallel matrix."""
    if "QKVParallelLinear" in kind:
        head, v_head = module.head_size, getattr(module, "v_head_size", module.head_size)
        kv_rank = rank // module.num_kv_head_replicas
        q = (module.total_num_heads * head, rank * module.num_heads * head, module.num_heads * head)
        k = (module.total_num_kv_heads * head, kv_rank * module.num_kv_heads * head, module.num_kv_heads * head)
        v = (module.total_num_kv_heads * v_head, kv_rank * module.num_kv_heads * v_head, module.num_kv_heads * v_head)
        blocks = [q, k, v]
    elif "MergedColumnParallelLinear" in kind:
        blocks = [(size, rank * (size // tp), size // tp) for size in module.output_sizes]
    else:
        rows = module.output_size // tp if "ColumnParallelLinear" in kind else module.output_size
        blocks = [(module.output_size, rank * rows if "ColumnParallelLinear" in kind else 0, rows)]
    if len(blocks) != len(names):
        return None
    return [(name, *block) for name, block in zip(names, blocks, strict=True)]


def _is_packed(module: torch.nn.Module) -> bool:
    product = getattr(module, "cpu_linear", None)
    # The plain fallback is a lambda around the live weight: it reads the parameter at each call.
    return product is not None and bool(getattr(product, "__closure__", None))


def read(sites_: list[Site]) -> Iterator[Reading]:
    """Fingerprints of everything at `sites_`, of what products and look-ups really use."""
    for site in sites_:
        if site.packed:
            yield from _read_packed(site)
        if not site.packed or site.lookup:
            yield from _read_plain(site)


def _read_plain(site: Site) -> Iterator[Reading]:
    stored = getattr(site.module, site.parameter).data
    for part in site.parts:
        box = stored[part.row : part.row + part.rows]
        value = fingerprint(box, part.shape, part.start)
        yield Reading(part.tensor, part.shape, part.start, tuple(box.shape), value, f"{site.path}.{site.parameter}")


def _read_packed(site: Site) -> Iterator[Reading]:
    """Multiply the identity: each output is one weight times one, plus zeros, hence exact."""
    module = site.module
    dtype = getattr(module, site.parameter).dtype
    sums = [0] * len(site.parts)
    for first in range(0, site.columns, READ_COLUMNS):
        width = min(READ_COLUMNS, site.columns - first)
        eye = torch.zeros(width, site.columns, dtype=dtype)
        eye[:, first : first + width].fill_diagonal_(1.0)
        columns = module.cpu_linear(eye, getattr(module, site.parameter), None)
        for index, part in enumerate(site.parts):
            box = columns[:, part.row : part.row + part.rows].t()
            start = (part.start[0], part.start[1] + first)
            sums[index] += fingerprint(box, part.shape, start)
    for part, value in zip(site.parts, sums, strict=True):
        extent = (part.rows, site.columns)
        yield Reading(part.tensor, part.shape, part.start, extent, value & ((1 << 64) - 1), f"{site.path} (repacked)")


def values(sites_: list[Site], tensor: str) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
    """Every copy of `tensor` that the engine computes with: (site, start of the box, values as float32)."""
    for site in sites_:
        for part in site.parts:
            if part.tensor != tensor:
                continue
            if not site.packed or site.lookup:
                stored = getattr(site.module, site.parameter).data[part.row : part.row + part.rows]
                yield f"{site.path}.{site.parameter}", part.start, stored.float().cpu().numpy()
            if site.packed:
                dtype = getattr(site.module, site.parameter).dtype
                product = site.module.cpu_linear(torch.eye(site.columns, dtype=dtype), None, None)
                box = product[:, part.row : part.row + part.rows].t()
                yield f"{site.path} (repacked)", part.start, box.float().numpy()
