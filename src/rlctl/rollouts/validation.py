"""Validation: the newest weights answer held-out prompts with the run's engines and a scorer. Seeds follow from the
prompt, so validations differ only by weights. Engines forget the prompts, so training is unchanged."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.backends.clients import EngineClient, generate_groups
from rlctl.backends.messages import GroupRequest, Sampling
from rlctl.data.broken_images import readable
from rlctl.data.chat import EncodedPrompt, PromptEncoder
from rlctl.data.holdout import open_validation
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.prompts import open_episodes
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.errors import ConfigError, InputError
from rlctl.refit.sync import WeightSync
from rlctl.rewards.prepare_rewards import prepare_rewards
from rlctl.rewards.reward_model_scorer import reward_digest
from rlctl.rewards.reward_plan import MixedRewards, RewardPlan, Rewards
from rlctl.rewards.statistics import Estimate
from rlctl.rollouts.environment_episodes import episode_request, episode_seed
from rlctl.rollouts.prompt_order import PromptOrder, PromptStream
from rlctl.rollouts.scored_groups import FAILING_SHARE, Scorers, scored
from rlctl.rollouts.source import sample_seed
from rlctl.settings.config import RlctlConfig, RolloutConfig, TextConfig
from rlctl.settings.run import VALIDATION_PREFIX, ValidationConfig
from rlctl.telemetry.headline import error_of
from rlctl.telemetry.metrics import LOSS

FIRST_POSITION = 2**48
"""First validation position, beyond training's, for separate seeds."""


