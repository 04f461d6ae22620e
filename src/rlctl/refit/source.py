"""The policy's side of a refit, on one rank: which boxes this rank sends, writing them, and their fingerprints.

Every rank works out its own part of the transfer plan; of several ranks that hold the same box, the plan lets one
send it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlctl.backends.vllm.segment import Segment, SegmentAddress
from rlctl.checkpoints.fingerprints import fingerprint
from rlctl.checkpoints.tensors import strided, transformed
from rlctl.errors import WorkerError
from rlctl.refit.records import SourceSetup, TableRow, staging_world
from rlctl.weights.fingerprints import combine
from rlctl.weights.plan import Copy, World, send_plan


@dataclass(frozen=True)
class Packed:
    """What one rank did in one refit."""

    rank: int
    seconds: float
    bytes: int
    copies: int


@dataclass
class SourceState:
    """What a rank keeps between refits."""

    setup: SourceSetup
    copies: tuple[Copy, ...]
    rows: dict[str, TableRow]
    segment: Segment | None


class RefitSource:
    """Mixed into a policy worker, which has `rank` and `parameters()`."""

    rank: int
    _refit: SourceState | None = None
    _refit_own: Segment | None = None
    """The staging memory, where this rank made it."""

    def parameters(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def refit_world(self, setup: SourceSetup) -> World:
        """The layouts of all ranks of the policy."""
        raise NotImplementedError

    def refit_create_segment(self, size: int) -> SegmentAddress | None:
        """Make the staging memory, on rank 0; None elsewhere."""
        if self.rank != 0:
            return None
        self._refit_own = Segment.create(size)
        return self._refit_own.address

    def refit_open(self, setup: SourceSetup) -> int:
        """Work out what this rank sends; returns its number of copies."""
        copies = send_plan(self.refit_world(setup), staging_world(setup.table), self.rank)
        own = self._refit_own
        if setup.address is not None and (own is None or own.address != setup.address):
            own = Segment(setup.address)
        self._refit = SourceState(setup, copies, {row.name: row for row in setup.table}, own)
        return len(copies)

    def refit_unlink(self) -> None:
        """Both sides have the staging memory mapped: take its name away, so that nothing outlives the processes."""
        if self._state().segment is not None:
            self._state().segment.unlink()

    def refit_pack(self) -> Packed:
        """Write this rank's boxes into the staging memory, from the live parameters."""
        begun, state = time.perf_counter(), self._state()
        if state.segment is None:
            raise WorkerError("refit_pack without staging memory.")
        count = 0
        for copy, values in self._boxes():
            row = state.rows[copy.destination_param]
            whole = state.segment.view(row.offset, row.shape, getattr(torch, row.dtype))
            strided(whole, copy.destination_view).copy_(transformed(values, copy))
            count += copy.elements * whole.element_size()
        return Packed(self.rank, time.perf_counter() - begun, count, len(state.copies))

    def refit_fingerprints(self) -> dict[str, int]:
        """Fingerprints of this rank's share of each tensor, in the dtype that the engine holds; shares add up."""
        state = self._state()
        sums: dict[str, int] = {}
        for copy, values in self._boxes():
            row = state.rows[copy.tensor]
            starts, steps = [s.start for s in copy.tensor_box], [s.step for s in copy.tensor_box]
            values = transformed(values, copy).to(getattr(torch, row.dtype))
            value = fingerprint(values, row.shape, starts, steps)
            sums[copy.tensor] = combine([sums.get(copy.tensor, 0), value])
        return sums

    def refit_perturb(self, seed: int, scale: float) -> None:
        """Change every element by noise that replicas share: for tests of a refit, never in a run."""
        world = self.refit_world(self._state().setup)
        held = {p.param: f"{p.tensor}{p.tensor_box}" for p in world.layout(self.rank).pieces}
        for name, parameter in self.parameters().items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}{held.get(name, name)}".encode()))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            with torch.no_grad():
                parameter.add_((scale * noise).to(parameter))

    def refit_values(self, tensor: str) -> list[tuple[list[tuple[int, int, int]], np.ndarray]]:
        """This rank's boxes of one tensor: (start, count, step) of each dimension, and the values as float32."""
        return [
            ([tuple(span) for span in copy.tensor_box], transformed(values, copy).float().cpu().numpy())
            for copy, values in self._boxes()
            if copy.tensor == tensor
        ]

    def refit_copy_gb_per_s(self, size: int) -> float | None:
        """Speed of copying `size` bytes within memory on this rank: what a colocated refit can at most reach.

        Best of three, into pages that exist; None on ranks other than 0.
        """
        if self.rank != 0:
            return None
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        best = float("inf")
        for _ in range(3):
            begun = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - begun)
        return size / 1e9 / best

    def refit_close(self) -> None:
        """Let go of the staging memory."""
        for segment in {self._refit_own, self._refit and self._refit.segment}:
            if segment is not None:
                segment.close()
        self._refit = self._refit_own = None

    def _boxes(self) -> Iterator[tuple[Copy, torch.Tensor]]:
        """The copies that this rank makes, and the live memory each reads, with the dimensions of the tensor."""
        state, parameters = self._state(), self.parameters()
        for copy in state.copies:
            if copy.source_param not in parameters:
                raise WorkerError(f"The policy's rank {self.rank} has no parameter {copy.source_param}.")
            memory = parameters[copy.source_param].detach()
            if not memory.is_contiguous():
                raise WorkerError(f"{copy.source_param} is not stored contiguously.")
            yield copy, strided(memory, copy.source_view)

    def _state(self) -> SourceState:
        if self._refit is None:
            raise WorkerError("The policy was asked to refit before refit_open.")
        return self._refit
