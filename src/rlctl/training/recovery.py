"""What a run does where its policy loses ranks: the processes start again, load the newest state and train again on the
batches since.

Engines, rollouts and environments stay. A batch is kept until a state after it can be loaded, so that nothing is
sampled again, and the state of prompts does not go back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from rlctl.cluster.workers import WorkerDiedError, cause_of
from rlctl.errors import RlctlError, WaitTimeoutError, WorkerError
from rlctl.rollouts.source import Batch
from rlctl.training.saving import Saver

T = TypeVar("T")
MOST_TOKENS = 200_000_000
"""Tokens of all batches that are kept; the columns of one take about 20 bytes, on disk where Ray's store is full."""
LOSSES = (WorkerError, WaitTimeoutError)
"""Errors that may follow from a lost rank."""


class TrainedPolicy(Protocol):
    """The policy of a run that can be started again."""

    def lost(self) -> list[RlctlError]:
        """Return the fault of each lost process, the likeliest cause first."""
        ...

    def end(self) -> None:
        """End its processes."""

    def keep(self, step: int) -> None:
        """Begin to keep its state after `step` where `start` finds it."""

    def start(self, newest: int) -> int:
        """Start its processes with the newest state that can be loaded, of step `newest` at most; return the state's
        step."""
        ...

    def rejoin(self, version: int) -> None:
        """Bring its weights into the engines, if there are any."""

    def take_turn(self) -> None:
        """Let it compute, where it shares devices with engines."""


class Steps(Protocol):
    """The loop, as far as it trains."""

    step: int
    version: int

    def train_on(self, batch: Batch) -> object: ...


@dataclass(frozen=True)
class Trained:
    """A batch that was trained on."""

    step: int
    """Steps before it."""
    version: int
    """The weights that were trained on it."""
    batch: Batch

    @property
    def tokens(self) -> int:
        return sum(one.tokens for group in self.batch.groups for one in group.sequences)


class NoRecovery:
    """Lets errors pass: a run ends with the first loss of its policy."""

    def run(self, part: Callable[[], T], loop: Steps, *, trains: bool = False) -> T:
        """Return what `part` returns. `trains`: it is done in the policy's turn on shared devices."""
        return part()

    def trained(self, version: int, batch: Batch, loop: Steps) -> None:
        """Take note of a batch that the weights of `version` were trained on after the steps of `loop`."""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of a step's policy losses."""
        return {}


class Recovery(NoRecovery):
    """Repeats parts of a step whose policy was lost, after it was brought back."""

    def __init__(self, policy: TrainedPolicy, saver: Saver, limit: int, tell: Callable[[str], None]) -> None:
        """Recover from at most `limit` losses of the policy; `tell` receives each with its cause."""
        self._policy, self._saver, self._limit, self._tell = policy, saver, limit, tell
        self._restarts = 0
        self._since: list[Trained] = []
        self._causes: list[str] = []
        self._lost_ranks = 0

    def trained(self, version: int, batch: Batch, loop: Steps) -> None:
        """Keep the batch, and drop the batches that the newest checkpoint contains."""
        step = loop.step
        self._since = [one for one in self._since if one.step >= self._saver.saved]
        self._since.append(Trained(step, version, batch))
        while len(self._since) > 1 and sum(one.tokens for one in self._since) > MOST_TOKENS:
            del self._since[0]
        self.run(partial(self._policy.keep, step + 1), loop, trains=True)

    def metrics(self) -> dict[str, Any]:
        (causes, self._causes), (lost, self._lost_ranks) = (self._causes, []), (self._lost_ranks, 0)
        counts = {"policy_restarts": len(causes), "lost_ranks": lost}
        return {**counts, "policy_failure": causes[-1]} if causes else {}

    def run(self, part: Callable[[], T], loop: Steps, *, trains: bool = False) -> T:
        """Return what `part` returns, which is done again after each loss of the policy."""
        version = loop.version
        while True:
            try:
                return part()
            except LOSSES as error:
                failure: RlctlError = error
            loop.version = version
            self._bring_back(failure, loop)
            if trains:
                self._policy.take_turn()

    def _bring_back(self, error: RlctlError, loop: Steps) -> None:
        """Raise `error` where the policy is not lost, or was lost too often."""
        while True:
            self._count(error)
            step, version = loop.step, loop.version
            try:
                self._policy.end()
                self._saver.lose()
                self._repeat(self._policy.start(max([step, *(one.step + 1 for one in self._since)])), loop)
                self._policy.rejoin(version)
                return
            except LOSSES as another:
                error = another
            finally:
                loop.step, loop.version = step, version

    def _count(self, error: RlctlError) -> None:
        lost = self._policy.lost()
        if not lost:
            raise error
        self._restarts += 1
        self._lost_ranks += len(lost)
        cause = cause_of(error if isinstance(error, WorkerDiedError) else lost[0])
        if self._restarts > self._limit:
            raise WorkerError(
                f"The policy was lost {self._restarts} times in this run, more than cluster.policy_restarts = "
                f"{self._limit}. The last time: {error.message}",
                error.hint,
            ) from None
        self._causes.append(cause)
        self._tell(f"the policy is lost ({cause}): starting it again ({self._restarts} of {self._limit} restarts)")

    def _repeat(self, begun: int, loop: Steps) -> None:
        """Train again on the batches since the state of step `begun`."""
        again = [one for one in self._since if one.step >= begun]
        if self._since and begun < self._since[0].step:
            raise RlctlError(
                f"The policy is back after step {begun}, and the batches of steps {begun + 1} to {self._since[0].step} "
                "are no longer kept.",
                "Save more often (run.checkpoint_every), or keep checkpoints in memory (run.memory_checkpoint_every).",
            )
        if again:
            self._tell(f"the policy goes on after step {begun} and trains again on {len(again)} batch(es) since then")
        for one in again:
            loop.step, loop.version = one.step, one.version
            loop.train_on(one.batch)
