"""Scoring in child processes, with time limits, restarts, and errors that name scorer and row.

Completions come from the model, so scorers can hang, crash or exhaust memory, and user functions can do anything. User
functions have one process. Built-in scorers have another, and more under load, so a slow expression delays no others.
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
from rlctl.processes.child import EndedError, Server
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rewards.scorers import BUILT_IN, CALL_SHARE, BatchScorer, Scorer
from rlctl.rewards.user_function import NoListError, UserBatchScorer

QUICK_S, SLOW_S = 0.5, 5.0
"""CPU seconds of a built-in scorer for one completion: in the first pass, and once all others have scores."""
BUILT_IN_LIMIT_S = 10.0
"""Time limit of a built-in scorer's process: a parser stuck on `9**9**9` cannot be interrupted. The completion counts
as wrong."""
MOST_PROCESSES = 8
WORK_A_PROCESS, WORK_A_MESSAGE = 64, 16
"""Completions for each further process, and completions in one message to a process."""
LATE = "not scored within reward.timeout_s"
"""Start of the message for a completion without time left in its step."""
SHOWN_CHARACTERS = 300
"""Characters of a completion in an error message."""
SHORT_OF_MEMORY = "If it does not send itself signal 9 (SIGKILL), the kernel may have, for lack of memory (`dmesg`)."


@dataclass(frozen=True)
class Work:
    """One completion for one scorer."""

    scorer: int
    completion: str
    row: PromptRow


@dataclass(frozen=True)
class Score:
    """The answer of a scorer. None: it does not apply, or it failed and the rollout is dropped."""

    value: float | None
    failure: str | None = None


@dataclass(frozen=True)
class Slow:
    """The answer of a built-in scorer that used up its time."""


Outcome = Score | Slow | RlctlError


class _SlowError(BaseException):  # parsers catch each Exception
    """A built-in scorer used up its time."""


class Lane:
    """A child process with some of a plan's scorers; it starts again after its end."""

    def __init__(self, plan: RewardPlan, scorers: Sequence[int]) -> None:
        """`scorers`: numbers of the plan's scorers."""
        self._plan = replace(plan, terms=tuple(plan.terms[number] for number in scorers))
        self._numbers = {number: place for place, number in enumerate(scorers)}
        self.server = Server(serve, f"the scorers ({', '.join(self._plan.scorers)})")
        self.starting_s = 0.0
        """Seconds spent on starts, which do not count towards a step's limit."""
        self.together: frozenset[int] = frozenset()
        """Scorers that take all completions in one call."""
        self.compares = False
        """Whether a scorer may compare completions."""

    def start(self) -> None:
        """Start the child unless it runs. Raises errors of building its scorers."""
        if self.server.connection is None:
            begun_at = time.monotonic()
            batched, self.compares = self.server.start(self._plan, self._plan.variables)
            self.together = frozenset(number for number, place in self._numbers.items() if place in batched)
            self.starting_s += time.monotonic() - begun_at

    def ask(self, work: Sequence[Work], limit_s: float | None) -> None:
        """Submit work with a CPU time limit each; `next` returns outcomes in order."""
        self.start()
        assert self.server.connection is not None
        numbered = [replace(piece, scorer=self._numbers[piece.scorer]) for piece in work]
        with contextlib.suppress(ConnectionError):  # a dead child shows at the first receive
            self.server.connection.send((numbered, limit_s))

    def next(self, patience_s: float) -> Outcome:
        """Return the next outcome. Raises TimeoutError (and ends the child), or EndedError."""
        self.start()
        try:
            return self.server.receive(patience_s)
        except TimeoutError:
            self.server.close()
            raise


