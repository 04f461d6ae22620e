"""Requests for positions, scored groups from the engines' results, and groups on disk."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.backends.batching.batch import TrainBatch, WeightedSequence
from rlctl.backends.clients import LogprobSource
from rlctl.backends.messages import GroupRequest, SampledGroup, Sampling
from rlctl.cluster.ray_session import fetch, put
from rlctl.cluster.workers import WorkerGroup
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import (
    REWARD_PART,
    EpisodeFacts,
    EpisodeFailure,
    MediaPart,
    Rollout,
    RolloutColumns,
    RolloutGroup,
    Turn,
)
from rlctl.errors import InputError, WaitTimeoutError
from rlctl.rewards.reward_worker import GroupScores, RewardWorker, ScoreRequest
from rlctl.rollouts.failed_episodes import WINDOW, FailedEpisodes
from rlctl.rollouts.ledger import Ledger
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.source import sample_seed
from rlctl.settings.config import RolloutConfig
from rlctl.settings.rewards import OnError, RewardConfig

# The scoring process has its own limit, and its error names the scorer, so it must come first, even after a restart.
MARGIN_S = 240.0
FAILING_SHARE = 0.05
"""A reward function may fail on this share of the rollouts in WINDOW batches."""
FIRST_BATCH = (
    "A failure in the first batch is probably a mistake in the code. If the function may fail on some "
    "completions, --set reward.on_error=zero gives these 0."
)
COLUMNS = ("tokens_T", "offsets_G", "loss_mask_T", "logprobs_T", "weight_version_T")
SCALARS = "scalars"


@dataclass(frozen=True)
class Scorers:
    """The process that scores a run's completions, and the reward model, if any."""

    workers: WorkerGroup[RewardWorker]
    model: LogprobSource | None = None
    """None without a reward model."""
    compares: bool = False
    """Whether a reward function takes `completions`."""

    def score(self, requests: Sequence[ScoreRequest], timeout_s: float) -> list[GroupScores | None]:
        """Return the scores of each group; None: only its environment gives rewards. Raises as `RewardWorker.score`."""
        workers = self.workers.within(timeout_s + MARGIN_S)
        try:
            values = self._model_scores(self.model, workers, requests) if self.model is not None and requests else None
            (scores,) = workers.call(RewardWorker.score, requests, values)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(error.message, "Raise reward.timeout_s, or see the scorer's log.") from None
        return scores

    def _model_scores(
        self, model: LogprobSource, workers: WorkerGroup[RewardWorker], requests: Sequence[ScoreRequest]
    ) -> list[list[float | str]]:
        """Return the reward model's values of each group's texts, or why a text is unreadable."""
        call, (columns,) = workers.submit_by_handle(RewardWorker.write, [(requests,)], [len(requests)])
        (written,) = call.results()
        texts = tuple(
            WeightedSequence(group, sample, written_group.prompt_tokens, tokens, advantage=0.0, token_weight=1.0)
            for group, written_group in enumerate(written)
            for sample, tokens in enumerate(written_group.tokens)
            if isinstance(tokens, int)
        )
        handles = model.handles(TrainBatch((texts,), dict(enumerate(columns)))) if texts else {}
        values: dict[tuple[int, int], float] = {
            (group, sample): float(logprobs.logprobs_R[-1])
            for group, [scores] in handles.items()
            for part in fetch([*scores.handles])
            for (sample, _), logprobs in part.items()
        }
        return [
            [
                error if isinstance(error, str) else values[group, sample]
                for sample, error in enumerate(written_group.tokens)
            ]
            for group, written_group in enumerate(written)
        ]