@dataclass(frozen=True)
class ValidationSet:
    """The prompts of a run's validation, with their tokens and scorers."""

    label: str
    rows: tuple[PromptRow, ...]
    tokens: tuple[tuple[int, ...], ...]
    sampling: Sampling
    rewards: Rewards | None
    """None: environments give all rewards."""
    fingerprint: dict[str, Any]
    encoders: Mapping[str, PromptEncoder] = field(default_factory=dict)
    """How prompts are written, by the label of their source; empty: no row has images or an environment."""
    played: frozenset[str] = frozenset()
    """The sources with an environment."""
    too_long: str = "refuse"
    """Treatment of a prompt that is too long (`data.too_long`)."""
    changed: str = ""
    """Words on prompts that were too long; empty where none was."""

    @classmethod
    def open(cls, config: RolloutConfig, prompts: PromptStream, model_dir: Path) -> ValidationSet | None:
        """Open the validation set; None without validation. Raises ConfigError or InputError."""
        validation = config.validation
        if not validation.wanted:
            return None
        if config.data.sources and validation.holdout and validation.data.name is None:
            return cls._of_sources(config, prompts)
        environment = prompts.environment.of("") if prompts.environment else None
        if environment and not (validation.data.name or config.data.name or config.data.sources or prompts.held_out):
            source, data = open_episodes(environment.plan.label, config.data.size), config.data
        else:
            source, data = open_validation(config, prompts.held_out)
        encoder = PromptEncoder.build(prompts.encoder.tokenizer, config.model, data, model_dir)
        if environment is not None:
            encoder = environment.showing_tools(encoder)
        reward = config.reward.model_copy(update={"terms": validation.reward}) if validation.reward else config.reward
        order = PromptOrder(len(source), config.run.seed)
        drawn = [source[order.at(place)] for place in range(min(len(source), validation.max_prompts))]
        rows = readable(drawn, data, encoder)
        alone = environment is not None and environment.plan.name and not (reward.terms or source.task)
        opened, time = encoder.opens_thought, config.model.chat_template_time
        rewards = None if alone else prepare_rewards(reward, source, apart=True, opened=opened, time=time)
        require_metric_of_the_best(config, judged=rewards is not None and bool(rewards.accuracy_by))
        return cls(
            label=source.label,
            rows=rows,
            tokens=tuple(encoder.encode(row) if row.prompt else () for row in rows),
            encoders={"": encoder},
            played=frozenset([""] if environment is not None else []),
            sampling=validation_sampling(config, encoder),
            rewards=rewards,
            fingerprint=source.fingerprint(),
            too_long=data.too_long,
            changed=f", {broken} with broken images left out" if (broken := len(drawn) - len(rows)) else "",
        )

    @classmethod
    def _of_sources(cls, config: RolloutConfig, prompts: PromptStream) -> ValidationSet:
        """Open the rows that are held out of each source, with its environment and scorers."""
        rows, plans, tokens, left_out = list[PromptRow](), dict[str, RewardPlan](), list[tuple[int, ...]](), 0
        time = config.model.chat_template_time
        for dataset in prompts.datasets:
            source, label = dataset.held_out, dataset.label
            assert source is not None  # `validation.holdout` holds rows of every source out
            order = PromptOrder(len(source), config.run.seed)
            drawn = [source[order.at(place)] for place in range(min(len(source), config.validation.max_prompts))]
            kept = readable(drawn, dataset.data, dataset.encoder)
            rows += [replace(row, source=label) for row in kept]
            tokens += [tuple(dataset.encoder.encode(row)) if row.prompt else () for row in kept]
            left_out += len(drawn) - len(kept)
            if dataset.has_scorers:
                plans[label] = prepare_rewards(
                    dataset.reward, source, apart=True, opened=dataset.encoder.opens_thought, time=time
                )
        judged = all(label in plans and plans[label].accuracy_by for label in (one.label for one in prompts.datasets))
        require_metric_of_the_best(config, judged=judged)
        return cls(
            label=", ".join(dataset.label for dataset in prompts.datasets),
            rows=tuple(rows),
            tokens=tuple(tokens),
            encoders={dataset.label: dataset.encoder for dataset in prompts.datasets},
            played=frozenset(dataset.label for dataset in prompts.datasets if dataset.play),
            sampling=validation_sampling(config, prompts.encoder),
            rewards=MixedRewards(plans) if plans else None,
            fingerprint={
                dataset.label: dataset.held_out.fingerprint() for dataset in prompts.datasets if dataset.held_out
            },
            too_long=config.data.too_long,
            changed=f", {left_out} with broken images left out" if left_out else "",
        )

    def fitted(self, limit: int, room: int) -> ValidationSet:
        """Return the set with prompts over `limit` tokens left out, or cut to the last `room`, per `data.too_long`.
        Raises InputError if refused or empty."""
        long = [place for place, tokens in enumerate(self.tokens) if len(tokens) > limit]
        if not long:
            return self
        if self.too_long == "cut":
            tokens = tuple(sequence[-room:] if len(sequence) > limit else sequence for sequence in self.tokens)
            return replace(
                self, tokens=tokens, changed=f"{self.changed}, {len(long)} of them cut to their last {room} tokens"
            )
        kept = [place for place in range(len(self.rows)) if place not in long]
        if self.too_long == "refuse" or not kept:
            raise InputError(
                f"validation: the prompt of {self.rows[long[0]].where} has {len(self.tokens[long[0]])} tokens, and "
                f"{limit} leave room for a completion.",
                "Raise --max-length, or leave such rows out with --set data.too_long=drop.",
            )
        rows, tokens = (tuple(values[place] for place in kept) for values in (self.rows, self.tokens))
        return replace(self, rows=rows, tokens=tokens, changed=f"{self.changed}, {len(long)} longer ones left out")

    def describe(self, config: RlctlConfig) -> str:
        rollouts = config.rollout_settings
        assert rollouts is not None  # prompts are validated on by sampling
        validation = rollouts.validation
        how = "greedy" if validation.temperature == 0 else f"temperature {validation.temperature:g}"
        origin = f" of {self.label}"
        if validation.data.name is None and validation.holdout:
            origin = f" held out of {'each source' if rollouts.data.sources else 'the data'}"
        return (
            f"validation: {times_of(validation)}: {len(self.rows)} prompt{'s' * (len(self.rows) > 1)}{origin}, "
            f"{validation.samples} sample{'s' * (validation.samples > 1)} each, {how}{self.changed}"
        )


def validation_sampling(config: TextConfig | RolloutConfig, encoder: PromptEncoder) -> Sampling:
    """Return how the tokens of a validation's answers are drawn."""
    sampling = Sampling.from_config(
        config.generation, stop=encoder.stop, stop_token_ids=encoder.stop_token_ids, never=encoder.never_sampled
    )
    temperature = config.validation.temperature
    sampling = replace(sampling, timeout_s=config.rollout_timeout_s, temperature=temperature)
    return replace(sampling, top_p=1.0, top_k=-1, min_p=0.0) if temperature == 0 else sampling


