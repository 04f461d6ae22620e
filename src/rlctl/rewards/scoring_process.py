"""Scoring processes: time limits, restarts, and errors with scorer and row.

Completions come from the model, so scorers can hang, crash or exhaust memory, and user functions can do anything.
Supervisors (`isolation/supervisor.py`) end everything they start. User functions have one process; built-in scorers
another, and more under load, so slow expressions delay no others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import InputError, RlctlError, WaitTimeoutError, WorkerError
from rlctl.isolation.child_process import ChildProcess, begun
from rlctl.isolation.user_function import NoListError, UserBatchScorer
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rewards.scorers import BUILT_IN, CALL_SHARE, BatchScorer, Scorer

QUICK_S, SLOW_S = 0.5, 5.0
"""CPU time of a built-in scorer for one completion: at first, and once all others have their scores."""
BUILT_IN_LIMIT_S = 10.0
"""Time limit of a built-in scorer's process: a parser stuck on `9**9**9` cannot be interrupted. The completion counts
as wrong."""
MOST_PROCESSES = 8
WORK_A_PROCESS, WORK_A_MESSAGE = 64, 16
"""Completions for which a further process is started, and those that a process is sent at once."""
LATE = "not scored within reward.timeout_s"
"""Start of the message for a completion without time left in its step."""
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


@dataclass(frozen=True)
class Slow:
    """The answer of a built-in scorer that has used up its time."""


Outcome = Score | Slow | RlctlError


class _SlowError(BaseException):  # parsers catch each Exception
    """A built-in scorer has used up its time."""


class _EndedError(Exception):
    """The process with the scorers has ended."""


class Lane:
    """A child process with some of a plan's scorers. It is started again after it was ended."""

    def __init__(self, plan: RewardPlan, scorers: Sequence[int]) -> None:
        """`scorers` are the numbers of the plan's scorers that it has."""
        self._plan = replace(plan, terms=tuple(plan.terms[number] for number in scorers))
        self._numbers = {number: place for place, number in enumerate(scorers)}
        self._child = ChildProcess(__name__, f"the scorers ({', '.join(self._plan.scorers)})")
        self.starting_s = 0.0
        """Seconds of starts, which do not count for a step."""
        self.together: frozenset[int] = frozenset()
        """Scorers that take all completions in one call."""
        self.compares = False
        """Whether one of them may compare the completions."""

    def start(self) -> Connection:
        """Return the connection to the child, started if needed. Raises errors of building its scorers."""
        if self._child.connection is not None:
            return self._child.connection
        begun_at = time.monotonic()
        connection = self._child.start(self._plan, self._plan.variables)
        places, self.compares = connection.recv()
        self.together = frozenset(number for number, place in self._numbers.items() if place in places)
        self.starting_s += time.monotonic() - begun_at
        return connection

    def ask(self, work: Sequence[Work], limit_s: float | None) -> None:
        """Submit work with a CPU time limit each; `next` returns outcomes in order."""
        asked = [replace(one, scorer=self._numbers[one.scorer]) for one in work]
        with contextlib.suppress(ConnectionError):  # a dead child shows at the first receive
            self.start().send((asked, limit_s))

    def next(self, patience_s: float) -> Outcome:
        """Return the next outcome. Raises TimeoutError (and ends the child), or _EndedError."""
        connection = self.start()
        try:
            if not connection.poll(max(0.0, patience_s)):
                self.close()
                raise TimeoutError
            return connection.recv()
        except (EOFError, ConnectionError) as error:
            raise _EndedError(self._child.ending()) from error

    def close(self) -> None:
        """End the child and everything it started; may be repeated."""
        self._child.close()