class ScoringProcess:
    """Scores completions in lanes; a lane starts again after a scorer hung or crashed."""

    def __init__(self, plan: RewardPlan) -> None:
        self.plan = plan
        built_in = [number for number, name in enumerate(plan.scorers) if name in BUILT_IN]
        functions = [number for number, name in enumerate(plan.scorers) if name not in BUILT_IN]
        processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0))) if built_in else 0
        self._built_in = [Lane(plan, built_in) for _ in range(processes)]
        self._functions = Lane(plan, functions) if functions else None
        self._lock = threading.Lock()

    @property
    def compares(self) -> bool:
        """Whether a function takes `completions`; False before the start."""
        return self._functions is not None and self._functions.compares

    @property
    def lanes(self) -> list[Lane]:
        return [*self._built_in, *([self._functions] if self._functions else [])]

    def start(self) -> None:
        """Start one process of each kind and wait for it. Raises errors of building its scorers."""
        lanes = [*self._built_in[:1], *([self._functions] if self._functions else [])]
        at_once([lane.start for lane in lanes])

    def score(self, work: list[Work]) -> list[Score]:
        """Return one Score per piece of work, in order, within the time limit.

        A built-in scorer that hangs, or dies twice, scores 0 with the failure noted; one death may come from outside.
        User function failures follow `on_error`: stop raises InputError or WaitTimeoutError with scorer and row. Raises
        WaitTimeoutError for a batch function, WorkerError if a function kills the process.
        """
        scores: dict[int, Score] = {}
        built_in = [number for number, piece in enumerate(work) if self._name(piece) in BUILT_IN]
        functions = [number for number, piece in enumerate(work) if self._name(piece) not in BUILT_IN]
        halves = ((self._score_built_in, built_in), (self._score_functions, functions))
        at_once([partial(score, work, numbers, scores) for score, numbers in halves if numbers])
        return [scores[number] for number in range(len(work))]

    def _name(self, work: Work) -> str:
        return self.plan.scorers[work.scorer]

    # Built-in scorers

    def _score_built_in(self, work: list[Work], numbers: list[int], scores: dict[int, Score]) -> None:
        """Score in several processes: all completions with a short limit, then the slow ones with a longer limit."""
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
        """Score items of `todo`, which processes share, in one process until the deadline."""
        before_s, died_at = lane.starting_s, -1
        batch = WORK_A_MESSAGE if limit_s == QUICK_S else 1
        while True:
            with self._lock:
                mine = deque(todo.popleft() for _ in range(min(batch, len(todo))))
            if not mine:
                return
            waiting = False
            while mine:
                if not waiting:
                    lane.ask([work[number] for number in mine], limit_s)
                    waiting = True
                left_s = deadline + lane.starting_s - before_s - time.monotonic()
                if left_s <= 0:
                    lane.server.close()
                    return
                try:
                    outcome = lane.next(min(left_s, BUILT_IN_LIMIT_S))
                except TimeoutError:
                    if left_s < BUILT_IN_LIMIT_S:
                        return
                    outcome, waiting = Score(0.0, f"no answer within {BUILT_IN_LIMIT_S:.0f} s"), False
                except EndedError as ended:
                    waiting = False
                    if died_at != mine[0]:
                        died_at = mine[0]
                        continue
                    outcome = Score(0.0, f"the scoring process died ({ended})")
                number = mine.popleft()
                if isinstance(outcome, RlctlError):
                    lane.server.close()
                    raise outcome
                if isinstance(outcome, Score):
                    scores[number] = outcome
                elif limit_s == SLOW_S:
                    scores[number] = Score(0.0, f"no answer within {SLOW_S:.0f} s")

    # User functions

    def _score_functions(self, work: list[Work], numbers: list[int], scores: dict[int, Score]) -> None:
        assert self._functions is not None  # there is work for it
        lane, stops = self._functions, self.plan.on_error == "stop"
        lane.start()
        before_s, deadline = lane.starting_s, time.monotonic() + self.plan.timeout_s
        # Batch functions come first: if a later function hangs and its process restarts, they are not called again.
        todo, waiting = deque(sorted(numbers, key=lambda number: work[number].scorer not in lane.together)), False
        while todo:
            number, piece, done = todo[0], work[todo[0]], len(numbers) - len(todo)
            left_s = deadline + lane.starting_s - before_s - time.monotonic()
            whole = stops or piece.scorer in lane.together
            if left_s <= 0 and not whole:
                lane.server.close()
                scores.update({late: self._failed(self._out_of_time(work[late], done, len(numbers))) for late in todo})
                return
            if not waiting:
                lane.ask([work[number] for number in todo], None)
                waiting = True
            try:
                outcome = lane.next(left_s if whole else CALL_SHARE * left_s)
            except TimeoutError:
                late = self._out_of_time(piece, done, len(numbers))
                if whole:
                    raise late from None
                outcome, waiting = self._failed(late), False
            except EndedError as ended:
                memory = f" {SHORT_OF_MEMORY}" if str(ended) == "signal 9" else ""
                raise WorkerError(
                    f"Reward function {self._name(piece)} ended its process ({ended}) while scoring {piece.row.where}, "
                    f"with {done} of {len(numbers)} scores done.",
                    f"Its output is above, or in the log of the reward worker.{memory}",
                ) from ended
            if isinstance(outcome, InputError) and not stops:
                outcome = self._failed(outcome)
            if isinstance(outcome, RlctlError):
                lane.server.close()
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
            lane.server.close()


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make all calls concurrently. Raises the first failure after all have ended."""
    if len(calls) == 1:
        calls[0]()
    elif calls:
        with ThreadPoolExecutor(len(calls)) as threads:
            pending = [threads.submit(call) for call in calls]
        for call in pending:
            call.result()


def serve(connection: Connection, plan: RewardPlan) -> None:
    """Send the numbers of the batch scorers and whether one compares completions; then answer work with Outcomes."""
    scorers = plan.build()
    batched = [number for number, scorer in enumerate(scorers) if isinstance(scorer, BatchScorer)]
    connection.send((batched, any(isinstance(scorer, UserBatchScorer) for scorer in scorers)))
    process = os.getpid()
    while True:
        work, limit_s = connection.recv()
        for outcome in outcomes(work, plan, scorers, limit_s):
            if os.getpid() != process:
                os._exit(0)  # a function forked, and this is its copy
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
                together[work.scorer] = _score_together(
                    scorer, [other for other in todo if other.scorer == work.scorer]
                )
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
            # A parser that fails on a completion judges it wrong. The failure is counted and logged.
            if name not in BUILT_IN:
                raise
            yield Score(0.0, f"{type(error).__name__}: {error}")


def _within(limit_s: float, scorer: Scorer, work: Work) -> float:
    """Return the score. Raises _SlowError after `limit_s` of CPU time."""

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
        values = scorer.score_all([piece.completion for piece in work], [piece.row for piece in work])
    except NoListError as error:  # no completion is the cause
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
    for value, piece in zip(values, work, strict=True):
        yield _naming_completion(value, piece) if isinstance(value, RlctlError) else Score(value)


def _naming_completion(error: RlctlError, work: Work) -> RlctlError:
    text, half = repr(work.completion), SHOWN_CHARACTERS // 2
    excerpt = text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
    return type(error)(f"{error.message} The completion was {excerpt}.", error.hint)
