"""Refits of adapters alone (`training.lora.refit` = delta or adapters): engines get the base once, then A and B.

Two sessions share one refit: the weights' session sends the base, verified as any weights, when an engine has none,
and the adapters' session sends A and B, after which the engines compute merged weights, or add the adapters to each
product. Both are `RefitSession`s with separate tensors and channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from rlctl.backends.base import AdapterReceiver, EngineWorker, WeightReceiver
from rlctl.cluster.workers import WorkerGroup
from rlctl.errors import VerificationError
from rlctl.refit.records import RefitReport, Share, TableRow
from rlctl.refit.session import RefitSession
from rlctl.refit.verify import TensorComparison
from rlctl.refit.weight_sender import AdapterSender
from rlctl.settings.training import Rounding
from rlctl.weights.adapters import AdapterRow, adapter_table


class AdapterRefits:
    """Refits of one policy's adapters into engines; methods as in `RefitSession`."""

    def __init__(
        self, weights: RefitSession, senders: WorkerGroup[AdapterSender], *, rounding: Rounding, adds: bool
    ) -> None:
        """`weights`: the session of the base. `rounding`: of merged weights; `adds`: engines add adapters to products
        instead."""
        self.weights, self._senders = weights, senders
        self._rounding: Rounding = rounding
        self._adds = adds
        self._rows: tuple[AdapterRow, ...] = ()
        self._adapters: RefitSession | None = None
        self._base_sent = False
        """Every engine holds the base."""

    @property
    def adapters(self) -> RefitSession:
        assert self._adapters is not None  # once the session is open
        return self._adapters

    @property
    def opened(self) -> bool:
        return self.weights.opened

    @property
    def note(self) -> str:
        return self.weights.note

    @property
    def shares(self) -> tuple[Share, ...]:
        return (*self.weights.shares, *self.adapters.shares)

    def open(self) -> None:
        weights = self.weights
        weights.open()
        self._base_sent = False
        # All ranks name their own adapters at once; each returns all.
        self._rows = self._senders.within(weights.settings.timeout_s).call(AdapterSender.refit_adapters)[0]
        engines = cast(WorkerGroup[EngineWorker], weights.engines)
        receivers = engines.held(EngineWorker.adapters)
        receivers.within(weights.settings.timeout_s).call(
            AdapterReceiver.refit_adapt, self._rows, self._rounding, self._adds
        )
        shapes = {row.name: row.shape for row in weights.setup.table}
        table = [TableRow(*row) for row in adapter_table(self._rows, shapes, weights.dtype)]
        self._adapters = RefitSession(
            self._senders, receivers, weights.facts, settings=weights.settings, dtype=weights.dtype, table=table
        )
        self._adapters.open()

    def reform(self, engines: WorkerGroup[WeightReceiver]) -> None:
        """Continue with other engines, which get the base in the next refit."""
        self.weights.engines = engines
        self.close()
        self.open()

    def refit(self, version: int, *, verify: bool | None = None) -> RefitReport:
        """As `RefitSession.refit`; an engine without a base gets it first."""
        if self.weights.broken:
            self.reform(self.weights.engines)
        base = None
        if not self._base_sent:
            base = self.weights.refit(version, verify=verify)
            self._base_sent = True
        report = self.adapters.refit(version, verify=verify)
        if report.verified:
            report = replace(report, verified=report.verified + self._matrices_verified(version, report.compared_all))
        return report if base is None else _together(base, report)

    def _matrices_verified(self, version: int, every: bool) -> int:
        """Compare adapted matrices (`every`, or a sample), merged or as the base; return how many."""
        adapted = [row.tensor for row in self._rows]
        try:
            return self.weights.verified(
                version, adapted if every else self.weights.sample_of(adapted, version), merged=not self._adds
            )
        except VerificationError:
            self._base_sent = False
            raise

    def compare(self, tensors: list[str] | None = None) -> list[TensorComparison]:
        """Compare the weights that engines hold, with the adapters if they are merged."""
        return self.weights.compare(tensors, merged=not self._adds)

    def reject(self, version: int) -> None:
        self._base_sent = False
        self.weights.reject(version)

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        self.weights.close()

    def abandon(self) -> None:
        if self._adapters is not None:
            self._adapters.abandon()
        self.weights.abandon()


def _together(base: RefitReport, adapters: RefitReport) -> RefitReport:
    """Return the report of a refit that sent both."""
    phases = {**base.seconds, **adapters.seconds}
    return replace(
        base,
        seconds={phase: base.seconds.get(phase, 0.0) + adapters.seconds.get(phase, 0.0) for phase in phases},
        bytes=base.bytes + adapters.bytes,
        sent_bytes=base.sent_bytes + adapters.sent_bytes,
        staging_bytes=base.staging_bytes + adapters.staging_bytes,
        packing_s=base.packing_s + adapters.packing_s,
        verified=base.verified + adapters.verified,
        shares=(*base.shares, *adapters.shares),
    )
