"""Rollouts that are made when they are asked for: the policy waits while engines sample and scorers score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.backends.clients import EngineClient
from rlctl.backends.messages import GroupRequest, GroupResult, Sampling
from rlctl.cluster.workers import WorkerGroup
from rlctl.config.schema import RlctlConfig
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.envs.reward_worker import GroupScores, RewardWorker, ScoreRequest
from rlctl.errors import InputError
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.generator import generate_groups
from rlctl.rollouts.ledger import Ledger
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.source import RolloutBatch, sample_seed
from rlctl.telemetry.phases import Phase, StepTimer

# The scorer has a limit of its own, and its error names the scorer: let it come first, also where it starts again.
MARGIN_S = 240.0


class SynchronousSource:
    """Samples and scores `batch.prompts` groups of `batch.generations` rollouts in each call of `next`."""

    def __init__(
        self,
        config: RlctlConfig,
        prompts: PromptStream,
        engines: EngineClient,
        rewards: WorkerGroup[RewardWorker],
        sync: WeightSync,
        timer: StepTimer,
    ) -> None:
        self._config, self._prompts, self._timer = config, prompts, timer
        self._engines, self._rewards, self._sync = engines, rewards, sync
        self._sampling = Sampling.from_config(
            config.generation, stop=prompts.encoder.stop, stop_token_ids=prompts.encoder.stop_token_ids
        )
        self._ledger = Ledger()

    def next(self, version: int) -> RolloutBatch:
        """Return the groups of the next positions; they are the same for any number of engines."""
        positions = self._ledger.take(self._config.batch.prompts)
        rows = {position: self._prompts.prompt_at(position) for position in positions}
        requests = [self._request(position) for position in positions]
        with self._timer(Phase.GENERATION), self._sync.generating() as freed_bytes:
            results = generate_groups(
                self._engines,
                requests,
                self._sampling,
                self._config.cluster.step_timeout_s,
                lambda error: self._sync.recover(error, version),
            )
        with self._timer(Phase.REWARD):
            groups, failures = _scored(self._rewards, requests, results, rows, self._config.reward.timeout_s)
        self._ledger.finish(positions)
        self._ledger.hand_over(positions)
        return RolloutBatch(tuple(groups), {"scorer_failures": failures, "offloaded_bytes": freed_bytes})

    def _request(self, position: int) -> GroupRequest:
        seeds = (
            sample_seed(self._config.run.seed, position, sample) for sample in range(self._config.batch.generations)
        )
        return GroupRequest(position, tuple(self._prompts.tokens(self._prompts.prompt_at(position))), tuple(seeds))

    def state(self) -> dict[str, Any]:
        """Return the ledger. Between two calls of `next` nothing is under way or finished."""
        return self._ledger.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the trained positions of `state`; positions that were under way are begun again.

        Raises InputError where it is not the state of synchronous rollouts.
        """
        try:
            self._ledger = Ledger.restored(state)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"The checkpoint's ledger of prompts cannot be read: {error}.",
                "Resume from a checkpoint before it, or start a new run.",
            ) from error
        if self._ledger.finished:
            raise InputError(
                "The checkpoint holds finished rollouts that were not trained on, and synchronous rollouts cannot take "
                "them over.",
                "Resume with the settings that the run was started with.",
            )


def _scored(
    workers: WorkerGroup[RewardWorker],
    requests: Sequence[GroupRequest],
    results: Sequence[GroupResult],
    prompts: Mapping[int, PromptRow],
    timeout_s: float,
) -> tuple[list[RolloutGroup], int]:
    """Return the groups of `results` with their rewards, and the number of completions on which a scorer failed.

    `requests` and `results` are in the same order. A group's number is its position, and `prompts` has the row of each.
    """
    asked = [ScoreRequest(prompts[result.group], result.texts) for result in results]
    (answers,) = workers.within(timeout_s + MARGIN_S).call(RewardWorker.score, asked)
    groups = [
        RolloutGroup(
            result.group, prompts[result.group], _rollouts(request, result, answer), result.columns, result.texts
        )
        for request, result, answer in zip(requests, results, answers, strict=True)
    ]
    return groups, sum(answer.failures for answer in answers)


def _rollouts(request: GroupRequest, result: GroupResult, scores: GroupScores) -> tuple[Rollout, ...]:
    return tuple(
        Rollout(
            position=result.group,
            sample=sample,
            seed=seed,
            first_version=result.first_versions[sample],
            last_version=result.last_versions[sample],
            stop_reason=result.finish_reasons[sample],
            prompt_tokens=result.prompt_tokens,
            tokens=result.tokens[sample],
            response_tokens=result.response_tokens[sample],
            reward=scores.rewards[sample],
            terms={name: values[sample] for name, values in scores.terms.items()},
            accuracy=None if scores.accuracies is None else scores.accuracies[sample],
        )
        for sample, seed in enumerate(request.seeds)
    )
