"""A policy that is lost at each call of a run in turn, with a policy that only remembers what it was trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlctl.backends.batching.batch import MinibatchResult, TrainBatch
from rlctl.errors import RlctlError, WorkerError
from rlctl.telemetry.headline import findings
from rlctl.training.recovery import Recovery
from training.test_loop import Recorder, Stop, loop

STEPS = 5


class Mortal(Recorder):
    """A policy whose weights are the positions that it was trained on; it dies in call number `dies`."""

    def __init__(self, dies: frozenset[int] = frozenset(), every: int = 2) -> None:
        super().__init__([[0.0, 1.0]] * STEPS)
        self.dies, self.every, self.calls = dies, every, 0
        self.weights: tuple[int, ...] = ()
        self.kept: dict[int, tuple[int, ...]] = {0: ()}
        self.engine: tuple[int, ...] | None = None
        self.dead, self.saved_at, self.starts = False, 0, 0

    def _called(self) -> None:
        self.calls += 1
        self.dead = self.dead or self.calls in self.dies
        if self.dead:
            raise WorkerError("policy rank 0 died during `x`.")

    def load_batch(self, batch: TrainBatch) -> Any:
        self._called()
        return super().load_batch(batch)

    def train(self, minibatches: int, *rest: Any) -> list[MinibatchResult]:
        self._called()
        self.weights += (self.asked[-1][1][0],)
        self._called()  # it may also be lost when its weights have changed
        return super().train(minibatches, *rest)

    def refit(self, version: int) -> Any:
        self._called()
        self.engine = self.weights
        return super().refit(version)

    def due(self, step: int, ending: bool) -> bool:
        return step != self.saved_at and (ending or step % self.every == 0)

    def begin(self, step: int, state: dict[str, Any], write: Any) -> None:
        self._called()
        self.saved_at, self.kept[step] = step, self.weights
        super().begin(step, state, write)

    # the saver, and the policy as its recovery has it
    @property
    def saved_step(self) -> int:
        return max(self.kept)

    def lost(self) -> list[RlctlError]:
        return [WorkerError(f"policy rank {rank} died.") for rank in (0, 1)] if self.dead else []

    def end(self) -> None: ...

    def keep(self, step: int) -> None:
        self._called()

    def lose(self) -> None: ...

    def start(self, newest: int) -> int:
        step = max(step for step in self.kept if step <= newest)
        self.dead, self.weights, self.starts = False, self.kept[step], self.starts + 1
        return step

    def rejoin(self, version: int) -> None:
        self._called()
        self.engine = self.weights

    def take_turn(self) -> None: ...


class Kept:
    """Stands for the saver of a recovery."""

    def __init__(self, policy: Mortal) -> None:
        self._policy = policy

    @property
    def saved(self) -> int:
        return self._policy.saved_step

    def lose(self) -> None: ...


def trained(policy: Mortal, limit: int = 3) -> Mortal:
    steps = loop(policy, STEPS)
    kept: Any = Kept(policy)
    steps.parts = replace(steps.parts, recovery=Recovery(policy, kept, limit, policy.said.append))
    stop: Any = Stop()
    steps.run(stop)
    return policy


def numbers(policy: Mortal) -> list[dict[str, Any]]:
    left_out = ("seconds", "tokens_per_s", "policy_restarts", "policy_failure", "lost_ranks")
    return [{name: value for name, value in line.items() if name not in left_out} for line in policy.logged]


@pytest.mark.parametrize("every", [1, 2, 100])
def test_what_was_trained_since_the_loaded_state_is_trained_again_and_the_rest_once(every):
    """Whichever call the policy dies in, its weights are in the end those of a run in which nothing happened."""
    whole = trained(Mortal(every=every))
    for number in range(1, whole.calls + 1):
        found = trained(Mortal(frozenset({number}), every))
        assert found.starts == 1
        assert found.weights == found.engine == whole.weights
        assert found.kept == whole.kept
        assert numbers(found) == numbers(whole)
        assert [what for what in found.asked if what[0] == "next"] == [one for one in whole.asked if one[0] == "next"]
        told = [line["step"] for line in found.logged if "policy_restarts" in line]
        assert len(told) == 1
        assert [line["lost_ranks"] for line in found.logged if "lost_ranks" in line] == [2]
        assert f"in step {told[0]}. The last cause: policy rank 0 died" in findings(found.logged)[0]


def test_a_loss_while_the_policy_is_brought_back_counts_too():
    whole = trained(Mortal())
    found = trained(Mortal(frozenset({9, 10, 12})))
    assert found.starts == 3
    assert found.weights == whole.weights
    with pytest.raises(WorkerError, match=r"lost 3 times in this run, more than cluster\.policy_restarts = 2"):
        trained(Mortal(frozenset({9, 10, 12})), limit=2)


def test_an_error_of_a_policy_that_lives_ends_the_run():
    policy = Mortal(frozenset({4}))
    policy.lost = list  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match="died during"):
        trained(policy)
    assert policy.starts == 0
