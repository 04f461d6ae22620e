"""Adapters in a vLLM worker that has the base of the adapted matrices: receive A and B, and compute with them.

With `delta` the worker keeps the base, computes base + scale B A as the trainer does, and writes the result where a
received weight goes. With `adapters` each product of a matrix is followed by scale B (A x), as the trainer's; nothing
is packed again.

The sum of a row and column has the same bits whichever rows and columns a process computes (measured with torch 2.13's
`addmm` on x86: 1 to 4 parts of either axis, ranks 1 to 64), so merged matrices are compared exactly with the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from vllm.config import set_current_vllm_config

from rlctl.backends.vllm import compat
from rlctl.backends.vllm.weights.assign import Assignment
from rlctl.backends.vllm.weights.locate import StoredMatrix, dtype_name
from rlctl.backends.vllm.weights.write import Destination, DirectWriter, LiveParameters, ReceivingEnd
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.errors import ConfigError
from rlctl.settings.training import Rounding
from rlctl.transport.device_memory import device_name
from rlctl.transport.movers import Received
from rlctl.transport.rounds import Connection, Need, Route
from rlctl.transport.staging import this_node
from rlctl.weights.adapters import AdapterRow
from rlctl.weights.layout import Layout, ParamSpec, Piece, Span, whole
from rlctl.weights.plan_execution import dtype_of, with_adapter
from rlctl.weights.readings import Reading
from rlctl.weights.rounding import narrow_into


class BaseWeights(Protocol):
    """The weights of one worker (`transfer.WorkerWeights`), open for refits."""

    device: torch.device
    config: Any
    number: int
    """Number of the worker in its engine."""
    assignment: Assignment
    parameters: LiveParameters
    kept: dict[str, torch.Tensor]

    def keep(self, kept: dict[str, torch.Tensor]) -> None: ...

    def joining(self, connection: Connection) -> AbstractContextManager[Connection]: ...


class _Part:
    """An adapted box of a matrix: its rows there, and the names of its A and B in the worker's layout."""

    def __init__(self, row: AdapterRow, matrix: StoredMatrix, start: tuple[int, ...], first: int, count: int) -> None:
        self.row, self.rows = row, slice(first, first + count)
        rows, columns = Span(start[-2], count), Span(start[-1], matrix.columns)
        every = Span(0, row.rank)
        self.a, self.b = f"{row.a}[{columns.start}]", f"{matrix.param}[{first}] of {row.b}"
        self.boxes = {self.a: (row.a, (every, columns)), self.b: (row.b, (rows, every))}


class AddedProduct:
    """The product of a linear layer on a CPU, followed by adapters: y = x W^T + scale (x A^T) B^T."""

    def __init__(self, base: Any, adapters: list[tuple[slice, torch.Tensor, torch.Tensor, float]]) -> None:
        """`adapters`: rows of W, A [r, inputs], B [rows, r] and scale."""
        self.base, self.adapters = base, adapters

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self.base(x, weight, bias)
        flat_x, flat_out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        for rows, a, b, scale in self.adapters:
            flat_out[:, rows].addmm_(flat_x @ a.t(), b.t(), alpha=scale)
        return out


