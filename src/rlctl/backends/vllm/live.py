"""Where the parts of each published tensor live inside a running vLLM model, found by walking its modules.

Runs in the engine's worker process. It serves three purposes: to read back what the engine really computes with, to
write boxes straight into parameters, and to say which tensors it cannot do that for, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from rlctl.backends.vllm import live_layers
from rlctl.backends.vllm.messages import Reading
from rlctl.backends.vllm.sites import Form, Part, Site
from rlctl.checkpoints.fingerprints import fingerprint

# Columns of a prepacked matrix that are read back at once.
READ_COLUMNS = 256
# Model classes of vLLM whose modules have other names than the published tensors: (vLLM's, published).
RENAMED = {"GptOssForCausalLM": ((".attn.", ".self_attn."), ("model.embedding.", "model.embed_tokens."))}

__all__ = ["Form", "Part", "Site", "Sites", "read", "sites", "values"]


class Sites(NamedTuple):
    """Everything found in a model."""

    found: list[Site]
    """What rlctl can read and write itself."""
    opaque: list[Site]
    """Of which it knows what tensors they hold, and not how."""
    unreadable: dict[str, str]
    """Parameter -> why its values are not known."""
    unknown: tuple[str, ...]
    """Those of them of which it is not known either what tensors they hold."""


def sites(model: torch.nn.Module) -> Sites:
    """The parameters that rlctl can read and write itself, and those that it cannot."""
    every = live_layers.walk(model)
    if getattr(model.config, "tie_word_embeddings", False):
        every = _name_after_input_embedding(every)
    for vllm, published in RENAMED.get(type(model).__name__, ()):
        every = [_renamed(site, vllm, published) for site in every]
    every = [site.because(site.opaque or _why_misshapen(site)) for site in every]
    found, opaque = [site for site in every if not site.opaque], [site for site in every if site.opaque]
    readable = {f"{site.path}.{site.parameter}" for site in found}
    unreadable = {name: site.opaque for site in opaque for name in _parameters(site) if name not in readable}
    covered = readable | set(unreadable)
    unknown = [name for name, _ in model.named_parameters() if name not in covered]
    for name in unknown:
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        unreadable[name] = f"is stored in a form of its own by {owner}"
    return Sites(found, opaque, unreadable, tuple(unknown))


def _parameters(site: Site) -> Iterator[str]:
    """The names of an opaque site's parameter and of what its module keeps beside it, scales for one."""
    yield f"{site.path}.{site.parameter}"
    if isinstance(site.module, torch.nn.Module):
        yield from (f"{site.path}.{name}" for name, _ in site.module.named_parameters(recurse=False))


def dtypes(model: torch.nn.Module) -> dict[str, str]:
    """The dtype in which the engine holds each published tensor; those that it does not show are left out.

    Not the same for all: a router's correction bias is kept in float32 in an engine of bfloat16.
    """
    return {
        part.tensor: str(site.kept().dtype).removeprefix("torch.") for site in sites(model).found for part in site.parts
    }


def _why_misshapen(site: Site) -> str:
    """Why the parameter cannot hold its parts: kernels may have taken its memory away. Empty: it can."""
    if site.form is Form.REPACKED or not site.parts:
        return ""
    kept = site.kept()
    last, shape = max(part.row + part.rows for part in site.parts), tuple(kept.shape)
    if site.transposed:
        shape = shape[::-1]
    holds = len(shape) > 0 and shape[0] >= last and (len(shape) == 1 or shape[1] >= site.columns)
    return "" if holds else f"is kept with shape {tuple(kept.shape)}"


def _name_after_input_embedding(found: list[Site]) -> list[Site]:
    """With tied embeddings the output module computes with a copy of the input embedding's published tensor."""
    names = {site.parts[0].tensor for site in found if site.lookup}
    return [
        replace(site, parts=tuple(replace(part, tensor=name) for part in site.parts)) if site.output else site
        for site in found
        for name in names
    ]


def _renamed(site: Site, vllm: str, published: str) -> Site:
    parts = tuple(replace(part, tensor=part.tensor.replace(vllm, published)) for part in site.parts)
    return replace(site, parts=parts)


def read(sites_: list[Site]) -> Iterator[Reading]:
    """Fingerprints of everything at `sites_`, of what products and look-ups really use."""
    for site in sites_:
        if site.packed:
            yield from _read_packed(site)
        if not site.packed or site.lookup:
            stored = site.stored()
            for part in site.parts:
                box = site.box(part, stored)
                value = fingerprint(box, part.shape, part.start)
                yield Reading(part.tensor, part.shape, part.start, tuple(box.shape), value, site.name)


def unread(sites_: Sites) -> list[Reading]:
    """Why values are not known: of each tensor that an opaque site holds, and of each parameter that nobody knows."""
    tensors = {part.tensor: site for site in sites_.opaque for part in site.parts}
    found = {name: f"{site.path}.{site.parameter} {site.opaque}" for name, site in tensors.items()}
    found |= {name: sites_.unreadable[name] for name in sites_.unknown}
    return [Reading(name, (), (), (), 0, name, unreadable=why) for name, why in found.items()]


def _read_packed(site: Site) -> Iterator[Reading]:
    """Multiply the identity: each output is one weight times one, plus zeros, hence exact."""
    sums = [0] * len(site.parts)
    for first, columns in _products(site):
        for index, part in enumerate(site.parts):
            box = columns[:, part.row : part.row + part.rows].t()
            start = (part.start[0], part.start[1] + first)
            sums[index] += fingerprint(box, part.shape, start)
    for part, value in zip(site.parts, sums, strict=True):
        extent = (part.rows, site.columns)
        yield Reading(part.tensor, part.shape, part.start, extent, value & ((1 << 64) - 1), f"{site.path} (repacked)")


def _products(site: Site) -> Iterator[tuple[int, torch.Tensor]]:
    """(first column, the matrix's columns from there on as rows [c, N]) of a repacked matrix."""
    module, weight = site.module, getattr(site.module, site.parameter)
    for first in range(0, site.columns, READ_COLUMNS):
        width = min(READ_COLUMNS, site.columns - first)
        eye = torch.zeros(width, site.columns, dtype=weight.dtype)
        eye[:, first : first + width].fill_diagonal_(1.0)
        yield first, module.cpu_linear(eye, weight, None)


def values(sites_: list[Site], tensor: str) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
    """Every copy of `tensor` that the engine computes with: (site, start of the box, values as float32)."""
    for site in sites_:
        parts = [part for part in site.parts if part.tensor == tensor]
        if parts and (not site.packed or site.lookup):
            stored = site.stored()
            for part in parts:
                yield site.name, part.start, site.box(part, stored).float().cpu().numpy()
        if parts and site.packed:
            whole = torch.cat([columns for _, columns in _products(site)]).t()
            for part in parts:
                yield f"{site.path} (repacked)", part.start, site.box(part, whole).float().numpy()
