"""A refit session: what is exchanged once, each transfer, and its end.

The driver's part only; the policy's ranks write (`source`), the engines load (`backends.vllm.transfer`), and no weight
passes through here. In a transfer both sides make one long call each and hand rounds over among themselves; the
driver watches both.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rlctl.backends.vllm.channel import EMPTY_BYTES, Connection, Lengths, Need, Rendezvous, buffer_bytes, cut_rounds
from rlctl.backends.vllm.messages import Received
from rlctl.cluster.workers import WorkerGroup, wait_together
from rlctl.config.schema import RefitConfig
from rlctl.errors import RlctlError, VerificationError, WaitTimeoutError, WorkerError
from rlctl.models.facts import ModelFacts
from rlctl.refit.channels import (
    choose_mover,
    meeting_host,
    place_of,
    plan_channels,
    shares_of,
    staging_bytes,
    ways_of,
)
from rlctl.refit.records import (
    Changes,
    Channel,
    Made,
    Opened,
    RefitReport,
    Sent,
    Share,
    SourcePlace,
    SourceSetup,
    TableRow,
)
from rlctl.refit.verify import Comparison, compare, require_as_converted, require_equal, source_sums
from rlctl.telemetry.phases import RefitPhase

if TYPE_CHECKING:
    from rlctl.weights.megatron import MegatronParallel

T = TypeVar("T")
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
        policy: WorkerGroup,
        engines: WorkerGroup,
        facts: ModelFacts,
        *,
        parallel: MegatronParallel,
        settings: RefitConfig,
        dtype: str,
        shapes: dict[str, tuple[int, ...]] | None = None,
        receive: Receive = "auto",
        members: int = 1,
        converted: Mapping[str, int] | None = None,
        converted_at: Path | None = None,
    ) -> None:
        """`shapes` are those of the published tensors; by default what the model's family says.

        `converted`: fingerprints, in `dtype`, that tensors have if the policy holds what a conversion wrote; compared
        when the first refit is. `converted_at`: where that conversion is, for the error's sake.

        `members`: how many of `engines` hold one model together (1, but for processes without an engine around them).
        """
        self.members = members
        self.policy, self.engines, self.settings, self.receive = policy, engines, settings, receive
        table = _published(facts, dtype) if shapes is None else tuple(TableRow(n, dtype, s) for n, s in shapes.items())
        self.setup = SourceSetup(facts, parallel, table)
        self.mover = settings.mover
        self.refits = self.attempts = 0
        self._base: int | None = None
        """Version that every engine holds whole."""
        self._since_full = 0
        self.opened = self.broken = False
        self.taken: dict[str, tuple[tuple[str, str], ...]] = {}
        """The receive path of each tensor and why it takes it; more than one where workers hold it differently."""
        self.shares: tuple[Share, ...] = ()
        self.last_comparison: Comparison | None = None
        self._dtype, self._converted, self._converted_at = dtype, converted or {}, converted_at

    @property
    def payload_bytes(self) -> int:
        return sum(row.bytes for row in self.setup.table)

    @property
    def staging_bytes(self) -> int:
        """Staging memory of the node that holds most of it."""
        by_node: dict[str, int] = {}
        for channel in self.setup.channels:
            by_node[channel.node] = by_node.get(channel.node, 0) + _staging(channel)
        return max(by_node.values(), default=0)

    def open(self) -> None:
        """Make the staging memory, and tell both sides what stays the same over all refits."""
        table = tuple((row.name, row.dtype, row.shape) for row in self.setup.table)
        places = tuple(self._wait("open", self.policy, "refit_place"))
        self._wait("open", self.engines, "refit_open", {"table": table, "receive": self.receive})
        needs: list[list[Need]] = self._wait("open", self.engines, "refit_needs")
        flat = [need for of_engine in needs for need in of_engine]
        self.setup = replace(self.setup, table=_as_held(self.setup.table, flat))
        self.taken = ways_of(self.setup.table, flat)
        self.shares = shares_of(self.setup.table, self.taken)
        self.mover = choose_mover(self.settings.mover, flat, places, self.settings.directory)
        channels = plan_channels(
            self.mover,
            flat,
            places,
            staging_bytes=staging_bytes(self.settings.staging_mb, flat),
            timeout_s=self.settings.timeout_s,
        )
        names = tuple(one.name for one in (*places, *flat))
        self._base, self._whole_only = None, self._why_whole(flat, places)
        sparse = self.settings.sparse and not self._whole_only
        self.setup = replace(
            self.setup,
            places=places,
            sparse=sparse,
            channels=self._prepared(channels, names, meeting_host(flat, places)),
        )
        self._connect([tuple(self._connection(need) for need in of_engine) for of_engine in needs])
        self._wait("open", self.policy, "refit_unlink")
        self.opened = True

    def reform(self, engines: WorkerGroup) -> None:
        """Go on with other engines (some left, some joined); the policy's processes stay as they are.

        Engines that joined hold these weights after the next refit.
        """
        self.close()
        self.engines = engines
        self.open()

    def _prepared(self, channels: tuple[Channel, ...], names: tuple[str, ...], host: str) -> tuple[Channel, ...]:
        """The channels with all that the two sides need to find each other."""
        made: list[Made] = self._wait("open", self.policy, "refit_make", channels, host)
        addresses = {index: address for one in made for index, address in one.addresses.items()}
        handles = {index: own for one in made for index, own in one.handles.items()}
        port = next((one.store_port for one in made if one.store_port is not None), None)
        group = None if port is None else Rendezvous(host, port, f"refit-{secrets.token_hex(4)}", names)
        directory = None
        if self.mover == "disk":
            directory = str(Path(self.settings.directory or ".").absolute() / f"rlctl-refit-{secrets.token_hex(4)}")
        links = [
            replace(
                c.connection,
                address=addresses.get(c.index),
                handles=handles.get(c.index, ()),
                group=group,
                directory=directory,
            )
            for c in channels
        ]
        return tuple(replace(c, connection=link) for c, link in zip(channels, links, strict=True))

    def _connect(self, connections: list[tuple[Connection, ...]]) -> None:
        """Both sides open their ends, at once: a collective group is there when all its members are."""
        waits = [
            (self.policy, "refit_open", self.policy.submit("refit_open", self.setup)),
            (self.engines, "refit_connect", self.engines.submit_each("refit_connect", [(one,) for one in connections])),
        ]
        opened: list[Opened] = self._guard("open", lambda: wait_together(waits, self.settings.timeout_s + MARGIN_S))[0]
        if problems := [line for one in opened for line in one.problems]:
            raise VerificationError(f"Refit: the transfer plan does not hold: {'; '.join(problems[:8])}.")

    def _connection(self, need: Need) -> Connection:
        return next(c.connection for c in self.setup.channels if need.name in c.connection.receivers)

    def refit(self, version: int, *, verify: bool | None = None) -> RefitReport:
        """Bring the policy's weights into every engine as `version`; `verify` None: as the settings say.

        Raises VerificationError naming tensors, WaitTimeoutError and WorkerError naming rank and phase; after any of
        them the engines refuse to generate until a full refit has succeeded.
        """
        if self.broken:  # a group that a member left cannot be used again
            self.reform(self.engines)
        if not self.opened:
            raise WorkerError("RefitSession.refit before open().")
        self.attempts += 1
        begun = time.perf_counter()
        self._wait("begin", self.engines, "refit_begin", version)
        moving = time.perf_counter()
        self.broken = self.mover == "collective"
        lengths, said = self._changes() if self.settings.sparse else (None, None)
        compared_s = time.perf_counter() - moving
        base, self._base = self._base, None  # whatever fails from here on, the next refit sends everything
        sent, wrote_s = self._move(version) if lengths is None else self._move_changes(version, base, lengths)
        self.broken = False
        moved = time.perf_counter()
        finished = self._wait("load", self.engines, "refit_finish", version)
        ended = time.perf_counter()
        self.refits += 1
        received: list[Received] = [one for of in self._wait("load", self.engines, "received") for one in of]
        waited = min(max(one.waited_s for one in received) + wrote_s + compared_s, moved - moving)
        reset = max(one["cache_reset"] for one in finished)
        exchanged = min(max(one.exchange_s for one in sent), waited)
        seconds = {
            RefitPhase.WAKE: moving - begun,
            **({RefitPhase.EXCHANGE: exchanged} if exchanged else {}),
            RefitPhase.PACK if self.mover in ("shared-memory", "cuda-ipc") else RefitPhase.TRANSFER: waited - exchanged,
            RefitPhase.LOAD: ended - moving - waited - reset,
            RefitPhase.CACHE_RESET: reset,
        }
        verified, verify_s = self._verified(version, verify)
        self._base, self._since_full = version, 0 if lengths is None else self._since_full + 1
        return RefitReport(
            version=version,
            seconds=seconds,
            bytes=self.payload_bytes,
            staging_bytes=self.staging_bytes,
            verified=verified,
            unread=len(self.last_comparison.unread) if verified and self.last_comparison else 0,
            verify_s=verify_s,
            mover=self.mover,
            receive=received[0].path,
            shares=self.shares,
            sparse=said,
            sent_bytes=sum(one.bytes for one in sent),
            packing_s=max(one.packing_s for one in sent),
        )

    def _why_whole(self, needs: list[Need], places: tuple[SourcePlace, ...]) -> str:
        """Why changed elements alone can never be sent in this session; empty: they can."""
        if self.mover == "disk":
            return "the disk mover sends whole boxes"
        if len({place_of(self.mover, place) for place in places}) > 1:
            return "boxes are exchanged between policy ranks, which sends them whole"
        return next((need.whole_only for need in needs if need.whole_only), "")

    def _changes(self) -> tuple[tuple[Lengths, ...] | None, str]:
        """(by channel, bytes of each sender in each round; what is sent), or None and why everything is."""
        if self._whole_only:
            return None, f"everything: {self._whole_only}"
        if self._base is None:
            return None, "everything: no version before to compare with"
        if self._since_full + 1 >= self.settings.full_every:
            return None, f"everything: every {self.settings.full_every} refits"
        by_rank: list[list[Changes]] = self._wait("compare", self.policy, "refit_compare")
        found = [one for of in by_rank for one in of]
        size, changed = sum(one.bytes for one in found), sum(one.changed for one in found)
        share = f"{changed / max(1, sum(one.elements for one in found)):.1%} of the elements have changed"
        if size > SPARSE_LIMIT * self.payload_bytes:
            return None, f"everything: {share}"
        sizes = [{one.channel: one.sizes for one in of} for of in by_rank]
        lengths = [
            tuple(zip_longest(*(sizes[rank].get(c.index, ()) for rank in c.senders), fillvalue=EMPTY_BYTES))
            for c in self.setup.channels
        ]
        return tuple(lengths), share

    def _move_changes(self, version: int, base: int | None, lengths: tuple[Lengths, ...]) -> tuple[list[Sent], float]:
        """Changed elements alone, over the version that the engines hold."""
        update = {"version": version, "epoch": self.attempts, "base": base, "lengths": lengths}
        waits = [
            (
                self.policy,
                "refit_send_changes",
                self.policy.submit("refit_send_changes", version, self.attempts, lengths),
            ),
            (self.engines, "refit_receive", self.engines.submit("refit_receive", update)),
        ]
        return self._guard("transfer", lambda: wait_together(waits, self.settings.timeout_s + MARGIN_S))[0], 0.0

    def _move(self, version: int) -> tuple[list[Sent], float]:
        """Both sides at once; the first failure of either ends it. Also the seconds before loading could begin."""
        update = {"version": version, "epoch": self.attempts}
        if self.mover == "disk":  # a version is read once it is complete
            begun = time.perf_counter()
            sent: list[Sent] = self._wait("transfer", self.policy, "refit_send", version, self.attempts)
            self._wait("transfer", self.policy, "refit_publish", version)
            wrote_s = time.perf_counter() - begun
            self._wait("load", self.engines, "refit_receive", update)
            self._wait("load", self.policy, "refit_retire", version)
            return sent, wrote_s
        waits = [
            (self.policy, "refit_send", self.policy.submit("refit_send", version, self.attempts)),
            (self.engines, "refit_receive", self.engines.submit("refit_receive", update)),
        ]
        return self._guard("transfer", lambda: wait_together(waits, self.settings.timeout_s + MARGIN_S))[0], 0.0

    def _verified(self, version: int, wanted: bool | None) -> tuple[int, float]:
        """(tensors compared, seconds): all of them on the first refit and every few after it, else a sample."""
        every = self.settings.verify_every
        due = self.refits == 1 or (every > 0 and (self.refits - 1) % every == 0)
        if wanted is not None:
            due = wanted
        sample = None if due else [] if wanted is False else self._sample(version)
        if sample == []:
            return 0, 0.0
        begun = time.perf_counter()
        try:
            for index, comparison in enumerate(self.compare(sample)):
                self.last_comparison = comparison
                require_equal(comparison, version, f"engine {index}")
        except RlctlError:
            self._wait("verify", self.engines, "refit_reject", version)
            raise
        return comparison.tensors, time.perf_counter() - begun

    def _as_converted(self) -> dict[str, int]:
        """What tensors of the precision of the conversion must be in the first refit."""
        rows = [row.name for row in self.setup.table if row.dtype == self._dtype]
        return {name: self._converted[name] for name in rows if name in self._converted}

    def _sample(self, version: int) -> list[str]:
        """Some tensors, others with every version, the same for the same version."""
        names = [row.name for row in self.setup.table]
        return sorted(names, key=lambda name: zlib.crc32(f"{version}{name}".encode()))[: self.settings.verify_sample]

    def compare(self, tensors: list[str] | None = None) -> list[Comparison]:
        """The policy's tensors (None: all) against what each engine computes with now.

        Raises VerificationError where those of the first refit are not what their conversion wrote.
        """
        waits = [
            (self.policy, "refit_fingerprints", self.policy.submit("refit_fingerprints", tensors)),
            (self.engines, "readings", self.engines.submit("readings", tensors)),
        ]
        found, readings = self._guard("verify", lambda: wait_together(waits, self.settings.timeout_s))
        source = source_sums(found)
        if self.refits == 1:
            require_as_converted(source, self._as_converted(), self._converted_at)
        firsts = range(0, len(readings), self.members)
        models = [[one for of in readings[first : first + self.members] for one in of] for first in firsts]
        return [compare(source, of_one, tensors) for of_one in models]

    def close(self) -> None:
        """Let go of the staging memory on both sides; tolerant of workers that are gone."""
        self.opened = self.broken = False
        if self.mover == "disk" and self.setup.channels:
            self._tolerantly(self.policy, "refit_retire", None)
        for group, method in ((self.policy, "refit_close"), (self.engines, "refit_close")):
            self._tolerantly(group, method)

    def _tolerantly(self, group: WorkerGroup, method: str, *args: Any) -> None:
        # A worker that is gone holds nothing, and its death was reported where it mattered.
        with contextlib.suppress(WorkerError, WaitTimeoutError):
            group.call(method, *args, timeout_s=min(30.0, self.settings.timeout_s))

    def _wait(self, phase: str, group: WorkerGroup, method: str, *args: Any) -> list[Any]:
        return self._guard(phase, lambda: group.call(method, *args, timeout_s=self.settings.timeout_s))

    def _guard(self, phase: str, wait: Callable[[], T]) -> T:
        """Name the phase in whatever goes wrong."""
        try:
            return wait()
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"Refit, phase {phase}: {error.message}", "Raise refit.timeout_s if it is just slow."
            ) from None
        except WorkerError as error:
            raise WorkerError(f"Refit, phase {phase}: {error.message}", error.hint) from None


def _staging(channel: Channel) -> int:
    rounds = cut_rounds(channel.layout, channel.connection.capacity)
    return min(2, len(rounds)) * buffer_bytes(rounds)


def _as_held(table: tuple[TableRow, ...], needs: list[Need]) -> tuple[TableRow, ...]:
    """`table` with the dtype in which the engines ask for each tensor."""
    held: dict[str, str] = {}
    for need in needs:
        if len(held) < len(table):  # replicas and slices of the same tensors say the same
            held |= {piece.tensor: need.layout.params[piece.param].dtype for piece in need.layout.pieces}
    return tuple(replace(row, dtype=held.get(row.name, row.dtype)) for row in table)


def _published(facts: ModelFacts, dtype: str) -> tuple[TableRow, ...]:
    """The published tensors as an engine computes with them, in the order of the model."""
    from rlctl.weights import hf

    # A policy is built without multi-token-prediction layers, and an engine generates without them.
    params = hf.layout(replace(facts, mtp_layers=0), dtype).params
    return tuple(TableRow(name, spec.dtype, spec.shape) for name, spec in params.items())
