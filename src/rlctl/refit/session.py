"""A refit session: what is exchanged once, each transfer, and its end.

The driver's part only; the policy's ranks write (`source`), the engines load (`backends.vllm.transfer`), and no weight
passes through here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rlctl.config.schema import RefitConfig
from rlctl.errors import RlctlError, WaitTimeoutError, WorkerError
from rlctl.models.facts import ModelFacts
from rlctl.refit.records import RefitReport, SourceSetup, TableRow
from rlctl.refit.verify import Comparison, compare, require_equal, source_sums
from rlctl.telemetry.phases import RefitPhase
from rlctl.weights.layout import ITEM_BYTES

if TYPE_CHECKING:
    from rlctl.weights.megatron import MegatronParallel

T = TypeVar("T")
ALIGNMENT = 256  # bytes; whole cache lines, and what vectorised copies like
Receive = Literal["loader", "direct", "auto"]


class Group(Protocol):
    """The part of `cluster.WorkerGroup` that a session uses."""

    name: str

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]: ...
    def call_each(self, method: str, args_by_rank: list[tuple], timeout_s: float | None = None) -> list[Any]: ...
    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[Any]: ...
    def wait(self, method: str, submitted: list[Any], timeout_s: float | None = None) -> list[Any]: ...
    def __len__(self) -> int: ...


def table_of(shapes: dict[str, tuple[int, ...]], dtype: str) -> tuple[TableRow, ...]:
    """Places for whole tensors, one behind the other, in the order in which the model's layers come."""
    rows, offset = [], 0
    for name, shape in shapes.items():
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        rows.append(TableRow(name, dtype, shape, offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(rows)


class RefitSession:
    """Refits of one policy into engines on the same node."""

    def __init__(
        self,
        policy: Group,
        engines: Group,
        facts: ModelFacts,
        *,
        parallel: MegatronParallel,
        settings: RefitConfig,
        dtype: str,
        shapes: dict[str, tuple[int, ...]] | None = None,
        receive: Receive = "auto",
    ) -> None:
        """`shapes` are those of the published tensors; by default what the model's family says."""
        self.policy, self.engines, self.settings, self.receive = policy, engines, settings, receive
        self.setup = SourceSetup(facts, parallel, dtype, table_of(shapes or _published_shapes(facts), dtype), None)
        self.refits = 0
        self.last_comparison: Comparison | None = None

    @property
    def payload_bytes(self) -> int:
        return sum(row.bytes for row in self.setup.table)

    @property
    def staging_bytes(self) -> int:
        last = self.setup.table[-1]
        return last.offset + last.bytes

    def open(self) -> None:
        """Make the staging memory, and tell both sides what stays the same over all refits."""
        address = self._one(self.policy, "refit_create_segment", self.staging_bytes)
        setup = SourceSetup(**{**_fields(self.setup), "address": address})
        self._wait("open", self.policy, "refit_open", setup)
        table = tuple((row.name, row.dtype, row.shape, row.offset) for row in setup.table)
        self._wait("open", self.engines, "refit_open", {"address": address, "table": table, "receive": self.receive})
        self._wait("open", self.policy, "refit_unlink")
        self.setup = setup

    def refit(self, version: int, *, verify: bool | None = None) -> RefitReport:
        """Bring the policy's weights into every engine as `version`; `verify` None: as the settings say.

        Raises VerificationError naming tensors, WaitTimeoutError and WorkerError naming rank and phase; after any of
        them the engines refuse to generate until a full refit has succeeded.
        """
        if self.setup.address is None:
            raise WorkerError("RefitSession.refit before open().")
        seconds: dict[RefitPhase, float] = {}
        begun = time.perf_counter()
        self._wait("begin", self.engines, "refit_begin", version)
        packed = time.perf_counter()
        self._wait("pack", self.policy, "refit_pack")
        loading = time.perf_counter()
        self._wait("load", self.engines, "refit_receive", {"first": 0, "last": len(self.setup.table)})
        finished = self._wait("load", self.engines, "refit_finish", version)
        ended = time.perf_counter()
        seconds[RefitPhase.CACHE_RESET] = max(one["cache_reset"] for one in finished)
        seconds[RefitPhase.PACK] = loading - packed
        seconds[RefitPhase.LOAD] = ended - loading + packed - begun - seconds[RefitPhase.CACHE_RESET]
        self.refits += 1
        verified, verify_s = self._verified(version, verify)
        received = self._wait("load", self.engines, "received")[0][0]
        return RefitReport(
            version=version,
            seconds=seconds,
            bytes=self.payload_bytes,
            staging_bytes=self.staging_bytes,
            verified=verified,
            verify_s=verify_s,
            receive=received.path,
            reasons=received.reasons,
        )

    def _verified(self, version: int, wanted: bool | None) -> tuple[int, float]:
        """(tensors compared, seconds); the first refit of a session is always compared."""
        every = self.settings.verify_every
        due = self.refits == 1 or (every > 0 and (self.refits - 1) % every == 0)
        if not (due if wanted is None else wanted):
            return 0, 0.0
        begun = time.perf_counter()
        try:
            for index, comparison in enumerate(self.compare()):
                self.last_comparison = comparison
                require_equal(comparison, version, f"engine {index}")
        except RlctlError:
            self._wait("verify", self.engines, "refit_reject", version)
            raise
        return comparison.tensors, time.perf_counter() - begun

    def compare(self) -> list[Comparison]:
        """The policy's tensors against what each engine computes with now."""
        asked = self.policy.submit("refit_fingerprints"), self.engines.submit("readings")
        source = source_sums(self._guard("verify", lambda: self._await(self.policy, "refit_fingerprints", asked[0])))
        readings = self._guard("verify", lambda: self._await(self.engines, "readings", asked[1]))
        return [compare(source, of_one) for of_one in readings]

    def close(self) -> None:
        """Let go of the staging memory on both sides; tolerant of workers that are gone."""
        for group, method in ((self.policy, "refit_close"), (self.engines, "refit_close")):
            try:
                group.call(method, timeout_s=min(30.0, self.settings.timeout_s))
            except (WorkerError, WaitTimeoutError):
                continue  # a worker that is gone holds nothing, and its death was reported where it mattered

    def _one(self, group: Group, method: str, argument: Any) -> Any:
        """The result of a method that acts on rank 0 alone, which knows by itself."""
        return self._wait("open", group, method, argument)[0]

    def _wait(self, phase: str, group: Group, method: str, *args: Any) -> list[Any]:
        return self._guard(phase, lambda: group.call(method, *args, timeout_s=self.settings.timeout_s))

    def _await(self, group: Group, method: str, submitted: list[Any]) -> list[Any]:
        return group.wait(method, submitted, self.settings.timeout_s)

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


def _fields(setup: SourceSetup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in asdict(setup)}


def _published_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    from rlctl.models.registry import weights_of

    return dict(weights_of(facts).tensors)