class WorkerAdapters(ReceivingEnd):
    """The adapters of one worker, and the base that its `WorkerWeights` keep."""

    def __init__(self, weights: BaseWeights) -> None:
        super().__init__(weights.device)
        self.weights = weights
        self._rounding: Rounding = "unbiased"
        self._adds = False
        """Adapters are added to products, and not to weights."""
        self._parts: dict[str, list[_Part]] = {}
        """The adapted parts of each matrix, by its name in the layout of the weights."""
        self._modules: dict[str, Any] = {}
        """The module of each of these matrices."""
        self._memory: dict[str, torch.Tensor] = {}
        """A and B by their names in the layout."""

    def adapt(self, rows: tuple[AdapterRow, ...], rounding: Rounding, adds: bool) -> None:
        """Take the adapters of `rows`: keep the base of their matrices, or (`adds`) add to products."""
        self.close()
        self._adds = adds
        by_tensor, self._parts, self._modules = {row.tensor: row for row in rows}, {}, {}
        self._rounding = rounding
        for tensor, reason in self.weights.assignment.loaded.items():
            if tensor in by_tensor:
                raise ConfigError(
                    f"training.lora.refit: the engine cannot add an adapter to {tensor}, which goes through "
                    f"its loader ({reason}).",
                    "Set training.lora.refit=merged.",
                )
        kept: dict[str, torch.Tensor] = {}
        with compat.memory_of_weights(self.weights.config):
            for matrix in self.weights.parameters.matrices:
                first, parts = 0, list[_Part]()
                for part in matrix.parts:
                    if (row := by_tensor.get(part.tensor)) is not None:
                        parts.append(_Part(row, matrix, part.start, first, part.rows))
                    first += part.rows
                if parts:
                    self._parts[matrix.param], self._modules[matrix.param] = parts, matrix.module
                if parts and not adds:
                    dtype = dtype_of(dtype_name(matrix))
                    kept[matrix.param] = torch.empty(first, matrix.columns, dtype=dtype, device=self.device)
        self.weights.keep(kept)
        largest = max((matrix.numel() for matrix in kept.values()), default=0)
        narrow = [matrix.dtype for matrix in kept.values() if matrix.dtype != torch.float32]
        self._scratch = torch.empty(largest, dtype=narrow[0] if narrow else torch.float32, device=self.device)
        self._wide = torch.empty(largest if narrow else 0, device=self.device)
        """A merged matrix before it is rounded."""

    def open(self, table: tuple[tuple[str, str, tuple[int, ...]], ...], receive: str) -> None:
        """Make the memory of A and B. `receive`: of no meaning here."""
        dtypes = {name: dtype for name, dtype, _ in table}
        params, pieces = dict[str, ParamSpec](), list[Piece]()
        for name, (tensor, box) in self._boxes().items():
            shape = tuple(span.count for span in box)
            params[name] = ParamSpec(shape, dtypes[tensor])
            pieces.append(Piece(tensor, box, name, whole(shape), (0, 1)))
        self.layout = Layout(0, params, tuple(pieces))
        self._shapes = {name: tuple(shape) for name, _, shape in table}
        self._memory = {
            name: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=self.device)
            for name, spec in params.items()
        }
        self.writer = DirectWriter(self.targets)

    def _boxes(self) -> dict[str, tuple[str, tuple[Span, ...]]]:
        return {name: box for parts in self._parts.values() for part in parts for name, box in part.boxes.items()}

    def targets(self) -> Mapping[str, Destination]:
        return {name: Destination(memory, memory.shape[0]) for name, memory in self._memory.items()}

    def need(self, engine: str) -> Need:
        route = Route("direct", "added to the base that the engine keeps", tuple(self.layout.by_tensor))
        name, place = f"{engine} worker {self.weights.number}", device_name(self.device)
        return Need(name, this_node(), place, (route,), self.layout, "adapters are sent whole")

    def connect_own(self, engine: str, connections: tuple[Connection, ...]) -> None:
        with self.weights.joining(connections[self.weights.number]) as connection:
            self.connect(connection, f"{engine} worker {self.weights.number}")

    def begin(self) -> None:
        self._received = Received(path="direct")

    def receive_update(self, update: dict[str, Any]) -> None:
        self._received.waited_s = self.receive(**update)
        if self._adds:
            self._add()
        else:
            with set_current_vllm_config(self.weights.config), torch.no_grad():
                self._merge()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _add(self) -> None:
        """Have the products add the adapters, which they read at each call. A received base has replaced them."""
        for param, module in self._modules.items():
            if not isinstance(module.cpu_linear, AddedProduct):
                module.cpu_linear = AddedProduct(module.cpu_linear, list(self._added(self._parts[param])))

    def _added(self, parts: list[_Part]) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, float]]:
        """Yield the adapters of a matrix."""
        for part in parts:
            yield part.rows, self._memory[part.a], self._memory[part.b], part.row.scale

    def _merge(self) -> None:
        live = self.weights.parameters.targets()
        for param, parts in self._parts.items():
            base, target = self.weights.kept[param], live[param]
            merged = target.memory
            if merged is None:
                merged = self._scratch[: base.numel()].view(base.shape)
            if sum(part.rows.stop - part.rows.start for part in parts) < len(base):
                merged.copy_(base)
            for part in parts:
                a, b = self._memory[part.a], self._memory[part.b]
                if merged.dtype == torch.float32:
                    with_adapter(base[part.rows], a, b, part.row.scale, out=merged[part.rows])
                else:
                    rows = base[part.rows]
                    wide = with_adapter(rows, a, b, part.row.scale, out=self._wide[: rows.numel()].view(rows.shape))
                    narrow_into(merged[part.rows], wide, self._rounding)
            for pack in target.packs:
                pack(merged)

    def finish(self) -> None:
        """A refit is complete once the adapters are merged."""

    def received(self) -> Received:
        return self._received

    def readings(self, tensors: list[str] | None = None) -> list[Reading]:
        """Fingerprints of A and B as received."""
        names = None if tensors is None else set(tensors)
        readings = []
        for name, (tensor, box) in self._boxes().items():
            if names is None or tensor in names:
                shape, start = self._shapes[tensor], tuple(span.start for span in box)
                value = fingerprint(self._memory[name], shape, start)
                extent = tuple(span.count for span in box)
                readings.append(Reading(tensor, shape, start, extent, value, tensor))
        return readings
