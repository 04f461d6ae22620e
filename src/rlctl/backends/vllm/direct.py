"""The direct receive path: boxes of published tensors straight into what a running model computes with.

A parameter that is stored plainly is overwritten in place. One that the CPU platform keeps repacked is packed again
from the staging memory, without the loader's buffers and bookkeeping. A model with a parameter that `live` does not
know (experts, latent attention) goes through the loader as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlctl.backends.vllm.live import Part, Site, sites

Whole = Callable[[str], torch.Tensor]
"""A published tensor by name, in staging memory."""


class DirectWriter:
    """Writes whole refits into one worker's model. `reason` says why it cannot; None: it can."""

    def __init__(self, model: torch.nn.Module, tensors: set[str]) -> None:
        self.sites, unknown = sites(model)
        self.reason = _why_not(self.sites, unknown, tensors)
        self._scratch: torch.Tensor | None = None
        if self.reason is None:
            for site in self.sites:
                if site.lookup and site.packed:
                    _drop_unused_copy(site)
            self.sites, _ = sites(model)

    def write(self, whole: Whole) -> None:
        """Bring every parameter up to date. Look-ups come first: a tied output embedding shares their memory."""
        for site in sorted(self.sites, key=lambda site: site.packed):
            if site.packed:
                self._repack(site, whole)
            else:
                target = getattr(site.module, site.parameter).data
                for part in site.parts:
                    target[part.row : part.row + part.rows].copy_(_box(site, part, whole))

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
    tensor = whole(part.tensor)
    rows = tensor[part.start[0] : part.start[0] + part.rows]
    return rows if tensor.dim() == 1 else rows[:, part.start[1] : part.start[1] + site.columns]


def _why_not(found: list[Site], unknown: list[str], tensors: set[str]) -> str | None:
    if unknown:
        return f"{len(unknown)} parameters are stored in a form of their own ({unknown[0]})"
    held = {part.tensor for site in found for part in site.parts}
    if held != tensors:
        return f"{len(held ^ tensors)} tensors do not match parameters one to one ({min(held ^ tensors)})"
    for site in found:
        parameter = getattr(site.module, site.parameter)
        if site.packed or not parameter.numel():
            continue
        last = max(part.row + part.rows for part in site.parts)
        if parameter.shape[0] < last or (parameter.dim() == 2 and parameter.shape[1] != site.columns):
            return f"{site.path}.{site.parameter} has shape {tuple(parameter.shape)}"
    return None


def _drop_unused_copy(site: Site) -> None:
    """vLLM packs the input embedding for products too, which nobody computes with it."""
    site.module.cpu_linear = torch.nn.functional.linear
