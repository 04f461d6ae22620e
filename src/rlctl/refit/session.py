"""A refit session on the driver: exchange once, then transfers. No weight passes through here.

The policy's ranks write (`policy_side.py`) and engines load (`backends.vllm.weights`); a transfer is one long call on
each side, watched by the driver.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from rlctl.backends.base import WeightReceiver
from rlctl.cluster.workers import WorkerGroup, wait_together
from rlctl.config.facts import UNDECIDED
from rlctl.errors import VerificationError, WaitTimeoutError, WorkerError
from rlctl.models.facts import ModelFacts
from rlctl.refit.channels import (
    choose_mover,
    meeting_host,
    paths_of,
    plan_channels,
    shared_place,
    shares_of,
    staging_bytes,
    where,
)
from rlctl.refit.records import RefitReport, SenderPlace, SenderSetup, Sent, Share, TableRow
from rlctl.refit.verify import TensorComparison, compare, require_as_converted, require_equal, source_sums
from rlctl.refit.weight_sender import WeightSender
from rlctl.settings.generation import RefitConfig
from rlctl.telemetry.phases import RefitPhase
from rlctl.transport.available import transport_facts
from rlctl.transport.facts import TransportFacts
from rlctl.transport.movers import Received
from rlctl.transport.rounds import (
    EMPTY_BYTES,
    ChangeSizes,
    Channel,
    Lengths,
    Need,
    Rendezvous,
    buffer_bytes,
    cut_rounds,
)

T = TypeVar("T")
W = TypeVar("W")
P = ParamSpec("P")
Receive = Literal["loader", "direct", "auto"]
# The driver waits a little longer than the two sides wait for each other, so that their error, which knows more, comes
# first.
MARGIN_S = 5.0
# Changed elements with their places are sent while they take less than this part of the payload.
SPARSE_LIMIT = 0.5


class RefitSession:
    """Refits of one policy into engines."""

    def __init__(
        self,
        policy: WorkerGroup[WeightSender],
        engines: WorkerGroup[WeightReceiver],
        facts: ModelFacts,
        *,
        settings: RefitConfig,
        dtype: str,
        receive: Receive = "auto",
        members: int = 1,
        converted: Mapping[str, int] | None = None,
        converted_at: Path | None = None,
        table: Sequence[TableRow] | None = None,
    ) -> None:
        """`converted`: fingerprints in `dtype` written by the conversion at `converted_at`, compared in the first
        refit; `members`: engines that hold one model together (more than 1 without engines); `table`: the tensors to
        send (None: the model's)."""
        self.members, self.facts = members, facts
        self.policy, self.engines, self.settings, self.receive = policy, engines, settings, receive
        from rlctl.weights import hf

        if table is None:
            # A policy is built without multi-token-prediction layers, and an engine generates without them.
            params = hf.layout(replace(facts, mtp_layers=0), dtype).params
            table = [TableRow(name, spec.dtype, spec.shape) for name, spec in params.items()]
        self.setup = SenderSetup(tuple(table))
        self.mover = settings.mover
        self.refits = self.attempts = 0
        self._base: int | None = None
        """The version that every engine holds completely."""
        self._since_full = 0
        self.opened = self.broken = False
        self.paths: dict[str, tuple[tuple[str, str], ...]] = {}
        """How each tensor comes into the engines, and why; more than one way where workers hold it differently."""
        self.shares: tuple[Share, ...] = ()
        self.note = ""
        """A remark on the mover, for the user."""
        self.last_comparison: TensorComparison | None = None
        self.dtype, self._converted, self._converted_at = dtype, converted or {}, converted_at

    @property
    def transport(self) -> TransportFacts:
        """The facts of the mover; once the session is open."""
        return transport_facts(self.mover)

    @property
    def payload_bytes(self) -> int:
        return sum(row.bytes for row in self.setup.table)

    @property
    def staging_bytes(self) -> int:
        """Staging memory of the node that holds most of it."""
        by_node: dict[str, int] = {}
        for channel in self.setup.channels:
            rounds = cut_rounds(channel.layout, channel.connection.capacity)
            by_node[channel.node] = by_node.get(channel.node, 0) + min(2, len(rounds)) * buffer_bytes(rounds)
        return max(by_node.values(), default=0)

    def open(self) -> None:
        """Make the staging memory, and send both sides the constants of all refits."""
        places = tuple(self._wait("open", self.policy, WeightSender.refit_place))
        self._wait("open", self.engines, WeightReceiver.refit_open, self.setup.table, self.receive)
        of_engines = self._wait("open", self.engines, WeightReceiver.refit_needs)
        needs = [need for of_engine in of_engines for need in of_engine]
        table = _as_held(self.setup.table, needs)
        self.paths = paths_of(table, needs)
        self.shares = shares_of(table, self.paths)
        together = where(needs, places)
        self.mover = choose_mover(self.settings.mover, together, self.settings.directory)
        self.note = self.transport.remark(together) if self.settings.mover in UNDECIDED else ""
        self._base, self._whole_only = None, self._why_whole(needs, places)
        channels = plan_channels(
            self.mover,
            needs,
            places,
            staging_bytes=staging_bytes(self.settings.staging_mb, needs),
            timeout_s=self.settings.timeout_s,
            sparse=self.settings.sparse and not self._whole_only,
            directory=self.transport.session_directory(self.settings.directory, f"rlctl-refit-{secrets.token_hex(4)}"),
        )
        self.setup = SenderSetup(table, places, self._prepared(channels, needs, places))
        links = {name: c.connection for c in self.setup.channels for name in c.connection.receivers}
        connections = [tuple(links[need.name] for need in of_engine) for of_engine in of_engines]
        # Both sides at once: a collective group is complete when all its members have joined, and ranks join the groups
        # of several channels in the channels' order.
        opening = self.policy.submit(WeightSender.refit_connect, self.setup)
        connecting = self.engines.submit_each(
            WeightReceiver.refit_connect, [(connection,) for connection in connections]
        )
        limit = self.settings.timeout_s + MARGIN_S
        by_rank, _ = self._guard("open", lambda: wait_together(opening, connecting, limit))
        if problems := [line for of_rank in by_rank for line in of_rank]:
            raise VerificationError(f"Refit: the transfer plan is wrong: {'; '.join(problems[:8])}.")
        self._wait("open", self.policy, WeightSender.refit_unlink)
        self.opened = True

    def reform(self, engines: WorkerGroup[WeightReceiver]) -> None:
        """Go on with other engines, which hold these weights after the next refit; the policy's processes stay."""
        self.engines = engines
        self.close()
        self.open()

    def _prepared(
        self, channels: tuple[Channel, ...], needs: list[Need], places: tuple[SenderPlace, ...]
    ) -> tuple[Channel, ...]:
        """Complete the channels with both sides' connection data."""
        host = meeting_host(needs, places)
        made = self._wait("open", self.policy, WeightSender.refit_make, channels, places, host)
        addresses = {index: address for report in made for index, address in report.addresses.items()}
        handles = {index: handle for report in made for index, handle in report.handles.items()}
        port, run = (
            next((report.store_port for report in made if report.store_port is not None), None),
            secrets.token_hex(4),
        )
        done = []
        for c in channels:
            link = replace(c.connection, address=addresses.get(c.index), handles=handles.get(c.index, ()))
            if port is not None:  # ranks without messages stay out
                c = replace(c, senders=tuple(rank for rank, report in enumerate(made) if c.index in report.sends))
                senders = tuple(places[rank].name for rank in c.senders)
                group = Rendezvous(host, port, f"refit-{run}-{c.index}", (*senders, *link.receivers))
                link = replace(link, senders=senders, group=group)
            done.append(replace(c, connection=link))
        return tuple(done)

    def refit(self, version: int, *, verify: bool | None = None) -> RefitReport:
        """Send the policy's weights to every engine as `version`. `verify` None: by the settings. Raises
        VerificationError naming tensors, WaitTimeoutError and WorkerError naming rank and phase; engines then refuse to
        generate until a full refit."""
        if self.broken:  # a group that a member left cannot be used again
            self.reform(self.engines)
        self.attempts += 1
        begun = time.perf_counter()
        self._wait("begin", self.engines, WeightReceiver.refit_begin, version)
        moving = time.perf_counter()
        self.broken = self.transport.joins
        lengths, sparse = self._changes() if self.settings.sparse else (None, None)
        compared_s = time.perf_counter() - moving
        base, self._base = self._base, None  # after any later failure, the next refit sends everything
        sent, wrote_s = self._move(version, base, lengths)
        self.broken = False
        moved = time.perf_counter()
        resets = self._wait("load", self.engines, WeightReceiver.refit_finish, version)
        ended = time.perf_counter()
        self.refits += 1
        results = self._wait("load", self.engines, WeightReceiver.received)
        received: list[Received] = [report for of_engine in results for report in of_engine]
        waited = min(max(report.waited_s for report in received) + wrote_s + compared_s, moved - moving)
        reset = max(resets)
        exchanged = min(max(report.exchange_s for report in sent), waited)
        seconds = {
            RefitPhase.WAKE: moving - begun,
            **({RefitPhase.EXCHANGE: exchanged} if exchanged else {}),
            RefitPhase.PACK if self.transport.shares else RefitPhase.TRANSFER: waited - exchanged,
            RefitPhase.LOAD: ended - moving - waited - reset,
            RefitPhase.CACHE_RESET: reset,
        }
        sample = self._to_compare(version, verify)
        verified = self.verified(version, sample)
        unread = dict(self.last_comparison.unread) if verified and self.last_comparison else {}
        self._base, self._since_full = version, 0 if lengths is None else self._since_full + 1
        return RefitReport(
            version=version,
            seconds=seconds,
            bytes=self.payload_bytes,
            staging_bytes=self.staging_bytes,
            verified=verified,
            compared_all=sample is None,
            unread=len(unread),
            unread_bytes=sum(row.bytes for row in self.setup.table if row.name in unread),
            unread_why=next(iter(unread.values()), ""),
            mover=self.mover,
            receive=received[0].path,
            shares=self.shares,
            sparse=sparse,
            sent_bytes=sum(report.bytes for report in sent),
            packing_s=max(report.packing_s for report in sent),
        )

    def _why_whole(self, needs: list[Need], places: tuple[SenderPlace, ...]) -> str:
        """The reason why this session can never send only changed elements; empty: it can."""
        if self.transport.whole_only:
            return self.transport.whole_only
        if len({shared_place(self.mover, place) for place in places}) > 1:
            return "boxes are exchanged between policy ranks, which sends them whole"
        return next((need.whole_only for need in needs if need.whole_only), "")

    def _changes(self) -> tuple[tuple[Lengths, ...] | None, str]:
        """Find changed elements. Return (by channel, bytes of each sender per round; None: send all), and the
        reason."""
        if self._whole_only:
            return None, f"everything: {self._whole_only}"
        if self._base is None:
            return None, "everything: no version before to compare with"
        if self._since_full + 1 >= self.settings.full_every:
            return None, f"everything: every {self.settings.full_every} refits"
        by_rank: list[list[ChangeSizes]] = self._wait("changes", self.policy, WeightSender.refit_find_changes)
        reports = [report for of in by_rank for report in of]
        size, changed = sum(report.bytes for report in reports), sum(report.changed for report in reports)
        share = f"{changed / max(1, sum(report.elements for report in reports)):.1%} of the elements have changed"
        if size > SPARSE_LIMIT * self.payload_bytes:
            return None, f"everything: {share}"
        sizes = [{report.channel: report.sizes for report in of} for of in by_rank]
        lengths = [
            tuple(zip_longest(*(sizes[rank].get(c.index, ()) for rank in c.senders), fillvalue=EMPTY_BYTES))
            for c in self.setup.channels
        ]
        return tuple(lengths), share

    def _move(self, version: int, base: int | None, lengths: tuple[Lengths, ...] | None) -> tuple[list[Sent], float]:
        """Send everything, or `lengths` of changes since `base`, until a side fails. Return the ranks' reports and the
        seconds before loading began."""
        update: dict[str, Any] = {"version": version, "attempt": self.attempts}
        if self.transport.stored:  # a version is read once it is complete
            begun = time.perf_counter()
            sent = self._wait("transfer", self.policy, WeightSender.refit_send, version, self.attempts)
            self._wait("transfer", self.policy, WeightSender.refit_publish, version)
            wrote_s = time.perf_counter() - begun
            self._wait("load", self.engines, WeightReceiver.refit_receive, update)
            self._wait("load", self.policy, WeightSender.refit_retire, version)
            return sent, wrote_s
        if lengths is None:
            sending = self.policy.submit(WeightSender.refit_send, version, self.attempts)
        else:
            update |= {"base": base, "lengths": lengths}
            sending = self.policy.submit(WeightSender.refit_send_changes, version, self.attempts, lengths)
        receiving = self.engines.submit(WeightReceiver.refit_receive, update)
        limit = self.settings.timeout_s + MARGIN_S
        return self._guard("transfer", lambda: wait_together(sending, receiving, limit))[0], 0.0

    def _to_compare(self, version: int, requested: bool | None) -> list[str] | None:
        """Return tensors to compare: all (None) at first and at intervals, else a sample determined by the version."""
        if requested is not None:
            return None if requested else []
        every = self.settings.verify_every
        if self.refits == 1 or (every > 0 and (self.refits - 1) % every == 0):
            return None
        return self.sample_of([row.name for row in self.setup.table], version)

    def sample_of(self, names: Sequence[str], version: int) -> list[str]:
        """Return the tensors to compare in a refit that compares a sample, determined by the version."""
        return sorted(names, key=lambda name: zlib.crc32(f"{version}{name}".encode()))[: self.settings.verify_sample]

    def verified(self, version: int, sample: list[str] | None, *, merged: bool = False) -> int:
        """Compare the tensors of `sample` (None: all); return how many. `merged`: as in `compare`."""
        if sample == []:
            return 0
        compared = 0
        try:
            for index, comparison in enumerate(self.compare(sample, merged=merged)):
                self.last_comparison, compared = comparison, comparison.tensors
                require_equal(comparison, version, f"engine {index}")
        except VerificationError:  # after any other error the engine waits for another full refit
            self.reject(version)
            raise
        return compared

    def reject(self, version: int) -> None:
        """Have the engines refuse to generate until a full refit has succeeded."""
        self._base = None
        self._wait("verify", self.engines, WeightReceiver.refit_reject, version)

    def compare(self, tensors: list[str] | None = None, *, merged: bool = False) -> list[TensorComparison]:
        """Compare tensors (None: all) with each engine's current ones; `merged`: with the weights that the policy
        computes with, also where the base is sent. Raises VerificationError if the first refit differs from the
        conversion."""
        sums = self.policy.submit(WeightSender.refit_fingerprints, tensors, merged)
        reading = self.engines.submit(WeightReceiver.readings, tensors)
        sums_by_rank, readings = self._guard("verify", lambda: wait_together(sums, reading, self.settings.timeout_s))
        source = source_sums(sums_by_rank)
        if self.refits == 1 and not merged:
            same = {row.name for row in self.setup.table if row.dtype == self.dtype}
            converted = {name: value for name, value in self._converted.items() if name in same}
            require_as_converted(source, converted, self._converted_at)
        firsts = range(0, len(readings), self.members)
        models = [[reading for of in readings[first : first + self.members] for reading in of] for first in firsts]
        return [compare(source, of_one, tensors) for of_one in models]

    def close(self) -> None:
        """Let go of the staging memory on both sides. Workers that are gone are passed over."""
        self.abandon()
        self._tolerantly(self.policy, WeightSender.refit_close)
        self._tolerantly(self.engines, WeightReceiver.refit_close)

    def abandon(self) -> None:
        """Remove what would outlive the processes, which are to end."""
        self.opened = self.broken = False
        if self.setup.channels and self.transport.stored:
            self._tolerantly(self.policy, WeightSender.refit_retire, None)

    def _tolerantly(
        self, group: WorkerGroup[W], method: Callable[Concatenate[W, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        # A lost worker holds no weights, and its loss was reported before.
        with contextlib.suppress(WorkerError, WaitTimeoutError):
            group.within(min(30.0, self.settings.timeout_s)).call(method, *args, **kwargs)

    def _wait(
        self,
        phase: str,
        group: WorkerGroup[W],
        method: Callable[Concatenate[W, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        return self._guard(phase, lambda: group.within(self.settings.timeout_s).call(method, *args, **kwargs))

    def _guard(self, phase: str, wait: Callable[[], T]) -> T:
        try:
            return wait()
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"Refit, phase {phase}: {error.message}", "Raise refit.timeout_s if it is only slow."
            ) from None
        except WorkerError as error:
            raise WorkerError(f"Refit, phase {phase}: {error.message}", error.hint) from None


def _as_held(table: tuple[TableRow, ...], needs: list[Need]) -> tuple[TableRow, ...]:
    dtypes: dict[str, str] = {}
    for need in needs:
        if len(dtypes) < len(table):  # replicas and slices of the same tensors have the same dtype
            dtypes |= {piece.tensor: need.layout.params[piece.param].dtype for piece in need.layout.pieces}
    return tuple(row._replace(dtype=dtypes.get(row.name, row.dtype)) for row in table)