class GroupMaker:
    """Makes the requests and scored groups of every rollout source."""

    def __init__(self, config: RolloutConfig, prompts: PromptStream, rewards: Scorers | None) -> None:
        self._config, self._prompts, self._rewards = config, prompts, rewards
        encoder = prompts.encoder
        sampling = Sampling.from_config(
            config.generation, stop=encoder.stop, stop_token_ids=encoder.stop_token_ids, never=encoder.never_sampled
        )
        self.sampling = replace(sampling, timeout_s=config.rollout_timeout_s)
        self._dropped: deque[int] = deque(maxlen=WINDOW)
        """Numbers of rollouts that each of the last batches lost to a failing reward function."""
        most = WINDOW * config.batch.rollouts
        self._failed = FailedEpisodes(
            {source: share * most for source, share in prompts.failing_shares().items()}, prompts.environment_digests()
        )

    @property
    def scores(self) -> bool:
        return self._rewards is not None

    @property
    def compares(self) -> bool:
        return self._rewards is not None and self._rewards.compares

    def row_at(self, position: int) -> PromptRow:
        return self._prompts.prompt_at(position)

    def request(self, position: int, row: PromptRow) -> GroupRequest:
        return self._prompts.group_request(position, row, self._seeds(position), self._config.run.seed)

    def _seeds(self, position: int) -> tuple[int, ...]:
        samples = range(self._config.batch.generations)
        return tuple(sample_seed(self._config.run.seed, position, sample) for sample in samples)

    def scored(self, results: Sequence[SampledGroup], rows: Mapping[int, PromptRow]) -> tuple[list[RolloutGroup], int]:
        """Score completions. Raises InputError for a failing function in the first batch."""
        seeds = {result.group: self._seeds(result.group) for result in results}
        groups, failures = scored(self._rewards, results, rows, seeds, self._config.reward)
        for group in groups:
            of_episodes = [failure.message for failure in group.failed]
            of_functions = [message for message in group.dropped if message not in of_episodes]
            if of_functions and group.position < self._config.batch.prompts:
                raise InputError(of_functions[0], FIRST_BATCH)
        return groups, failures

    def lost(self, groups: Sequence[RolloutGroup], ledger: Ledger) -> dict[str, Any]:
        """Return metrics of a batch's failed rewards and episodes. Pause sources with too many failed episodes, from
        the first position that the ledger has not given out. Raises InputError if the last batches lost too many."""
        if not self.scores and self._prompts.environment is None:
            return {}
        of_episodes = {failure.message for group in groups for failure in group.failed}
        dropped = [failure for group in groups for failure in group.dropped]
        failures = [failure for failure in dropped if failure not in of_episodes]
        self._dropped.append(len(failures))
        if sum(self._dropped) > FAILING_SHARE * WINDOW * self._config.batch.rollouts:
            lost = [*self._dropped]
            self._dropped.clear()  # a resume may have a better function
            raise InputError(
                f"A reward function failed on {sum(lost)} rollouts of the last {len(lost)} batches; "
                f"more than {FAILING_SHARE:.0%} of {WINDOW} batches end the run. The last failure: {failures[-1]}",
                "Fix it and continue with --allow-changes, or set reward.on_error=zero, which gives 0 there.",
            )
        first = any(group.position < self._config.batch.prompts for group in groups)
        above = self._failed.count(groups, first=first)
        for source in above:
            self._failed.pause(source, ledger.first_untaken)
            self._prompts.pause(source, ledger.first_untaken)
        errors = [*failures, *dropped, *(failure.message for group in groups for failure in group.failed)]
        reasons = Counter(failure.reason for group in groups for failure in group.failed)
        return {
            "dropped_rollouts": len(dropped),
            **({"reward_error": errors[0]} if errors else {}),
            **({"failed_episodes": dict(sorted(reasons.items()))} if reasons else {}),
            **({"paused": above} if above else {}),
            **({"paused_sources": self._failed.paused} if self._failed.paused else {}),
        }

    def state(self, ledger: Ledger) -> dict[str, Any]:
        """Return as JSON the ledger and everything else that determines the next batches."""
        orders = self._prompts.state(ledger.first_open)
        dropped = {"dropped": list(self._dropped), **self._failed.state()}
        return {**ledger.state(), **dropped, **({"orders": orders} if orders else {})}

    def restored(self, state: Mapping[str, Any]) -> Ledger:
        """Continue from the result of `state`; return the ledger. Raises InputError for an unreadable one."""
        try:
            ledger = Ledger.restored(state)
            self._prompts.restore(state.get("orders", {}))
            self._dropped.extend(map(int, state.get("dropped", ())))
            self._failed.restore(state, ledger.first_untaken)
            for source, position, digest in self._failed.pauses:
                self._prompts.pause(source, position, ends=not digest)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"The checkpoint's ledger and order of prompts cannot be read: {error}.",
                "Resume from a checkpoint before it, or start a new run.",
            ) from error
        return ledger


