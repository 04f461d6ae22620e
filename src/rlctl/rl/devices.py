"""Whose turn it is on devices that policy and engines share.

One of them computes at a time, and what the other holds waits in host memory (`training.offload`, vLLM's sleep mode) or
is dropped. While weights move both hold theirs, and nothing else that can wait. On a CPU nothing is given back unless
`training.offload` is set, and these turns are only counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from rlctl.cluster.workers import WorkerDiedError, WorkerGroup
from rlctl.errors import RlctlError


class Turn(Enum):
    """Who has the devices."""

    POLICY = "policy"
    ENGINES = "engines"
    WEIGHTS = "weights"
    """Both, for a refit."""


class DeviceTurns:
    """Hands the devices from one to the other. Begins with the policy's turn, engines that sleep being asleep."""

    def __init__(self, policy: WorkerGroup, engines: WorkerGroup, *, offload: bool, engines_sleep: bool) -> None:
        """`offload`: the policy can wait in host memory; `engines_sleep`: the engines can."""
        self._policy, self._engines = policy, engines
        self._offload, self._engines_sleep = offload, engines_sleep
        self.turn = Turn.POLICY

    @contextmanager
    def generating(self) -> Iterator[int]:
        """The engines' turn for the block, the policy's after it; the bytes that the policy's devices got back."""
        yield self.to_engines()
        self.to_policy()

    def make_room(self) -> int:
        """Move all of the policy's state to host memory, where it is to wait there; the bytes that devices got back."""
        return sum(self._policy.call("sleep")) if self._offload else 0

    def to_engines(self) -> int:
        """The engines compute; the bytes that the policy's devices got back."""
        freed = self.make_room()
        self._tell_engines("wake")
        self.turn = Turn.ENGINES
        return freed

    def to_policy(self) -> None:
        """The policy computes."""
        self._tell_engines("sleep")
        if self._offload:
            self._policy.call("wake")
        self.turn = Turn.POLICY

    def to_weights(self) -> None:
        """Weights move: gradients and optimizer wait, and the engines wake for their weights alone."""
        if self.turn is Turn.ENGINES:
            self.to_policy()
        if self._engines_sleep and self._offload:
            self._policy.call("sleep", keep_weights=True)
        self.turn = Turn.WEIGHTS

    def _tell_engines(self, method: str) -> None:
        """Engines that sleep do it. One whose process is gone holds no memory; it is missed, and replaced, where it
        is to answer."""
        if self._engines_sleep:
            for outcome in self._engines.outcomes(method, self._engines.submit(method)):
                if isinstance(outcome, RlctlError) and not isinstance(outcome, WorkerDiedError):
                    raise outcome
