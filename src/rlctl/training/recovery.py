"""Recovery of a run whose policy lost ranks: restart the processes, load the newest state, and train again on the
batches since then.

Engines, rollouts and environments keep running. Each batch is kept until a later state can be loaded, so that rlctl
samples nothing again, and the position in the prompts does not move back.
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
"""Maximum number of tokens in the kept batches. A token's columns take about 20 bytes in Ray's object store, which
spills to disk when full."""
LOSSES = (WorkerError, WaitTimeoutError)
"""Errors that a lost rank can cause."""


class TrainedPolicy(Protocol):
    """A run's policy whose processes can be restarted."""

    def lost(self) -> list[RlctlError]:
        """Return the fault of each lost process, the likeliest cause first."""
        ...

    def end(self) -> None:
        """Kill the processes."""

    def keep(self, step: int) -> None:
        """Begin to save the state after `step` for a later `start`."""

    def start(self, newest: int) -> int:
        """Restart the processes with the newest loadable state up to step `newest`; return the state's step."""
        ...

    def rejoin(self, version: int) -> None:
        """Send the weights to the engines, if the run has engines."""

    def take_turn(self) -> None:
        """Give the policy its turn on devices that it shares with engines."""


class Steps(Protocol):
    """The part of the loop that trains."""

    step: int
    version: int

    def train_on(self, batch: Batch) -> object: ...


@dataclass(frozen=True)
class Trained:
    """A batch that the policy was trained on."""

    step: int
    """Number of steps before the batch."""
    version: int
    """Version of the weights before the update."""
    batch: Batch

    @property
    def tokens(self) -> int:
        return sum(sequence.tokens for group in self.batch.groups for sequence in group.sequences)


class NoRecovery:
    """Does nothing: the first loss of the policy ends the run."""

    def run(self, part: Callable[[], T], loop: Steps, *, trains: bool = False) -> T:
        """Return the result of `part`. `trains`: the part needs the policy's turn on shared devices."""
        return part()

    def trained(self, version: int, batch: Batch, loop: Steps) -> None:
        """Record a batch on which the weights of `version` were trained, as the loop's current step."""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics about losses of the policy since the last call."""
        return {}


class Recovery(NoRecovery):
    """Restarts a lost policy, and repeats the part of the step that failed."""

    def __init__(self, policy: TrainedPolicy, saver: Saver, limit: int, tell: Callable[[str], None]) -> None:
        """Recover from at most `limit` losses of the policy. `tell` receives each loss with its cause."""
        self._policy, self._saver, self._limit, self._tell = policy, saver, limit, tell
        self._restarts = 0
        self._since: list[Trained] = []
        self._causes: list[str] = []
        self._lost_ranks = 0

    def trained(self, version: int, batch: Batch, loop: Steps) -> None:
        """Keep the batch, and drop the batches that the newest checkpoint contains."""
        step = loop.step
        self._since = [trained for trained in self._since if trained.step >= self._saver.saved]
        self._since.append(Trained(step, version, batch))
        while len(self._since) > 1 and sum(trained.tokens for trained in self._since) > MOST_TOKENS:
            del self._since[0]
        self.run(partial(self._policy.keep, step + 1), loop, trains=True)

    def metrics(self) -> dict[str, Any]:
        (causes, self._causes), (lost, self._lost_ranks) = (self._causes, []), (self._lost_ranks, 0)
        counts = {"policy_restarts": len(causes), "lost_ranks": lost}
        return {**counts, "policy_failure": causes[-1]} if causes else {}

    def run(self, part: Callable[[], T], loop: Steps, *, trains: bool = False) -> T:
        """Return the result of `part`, which is repeated after each loss of the policy."""
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
        """Restart the policy. Raises `error` if the policy is not lost, and WorkerError after too many losses."""
        while True:
            self._count(error)
            step, version = loop.step, loop.version
            try:
                self._policy.end()
                self._saver.lose()
                newest = max([step, *(trained.step + 1 for trained in self._since)])
                self._repeat(self._policy.start(newest), loop)
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
        self._tell(f"the policy is lost ({cause}): restarting it ({self._restarts} of {self._limit} restarts)")

    def _repeat(self, begun: int, loop: Steps) -> None:
        """Train again on the batches since the state of step `begun`."""
        batches = [trained for trained in self._since if trained.step >= begun]
        if self._since and begun < self._since[0].step:
            raise RlctlError(
                f"The policy is back after step {begun}, and the batches of steps {begun + 1} to {self._since[0].step} "
                "are no longer kept.",
                "Save more often (run.checkpoint_every), or keep checkpoints in memory (run.memory_checkpoint_every).",
            )
        if batches:
            self._tell(
                f"the policy continues after step {begun} and trains again on {len(batches)} batch(es) since then"
            )
        for trained in batches:
            loop.step, loop.version = trained.step, trained.version
            loop.train_on(trained.batch)