def scored(
    scorers: Scorers | None,
    results: Sequence[SampledGroup],
    rows: Mapping[int, PromptRow],
    seeds: Mapping[int, Sequence[int]],
    settings: RewardConfig,
) -> tuple[list[RolloutGroup], int]:
    """Return groups with rewards of `scorers` and environments, and the number of failures."""
    answers: Sequence[GroupScores | None] = [None] * len(results)
    if scorers is not None:
        requests = [
            ScoreRequest(rows[result.group], result.texts, result.transcripts if result.episodes else None)
            for result in results
        ]
        answers = scorers.score(requests, settings.timeout_s)
    return groups_with_scores(results, rows, seeds, answers, settings.on_error)


def groups_with_scores(
    results: Sequence[SampledGroup],
    rows: Mapping[int, PromptRow],
    seeds: Mapping[int, Sequence[int]],
    answers: Sequence[GroupScores | None],
    on_error: OnError,
) -> tuple[list[RolloutGroup], int]:
    """Return groups with scores (None: none) and environment results, and the number of failures."""
    groups, failures = [], 0
    for result, scores in zip(results, answers, strict=True):
        scores = _with_environment(scores, result, on_error)
        rollouts = tuple(
            Rollout(
                position=result.group,
                sample=sample,
                seed=seed,
                versions=result.versions[sample],
                stop_reason=result.finish_reasons[sample],
                prompt_tokens=result.prompt_tokens,
                tokens=result.tokens[sample],
                response_tokens=result.response_tokens[sample],
                reward=scores.rewards[sample],
                terms={name: values[sample] for name, values in scores.terms.items()},
                accuracy=None if scores.accuracies is None else scores.accuracies[sample],
                answered=None if scores.answered is None else scores.answered[sample],
                episode=result.episodes[sample] if result.episodes else None,
                images=result.images[sample] if result.images else 0,
                image_tokens=result.image_tokens[sample] if result.images else 0,
            )
            for sample, seed in enumerate(seeds[result.group])
            if not (scores.dropped and scores.rewards[sample] is None)
        )
        row = rows[result.group]
        dropped, failures = scores.dropped, failures + scores.failures
        turns = result.transcripts if result.episodes else None
        failed = tuple(
            EpisodeFailure(episode.reason, episode.cause, episode.failure)
            for episode in result.episodes
            if episode.failure is not None
        )
        groups.append(RolloutGroup(result.group, row, rollouts, result.columns, result.texts, turns, dropped, failed))
    return groups, failures


ENVIRONMENT = "environment"
"""Label of the environment's reward among the labels of reward terms."""


