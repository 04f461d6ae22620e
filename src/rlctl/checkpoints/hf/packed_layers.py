"""Packed linear layers of a Hugging Face directory (`models/quantized_base.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.models.facts import QuantizedBase
from rlctl.models.quantized_base import PARTS
from rlctl.weights.layout import Shape

if TYPE_CHECKING:
    from rlctl.checkpoints.packed_matrix import PackedMatrix


class PackedLayers:
    """Packed linear layers of a directory, whose params are dequantized in bfloat16."""

    def __init__(self, files: SafetensorsDirectory, base: QuantizedBase | None) -> None:
        self.files, self._base = files, base
        self._shapes: dict[str, Shape] = {}

    def add(self, name: str, shape: Shape) -> list[str]:
        """Return the stored tensors of a published tensor; empty: it is not packed."""
        parts = self._parts(name)
        if parts and len(shape) == 2:
            self._shapes[name] = shape
            return parts
        return []

    def __contains__(self, param: str) -> bool:
        return param in self._shapes

    def _parts(self, param: str) -> list[str]:
        """The stored tensors of a layer, its codes first."""
        names = PARTS.get(self._base.method, ()) if self._base is not None else ()
        parts = [f"{param.removesuffix('.weight')}.{name}" for name in names]
        stored = [part for part in parts if part in self.files.tensors]
        return stored if stored[:1] == parts[:1] else []

    def codes(self, param: str) -> str:
        return self._parts(param)[0]

    def read(self, param: str) -> PackedMatrix:
        """Return the matrix of a param. Raises InputError for wrong shapes."""
        from rlctl.checkpoints.packed_matrix import read_packed

        assert self._base is not None
        outputs, inputs = self._shapes[param]
        stem, parts = param.removesuffix(".weight"), self._parts(param)
        return read_packed(self.files.read, stem, self._base, (outputs, inputs), parts)

    def drop(self, param: str) -> None:
        for name in self._parts(param):
            self.files.drop(name)
