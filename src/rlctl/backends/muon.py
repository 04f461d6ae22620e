"""Muon over divided matrices (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982), on both policy backends.

Momentum stays where the weights are. In a step, one rank receives each matrix whole, orthogonalizes it by
Newton-Schulz iterations and returns to each holder its part, so an update does not depend on the layout.
torch.optim.Muon takes whole matrices in one process; Megatron-Core's refuses the distributed optimizer, and its update
depends on tensor parallelism (`docs/library_surprises.md`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlctl.models.matrices import Matrix
from rlctl.planner.inputs.constants import MUON_ROUND_ELEMENTS
from rlctl.settings.training import OptimizerConfig
from rlctl.weights.hidden_matrices import MatrixPart

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the quintic polynomial, as published; torch.optim.Muon has the same."""
EPS = 1e-7
"""Smallest norm that a matrix is divided by, as in torch.optim.Muon."""
MOMENTUM = "momentum_buffer"
"""The name of the state, as in torch.optim.Muon."""


def newton_schulz(matrices_NRC: Tensor, steps: int) -> Tensor:
    """Return matrices with the singular vectors of `matrices_NRC` and singular values near 1."""
    a, b, c = COEFFICIENTS
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.mT if tall else matrices_NRC
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@dataclass(frozen=True)
class Divided:
    """All hidden matrices of the ranks of `group`, and the rank of the group that orthogonalizes each."""

    matrices: Sequence[Matrix]
    owners: Sequence[int]
    group: Any

    def rounds(self) -> list[int]:
        """Return the round of each matrix: owners fill rounds up to `MUON_ROUND_ELEMENTS`."""
        rounds, filled = [0] * len(self.matrices), dict[int, tuple[int, int]]()
        for place, (matrix, owner) in enumerate(zip(self.matrices, self.owners, strict=True)):
            number, elements = filled.get(owner, (0, 0))
            size = math.prod(matrix.shape)
            if elements and elements + size > MUON_ROUND_ELEMENTS:
                number, elements = number + 1, 0
            rounds[place], filled[owner] = number, (number, elements + size)
        return rounds


@dataclass
class Sent:
    """A part of a matrix that this rank holds."""

    param: Tensor
    part: MatrixPart
    first: bool = True
    """Whether the owner takes this copy; False: another rank holds the same."""

    def view(self) -> Tensor:
        """Return the part of the gradient."""
        gradient, view = _local(self.param.grad), self.part.view
        return gradient.as_strided(view.shape, view.strides, gradient.storage_offset() + view.offset)


@dataclass(frozen=True)
class Received:
    """A part of a matrix of this owner that another rank holds."""

    matrix: int
    row: int
    column: int
    rows: int
    columns: int
    first: bool

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def of(self, matrices: dict[int, Tensor]) -> Tensor:
        whole = matrices[self.matrix]
        return whole[self.row : self.row + self.rows, self.column : self.column + self.columns]


@dataclass
class Round:
    """What a rank sends and receives for the matrices that are orthogonalized at once, by rank of the group."""

    sent: list[list[Sent]] = field(default_factory=list)
    received: list[list[Received]] = field(default_factory=list)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    local = getattr(tensor, "to_local", None)  # a DTensor's
    return tensor if local is None else local()


