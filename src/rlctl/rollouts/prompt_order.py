"""The endless order of prompts: the prompt at each position, as a row for the rewards and as tokens for the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlctl.backends.messages import GroupRequest
from rlctl.data.broken_images import broken_images
from rlctl.data.chat import EncodedPrompt, PromptEncoder, load_tokenizer
from rlctl.data.holdout import columns_of_prompts, hold_out
from rlctl.data.image_rows import require_images
from rlctl.data.mixing import Mixing, source_settings
from rlctl.data.prompt_records import difficulties
from rlctl.data.prompt_rows import PromptDataset, PromptRow
from rlctl.data.prompts import open_episodes, open_prompts
from rlctl.data.rollouts import RolloutGroup
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.errors import ConfigError, InputError
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes, episode_request, episode_seed
from rlctl.settings.config import RlctlConfig, RolloutConfig
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import RewardConfig

SCANNED_PROMPTS, SEEN_PROMPTS = 2048, 128
"""Numbers of first prompts whose tokens and whose image tokens are counted."""
CHECKED_IMAGES = 1000
"""Rows of a dataset whose images are decoded before a run; others are decoded in their step."""
SAMPLED_ROWS = 16
"""Rows of a dataset that are searched for images."""
# Begin and end tokens around a text. Each token of the text covers at least a byte of it.
TOKENS_AROUND = 2
ORDERS_KEPT = 2
"""Epochs with cached orders: the current and the previous one."""


@dataclass(frozen=True)
class OpenedDataset:
    """One opened prompt dataset of a run."""

    label: str
    """Its name among several; empty for the only one."""
    prompts: PromptDataset
    data: DataConfig
    encoder: PromptEncoder
    reward: RewardConfig
    order: PromptOrder
    weight: float | None = 1.0
    """Its weight in the mixture; None: its size."""


class PromptStream:
    """The prompt at each position: a pure function, except for pass-rate orders, which depend on `observe` and keep
    `state`."""

    kind = "prompt"
    """Word for a row of the data."""

    def __init__(
        self,
        datasets: Sequence[OpenedDataset],
        planned: int,
        held_out: PromptDataset | None = None,
        environment: EnvironmentEpisodes | None = None,
    ) -> None:
        """`planned`: maximum number of positions of the run. `held_out`: prompts for validation."""
        self.datasets, self.planned, self.held_out = datasets, planned, held_out
        self._mixing = self._mixed()
        self.environment = environment
        self._named = {dataset.label: dataset for dataset in datasets}
        self.limit: int | None = None
        """Maximum number of tokens of a prompt, set by the plan."""
        self.room = 0
        """Tokens that a cut prompt keeps (`data.too_long`)."""
        self._fitted: list[str] = []

    @classmethod
    def open(cls, config: RlctlConfig, model_dir: Path, rows: RowType = PROMPTS) -> Self:
        """Open data and tokenizer. Raises InputError."""
        opened = [open_prompts(source.data, config.run.seed, rows) for source in source_settings(config)]
        stream = cls._of(config, model_dir, opened)
        stream.rows = rows
        return stream

    @classmethod
    def open_rollouts(cls, config: RolloutConfig, model_dir: Path) -> Self:
        """Open data, tokenizer and environment. Raises InputError."""
        environment_name = config.environment.name
        if environment_name and not (config.data.name or config.data.sources):
            opened = [open_episodes(environment_name, config.data.size)]
        else:
            opened = [open_prompts(source.data, seed=config.run.seed) for source in source_settings(config)]
        stream = cls._of(config, model_dir, opened)
        first = stream.datasets[0]
        environment = EnvironmentEpisodes.open(config, first.encoder, first.prompts[0])
        rounds = config.filter.max_rounds if config.filter.groups == "replace" else 1
        ahead = config.rollouts.max_staleness if config.samples_while_training else 0
        planned = config.batch.prompts * (config.run.steps * rounds + ahead)
        datasets = stream.datasets
        if environment is not None:
            datasets = [replace(dataset, encoder=environment.showing_tools(dataset.encoder)) for dataset in datasets]
        with_environment = cls(datasets, planned, stream.held_out, environment)
        with_environment._fitted = stream._fitted
        return with_environment

    @classmethod
    def _of(cls, config: RlctlConfig, model_dir: Path, opened: list[PromptDataset]) -> Self:
        settings = source_settings(config)
        held_out = None
        if config.validation.holdout:
            if len(opened) > 1:
                raise ConfigError(
                    f"validation.holdout = {config.validation.holdout}: prompts are held out of one source, and "
                    f"data.sources lists {len(opened)}.",
                    "Name other prompts with --set validation.data.name=...",
                )
            columns = columns_of_prompts(config, settings[0].data)
            opened[0], held_out = hold_out(opened[0], config.validation.holdout, config.run.seed, columns)
        tokenizer = load_tokenizer(model_dir, config.model)
        datasets = [
            OpenedDataset(
                label=source.label,
                prompts=prompts,
                data=source.data,
                encoder=PromptEncoder.build(tokenizer, config.model, source.data, model_dir),
                reward=source.reward,
                order=PromptOrder.of(prompts, source.data, config.run.seed, number),
                weight=source.weight,
            )
            for number, (source, prompts) in enumerate(zip(settings, opened, strict=True))
        ]
        planned = config.batch.prompts * config.run.steps
        stream = cls(datasets, planned, held_out)
        stream.leave_out_broken_images(config.run.seed)
        return stream

    rows: RowType = PROMPTS
    """Contents of a dataset row."""

    def _mixed(self) -> Mixing:
        return Mixing.of(
            [dataset.weight for dataset in self.datasets], [len(dataset.prompts) for dataset in self.datasets]
        )

    @property
    def encoder(self) -> PromptEncoder:
        """Return the first dataset's prompt encoder, with all datasets' end tokens and texts."""
        return self.datasets[0].encoder

    def prompt_at(self, position: int) -> PromptRow:
        number, turn = self._mixing.at(position)
        dataset = self.datasets[number]
        return self._row(dataset, dataset.order.at(turn))

    def group_request(self, position: int, row: PromptRow, seeds: Sequence[int], run_seed: int) -> GroupRequest:
        if self.environment is None:
            prompt = self.encoded(row)
            return GroupRequest(position, prompt.tokens, tuple(seeds), media=prompt.media)
        encoder = self._named[row.source].encoder
        return episode_request(position, row, encoder, seeds, episode_seed(run_seed, position))

    def encoded(self, row: PromptRow) -> EncodedPrompt:
        """Return a prompt as the model reads it, with its images and the environment's first messages."""
        encoder = self._named[row.source].encoder
        opened = encoder.prompt(row) if self.environment is None else self.environment.opened(row, encoder)
        return self._fitting(row, opened)

    def text(self, row: PromptRow) -> str:
        """Return a prompt as the model reads it, with the environment's first messages."""
        encoder = self._named[row.source].encoder
        if self.environment is not None:
            return str(encoder.tokenizer.decode(self.environment.measured(row, encoder)))
        return encoder.text(row)

    def tokens(self, row: PromptRow) -> Sequence[int]:
        """Return the token ids of a prompt. Raises InputError if it is too long for the run."""
        encoder = self._named[row.source].encoder
        if row.images and self._cuts(row):  # the positions of images decide the cut
            return self._fitting(row, encoder.prompt(row)).tokens
        return self._fitting(row, EncodedPrompt(tuple(self._whole(row)))).tokens

    def _cuts(self, row: PromptRow) -> bool:
        return self._named[row.source].data.too_long == "cut"

    def _fitting(self, row: PromptRow, prompt: EncodedPrompt) -> EncodedPrompt:
        if self.limit is None or len(prompt.tokens) <= self.limit:
            return prompt
        if self._cuts(row):
            return prompt.last(self.room)
        raise InputError(
            f"{row.where}: the prompt has {len(prompt.tokens)} tokens, and {self.limit} leave room for a completion.",
            "Raise --max-length, or leave such rows out with --set data.too_long=drop.",
        )

    def _whole(self, row: PromptRow) -> Sequence[int]:
        encoder = self._named[row.source].encoder
        return encoder.encode(row) if self.environment is None else self.environment.measured(row, encoder)

    def _too_long(self, row: PromptRow, limit: int) -> bool:
        may_exceed = bool(row.images) or len(self.text(row).encode()) + TOKENS_AROUND > limit
        return may_exceed and len(self._whole(row)) > limit

    def leave_out_broken_images(self, seed: int) -> None:
        """Leave out rows with unreadable images, if configured. Raises InputError for others, and if none is left."""
        for number, dataset in enumerate(self.datasets):
            every, drops = dataset.prompts, dataset.data.broken_images == "drop"
            if not any(row.images for row in every.sample(SAMPLED_ROWS)):
                continue
            broken = broken_images(every, len(every) if drops else CHECKED_IMAGES, dataset.encoder.images(every.label))
            if broken and (not drops or len(broken) == len(every)):
                raise next(iter(broken.values()))
            if not broken:
                continue
            kept = every.only(np.delete(np.arange(len(every)), [*broken]), broken_images=len(broken))
            order = PromptOrder.of(kept, dataset.data, seed, number)
            first = next(iter(broken.values())).message
            self._fitted.append(
                f"{len(broken):,} of {len(every):,} rows are left out (data.broken_images=drop): {first}"
            )
            self._named[dataset.label] = replace(dataset, prompts=kept, order=order)
        self.datasets = [self._named[dataset.label] for dataset in self.datasets]
        self._mixing = self._mixed()

    def leave_out_long(self, limit: int, seed: int) -> None:
        """Leave out prompts over `limit` tokens, if configured. Raises InputError if none is left."""
        for number, dataset in enumerate(self.datasets):
            if dataset.data.too_long != "drop":
                continue
            every, label = dataset.prompts, dataset.label or dataset.prompts.label
            long = np.array([self._too_long(self._row(dataset, index), limit) for index in range(len(every))])
            if long.all():
                raise InputError(
                    f"Every prompt of {label} is longer than {limit:,} tokens, and data.too_long=drop leaves it out.",
                    "Raise --max-length, or name other prompts.",
                )
            if not long.any():
                continue
            kept = every.only(np.flatnonzero(~long), left_out=int(long.sum()))
            order = PromptOrder.of(kept, dataset.data, seed, number)
            self._fitted.append(
                f"{long.sum():,} of {len(every):,} prompts of {label} are left out (data.too_long=drop): they are "
                f"longer than {limit:,} tokens"
            )
            self._named[dataset.label] = replace(dataset, prompts=kept, order=order)
        self.datasets = [self._named[dataset.label] for dataset in self.datasets]
        self._mixing = self._mixed()

    def lengths(self) -> list[int]:
        """Return the numbers of tokens of the run's first prompts."""
        return [len(self.tokens(row)) for row in self._first(SCANNED_PROMPTS)]

    def require_images(self, most: int) -> None:
        """Raise InputError for a prompt with more images than engines take."""
        require_images(self._first(self.planned), most)

    def image_share(self) -> float:
        """Return the share of image tokens in the first prompts."""
        rows = [*self._first(SEEN_PROMPTS)]
        return sum(map(self._image_tokens, rows)) / max(1, sum(len(self.tokens(row)) for row in rows))

    def _image_tokens(self, row: PromptRow) -> int:
        if self.environment is not None:
            return sum(part.tokens for part in self.encoded(row).media)
        expansion = self._named[row.source].encoder.images().expansion
        return sum(len(expansion(image.size())) for image in row.images)

    def require_fit(self) -> None:
        """Raise InputError for a prompt that is too long, before the run rather than in its step."""
        if self.limit is None:
            return
        long = [row for row in self._first(self.planned) if self._too_long(row, self.limit)]
        for row in long:
            self.tokens(row)
        if long:
            self._fitted.append(
                f"{len(long):,} prompt{'s keep their' if len(long) > 1 else ' keeps its'} last {self.room:,} tokens "
                f"(data.too_long=cut), the first in {long[0].where}"
            )

    def notes(self) -> list[str]:
        """Return notes on long prompts and on control tokens in rows. Raises InputError if the tokenizer cannot escape
        one."""
        rows: dict[str, list[PromptRow]] = {dataset.label: [] for dataset in self.datasets}
        for row in self._first(self.planned):
            rows[row.source].append(row)
        notes = [*self._fitted]
        for dataset in self.datasets:
            notes += dataset.prompts.notes
            if len(dataset.prompts) == 1 and dataset.prompts[0].prompt:
                notes.append(f"{dataset.label or dataset.prompts.label} has one row, on which every step trains")
            rows_with_controls = [
                row for row in rows[dataset.label] if dataset.encoder.controls_in(row, texts=self.kind == "text")
            ]
            for row in rows_with_controls:
                self.tokens(row)
            notes += dataset.encoder.notes_on(rows_with_controls, texts=self.kind == "text")
            notes += dataset.encoder.notes_on_places(rows[dataset.label])
            notes += dataset.encoder.notes_on_instructions(dataset.prompts.instructions)
        return notes

    def observe(self, groups: Iterable[RolloutGroup]) -> None:
        """Record the pass rates of finished groups."""
        for group in groups:
            self._named[group.prompt.source].order.observe(group)

    def state(self, since: int = 0) -> dict[str, Any]:
        """Return the state of the orders from position `since` on, as JSON, by dataset."""
        turns = self._mixing.turns(since)
        states = (
            (dataset.label, dataset.order.state(turn)) for dataset, turn in zip(self.datasets, turns, strict=True)
        )
        return {label: state for label, state in states if state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`. Raises ValueError, TypeError or KeyError for other values."""
        for label, saved in state.items():
            self._named[label].order.restore(saved)

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of the data for the manifest, which shows changed data on resume."""
        prints = {dataset.label: dataset.prompts.fingerprint() for dataset in self.datasets}
        return prints if len(prints) > 1 else prints[self.datasets[0].label]

    def describe(self) -> list[str]:
        """Return a line for each dataset: its name, size and share of the prompts."""
        total = sum(self._mixing.parts)
        shares = [f", {part / total:.1%} of the {self.kind}s" if part < total else "" for part in self._mixing.parts]
        counts = [len(dataset.prompts) for dataset in self.datasets]
        return [
            f"data: {dataset.label or dataset.prompts.label} ({count:,} {self.kind}{'s' * (count != 1)}{share})"
            for dataset, count, share in zip(self.datasets, counts, shares, strict=True)
        ]

    def _first(self, limit: int) -> Iterator[PromptRow]:
        turns = self._mixing.turns(min(self.planned, limit))
        for dataset, count in zip(self.datasets, turns, strict=True):
            for turn in range(min(count, len(dataset.prompts))):
                yield self._row(dataset, dataset.order.at(turn))

    def _row(self, dataset: OpenedDataset, index: int) -> PromptRow:
        row = dataset.prompts[index]
        return replace(row, source=dataset.label) if dataset.label else row


class PromptOrder:
    """Epochs over `size` prompts, each prompt once per epoch, in an order fixed by the seed; `number` separates a run's
    sources. With difficulties, easy prompts come first."""

    def __init__(
        self, size: int, seed: int, shuffle: bool = True, *, number: int = 0, difficulty: np.ndarray | None = None
    ) -> None:
        if size < 1:
            raise ValueError("an order needs at least one prompt")
        self.size, self.seed, self.shuffle, self.number, self.difficulty = size, seed, shuffle, number, difficulty
        self._rows = lru_cache(maxsize=ORDERS_KEPT)(self._epoch)

    @classmethod
    def of(cls, prompts: PromptDataset, data: DataConfig, seed: int, number: int = 0) -> PromptOrder:
        """Return the order that `data` configures. Raises InputError for invalid difficulties."""
        kind = PassRateOrder if data.order == "pass-rate" else PromptOrder
        difficulty = difficulties(prompts, data) if data.order == "difficulty" else None
        shuffle = data.shuffle and data.order != "as-written"
        return kind(len(prompts), seed, shuffle, number=number, difficulty=difficulty)

    def at(self, turn: int) -> int:
        """Return the row at a turn of the dataset (from 0)."""
        epoch, offset = divmod(turn, self.size)
        return int(self._rows(epoch)[offset])

    def observe(self, group: RolloutGroup) -> None:
        """Record a finished group. This order depends on none."""

    def state(self, since: int = 0) -> dict[str, Any]:
        """Return the state from turn `since` on: empty."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""

    def _epoch(self, epoch: int) -> np.ndarray:
        """Return the order of rows in an epoch, int64 [size]."""
        rows = np.arange(self.size)
        if self.shuffle:
            # numpy keeps the streams of bit generators stable between versions, but not `Generator.permutation`. A
            # trailing 0 (the first source) does not change a SeedSequence.
            draws = np.random.PCG64(np.random.SeedSequence((self.seed, epoch, self.number))).random_raw(self.size)
            rows = np.argsort(draws, kind="stable")
        return rows if self.difficulty is None else rows[np.argsort(self.difficulty[rows], kind="stable")]


class PassRateOrder(PromptOrder):
    """Later epochs start with prompts whose pass rate is nearest to one half. The rate is the share of right
    completions (without accuracy the mean reward, limited to 0..1) at the last visit. An epoch's order is fixed with
    its first prompt."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rates: dict[int, float] = {}
        self._fixed: dict[int, np.ndarray] = {}

    def observe(self, group: RolloutGroup) -> None:
        right = [
            min(max(rollout.reward or 0.0, 0.0), 1.0) if rollout.accuracy is None else rollout.accuracy
            for rollout in group.rollouts
        ]
        if right:  # otherwise a reward function failed on all rollouts
            self._rates[group.prompt.index] = sum(right) / len(right)

    def state(self, since: int = 0) -> dict[str, Any]:
        orders = {
            str(epoch): rows.tolist() for epoch, rows in sorted(self._fixed.items()) if epoch >= since // self.size
        }
        return {"rates": sorted(self._rates.items()), "orders": orders}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rates = {int(row): float(rate) for row, rate in state["rates"]}
        self._fixed = {int(epoch): np.array(rows, dtype=np.int64) for epoch, rows in state["orders"].items()}
        if any(sorted(rows.tolist()) != list(range(self.size)) for rows in self._fixed.values()):
            raise ValueError("an order of prompts does not hold each prompt once")

    def at(self, turn: int) -> int:
        epoch, offset = divmod(turn, self.size)
        if epoch and epoch not in self._fixed:
            rows = self._epoch(epoch)
            distance = np.array([abs(self._rates.get(row, 0.5) - 0.5) for row in range(self.size)])
            self._fixed[epoch] = rows[np.argsort(distance[rows], kind="stable")]
        return int((self._fixed[epoch] if epoch else self._rows(0))[offset])