def times_of(validation: ValidationConfig) -> str:
    every = f"every {f'{validation.every} steps' if validation.every > 1 else 'step'}"
    at = (
        [every] * (validation.every > 0)
        + ["before the first"] * validation.at_start
        + ["after the last"] * validation.at_end
    )
    return ", ".join(at)


@dataclass(frozen=True)
class Validated:
    """The outcome of one validation."""

    metrics: dict[str, float]
    measured: int
    """Number of prompts or texts."""
    groups: tuple[RolloutGroup, ...]
    """The answers of engines, for people to read."""


class Validation(ABC):
    """Validates a run, and knows whether it still gets better."""

    def __init__(self, config: RlctlConfig, metric: str, of: tuple[object, ...]) -> None:
        """`metric` ranks validations; `of` identifies its inputs besides weights."""
        self._config, self.metric = config, metric
        self._best, self._since = -math.inf, 0
        self._of = sha256(json.dumps((metric, *of), sort_keys=True, default=str).encode()).hexdigest()

    @abstractmethod
    def measure(self, version: int) -> Validated:
        """Validate the weights of `version`."""

    def due(self, step: int) -> bool:
        validation = self._config.validation
        if step == 0:
            return validation.at_start
        return (validation.every > 0 and step % validation.every == 0) or (
            validation.at_end and step == self._config.run.steps
        )

    def _compare(self, value: float) -> None:
        """Take note of a value of the metric; of a loss its negative is taken, which is better the higher it is."""
        value = -value if self.metric == LOSS else value
        better = value > self._best
        self._best, self._since = (value, 0) if better else (self._best, self._since + 1)

    @property
    def plateau(self) -> str | None:
        """Return the sentence that ends the run after `validation.stop_after` validations without improvement."""
        limit = self._config.validation.stop_after
        if limit is None or self._since < limit:
            return None
        best = -self._best if self.metric == LOSS else self._best
        return (
            f"{VALIDATION_PREFIX}{self.metric} has not been better than {best:.4g} for {self._since} "
            "validations in a row (validation.stop_after): the run ends here"
        )

    def state(self) -> dict[str, Any]:
        """Return the best value, validations since then, and inputs, as JSON."""
        return {"best": self._best if math.isfinite(self._best) else None, "since": self._since, "of": self._of}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` (none without validation). After changes of prompts, scorers or sampling, the best
        value starts anew."""
        if state.get("of", self._of) != self._of:
            return
        best, since = state.get("best"), state.get("since")
        self._best = float(best) if isinstance(best, int | float) else -math.inf
        self._since = since if isinstance(since, int) else 0


class SampledValidation(Validation):
    """Validates by completions of prompts, with the engines and a scorer of the run."""

    def __init__(
        self,
        config: RolloutConfig,
        data: ValidationSet,
        engines: EngineClient,
        rewards: Scorers | None,
        sync: WeightSync,
    ) -> None:
        validation = config.validation
        plans = data.rewards.plans.values() if isinstance(data.rewards, MixedRewards) else (data.rewards,)
        terms = [term for plan in plans if plan is not None for term in plan.terms]
        scorers = [(term.name, term.weight, reward_digest(term.name), *term.params.items()) for term in terms]
        of = (data.fingerprint, len(data.rows), scorers, validation.samples, validation.temperature)
        super().__init__(config, metric_of_the_best(config), of)
        self._data, self._engines, self._rewards, self._sync = data, engines, rewards, sync
        self._sampled = config

    def measure(self, version: int) -> Validated:
        """Validate the weights of `version`, which engines hold. Raises InputError where scoring fails too often."""
        config, data = self._sampled, self._data
        requests, rows, samples = [], {}, range(config.validation.samples)
        for position, (row, tokens) in enumerate(zip(data.rows, data.tokens, strict=True), FIRST_POSITION):
            of_row = FIRST_POSITION + row.index
            seeds = tuple(sample_seed(config.run.seed, of_row, sample) for sample in samples)
            encoder = data.encoders.get(row.source)
            prompt = EncodedPrompt(tokens) if encoder is None else encoder.fitted(row, tokens)
            request = GroupRequest(position, prompt.tokens, seeds, media=prompt.media)
            if encoder is not None and row.source in data.played:
                request = episode_request(position, row, encoder, seeds, episode_seed(config.run.seed, of_row))
            requests.append(request)
            rows[position] = row
        with self._sync.generating():
            results = generate_groups(
                self._engines,
                requests,
                data.sampling,
                config.cluster.step_limit_s,
                lambda error: self._sync.recover(error, version),
            )
            self._engines.forget_prompts()
        seeds_of = {request.group: request.seeds for request in requests}
        groups, failures = scored(self._rewards, results, rows, seeds_of, config.reward)
        of_episodes = {failure.message for group in groups for failure in group.failed}
        reasons = [reason for group in groups for reason in group.dropped if reason not in of_episodes]
        samples = config.validation.samples * len(groups)
        if of_episodes and not any(group.rollouts for group in groups):
            message = f"validation: no episode was whole. The first failure: {min(of_episodes)}"
            raise InputError(message, "Fix the environment, or what it needs.")
        if reasons and (not math.isfinite(self._best) or len(reasons) > FAILING_SHARE * samples):
            message = f"validation: a reward function failed on {len(reasons)} of {samples} completions. {reasons[0]}"
            raise InputError(message, "Fix it, or set reward.on_error=zero, which gives 0 there.")
        result = Validated({**metrics_of(groups, failures), **source_metrics_of(groups)}, len(groups), tuple(groups))
        self._compare(result.metrics[self.metric])
        return result


def require_metric_of_the_best(config: RolloutConfig, *, judged: bool) -> None:
    """Raise ConfigError unless validation has the metric of `run.keep_best_by`. `judged`: it has an accuracy."""
    names = ["reward_mean", *(["accuracy", f"pass@{config.validation.samples}"] if judged else [])]
    if metric_of_the_best(config) not in names:
        raise ConfigError(
            f"run.keep_best_by = {config.run.keep_best_by}: no such metric says which validation is better.",
            f"There are {', '.join(VALIDATION_PREFIX + name for name in names)}.",
        )


def source_metrics_of(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of each source of validated groups; empty: one source."""
    by_source: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        if group.prompt.source and group.rollouts:
            by_source.setdefault(group.prompt.source, []).append(group)
    return {
        f"sources/{source}/{name}": value
        for source, part in sorted(by_source.items())
        for name, value in metrics_of(part, 0).items()
        if name not in ("scorer_failures", "truncated_fraction") and not name.endswith("_stderr")
    }


def metric_of_the_best(config: RlctlConfig) -> str:
    by = config.run.keep_best_by
    usual = next(iter(config.step_metrics), LOSS)
    return by.removeprefix(VALIDATION_PREFIX) if by.startswith(VALIDATION_PREFIX) else usual


def metrics_of(groups: list[RolloutGroup], failures: int) -> dict[str, float]:
    """Return the metrics of validated groups: means over prompts, with their standard errors."""
    dropped = sum(len(group.dropped) for group in groups)
    groups = [group for group in groups if group.rollouts]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics: dict[str, float] = {}

    def estimate(name: str, value: Callable[[Rollout], float | None]) -> None:
        mean = Estimate.of([float(np.mean([value(rollout) or 0.0 for rollout in group.rollouts])) for group in groups])
        metrics[name] = mean.value
        if mean.stderr is not None:
            metrics[error_of(name)] = mean.stderr

    estimate("reward_mean", lambda rollout: rollout.reward)
    if all(rollout.accuracy is not None for rollout in rollouts):
        estimate("accuracy", lambda rollout: rollout.accuracy)
        most = max(len(group.rollouts) for group in groups)
        metrics[f"pass@{most}"] = float(
            np.mean([max(rollout.accuracy or 0.0 for rollout in g.rollouts) for g in groups])
        )
    estimate("response_tokens_mean", lambda rollout: rollout.response_tokens)
    estimate("truncated_fraction", lambda rollout: rollout.truncated)
    metrics["scorer_failures"] = float(failures)
    if dropped:
        metrics["dropped_rollouts"] = float(dropped)
    return metrics
