"""The direct receive path: rows of published tensors straight into what a running model computes with.

A matrix that is stored plainly is overwritten in place. One that the CPU platform keeps repacked, and an expert that it
keeps in an order of its own, is packed again from the staging memory, without the loader's buffers and bookkeeping.
`assignment` says which tensors come this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from rlctl.backends.vllm import expert_packing
from rlctl.backends.vllm.live import Form, Site
from rlctl.weights.layout import Layout, ParamSpec, Piece, Span


@dataclass(frozen=True)
class Target:
    """Where a parameter's rows go: into `memory`, if there is any, and then to `packs`."""

    memory: torch.Tensor | None
    rows: int
    packs: tuple[Callable[[torch.Tensor], None], ...] = ()


def param_name(site: Site) -> str:
    """The site's name in the layout that a worker asks for."""
    return f"{site.path}.{site.parameter}" + ("" if site.index is None else f"[{site.index}]")


class DirectWriter:
    """What goes into some places of one worker's model, and writing it."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = [_without_unused_copy(site) for site in sites]
        self._padded: dict[tuple[int, ...], torch.Tensor] = {}

    def layout(self) -> Layout:
        """Every parameter once: its site's rows one below the other, [rows, columns] or [rows].

        A site that shares its memory with another (tied embeddings, a router's bias) asks for nothing: it is filled
        with the other.
        """
        params: dict[str, ParamSpec] = {}
        pieces: list[Piece] = []
        shared = self.shared()
        for index, site in enumerate(self.sites):
            if index in shared:
                continue
            name, dtype = param_name(site), str(site.kept().dtype).removeprefix("torch.")
            width = () if _is_vector(site) else (site.columns,)
            params[name] = ParamSpec((_rows(site), *width), dtype)
            pieces += _pieces(site, name, width)
        return Layout(0, params, tuple(pieces))

    def targets(self) -> dict[str, Target]:
        """Where each parameter of `layout` goes, as things are now."""
        found: dict[str, Target] = {}
        shared = self.shared()
        for index, site in enumerate(self.sites):
            name = param_name(self.sites[shared.get(index, index)])
            packs = (partial(self.pack, site),) if site.form is not Form.PLAIN else ()
            if index in shared:
                found[name] = replace(found[name], packs=found[name].packs + packs)
            else:
                found[name] = Target(self.memory(site), _rows(site), packs)
        return found

    def shared(self) -> dict[int, int]:
        """Sites that compute with, or pack from, the memory of an earlier site; both by their place in `sites`."""
        first: dict[tuple, int] = {}
        found: dict[int, int] = {}
        for index, site in enumerate(self.sites):
            memory = self.memory(site)
            if memory is not None:
                earlier = first.setdefault((memory.data_ptr(), memory.shape, memory.stride()), index)
                if earlier != index:
                    found[index] = earlier
        return found

    def memory(self, site: Site) -> torch.Tensor | None:
        """The live rows of a site; None where the engine holds nothing but a copy in another order."""
        if site.form is Form.PERMUTED or not site.kept().numel():
            return None
        stored = site.stored()[: _rows(site)]
        return stored if stored.dim() == 1 else stored[:, : site.columns]

    def pack(self, site: Site, fused: torch.Tensor) -> None:
        """Renew the copy in another order from the site's whole matrix."""
        if site.form is Form.PERMUTED:
            self._permute(site, fused)
            return
        module = site.module
        if not getattr(module, site.parameter).numel():
            module.register_parameter(site.parameter, torch.nn.Parameter(fused, requires_grad=False))
        module.quant_method.process_weights_after_loading(module)

    def _permute(self, site: Site, fused: torch.Tensor) -> None:
        """Write an expert in its kernel's order; the kernel's padding is zeros."""
        kept = site.kept()
        if not site.transposed and fused.shape == kept.shape and fused.dtype == kept.dtype:
            expert_packing.pack(fused.contiguous(), kept, site.isa)
            return
        plain = self._padded.setdefault(tuple(kept.shape), torch.zeros_like(kept))
        stored, row = plain.t() if site.transposed else plain, 0
        for part in site.parts:
            stored[part.row : part.row + part.rows, : site.columns].copy_(fused[row : row + part.rows])
            row += part.rows
        expert_packing.pack(plain, kept, site.isa)


def _rows(site: Site) -> int:
    return sum(part.rows for part in site.parts)


def _is_vector(site: Site) -> bool:
    return site.form is Form.PLAIN and site.kept().dim() == 1


def _pieces(site: Site, name: str, width: tuple[int, ...]) -> list[Piece]:
    """The published boxes in the site's rows, part after part. A tensor of all experts has one index more in front."""
    found, row = [], 0
    for part in site.parts:
        inner = (part.rows, *width)
        leading = len(part.shape) - len(inner)
        box = tuple(Span(start, count) for start, count in zip(part.start, (*(1,) * leading, *inner), strict=True))
        at = (Span(row, part.rows), *(Span(0, columns) for columns in width))
        found.append(Piece(part.tensor, box, name, at, tuple(range(leading, len(box)))))
        row += part.rows
    return found


def _without_unused_copy(site: Site) -> Site:
    """vLLM packs the input embedding for products too, which nobody computes with it."""
    if not (site.lookup and site.packed):
        return site
    site.module.cpu_linear = torch.nn.functional.linear
    return replace(site, form=Form.PLAIN)