class Muon:
    """Updates an optimizer's hidden matrices by Muon, and leaves the other parameters to the optimizer's own step."""

    def __init__(
        self,
        optimizer: Any,
        settings: OptimizerConfig,
        divided: Divided,
        held: Sequence[tuple[Tensor, Sequence[MatrixPart]]],
        dtype: torch.dtype,
    ) -> None:
        """Take over `step` of `optimizer`. `held`: this rank's parts of its trained tensors; `dtype` of the products.
        Collective."""
        self._settings = settings
        self._optimizer, self._divided, self._dtype = optimizer, divided, dtype
        self._size = torch.distributed.get_world_size(divided.group)
        self._params = {id(param): param for param, _ in held}
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
        self.steps = 0
        """Number of steps taken."""
        self._creates_states = False
        self._rounds = self._plan([Sent(param, part) for param, parts in held for part in parts])
        self._step_others, optimizer.step, optimizer.muon = optimizer.step, self.step, self

    def updates(self, param: Tensor) -> bool:
        """Return whether Muon updates a parameter on this rank."""
        return id(param) in self._params

    # --- who sends which parts to whom

    def _plan(self, sent: list[Sent]) -> list[Round]:
        divided = self._divided
        numbers = divided.rounds()
        sent.sort(key=lambda piece: numbers[piece.part.matrix])
        by_owner = [
            [piece for piece in sent if divided.owners[piece.part.matrix] == rank] for rank in range(self._size)
        ]
        tables = [[_row(piece.part) for piece in to] for to in by_owner]
        arrived = self._exchanged_tables(tables)
        seen, covered = set[tuple[int, ...]](), dict[int, int]()
        received = list[list[Received]]()
        for table in arrived:
            parts = []
            for row in table:
                part = Received(*row, first=tuple(row) not in seen)
                seen.add(tuple(row))
                covered[part.matrix] = covered.get(part.matrix, 0) + part.size * part.first
                parts.append(part)
            received.append(parts)
        for place, elements in covered.items():
            matrix = divided.matrices[place]
            assert elements >= math.prod(matrix.shape), f"{matrix.tensor}: ranks hold {elements} of {matrix.shape}"
        firsts = self._exchanged_tables([[[int(part.first)] for part in parts] for parts in received])
        for to, flags in zip(by_owner, firsts, strict=True):
            for piece, (flag,) in zip(to, flags, strict=True):
                piece.first = bool(flag)
        rounds = [Round() for _ in range(max(numbers, default=-1) + 1)]
        for number, exchange in enumerate(rounds):
            exchange.sent = [[piece for piece in to if numbers[piece.part.matrix] == number] for to in by_owner]
            exchange.received = [[part for part in of if numbers[part.matrix] == number] for of in received]
        return rounds

    def _exchanged_tables(self, tables: list[list[list[int]]]) -> list[list[list[int]]]:
        """Return the tables of integers that other ranks have for this one; a table's rows have one length."""
        if self._size == 1:
            return tables
        device = self._device or torch.device("cpu")
        shapes = torch.tensor([[len(table), len(table[0]) if table else 0] for table in tables], device=device)
        theirs = torch.empty_like(shapes)
        torch.distributed.all_to_all_single(theirs, shapes, group=self._divided.group)
        flat = torch.tensor([value for table in tables for row in table for value in row], dtype=torch.long)
        counts = [rows * columns for rows, columns in theirs.tolist()]
        arrived = self._exchange(flat.to(device), [sum(map(len, table)) for table in tables], counts).split(counts)
        return [
            part.view(rows, columns).tolist() if rows else []
            for part, (rows, columns) in zip(arrived, theirs.tolist(), strict=True)
        ]

    def _exchange(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Exchange elements of a flat tensor, as bytes: gloo takes no bfloat16."""
        if self._size == 1:
            return values
        width, output = values.element_size(), values.new_empty(sum(received))
        torch.distributed.all_to_all_single(
            output.view(torch.uint8), values.view(torch.uint8),
            [width * count for count in received], [width * count for count in sent], group=self._divided.group,
        )  # fmt: skip
        return output

    # --- a step

    @contextlib.contextmanager
    def creating_states(self) -> Iterator[None]:
        """A step in this block makes states and changes no hidden matrix. It is not collective."""
        self._creates_states = True
        try:
            yield
        finally:
            self._creates_states = False

    def step(self) -> None:
        """Take a step. Collective over the group."""
        self.step_others()
        self.step_matrices()

    def step_others(self) -> None:
        """Take AdamW's step, of all parameters but hidden matrices."""
        with self._others():
            self._step_others()

    @torch.no_grad()
    def step_matrices(self) -> None:
        """Take Muon's step. Collective over the group. Gradients of hidden matrices become their updates."""
        for param in self._params.values():
            if MOMENTUM not in self._optimizer.state[param]:
                self._optimizer.state[param][MOMENTUM] = torch.zeros_like(param)
        if self._creates_states:
            return
        self.steps += 1
        settings = self._settings
        decay = settings.muon_momentum
        for param in self._params.values():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            gradient, momentum = _local(param.grad), _local(self._optimizer.state[param][MOMENTUM])
            momentum.lerp_(gradient, 1 - decay)
            if settings.muon_nesterov:
                gradient.lerp_(momentum, decay)
            else:
                gradient.copy_(momentum)
        for exchange in self._rounds:
            self._orthogonalize(exchange)
        for param in self._params.values():
            group, weights = self._groups[id(param)], _local(param)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(_local(param.grad), alpha=-group["lr"])

    @contextlib.contextmanager
    def _others(self) -> Iterator[None]:
        """The optimizer knows of its other parameters alone."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [param for param in group["params"] if id(param) not in self._params]
            self._optimizer.param_groups = [group for group in groups if group["params"]]
            yield
        finally:
            self._optimizer.param_groups = groups
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def _orthogonalize(self, exchange: Round) -> None:
        settings = self._settings
        outgoing = [[piece for piece in to if piece.first] for to in exchange.sent]
        incoming = [[part for part in of if part.first] for of in exchange.received]
        arrived = self._exchange(
            self._flat(piece.view() for to in outgoing for piece in to), _sizes(outgoing), _sizes(incoming)
        )
        matrices = self._assembled([part for of in incoming for part in of], arrived)
        self._orthogonalize_whole(matrices)
        parts = self._flat(part.of(matrices) for of in exchange.received for part in of)
        sent = [piece for to in exchange.sent for piece in to]
        back = self._exchange(parts, _sizes(exchange.received), _sizes(exchange.sent))
        for piece, values in zip(sent, back.split([_size(piece) for piece in sent]), strict=True):
            shape = self._divided.matrices[piece.part.matrix].shape
            view = piece.view()
            view.copy_(values.view(view.shape)).mul_(settings.muon_scale * math.sqrt(max(shape)))

    def _flat(self, views: Iterator[Tensor]) -> Tensor:
        parts = [view.to(self._dtype).reshape(-1) for view in views]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self._dtype, device=self._device)

    def _assembled(self, parts: list[Received], values: Tensor) -> dict[int, Tensor]:
        matrices = dict[int, Tensor]()
        for part, elements in zip(parts, values.split([part.size for part in parts]), strict=True):
            if part.matrix not in matrices:
                matrices[part.matrix] = values.new_empty(self._divided.matrices[part.matrix].shape)
            part.of(matrices).copy_(elements.view(part.rows, part.columns))
        return matrices

    def _orthogonalize_whole(self, matrices: dict[int, Tensor]) -> None:
        """Replace each matrix by its orthogonalized one. Matrices of equal shapes are computed in one batch."""
        settings = self._settings
        by_shape = dict[tuple[int, ...], list[int]]()
        for place, matrix in matrices.items():
            by_shape.setdefault(tuple(matrix.shape), []).append(place)
        for places in by_shape.values():
            whole = torch.stack([matrices.pop(place) for place in places])
            matrices |= zip(places, newton_schulz(whole, settings.muon_steps), strict=True)


def muon_of(optimizer: Any) -> Muon | None:
    """Return the Muon that has taken over an optimizer's step; None: it is AdamW alone."""
    return getattr(optimizer, "muon", None)


def _row(part: MatrixPart) -> list[int]:
    return [part.matrix, part.row, part.column, *part.view.shape]


def _size(piece: Sent | Received) -> int:
    return math.prod(piece.part.view.shape) if isinstance(piece, Sent) else piece.size


def _sizes(by_rank: Sequence[Sequence[Sent | Received]]) -> list[int]:
    return [sum(map(_size, parts)) for parts in by_rank]
