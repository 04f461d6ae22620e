"""Generation as the loop sees it: the prompts of a step dealt to the engines, one seed a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlctl.backends.vllm.messages import GroupRequest, GroupResult, Sampling, rollouts_of
from rlctl.cluster.workers import WorkerGroup
from rlctl.data.rollouts import Rollout
from rlctl.rl.batch import sample_seed

# The driver waits longer than the engine's own limit, so that the engine's error, which knows more, comes first.
MARGIN_S = 60.0


def generate_groups(
    engines: WorkerGroup, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float
) -> list[GroupResult]:
    """The results of all requests in the order of their groups; the requests are dealt to the engines in turn."""
    count = len(engines)
    shares = [(list(requests[index::count]), sampling, timeout_s) for index in range(count)]
    answers = engines.call_each("generate", shares, timeout_s=timeout_s + MARGIN_S)
    return sorted((result for answer in answers for result in answer), key=lambda result: result.group)


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
    ) -> None:
        """`prompt_tokens(step)` gives the token ids of each prompt of a step."""
        self._engines, self._prompt_tokens, self._sampling = engines, prompt_tokens, sampling
        self._generations, self._seed, self._timeout_s = generations, seed, timeout_s

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
        results = generate_groups(self._engines, requests, self._sampling, self._timeout_s)
        return [rollout for result in results for rollout in rollouts_of(result, self._generations)]
