"""Choose a path into one worker's model for each published tensor, with the reason.

A tensor is written directly if all its places are known, else through vLLM's loader. The layerwise reload takes modules
out of use, so it gets whole modules with all their tensors. With unknown parameters, the surrounding layer goes through
the loader, or else the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rlctl.backends.vllm.weights.locate import Storage, StoredMatrices, StoredMatrix
from rlctl.transport.rounds import Route

DIRECT, LOADER, MIXED = "direct", "loader", "mixed"
MODEL = ""
"""The path of the model itself."""
WRITTEN = {
    Storage.PLAIN: "stored plainly and overwritten",
    Storage.REPACKED: "packed again for the processor's matrix products",
    Storage.PERMUTED: "packed again for the processor's product of experts",
}
BESIDE = "in one module with a tensor that goes through the loader"
UNMATCHED = "in a layer with parameters and tensors that are not known to match"


@dataclass(frozen=True)
class Assignment:
    """The matrices that a worker writes directly, and the tensors that it leaves to the loader."""

    direct: tuple[StoredMatrix, ...]
    loaded: dict[str, str]
    """Published tensor -> why it goes through the loader."""
    reloaded: tuple[str, ...] = ()
    """Paths of the modules that this fills, with all below them."""
    unknown_storage: tuple[str, ...] = ()
    """The modules among or below them that only the loader can fill."""

    @property
    def path(self) -> str:
        """The way of its tensors (a matrix's `path` is its module): `direct`, `loader`, or `mixed`."""
        if not self.loaded:
            return DIRECT
        return MIXED if self.direct else LOADER

    def routes(self) -> tuple[Route, ...]:
        tensors_by_route: dict[tuple[str, str], list[str]] = {}
        for tensor, reason in (_written(self.direct) | self.loaded).items():
            tensors_by_route.setdefault((LOADER if tensor in self.loaded else DIRECT, reason), []).append(tensor)
        return tuple(Route(path, reason, tuple(tensors)) for (path, reason), tensors in tensors_by_route.items())


def all_loaded(tensors: Collection[str], reason: str) -> Assignment:
    return Assignment((), dict.fromkeys(tensors, reason), (MODEL,))


def assign(
    matrices: StoredMatrices, tensors: Collection[str], *, alone: bool, elsewhere: Collection[str] = ()
) -> Assignment:
    """Assign paths for a model with `matrices`. `alone`: no other worker has parts of it, so every tensor needs a
    place; else `elsewhere` has other workers' modules."""
    tensors = [tensor for tensor in tensors if not _within(tensor, set(elsewhere))]
    every = [matrix for matrix in (*matrices.found, *matrices.unknown_storage) if matrix.parts]
    strange = list(_unmatched(matrices, every, set(tensors), alone))
    layers = {_layer(name) for name in strange}
    if strange and not all(_inhabited(layer, every, tensors) for layer in layers):
        return all_loaded(tensors, f"{len(strange)} parameters or tensors do not match one to one ({strange[0]})")
    loaded = {tensor: UNMATCHED for tensor in tensors if _within(tensor, layers)}
    loaded |= {part.tensor: reason for matrix in every if (reason := _why_loaded(matrix)) for part in matrix.parts}
    if not loaded:
        return Assignment(tuple(every), {})
    paths = _closed([matrix for matrix in every if not matrix.derived], loaded, layers)
    direct = tuple(
        matrix for matrix in matrices.found if matrix.parts and not any(p.tensor in loaded for p in matrix.parts)
    )
    loaded = {tensor: loaded[tensor] for tensor in tensors if tensor in loaded}
    if not direct:
        return Assignment((), loaded, (MODEL,))
    return Assignment(direct, loaded, tuple(sorted(paths)), _filled_by_loader_alone(matrices, every))


def _filled_by_loader_alone(matrices: StoredMatrices, every: list[StoredMatrix]) -> tuple[str, ...]:
    """Modules of unknown storage whose tensors no other module has (another, like tied embeddings, could fill them)."""
    holders = Counter(tensor for tensor, _ in {(p.tensor, s.path) for s in every if not s.derived for p in s.parts})
    stored = [matrix for matrix in matrices.unknown_storage if not matrix.derived]
    return tuple(sorted({matrix.path for matrix in stored if any(holders[part.tensor] == 1 for part in matrix.parts)}))


def _written(direct: tuple[StoredMatrix, ...]) -> dict[str, str]:
    forms = [(Storage.PLAIN if matrix.lookup else matrix.storage, matrix) for matrix in direct]
    plain_first = sorted(forms, key=lambda form: form[0] is not Storage.PLAIN)
    return {part.tensor: WRITTEN[form] for form, matrix in plain_first for part in matrix.parts}


def _unmatched(matrices: StoredMatrices, every: list[StoredMatrix], tensors: set[str], alone: bool) -> Iterator[str]:
    yield from matrices.unknown
    tensors_of = {part.tensor for matrix in every for part in matrix.parts}
    yield from sorted(tensors_of - tensors)
    # Parameters missing in one worker may be in another, and verification looks at all of them. A worker that does not
    # know all its parameters proves nothing.
    if alone or matrices.unknown or matrices.unknown_storage:
        yield from sorted(tensors - tensors_of - {tensor for matrix in matrices.found for tensor in matrix.elsewhere})


def _layer(name: str) -> str:
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else MODEL


def _inhabited(layer: str, every: list[StoredMatrix], tensors: Collection[str]) -> bool:
    inside = {layer} - {MODEL}
    return any(_within(matrix.path, inside) for matrix in every) and any(_within(tensor, inside) for tensor in tensors)


def _within(name: str, paths: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in paths for count in range(1, len(parts) + 1))


def _why_loaded(matrix: StoredMatrix) -> str:
    """Why a matrix's tensors cannot be written directly; empty: they can."""
    if matrix.why_unknown:
        return f"its parameter {matrix.why_unknown}"
    if matrix.storage is Storage.PLAIN and sum(part.rows for part in matrix.parts) != max(
        p.row + p.rows for p in matrix.parts
    ):
        return "its parameter is padded between its parts"
    return ""


def _closed(stored: list[StoredMatrix], loaded: dict[str, str], layers: set[str]) -> set[str]:
    """Modules to reload so that `loaded` can be loaded, closed over their tensors, which are added to `loaded`."""
    paths = set(layers)
    while True:
        before = len(paths), len(loaded)
        for matrix in stored:
            if any(part.tensor in loaded for part in matrix.parts) and not _within(matrix.path, paths):
                paths.add(matrix.path)
            if _within(matrix.path, paths):
                for part in matrix.parts:
                    loaded.setdefault(part.tensor, BESIDE)
        if before == (len(paths), len(loaded)):
            return {path for path in paths if not _within(path.rpartition(".")[0], paths)}
