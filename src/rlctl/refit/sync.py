"""Weight synchronization between policy and engines, on separate or shared devices, also after a loss.

On shared devices one side computes while the other's memory is in host memory (`training.offload`, vLLM's sleep mode)
or dropped; during a refit both hold weights. On a CPU turns are counted, and memory moves only with `training.offload`.
A lost engine (a dead or silent process) is replaced, or left out while its host is lost; then the session is formed
again, and a full, verified refit updates all engines. Trainers stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path

from rlctl.backends.clients import EngineClient, PolicyClient
from rlctl.cluster.workers import WorkerGroup, cause_of
from rlctl.errors import RlctlError, VerificationError, WaitTimeoutError, WorkerError
from rlctl.models.facts import ModelFacts
from rlctl.refit.adapter_refits import AdapterRefits
from rlctl.refit.decoding import DecodeCheck
from rlctl.refit.records import RefitReport
from rlctl.refit.session import Receive, RefitSession
from rlctl.refit.weight_sender import AdapterSender, WeightSender
from rlctl.settings.generation import RefitConfig
from rlctl.settings.training import Rounding
from rlctl.telemetry.phases import RefitPhase


class DeviceHolder(Enum):
    """The side that has the devices."""

    POLICY = "policy"
    ENGINES = "engines"
    WEIGHTS = "weights"
    """Both, for a refit."""


class DeviceHandover:
    """Hands the devices from one to the other. Begins with the policy's turn, engines that sleep being asleep."""

    def __init__(
        self,
        policy: PolicyClient,
        engines: EngineClient,
        *,
        offload: bool,
        engines_sleep: bool,
        engines_discard: bool = False,
    ) -> None:
        """`offload`: the policy can wait in host memory; `engines_sleep`: the engines can; `engines_discard`: they keep
        no copy of their weights before a refit."""
        self.engines_discard = engines_discard
        self._policy, self._engines = policy, engines
        self._offload, self._engines_sleep = offload, engines_sleep
        self.holder = DeviceHolder.POLICY
        self.when_all_sleep: Callable[[tuple[int, int]], None] | None = None
        """Called once when both sides first sleep after a turn, with used and total bytes of the GPU with the least
        free memory."""

    @property
    def taken(self) -> bool:
        """Whether one side waits while the other computes."""
        return self._offload or self._engines_sleep

    def begin_again(self) -> None:
        """Give the devices to the policy, whose processes are to start."""
        if self._engines_sleep:
            self._engines.sleep()
        self.holder = DeviceHolder.POLICY

    @contextmanager
    def generating(self, refit_next: bool = False) -> Iterator[int]:
        """The engines' turn for the block, then the policy's; yields the bytes that the policy's devices got back.
        `refit_next`: engines get new weights before they generate again."""
        yield self.to_engines()
        self.to_policy(refit_next)

    def make_room(self) -> int:
        """Move the policy's state to host memory where it is to wait there; return the bytes that devices got."""
        return self._policy.sleep() if self._offload else 0

    def to_engines(self) -> int:
        """Let the engines compute; return the bytes that the policy's devices got back."""
        freed = self.make_room()
        if self._engines_sleep:
            self._engines.wake()
        self.holder = DeviceHolder.ENGINES
        return freed

    def to_policy(self, refit_next: bool = False) -> None:
        if self._engines_sleep:
            self._engines.sleep(refit_next)
        if self._offload:
            if self._engines_sleep and self.holder is DeviceHolder.ENGINES:
                tell, self.when_all_sleep = self.when_all_sleep, None
                if tell is not None and (used := self._policy.device_used()) is not None:
                    tell(used)
            self._policy.wake()
        self.holder = DeviceHolder.POLICY

    def to_weights(self) -> None:
        """Prepare a refit: gradients and optimizer wait, and engines wake only their weights."""
        if self.holder is DeviceHolder.ENGINES:
            self.to_policy()
        if self._engines_sleep and self._offload:
            self._policy.sleep(keep_weights=True)
        self.holder = DeviceHolder.WEIGHTS


