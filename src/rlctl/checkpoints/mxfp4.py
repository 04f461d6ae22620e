"""gpt-oss's published experts: four-bit blocks and their scales, read as the bfloat16 tensors that the family names.

A tensor X [E, in, out] is published as X_blocks [E, out, in / 32, 16] and X_scales [E, out, in / 32]. Each expert is a
param of its own, `X@e` [out, in], unpacked when it is read, so that memory holds one expert and not a layer of them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from rlctl.checkpoints.safetensors import SafetensorsDirectory
from rlctl.errors import InputError
from rlctl.weights.layout import ParamSpec, Piece, Shape, Span, whole

if TYPE_CHECKING:
    import torch

BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32
HELD = 2
"""Unpacked experts kept: the gate's rows and the up-projection's are asked for one after the other."""


def is_packed(name: str, files: SafetensorsDirectory) -> bool:
    """Whether the tensor is published in four bits."""
    return name not in files.tensors and name + BLOCKS in files.tensors


def packed_params(
    name: str, shape: Shape, files: SafetensorsDirectory
) -> tuple[dict[str, ParamSpec], list[Piece], tuple[str, str]]:
    """Params and pieces of a packed tensor, and the stored tensors they are read from.

    Raises:
        InputError: no scales, or shapes that do not make up `shape`.
    """
    blocks, scales = files.tensors[name + BLOCKS], files.tensors.get(name + SCALES)
    if scales is None:
        raise InputError(f"{blocks.file.name}: {name}{BLOCKS} is there, but {name}{SCALES} is missing.")
    experts, width, rows = shape
    groups = (experts, rows, width // GROUP)
    if width % GROUP or blocks.shape != (*groups, GROUP // 2) or scales.shape != groups:
        found = f"{list(blocks.shape)} with scales {list(scales.shape)}"
        raise InputError(f"{blocks.file.name}: {name}{BLOCKS} has shape {found}; config.json implies {list(shape)}.")
    params, pieces = {}, []
    for expert in range(experts):
        param = f"{name}@{expert}"
        params[param] = ParamSpec((rows, width), "bfloat16")
        box = (Span(expert, 1), Span(0, width), Span(0, rows))
        pieces.append(Piece(name, box, param, whole((rows, width)), (2, 1)))
    return params, pieces, (blocks.name, scales.name)


class PublishedFiles:
    """The stored tensors of a directory as a source, packed experts among them."""

    def __init__(self, files: SafetensorsDirectory) -> None:
        self.files = files
        self._unpacked: OrderedDict[str, torch.Tensor] = OrderedDict()

    def read(self, param: str) -> torch.Tensor:
        if param in self.files.tensors:
            return self.files.read(param)
        if param not in self._unpacked:
            self._unpacked[param] = self._unpack(*_expert(param))
            while len(self._unpacked) > HELD:
                self._unpacked.popitem(last=False)
        return self._unpacked[param]

    def drop(self, param: str) -> None:
        if param in self.files.tensors:
            self.files.drop(param)
            return
        name, _ = _expert(param)
        self.files.drop(name + BLOCKS)

    def place(self, param: str) -> tuple[str, int]:
        """File and byte at which a param begins."""
        name, expert = (param, 0) if param in self.files.tensors else _expert(param)
        stored = self.files.tensors.get(name) or self.files.tensors[name + BLOCKS]
        return stored.file.name, stored.offset + expert * (stored.bytes // max(1, stored.shape[0] if expert else 1))

    def _unpack(self, name: str, expert: int) -> torch.Tensor:
        import torch

        from rlctl.checkpoints.tensors import unpack_mxfp4

        blocks, scales = self.files.read(name + BLOCKS)[expert], self.files.read(name + SCALES)[expert]
        return unpack_mxfp4(blocks, scales, torch.bfloat16)


def _expert(param: str) -> tuple[str, int]:
    name, _, expert = param.rpartition("@")
    return name, int(expert)