def _with_environment(scores: GroupScores | None, result: SampledGroup, on_error: OnError) -> GroupScores:
    """Combine scorers' and environments' rewards; None: no scorers. Raises InputError for a failure if `on_error` is
    stop."""
    if not result.episodes:
        return scores or GroupScores(result.rewards, None, {})
    failures = [episode.failure for episode in result.episodes]
    if on_error == "stop" and (failure := next(filter(None, failures), None)):
        raise InputError(failure, "Fix it, or choose with reward.on_error what such a rollout counts.")
    rewards: list[float | None] = []
    for sample, (reward, failure) in enumerate(zip(result.rewards, failures, strict=True)):
        scored = 0.0 if scores is None else scores.rewards[sample]
        lost = failure is not None and (on_error == "drop" or not result.response_tokens[sample])
        rewards.append(None if scored is None or lost else (0.0 if failure else reward or 0.0) + scored)
    dropped = tuple(failure for failure, reward in zip(failures, rewards, strict=True) if failure and reward is None)
    base = scores or GroupScores((), None, {})
    names = {name for episode in result.episodes for name in episode.counts}
    parts: dict[str, Sequence[float | None]] = {
        name.removeprefix(REWARD_PART): tuple(episode.counts.get(name, 0.0) for episode in result.episodes)
        for name in sorted(names)
        if name.startswith(REWARD_PART)
    }
    if scores and not parts:
        parts = {ENVIRONMENT: result.rewards}
    return replace(
        base,
        rewards=tuple(rewards),
        terms={**base.terms, **parts},
        failures=base.failures + sum(failure is not None for failure in failures),
        dropped=(*base.dropped, *dropped),
    )


def save_groups(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """Write finished groups with their columns and texts."""
    arrays: dict[str, np.ndarray] = {}
    scalars: list[dict[str, Any]] = []
    for group in groups:
        columns: RolloutColumns = fetch(group.columns)
        arrays |= {f"{group.position}/{name}": getattr(columns, name) for name in COLUMNS}
        arrays |= {f"{group.position}/extra/{name}": array for name, array in columns.extra_T.items()}
        turns = group.transcripts and [[turn.record() for turn in episode] for episode in fetch(group.transcripts)]
        rollouts = [dataclasses.asdict(rollout) for rollout in group.rollouts]
        scalars_of_group = {
            "position": group.position,
            "rollouts": rollouts,
            "texts": fetch(group.texts),
            "turns": turns,
        }
        media = [[vars(part) | {"data": None} for part in parts] for parts in columns.media_G]
        for sample, parts in enumerate(columns.media_G):
            arrays |= {f"{group.position}/media/{sample}/{number}": part.data for number, part in enumerate(parts)}
        failed = [dataclasses.asdict(failure) for failure in group.failed]
        scalars.append({**scalars_of_group, "media": media, "dropped": group.dropped, "failed": failed})
    arrays[SCALARS] = np.frombuffer(json.dumps(scalars).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _loaded(scalars: dict[str, Any]) -> Rollout:
    episode = scalars.get("episode")
    facts = episode and EpisodeFacts(**{**episode, "contexts": tuple(episode.get("contexts", ()))})
    return Rollout(**{**scalars, "versions": tuple(map(tuple, scalars["versions"])), "episode": facts})


def load_groups(path: Path, row_at: Callable[[int], PromptRow]) -> list[RolloutGroup]:
    """Return the groups that `save_groups` wrote. Raises InputError for an unreadable or changed file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        groups = []
        for scalars in json.loads(arrays.pop(SCALARS).tobytes()):
            position, extra = int(scalars["position"]), f"{scalars['position']}/extra/"
            tokens: dict[str, Any] = {name: arrays[f"{position}/{name}"] for name in COLUMNS}
            further = {name.removeprefix(extra): array for name, array in arrays.items() if name.startswith(extra)}
            media = tuple(
                tuple(
                    MediaPart(**part | {"data": arrays[f"{position}/media/{sample}/{number}"]})
                    for number, part in enumerate(parts)
                )
                for sample, parts in enumerate(scalars.get("media", ()))
            )
            columns = put(RolloutColumns(**tokens, extra_T=further, media_G=media))
            rollouts = tuple(map(_loaded, scalars["rollouts"]))
            texts, turns, dropped = put(scalars["texts"]), scalars.get("turns"), tuple(scalars.get("dropped", ()))
            turns = turns and put([[Turn.of(turn) for turn in episode] for episode in turns])
            failed = tuple(EpisodeFailure(**failure) for failure in scalars.get("failed", ()))
            groups.append(RolloutGroup(position, row_at(position), rollouts, columns, texts, turns, dropped, failed))
        return groups
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} cannot be read: {error}.", "Remove its checkpoint to resume from the one before."
        ) from error
