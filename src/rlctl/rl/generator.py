"""Generation as the loop sees it: the prompts of a step dealt to the engines, one seed a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlctl.backends.vllm.messages import (
    VALUES_A_GROUP,
    GroupRequest,
    GroupResult,
    Sampling,
    joined,
    rollouts_of,
)
from rlctl.cluster.workers import WorkerGroup
from rlctl.data.rollouts import Rollout
from rlctl.errors import RlctlError, WaitTimeoutError, WorkerError
from rlctl.rl.batch import sample_seed

# The driver waits longer than the engine's own limit, so that the engine's error, which knows more, comes first.
MARGIN_S = 60.0


def generate_groups(
    engines: WorkerGroup,
    requests: Sequence[GroupRequest],
    sampling: Sampling,
    timeout_s: float,
    recover: Callable[[RlctlError], object] | None = None,
) -> list[GroupResult]:
    """The results of all requests in the order of their groups, with handles of columns and texts; the requests are
    dealt to the engines in turn.

    `recover(error)` brings the engines back after the failure of one, or raises; what that one had is asked for again.
    """
    results: list[GroupResult] = []
    left = list(requests)
    while left:
        answers, left, error = _ask(engines, left, sampling, timeout_s)
        results += answers
        if error is not None:
            if recover is None:
                raise error
            recover(error)
    return sorted(results, key=lambda result: result.group)


def _ask(
    engines: WorkerGroup, requests: list[GroupRequest], sampling: Sampling, timeout_s: float
) -> tuple[list[GroupResult], list[GroupRequest], RlctlError | None]:
    """(what came back, what did not, and why) of requests dealt to all engines."""
    count = len(engines)
    shares = [requests[index::count] for index in range(count)]
    asked, handles = engines.submit_apart(
        "generate_apart",
        [(share, sampling, timeout_s) for share in shares],
        [VALUES_A_GROUP * len(share) for share in shares],
    )
    outcomes = engines.outcomes("generate", asked, timeout_s + MARGIN_S)
    answers: list[GroupResult] = []
    lost: list[GroupRequest] = []
    error: RlctlError | None = None
    for share, outcome, values in zip(shares, outcomes, handles, strict=True):
        if isinstance(outcome, WorkerError | WaitTimeoutError):  # it failed, is gone, or does not answer
            lost, error = lost + share, error or outcome
        else:
            answers += joined(outcome, values)
    return answers, lost, error


class EngineGenerator:
    """Samples `generations` rollouts of each prompt of a step on a group of engines."""

    def __init__(
        self,
        engines: WorkerGroup,
        prompt_tokens: Callable[[int], Sequence[Sequence[int]]],
        sampling: Sampling,
        *,
        generations: int,
        seed: int,
        timeout_s: float,
        recover: Callable[[RlctlError, int], object],
    ) -> None:
        """`prompt_tokens(step)` gives the token ids of each prompt of a step.

        `recover(error, step)` brings the engines back after the failure of one, to the weights of `step`, or raises.
        """
        self._engines, self._prompt_tokens, self._sampling = engines, prompt_tokens, sampling
        self._generations, self._seed, self._timeout_s = generations, seed, timeout_s
        self._recover = recover

    def generate(self, step: int) -> list[Rollout]:
        """The rollouts of `step`, ordered by group and sample; the same for any number of engines."""
        requests = [
            GroupRequest(
                group,
                tuple(tokens),
                tuple(sample_seed(self._seed, step, group, sample) for sample in range(self._generations)),
            )
            for group, tokens in enumerate(self._prompt_tokens(step))
        ]
        results = generate_groups(
            self._engines, requests, self._sampling, self._timeout_s, lambda error: self._recover(error, step)
        )
        return [rollout for result in results for rollout in rollouts_of(result, self._generations)]
