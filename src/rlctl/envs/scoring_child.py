"""The process that scores: reads work from a pipe, answers score by score. Started by `scoring_process`.

Completions are scored here because they are the model's: a scorer that parses them can hang, crash or take all memory,
and a user's function can do anything.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rlctl.data.rows import PromptRow
from rlctl.envs.plan import RewardPlan
from rlctl.envs.scorers import Scorer, is_built_in
from rlctl.errors import RlctlError


@dataclass(frozen=True)
class Work:
    """One completion for one scorer."""

    scorer: int
    completion: str
    row: PromptRow


@dataclass(frozen=True)
class Score:
    """What a scorer said; with `failure`, why a built-in one could not (and the value is 0)."""

    value: float
    failure: str | None = None


@dataclass(frozen=True)
class Batch:
    """Work for the child, to be answered with one Score each, in order."""

    work: list[Work]
    limit_s: float
    """The child ends itself after this long, should its parent be gone."""


def main() -> None:
    """Answers to the plan with None and to each piece of work with a Score; with an RlctlError where the user errs."""
    connection = Connection(int(sys.argv[1]))
    os.dup2(2, 1)  # what a user's function prints belongs in the log, not on a stdout that someone parses
    plan: RewardPlan = connection.recv()
    try:
        scorers = plan.build()
    except RlctlError as error:
        connection.send(error)
        return
    connection.send(None)
    while True:
        try:
            batch: Batch = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        faulthandler.dump_traceback_later(batch.limit_s, exit=True)
        for work in batch.work:
            answer = _score(plan.scorers[work.scorer], scorers[work.scorer], work)
            try:
                connection.send(answer)
            except ConnectionError:
                return  # the parent raised the first error that it was told, and is gone
        faulthandler.cancel_dump_traceback_later()


def _score(name: str, scorer: Scorer, work: Work) -> Score | RlctlError:
    try:
        return Score(scorer(work.completion, work.row))
    except RlctlError as error:
        return error
    except Exception as error:
        # A parser that trips over what a model wrote has found it not to be right. It is counted and logged.
        if not is_built_in(name):
            raise
        return Score(0.0, f"{type(error).__name__}: {error}")