class ScoringProcess:
    """Scores in child processes, which are started again after a scorer hung or crashed on a completion."""

    def __init__(self, plan: RewardPlan) -> None:
        self.plan = plan
        built_in, own = ([n for n, name in enumerate(plan.scorers) if (name in BUILT_IN) == so] for so in (True, False))
        most = min(MOST_PROCESSES, len(os.sched_getaffinity(0))) if built_in else 0
        self._built_in = [Lane(plan, built_in) for _ in range(most)]
        self._own = Lane(plan, own) if own else None
        self._lock = threading.Lock()

    @property
    def compares(self) -> bool:
        """Whether a function takes `completions`; known once it has started."""
        return self._own is not None and self._own.compares

    @property
    def lanes(self) -> list[Lane]:
        return [*self._built_in, *([self._own] if self._own else [])]

    def start(self) -> None:
        """Start one process of each kind and wait until they have their scorers. Raises what building them raised."""
        at_once([lane.start for lane in (*self._built_in[:1], *([self._own] if self._own else []))])

    def score(self, work: list[Work]) -> list[Score]:
        """Return one Score per piece of work, in order, within the time limit.

        A built-in scorer that hangs, or dies twice, scores 0 with the failure noted; one death may come from outside.
        User function failures follow `on_error`: stop raises InputError or WaitTimeoutError with scorer and row. Raises
        WaitTimeoutError for a batch function, WorkerError if a function kills the process.
        """
        scores: dict[int, Score] = {}
        of = {so: [n for n, one in enumerate(work) if (self._name(one) in BUILT_IN) == so] for so in (True, False)}
        tasks = []
        if of[True]:
            tasks.append(partial(self._score_built_in, work, of[True], scores))
        if of[False]:
            tasks.append(partial(self._score_own, work, of[False], scores))
        at_once(tasks)
        return [scores[number] for number in range(len(work))]

    def _name(self, work: Work) -> str:
        return self.plan.scorers[work.scorer]

    # Built-in scorers

    def _score_built_in(self, work: list[Work], numbers: list[int], scores: dict[int, Score]) -> None:
        """Score with several processes: all completions for a short time each, and then the slow ones for longer."""
        deadline = time.monotonic() + self.plan.timeout_s
        for limit_s in (QUICK_S, SLOW_S):
            todo = deque(number for number in numbers if number not in scores)
            share = WORK_A_PROCESS if limit_s == QUICK_S else 1
            lanes = self._built_in[: -(-len(todo) // share)]
            at_once([partial(self._empty, lane, todo, work, scores, limit_s, deadline) for lane in lanes])
        late = [number for number in numbers if number not in scores]
        if late and self.plan.on_error == "stop":
            raise self._out_of_time(work[late[0]], len(numbers) - len(late), len(numbers))
        for number in late:
            scores[number] = Score(0.0, f"{LATE} = {self.plan.timeout_s:g} s")

    def _empty(
        self, lane: Lane, todo: deque[int], work: list[Work], scores: dict[int, Score], limit_s: float, deadline: float
    ) -> None:
        """Score items of `todo` with one process, like others, until the deadline."""
        before_s, died_at = lane.starting_s, -1
        most = WORK_A_MESSAGE if limit_s == QUICK_S else 1
        while True:
            with self._lock:
                mine = deque(todo.popleft() for _ in range(min(most, len(todo))))
            if not mine:
                return
            asked = False
            while mine:
                if not asked:
                    lane.ask([work[number] for number in mine], limit_s)
                    asked = True
                left_s = deadline + lane.starting_s - before_s - time.monotonic()
                if left_s <= 0:
                    lane.close()
                    return
                try:
                    outcome = lane.next(min(left_s, BUILT_IN_LIMIT_S))
                except TimeoutError:
                    if left_s < BUILT_IN_LIMIT_S:
                        return
                    outcome, asked = Score(0.0, f"no answer within {BUILT_IN_LIMIT_S:.0f} s"), False
                except _EndedError as ended:
                    asked = False
                    if died_at != mine[0]:
                        died_at = mine[0]
                        continue
                    outcome = Score(0.0, f"the scoring process died ({ended})")
                number = mine.popleft()
                if isinstance(outcome, RlctlError):
                    lane.close()
                    raise outcome
                if isinstance(outcome, Score):
                    scores[number] = outcome
                elif limit_s == SLOW_S:
                    scores[number] = Score(0.0, f"no answer within {SLOW_S:.0f} s")

    # The user's functions

    def _score_own(self, work: list[Work], numbers: list[int], scores: dict[int, Score]) -> None:
        assert self._own is not None  # there is work for it
        lane, stops = self._own, self.plan.on_error == "stop"
        lane.start()
        before_s, deadline = lane.starting_s, time.monotonic() + self.plan.timeout_s
        # Functions of many completions come first: where another one hangs, they are not called again.
        todo, asked = deque(sorted(numbers, key=lambda number: work[number].scorer not in lane.together)), False
        while todo:
            number, one, done = todo[0], work[todo[0]], len(numbers) - len(todo)
            left_s = deadline + lane.starting_s - before_s - time.monotonic()
            whole = stops or one.scorer in lane.together
            if left_s <= 0 and not whole:
                lane.close()
                scores.update({late: self._failed(self._out_of_time(work[late], done, len(numbers))) for late in todo})
                return
            if not asked:
                lane.ask([work[number] for number in todo], None)
                asked = True
            try:
                outcome = lane.next(left_s if whole else CALL_SHARE * left_s)
            except TimeoutError:
                late = self._out_of_time(one, done, len(numbers))
                if whole:
                    raise late from None
                outcome, asked = self._failed(late), False
            except _EndedError as ended:
                memory = f" {SHORT_OF_MEMORY}" if str(ended) == "signal 9" else ""
                raise WorkerError(
                    f"Reward function {self._name(one)} ended its process ({ended}) while scoring {one.row.where}, "
                    f"with {done} of {len(numbers)} scores done.",
                    f"Its output is above, or in the log of the reward worker.{memory}",
                ) from ended
            if isinstance(outcome, InputError) and not stops:
                outcome = self._failed(outcome)
            if isinstance(outcome, RlctlError):
                lane.close()
                raise outcome
            assert isinstance(outcome, Score)  # only built-in scorers have a limit of CPU time
            scores[number] = outcome
            todo.popleft()

    def _failed(self, error: RlctlError) -> Score:
        return Score(0.0 if self.plan.on_error == "zero" else None, str(error))

    def _out_of_time(self, work: Work, done: int, of: int) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"Scoring took longer than reward.timeout_s = {self.plan.timeout_s:g} s: scorer {self._name(work)} was at "
            f"{work.row.where}, with {done} of {of} scores done.",
            "Raise it with --set reward.timeout_s=..., or make the scorer faster.",
        )

    def close(self) -> None:
        """End the children and everything they started; may be repeated."""
        for lane in self.lanes:
            lane.close()


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make all calls concurrently. Raises the first failure after all have ended."""
    if len(calls) == 1:
        calls[0]()
    elif calls:
        with ThreadPoolExecutor(len(calls)) as threads:
            pending = [threads.submit(call) for call in calls]
        for one in pending:
            one.result()


def main() -> None:
    """Answer the plan with None, the batch scorers, and whether one compares completions; work with Outcomes; and user
    errors with RlctlErrors."""
    connection, plan, scorers = begun(RewardPlan.build)
    together = [number for number, scorer in enumerate(scorers) if isinstance(scorer, BatchScorer)]
    connection.send((together, any(isinstance(scorer, UserBatchScorer) for scorer in scorers)))
    process = os.getpid()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has what it wanted, and is gone
        while True:
            todo, limit_s = connection.recv()
            for outcome in outcomes(todo, plan, scorers, limit_s):
                if os.getpid() != process:
                    os._exit(0)  # a function has forked, and its copy has come back from it too
                connection.send(outcome)


def outcomes(
    todo: list[Work], plan: RewardPlan, scorers: Sequence[Scorer | BatchScorer], limit_s: float | None = None
) -> Iterator[Outcome]:
    """Yield each outcome; a batch function is called once, and a built-in scorer has `limit_s` of CPU time per
    piece."""
    together: dict[int, Iterator[Score | RlctlError]] = {}
    for work in todo:
        name, scorer = plan.scorers[work.scorer], scorers[work.scorer]
        if isinstance(scorer, BatchScorer):
            if work.scorer not in together:
                together[work.scorer] = _score_together(scorer, [one for one in todo if one.scorer == work.scorer])
            yield next(together[work.scorer])
            continue
        try:
            if limit_s is None:
                yield Score(scorer(work.completion, work.row))
            else:
                yield Score(_within(limit_s, scorer, work))
        except _SlowError:
            yield Slow()
        except RlctlError as error:
            yield _naming_completion(error, work)
        except Exception as error:
            # A parser that trips over what a model wrote has found it not to be right. It is counted and logged.
            if name not in BUILT_IN:
                raise
            yield Score(0.0, f"{type(error).__name__}: {error}")


def _within(limit_s: float, scorer: Scorer, work: Work) -> float:
    """Return the score. Raises _SlowError after that much CPU time."""

    def stop(number: int, frame: object) -> None:
        raise _SlowError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return scorer(work.completion, work.row)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _score_together(scorer: BatchScorer, work: Sequence[Work]) -> Iterator[Score | RlctlError]:
    try:
        values = scorer.score_all([one.completion for one in work], [one.row for one in work])
    except NoListError as error:  # no completion's fault
        yield from (error for _ in work)
        return
    except RlctlError as error:
        if len(work) == 1:
            yield _naming_completion(error, work[0])
            return
        middle = len(work) // 2
        yield from _score_together(scorer, work[:middle])
        yield from _score_together(scorer, work[middle:])
        return
    for value, one in zip(values, work, strict=True):
        yield _naming_completion(value, one) if isinstance(value, RlctlError) else Score(value)


def _naming_completion(error: RlctlError, work: Work) -> RlctlError:
    text, half = repr(work.completion), SHOWN_CHARACTERS // 2
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
    return type(error)(f"{error.message} The completion was {shown}.", error.hint)
