"""The process that scores, and its parent's side: time limits, restarts, and errors that name scorer and row.

Completions are scored in a process of their own because they are the model's: a scorer that parses them can hang, crash
or take all memory, and a user's function can do anything. Supervisors (`envs/supervisor.py`) end what it starts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rlctl.data.prompt_rows import PromptRow
from rlctl.envs.child_process import ChildProcess, begun
from rlctl.envs.scorers import BUILT_IN, BatchScorer, RewardPlan, Scorer
from rlctl.errors import InputError, RlctlError, WaitTimeoutError, WorkerError

BUILT_IN_LIMIT_S = 10.0
"""For one completion. Longer means a parser lost in what the model wrote (`9**9**9`): it counts as wrong."""
SHOWN_CHARACTERS = 300
"""Characters of a completion in an error message."""
SHORT_OF_MEMORY = "Where nothing in it sends signal 9 (SIGKILL), the kernel does so when memory is short (`dmesg`)."


@dataclass(frozen=True)
class Work:
    """One completion for one scorer."""

    scorer: int
    completion: str
    row: PromptRow


@dataclass(frozen=True)
class Score:
    """The answer of a scorer; None where it does not apply, or failed and the rollout is to be dropped."""

    value: float | None
    failure: str | None = None


class _LostError(Exception):
    """A built-in scorer hung on a completion, or died."""

    def __init__(self, why: str, died: bool = False) -> None:
        super().__init__(why)
        self.died = died


class ScoringProcess:
    """Scores in a child process, which is started again after a scorer hung or crashed on a completion."""

    def __init__(self, plan: RewardPlan) -> None:
        self.plan = plan
        self._child = ChildProcess(__name__, f"the scorers ({', '.join(plan.scorers)})")

    def start(self) -> Connection:
        """Start the child and wait until it has its scorers. Raises what building them raised."""
        return self._child.start(self.plan)

    def score(self, work: list[Work]) -> list[Score]:
        """Return one Score for each piece of work, in order, within the plan's time limit.

        A built-in scorer that hangs on a completion, or dies on it twice, gives it 0, with the failure said. One death
        says nothing of the completion: it may come from outside, as where memory is short. Raises WaitTimeoutError
        (names scorer and row) at the time limit, InputError where a user's function errs and the plan's `on_error` is
        stop, WorkerError where it takes the process down.
        """
        if self._child.connection is None:
            self.start()  # has a limit of its own
        deadline = time.monotonic() + self.plan.timeout_s
        # Built-in scorers come first: where one is lost, no function of many completions was called yet.
        order = sorted(range(len(work)), key=lambda index: self.plan.scorers[work[index].scorer] not in BUILT_IN)
        todo = [work[index] for index in order]
        scores: list[Score] = []
        died_at = -1
        while len(scores) < len(todo):
            connection = self._child.connection or self.start()
            with contextlib.suppress(ConnectionError):  # a dead child shows at the first receive
                connection.send(todo[len(scores) :])
            try:
                while len(scores) < len(todo):
                    scores.append(self._next(connection, todo, len(scores), deadline))
            except _LostError as lost:
                if lost.died and died_at < len(scores):
                    died_at = len(scores)
                else:
                    scores.append(Score(0.0, str(lost)))
        by_index = dict(zip(order, scores, strict=True))
        return [by_index[index] for index in range(len(work))]

    def _next(self, connection: Connection, work: list[Work], done: int, deadline: float) -> Score:
        """Return the next score. Raises _LostError where a built-in scorer does not come to one."""
        current = work[done]
        name, so_far = self.plan.scorers[current.scorer], f"with {done} of {len(work)} scores done"
        limit_s = deadline - time.monotonic()
        patience_s = min(limit_s, BUILT_IN_LIMIT_S) if name in BUILT_IN else limit_s
        try:
            if not connection.poll(max(0.0, patience_s)):
                self.close()
                if patience_s < limit_s:
                    raise _LostError(f"no answer within {BUILT_IN_LIMIT_S:.0f} s")
                raise WaitTimeoutError(
                    f"Scoring took longer than reward.timeout_s = {self.plan.timeout_s:g} s: scorer {name} was at "
                    f"{current.row.where}, {so_far}.",
                    "Raise it with --set reward.timeout_s=..., or make the scorer faster.",
                )
            outcome: Score | RlctlError = connection.recv()
        except (EOFError, ConnectionError) as error:
            ending = self._child.ending()
            if name in BUILT_IN:
                raise _LostError(f"the scoring process died ({ending})", died=True) from error
            memory = f" {SHORT_OF_MEMORY}" if ending == "signal 9" else ""
            raise WorkerError(
                f"Reward function {name} ended its process ({ending}) while scoring {current.row.where}, {so_far}.",
                f"Its output is above, or in the log of the reward worker.{memory}",
            ) from error
        if isinstance(outcome, InputError) and self.plan.on_error != "stop" and name not in BUILT_IN:
            return Score(0.0 if self.plan.on_error == "zero" else None, str(outcome))
        if isinstance(outcome, RlctlError):
            self.close()
            raise outcome
        return outcome

    def close(self) -> None:
        """Ends the child and whatever it has started; may be called twice."""
        self._child.close()


def main() -> None:
    """The child answers to the plan with None, to work with a Score, and where the user errs with an RlctlError."""
    connection, plan, scorers = begun(RewardPlan.build)
    process = os.getpid()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has what it wanted, and is gone
        while True:
            for outcome in outcomes(connection.recv(), plan, scorers):
                if os.getpid() != process:
                    os._exit(0)  # a function has forked, and its copy has come back from it too
                connection.send(outcome)


def outcomes(
    todo: list[Work], plan: RewardPlan, scorers: Sequence[Scorer | BatchScorer]
) -> Iterator[Score | RlctlError]:
    """Yield the outcome of each piece of work; a function of many completions is called once."""
    together: dict[int, Iterator[Score | RlctlError]] = {}
    for work in todo:
        name, scorer = plan.scorers[work.scorer], scorers[work.scorer]
        if isinstance(scorer, BatchScorer):
            if work.scorer not in together:
                together[work.scorer] = _score_together(scorer, [one for one in todo if one.scorer == work.scorer])
            yield next(together[work.scorer])
            continue
        try:
            yield Score(scorer(work.completion, work.row))
        except RlctlError as error:
            yield _naming_completion(error, work)
        except Exception as error:
            # A parser that trips over what a model wrote has found it not to be right. It is counted and logged.
            if name not in BUILT_IN:
                raise
            yield Score(0.0, f"{type(error).__name__}: {error}")


def _score_together(scorer: BatchScorer, work: Sequence[Work]) -> Iterator[Score | RlctlError]:
    """Yield the outcomes of one scorer. Where it fails it is called with each half, to find out on what."""
    try:
        values = scorer.score_all([one.completion for one in work], [one.row for one in work])
    except RlctlError as error:
        if len(work) == 1:
            yield _naming_completion(error, work[0])
            return
        middle = len(work) // 2
        yield from _score_together(scorer, work[:middle])
        yield from _score_together(scorer, work[middle:])
        return
    yield from map(Score, values)


def _naming_completion(error: RlctlError, work: Work) -> RlctlError:
    """Return the error of a scorer with the completion that it was given, cut in the middle where it is long."""
    text, half = repr(work.completion), SHOWN_CHARACTERS // 2
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
    return type(error)(f"{error.message} The completion was {shown}.", error.hint)
