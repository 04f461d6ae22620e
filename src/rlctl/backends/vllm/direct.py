"""The direct receive path: boxes of published tensors straight into what a running model computes with.

A parameter that is stored plainly is overwritten in place. One that the CPU platform keeps repacked is packed again
from the staging memory, without the loader's buffers and bookkeeping. A model with a parameter that `live` cannot place
goes through the loader as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlctl.backends.vllm import expert_packing
from rlctl.backends.vllm.live import Form, Part, Site, sites

Whole = Callable[[str], torch.Tensor]
"""A published tensor by name, in staging memory."""


class DirectWriter:
    """Writes whole refits into one worker's model. `reason` says why it cannot; None: it can."""

    def __init__(self, model: torch.nn.Module, tensors: set[str]) -> None:
        self.sites, unreadable = sites(model)
        self.reason = _why_not(self.sites, unreadable, tensors)
        self._scratch: torch.Tensor | None = None
        if self.reason is None:
            for site in self.sites:
                if site.lookup and site.packed:
                    _drop_unused_copy(site)
            self.sites = sites(model).found

    def write(self, whole: Whole) -> None:
        """Bring every parameter up to date. Look-ups come first: a tied output embedding shares their memory."""
        for site in sorted(self.sites, key=lambda site: site.packed):
            if site.form is Form.REPACKED:
                self._repack(site, whole)
            elif site.form is Form.PERMUTED:
                self._permute(site, whole)
            else:
                stored = site.stored()
                for part in site.parts:
                    site.box(part, stored).copy_(_box(site, part, whole))

    def _permute(self, site: Site, whole: Whole) -> None:
        """Put an expert together as published, padding and all, and write it in its kernel's order."""
        kept = site.kept()
        plain = self._buffer(kept.numel(), kept.dtype).view(kept.shape)
        padded = sum(part.rows * site.columns for part in site.parts) < kept.numel()
        if padded:
            plain.zero_()
        stored = plain.t() if site.transposed else plain
        for part in site.parts:
            site.box(part, stored).copy_(_box(site, part, whole))
        expert_packing.pack(plain, kept, site.isa)

    def _repack(self, site: Site, whole: Whole) -> None:
        """Hand the module its weight as the loader would, and let it pack that as it does at the start."""
        module, kept = site.module, getattr(site.module, site.parameter)
        fused = self._fused(site, whole, kept.dtype)
        if kept.numel():  # the output embedding keeps its parameter beside the packed copy
            kept.data[: fused.shape[0]].copy_(fused)
        else:
            module.register_parameter(site.parameter, torch.nn.Parameter(fused, requires_grad=False))
        module.quant_method.process_weights_after_loading(module)

    def _fused(self, site: Site, whole: Whole, dtype: torch.dtype) -> torch.Tensor:
        """The module's whole matrix: a view of the staging memory where one tensor is all of it, else put together."""
        if len(site.parts) == 1:
            box = _box(site, site.parts[0], whole)
            if box.dtype == dtype and box.is_contiguous():
                return box
        rows = sum(part.rows for part in site.parts)
        scratch = self._buffer(rows * site.columns, dtype).view(rows, site.columns)
        for part in site.parts:
            scratch[part.row : part.row + part.rows].copy_(_box(site, part, whole))
        return scratch

    def _buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that all modules share: packing has copied it by the time the next one needs it."""
        if self._scratch is None or self._scratch.numel() < size or self._scratch.dtype != dtype:
            self._scratch = torch.empty(size, dtype=dtype)
        return self._scratch[:size]


def _box(site: Site, part: Part, whole: Whole) -> torch.Tensor:
    """The part of a published tensor that `site` holds, with the tensor's number of dimensions."""
    tensor = whole(part.tensor)
    if tensor.dim() == 1:
        return tensor[part.start[0] : part.start[0] + part.rows]
    leading, (row, column) = part.start[:-2], part.start[-2:]
    if tensor.dim() == 2 and site.columns == 1 and _is_vector(site):
        return tensor[row : row + 1, column : column + part.rows]
    rows = tensor[tuple(slice(at, at + 1) for at in leading)]
    return rows[..., row : row + part.rows, column : column + site.columns]


def _is_vector(site: Site) -> bool:
    return site.kept().dim() == 1


def _why_not(found: list[Site], unreadable: dict[str, str], tensors: set[str]) -> str | None:
    if unreadable:
        name, why = next(iter(unreadable.items()))
        return f"{len(unreadable)} parameters cannot be written directly ({name} {why})"
    held = {part.tensor for site in found for part in site.parts}
    if held != tensors:
        return f"{len(held ^ tensors)} tensors do not match parameters one to one ({min(held ^ tensors)})"
    return None


def _drop_unused_copy(site: Site) -> None:
    """vLLM packs the input embedding for products too, which nobody computes with it."""
    site.module.cpu_linear = torch.nn.functional.linear
