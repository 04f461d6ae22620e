"""The parent's side of the process that scores: time limits, restarts, and errors that name scorer and row."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from rlctl.envs.plan import RewardPlan
from rlctl.envs.scorers import is_built_in
from rlctl.envs.scoring_child import Batch, Score, Work
from rlctl.errors import RlctlError, WaitTimeoutError, WorkerError

START_TIMEOUT_S = 180.0
"""To import reasoning-gym or a user's file; seconds from a local disk."""
BUILT_IN_LIMIT_S = 10.0
"""For one completion. Longer means a parser lost in what the model wrote (`9**9**9`): it counts as wrong."""
GRACE_S = 30.0
PACKAGES = str(Path(__file__).parents[2])
# Not `-m`: pickle would look the child's classes up in __main__. The path is for an rlctl found by a relative sys.path.
CHILD = "import sys; sys.path.append(sys.argv[2]); from rlctl.envs.scoring_child import main; main()"


class ScoringProcess:
    """Scores in a child process, which is started again after a scorer hung or crashed on a completion."""

    def __init__(self, plan: RewardPlan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> ScoringProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the child and waits until it has its scorers. Raises what building them raised."""
        ours, theirs = Pipe()
        command = [sys.executable, "-c", CHILD, str(theirs.fileno()), PACKAGES]
        # A session of its own: Ctrl-C in the terminal is for the run, which ends this process itself.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._connection = ours
        try:
            ours.send(self._plan)
            if not ours.poll(START_TIMEOUT_S):
                raise WaitTimeoutError(
                    f"The scorers ({', '.join(self._plan.scorers)}) were not ready within {START_TIMEOUT_S:.0f} s."
                )
            answer = ours.recv()
        except (EOFError, ConnectionError) as error:
            raise WorkerError(
                f"The process of the scorers ({', '.join(self._plan.scorers)}) died at its start ({self._ending()}).",
                "Its output is above, or in the log of the reward worker.",
            ) from error
        except BaseException:
            self.close()
            raise
        if isinstance(answer, RlctlError):
            self.close()
            raise answer

    def score(self, work: list[Work]) -> list[Score]:
        """One Score for each piece of work, in order, within the plan's time limit.

        A built-in scorer that hangs or dies on a completion gives it 0, with the failure said. Raises WaitTimeoutError
        (names scorer and row) at the time limit, InputError where a user's function errs, WorkerError where it takes
        the process down.
        """
        if self._connection is None:
            self.start()  # has a limit of its own
        deadline = time.monotonic() + self._plan.timeout_s
        scores: list[Score] = []
        while len(scores) < len(work):
            if self._connection is None:
                self.start()
            with contextlib.suppress(ConnectionError):  # a dead child shows at the first receive
                self._connection.send(Batch(work[len(scores) :], deadline - time.monotonic() + GRACE_S))
            failure = self._receive(work, scores, deadline)
            if failure is not None:
                scores.append(Score(0.0, failure))
        return scores

    def _receive(self, work: list[Work], scores: list[Score], deadline: float) -> str | None:
        """Appends what arrives to `scores`; ends when all has, or with what befell the next piece of work."""
        while len(scores) < len(work):
            current = work[len(scores)]
            name = self._plan.scorers[current.scorer]
            limit_s = deadline - time.monotonic()
            patience_s = min(limit_s, BUILT_IN_LIMIT_S) if is_built_in(name) else limit_s
            try:
                if not self._connection.poll(max(0.0, patience_s)):
                    self.close()
                    if patience_s < limit_s:
                        return f"no answer within {BUILT_IN_LIMIT_S:.0f} s"
                    raise self._out_of_time(name, current, len(scores), len(work))
                answer = self._connection.recv()
            except (EOFError, ConnectionError) as error:
                ending = self._ending()
                if is_built_in(name):
                    return f"the scoring process died ({ending})"
                raise WorkerError(
                    f"Reward function {name} ended its process ({ending}) while scoring {current.row.where}.",
                    "Its output is in the log of the reward worker.",
                ) from error
            if isinstance(answer, RlctlError):
                self.close()
                raise answer
            scores.append(answer)
        return None

    def _out_of_time(self, name: str, current: Work, done: int, total: int) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"Scoring took longer than reward.timeout_s = {self._plan.timeout_s:g} s: scorer {name} was at "
            f"{current.row.where}, with {done} of {total} scores done.",
            "Raise it with --set reward.timeout_s=..., or make the scorer faster.",
        )

    def _ending(self) -> str:
        """How the child ended, for a message; cleans up after it."""
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        code = process.returncode
        self.close()
        return "still running" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Ends the child; may be called twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._process = None
