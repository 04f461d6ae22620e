"""One place in a running vLLM model that holds parts of published tensors, and how it keeps them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from rlctl.backends.vllm import expert_packing


class Form(Enum):
    """How a module keeps a matrix."""

    PLAIN = "plain"
    REPACKED = "repacked"
    """In a copy that only the module's own product can read."""
    PERMUTED = "permuted"
    """The same elements in the order of the grouped product of experts (`expert_packing`)."""


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
    """One matrix or vector of one module, and the parts it holds."""

    path: str
    module: Any
    """What has `parameter` as an attribute: a module, or an object that computes with the tensor itself."""
    parameter: str
    parts: tuple[Part, ...]
    columns: int
    """Width of the matrix; 1 for a vector."""
    form: Form = Form.PLAIN
    lookup: bool = False
    """Rows are looked up in the parameter itself (besides a repacked copy used for products)."""
    output: bool = False
    """The output embedding."""
    index: int | None = None
    """Which matrix of a stack."""
    transposed: bool = False
    """Kept with rows and columns exchanged against the published tensor."""
    isa: str = ""
    """PERMUTED: which of vLLM's orders."""
    label: str = ""
    """What readings call it, where boxes of one tensor lie in several sites."""
    derived: bool = False
    """Made from, or the same memory as, what another module was loaded with: no loader writes here."""
    opaque: str = ""
    """Why it is not known how the parts are kept; their shapes and rows mean nothing then. Empty: it is known."""

    @property
    def packed(self) -> bool:
        return self.form is Form.REPACKED

    @property
    def name(self) -> str:
        return self.label or f"{self.path}.{self.parameter}"

    def because(self, why: str) -> Site:
        """The site as an opaque one; itself where `why` is empty."""
        return replace(self, opaque=why) if why else self

    def kept(self) -> torch.Tensor:
        """The tensor as the module keeps it: the matrix of the stack, in whatever order it is in."""
        value = getattr(self.module, self.parameter).data
        return value if self.index is None else value[self.index]

    def stored(self) -> torch.Tensor:
        """The matrix or vector with the published tensor's rows and columns; memory of its own only if PERMUTED."""
        value = self.kept()
        if self.form is Form.PERMUTED:
            value = expert_packing.unpacked(value, self.isa)
        return value.t() if self.transposed else value

    def box(self, part: Part, stored: torch.Tensor) -> torch.Tensor:
        """The view of `stored` that holds `part`, with as many dimensions as the published tensor."""
        rows = stored[part.row : part.row + part.rows]
        rows = rows if rows.dim() == 1 else rows[:, : self.columns]
        return rows if rows.dim() == len(part.shape) else rows.unsqueeze(0)
