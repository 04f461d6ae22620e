"""Assigns each published tensor a way into the model of one worker, with the reason.

A tensor is written directly where all its places are known, and goes through vLLM's loader otherwise. The loader's
layerwise reload takes modules out of use, so a module is given to it as a whole, with the tensors of all its
parameters; the other modules stay as they are. Where it is not known which tensors a parameter holds, the layer around
it is given to the loader, and where there is no such layer, the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rlctl.backends.vllm.weights.locate import Form, Site, Sites
from rlctl.transport.rounds import Route

DIRECT, LOADER, MIXED = "direct", "loader", "mixed"
MODEL = ""
"""The path of the model itself."""
WRITTEN = {
    Form.PLAIN: "stored plainly and overwritten",
    Form.REPACKED: "packed again for the processor's matrix products",
    Form.PERMUTED: "packed again for the processor's product of experts",
}
BESIDE = "in one module with a tensor that goes through the loader"
UNMATCHED = "in a layer with parameters and tensors that are not known to match"


@dataclass(frozen=True)
class Assignment:
    """The sites that a worker writes directly, and the tensors that it leaves to the loader."""

    direct: tuple[Site, ...]
    loaded: dict[str, str]
    """Published tensor -> why it goes through the loader."""
    reloaded: tuple[str, ...] = ()
    """Paths of the modules that this fills, with all below them."""
    opaque: tuple[str, ...] = ()
    """The modules among or below them that only the loader is known to fill."""

    @property
    def path(self) -> str:
        """The way of its tensors (a site's `path` is its module): `direct`, `loader`, or `mixed`."""
        if not self.loaded:
            return DIRECT
        return MIXED if self.direct else LOADER

    def routes(self) -> tuple[Route, ...]:
        """The tensors by path and reason."""
        found: dict[tuple[str, str], list[str]] = {}
        for tensor, why in (_written(self.direct) | self.loaded).items():
            found.setdefault((LOADER if tensor in self.loaded else DIRECT, why), []).append(tensor)
        return tuple(Route(path, why, tuple(tensors)) for (path, why), tensors in found.items())


def all_loaded(tensors: Collection[str], why: str) -> Assignment:
    """The assignment that sends everything through the loader."""
    return Assignment((), dict.fromkeys(tensors, why), (MODEL,))


def assign(sites: Sites, tensors: Collection[str], *, alone: bool, elsewhere: Collection[str] = ()) -> Assignment:
    """The assignment of a model with `sites` that is sent `tensors`. `alone`: no other worker holds a part of the
    model, so that each tensor must have a place in it; else other workers hold the modules at the paths `elsewhere`."""
    tensors = [tensor for tensor in tensors if not _within(tensor, set(elsewhere))]
    every = [site for site in (*sites.found, *sites.opaque) if site.parts]
    strange = list(_unmatched(sites, every, set(tensors), alone))
    layers = {_layer(name) for name in strange}
    if strange and not all(_inhabited(layer, every, tensors) for layer in layers):
        return all_loaded(tensors, f"{len(strange)} parameters or tensors do not match one to one ({strange[0]})")
    loaded = {tensor: UNMATCHED for tensor in tensors if _within(tensor, layers)}
    loaded |= {part.tensor: why for site in every if (why := _why_loaded(site)) for part in site.parts}
    if not loaded:
        return Assignment(tuple(every), {})
    paths = _closed([site for site in every if not site.derived], loaded, layers)
    direct = tuple(site for site in sites.found if site.parts and not any(p.tensor in loaded for p in site.parts))
    loaded = {tensor: loaded[tensor] for tensor in tensors if tensor in loaded}
    if not direct:
        return Assignment((), loaded, (MODEL,))
    return Assignment(direct, loaded, tuple(sorted(paths)), _filled_by_loader_alone(sites, every))


def _filled_by_loader_alone(sites: Sites, every: list[Site]) -> tuple[str, ...]:
    """Paths of modules with opaque places for tensors that no other module has: one that has may share its memory, as
    tied embeddings do, and be filled with it."""
    holders = Counter(tensor for tensor, _ in {(p.tensor, s.path) for s in every if not s.derived for p in s.parts})
    own = [site for site in sites.opaque if not site.derived]
    return tuple(sorted({site.path for site in own if any(holders[part.tensor] == 1 for part in site.parts)}))


def _written(direct: tuple[Site, ...]) -> dict[str, str]:
    """Why each tensor is written directly: of copies in several forms the one that is not plain counts."""
    forms = [(Form.PLAIN if site.lookup else site.form, site) for site in direct]
    plain_first = sorted(forms, key=lambda of_site: of_site[0] is not Form.PLAIN)
    return {part.tensor: WRITTEN[form] for form, site in plain_first for part in site.parts}


def _unmatched(sites: Sites, every: list[Site], tensors: set[str], alone: bool) -> Iterator[str]:
    """Parameters of which it is not known what they hold, and tensors of which it is not known where they are."""
    yield from sites.unknown
    held = {part.tensor for site in every for part in site.parts}
    yield from sorted(held - tensors)
    # What one of several workers does not hold another one does, and verification looks at all of them. Where one does
    # not know all of its own parameters, that tells nothing.
    if alone or sites.unknown or sites.opaque:
        yield from sorted(tensors - held - {tensor for site in sites.found for tensor in site.elsewhere})


def _layer(name: str) -> str:
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else MODEL


def _inhabited(layer: str, every: list[Site], tensors: Collection[str]) -> bool:
    """Whether both sides call a layer by this name."""
    inside = {layer} - {MODEL}
    return any(_within(site.path, inside) for site in every) and any(_within(tensor, inside) for tensor in tensors)


def _within(name: str, paths: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in paths for count in range(1, len(parts) + 1))


def _why_loaded(site: Site) -> str:
    """Why a site's tensors cannot be written directly; empty: they can."""
    if site.opaque:
        return f"its parameter {site.opaque}"
    if site.form is Form.PLAIN and sum(part.rows for part in site.parts) != max(p.row + p.rows for p in site.parts):
        return "its parameter is padded between its parts"
    return ""


def _closed(own: list[Site], loaded: dict[str, str], layers: set[str]) -> set[str]:
    """Paths of the modules that must be reloaded so that `loaded` may be, and all of whose tensors must then be loaded
    as well: those are added to it."""
    paths = set(layers)
    while True:
        before = len(paths), len(loaded)
        for site in own:
            if any(part.tensor in loaded for part in site.parts) and not _within(site.path, paths):
                paths.add(site.path)
            if _within(site.path, paths):
                for part in site.parts:
                    loaded.setdefault(part.tensor, BESIDE)
        if before == (len(paths), len(loaded)):
            return {path for path in paths if not _within(path.rpartition(".")[0], paths)}