class WeightSync:
    """Owns the refit session, the turns on devices and the recovery of engines; open within a `with` block."""

    def __init__(
        self,
        policy: PolicyClient,
        senders: WorkerGroup[WeightSender],
        engines: EngineClient,
        facts: ModelFacts,
        *,
        settings: RefitConfig,
        dtype: str,
        offload: bool,
        engines_sleep: bool,
        engines_discard: bool = False,
        receive: Receive = "auto",
        converted: Mapping[str, int] | None = None,
        converted_at: Path | None = None,
        decode_check: DecodeCheck | None = None,
        restarts: int = 0,
        tell: Callable[[str], None] = lambda _: None,
        adapters: WorkerGroup[AdapterSender] | None = None,
        adds: bool = False,
        rounding: Rounding = "unbiased",
    ) -> None:
        """`dtype`, `receive`, `converted`, `converted_at`: see `RefitSession`; `offload`, `engines_sleep`: see
        `DeviceHandover`. `decode_check` follows fully compared refits. At most `restarts` lost engines are replaced;
        `tell` receives losses. `adapters`: engines have a base and receive adapters alone, which they merge with
        `rounding`, or add to products (`adds`)."""
        self.engines, self._policy, self._decode_check = engines, policy, decode_check
        self.whole = RefitSession(
            senders,
            engines.receivers,
            facts,
            settings=settings,
            dtype=dtype,
            receive=receive,
            converted=converted,
            converted_at=converted_at,
        )
        self.session = (
            self.whole if adapters is None else AdapterRefits(self.whole, adapters, rounding=rounding, adds=adds)
        )
        self.devices = DeviceHandover(
            policy, engines, offload=offload, engines_sleep=engines_sleep, engines_discard=engines_discard
        )
        self._restarts, self._tell = restarts, tell
        self.lost_engines = 0
        """Engines that were lost so far."""
        self._agreed = False  # the engines' log-probs with the policy's, once
        self.policy_elsewhere = False
        """The policy computes for another run, so that it cannot refit these engines."""
        self.before_refit: Callable[[], None] = lambda: None
        """Called before each refit of a run, where rollouts are in flight that must be finished first."""

    def __enter__(self) -> WeightSync:
        self.devices.to_weights()
        self.session.open()
        if self.devices.engines_discard:  # the first refit, which compares weights and decoding, shows that it works
            self.engines.sleep(refit_next=True)
        if self.session.note:
            self._tell(self.session.note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.session.close()
        elif kind is not KeyboardInterrupt:  # after it the processes, which may be busy, are ended without a question
            self.session.abandon()

    def generating(self, *, refit_next: bool = False) -> AbstractContextManager[int]:
        return self.devices.generating(refit_next)

    @property
    def takes_turns(self) -> bool:
        return self.devices.taken

    def to_policy(self) -> None:
        """Let the policy compute: a refit leaves its optimizer aside."""
        self.devices.to_policy()

    def refit(self, version: int, *, verify: bool | None = None) -> RefitReport:
        """Send the policy's weights to every engine as `version`, replacing lost engines; `verify` as in
        `RefitSession.refit`."""
        begun = time.perf_counter()
        self.before_refit()
        verify = self._take_back() or verify
        self.devices.to_weights()
        offloaded_s = time.perf_counter() - begun
        try:
            report = self._decoded(self.session.refit(version, verify=verify))
        except (WorkerError, WaitTimeoutError) as error:
            return self.recover(error, version)
        return replace(report, seconds={RefitPhase.OFFLOAD: offloaded_s} | report.seconds)

    def _take_back(self) -> bool:
        try:
            if not self.engines.take_back(self._tell):
                return False
        except WaitTimeoutError as error:  # they can take part again in the next refit
            self._tell(f"engines whose host was lost are not looked for: {error.message}")
            return False
        self._tell(f"a lost host is back: going on with {len(self.engines)} engine(s)")
        self.session.reform(self.engines.receivers)
        return True

    def _decoded(self, report: RefitReport) -> RefitReport:
        """After a fully compared refit, also compare decoding. Raises VerificationError; engines then refuse to
        generate until a full refit."""
        check = self._decode_check
        if check is None or not report.compared_all:
            return report
        with self.devices.generating():
            # Rollouts that were kept in flight come first: this may take as long as they do.
            decoded = check.decode(self.engines, report.version, self.engines.group.call_timeout_s)
        try:
            agreement = check.compare(self._policy, decoded, report.version, report.verified, agreed=self._agreed)
        except VerificationError:
            self.session.reject(report.version)
            raise
        self._agreed = True
        return replace(report, decoding=agreement)

    def recover(self, error: RlctlError, version: int) -> RefitReport:
        """Replace engines lost with `error` and refit all to `version`; devices keep their owner. Raises `error` if
        none is lost or replaceable, or the policy is elsewhere; WorkerError for too many losses."""
        if self.policy_elsewhere:
            raise error
        generating = self.devices.holder is DeviceHolder.ENGINES
        while True:
            lost = self.engines.lost() if self._restarts else []
            if not lost:
                raise error
            self._count(error, lost)
            try:
                self.devices.make_room()
                self._replace(lost)
                self.devices.to_policy()
                report = self._reformed(version)
                if generating:
                    self.devices.to_engines()
            except (WorkerError, WaitTimeoutError) as another:
                error = another
                continue
            self._tell(
                f"{len(self.engines)} engine(s) hold version {version} again: {report.bytes / 1e6:.0f} MB in "
                f"{sum(report.seconds.values()):.1f} s, {report.verified} tensors compared, all equal"
            )
            return report

    def rejoin(self, version: int) -> RefitReport:
        """Refit all engines to `version` from a policy whose processes are new, replacing lost engines."""
        self.devices.begin_again()
        try:
            return self._reformed(version)
        except (WorkerError, WaitTimeoutError) as error:
            return self.recover(error, version)

    def _reformed(self, version: int) -> RefitReport:
        self.devices.to_weights()
        self.session.reform(self.engines.receivers)
        return self._decoded(self.session.refit(version, verify=True))

    def _count(self, error: RlctlError, lost: list[int]) -> None:
        self.lost_engines += len(lost)
        logs = ", ".join(str(self.engines.group.log_path(rank)) for rank in lost)
        if self.lost_engines > self._restarts:
            raise WorkerError(
                f"{self.lost_engines} engines were lost in this run, more than cluster.engine_restarts = "
                f"{self._restarts}. The last one: {error.message}",
                error.hint or f"See {logs}.",
            ) from None
        self._tell(f"engine {', '.join(map(str, lost))} is lost ({cause_of(error)} See {logs}): starting another")

    def _replace(self, lost: list[int]) -> None:
        """Start new engines for `lost`, or continue with the others. Engines set aside start once Ray has a place, as
        after a host's return."""
        placed = self.engines.group.placed(lost)
        away = [rank for rank in lost if rank not in placed]
        if len(away) == len(self.engines):  # no engine is left: wait for a place
            placed, away = lost, []
        try:
            self.engines.replace(placed)
        except (WorkerError, WaitTimeoutError) as error:
            if len(lost) == len(self.engines):
                raise
            self.engines.set_aside(lost)  # Ray may not know yet that their host is lost
            self._tell(f"no other could be started ({cause_of(error)}): going on with {len(self.engines)} engine(s)")
            return
        if away:
            self.engines.set_aside(away)
            self._tell(f"the host of {len(away)} of them is lost: going on with {len(self.engines)} engine(s)")
