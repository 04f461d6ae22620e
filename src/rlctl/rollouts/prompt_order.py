"""The endless order of prompts: the prompt at each position, as a row for the rewards and as tokens for the engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlctl.backends.messages import GroupRequest
from rlctl.data.broken_images import broken_images
from rlctl.data.chat import EncodedPrompt, PromptEncoder, load_tokenizer
from rlctl.data.holdout import columns_of_prompts, hold_out
from rlctl.data.image_rows import require_images
from rlctl.data.mixing import ChangedMixing, Mixing, SourceSettings, source_settings
from rlctl.data.prompt_records import difficulties
from rlctl.data.prompt_rows import PromptDataset, PromptRow
from rlctl.data.prompts import open_episodes, open_prompts
from rlctl.data.rollouts import RolloutGroup
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.errors import ConfigError, InputError
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes, episode_request, episode_seed
from rlctl.rollouts.source_episodes import SourceEpisodes
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
PART_ROWS = 2**18
"""Rows up to which an epoch's order is in memory as a whole."""


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
    play: EnvironmentEpisodes | None = None
    """Its environment; None: its completions have one turn."""
    held_out: PromptDataset | None = None
    """Its rows for validation."""

    @property
    def has_scorers(self) -> bool:
        """Whether scorers are needed: without any, the environment gives all rewards."""
        named = self.play is not None and self.play.plan.name
        return bool(self.reward.terms or self.prompts.task or not named)


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
        environment: SourceEpisodes | None = None,
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
        opened = [_opened(source, config.run.seed) for source in source_settings(config)]
        stream = cls._of(config, model_dir, opened)
        environment = SourceEpisodes.open(
            config, ((dataset.label, dataset.encoder, dataset.prompts[0]) for dataset in stream.datasets)
        )
        rounds = config.filter.max_rounds if config.filter.groups == "replace" else 1
        ahead = config.rollouts.max_staleness if config.samples_while_training else 0
        planned = config.batch.prompts * (config.run.steps * rounds + ahead)
        plays = environment.plays if environment else {}
        datasets = [
            replace(dataset, encoder=play.showing_tools(dataset.encoder), play=play)
            if (play := plays.get(dataset.label))
            else dataset
            for dataset in stream.datasets
        ]
        with_environment = cls(datasets, planned, stream.held_out, environment)
        with_environment._fitted = stream._fitted
        return with_environment

    @classmethod
    def _of(cls, config: RlctlConfig, model_dir: Path, opened: list[PromptDataset]) -> Self:
        settings = source_settings(config)
        held: list[PromptDataset | None] = [None] * len(opened)
        if config.validation.holdout:
            if len(opened) > 1 and config.rollout_settings is None:
                raise ConfigError(
                    f"validation.holdout = {config.validation.holdout}: texts are held out of one source, and "
                    f"data.sources lists {len(opened)}.",
                    "Name other texts with --set validation.data.name=...",
                )
            for number, source in enumerate(settings):
                columns = columns_of_prompts(config, source.data)
                opened[number], held[number] = hold_out(
                    opened[number], config.validation.holdout, config.run.seed, columns
                )
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
                held_out=held[number],
            )
            for number, (source, prompts) in enumerate(zip(settings, opened, strict=True))
        ]
        planned = config.batch.prompts * config.run.steps
        stream = cls(datasets, planned, held[0])
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

    def failing_shares(self) -> dict[str, float]:
        """Return each dataset's share of the rollouts that may be failed episodes (`environment.failing`)."""
        parts = self._mixing.parts
        limits = (dataset.play.limits.failing if dataset.play else 0.0 for dataset in self.datasets)
        return {label: limit * part / sum(parts) for label, limit, part in zip(self._named, limits, parts, strict=True)}

    def environment_digests(self) -> dict[str, str]:
        """Return a digest of each dataset's environment, which changes with its code and parameters."""
        plays = {label: dataset.play.manifest() if dataset.play else None for label, dataset in self._named.items()}
        return {label: sha256(json.dumps(play, default=str).encode()).hexdigest() for label, play in plays.items()}

    def pause(self, label: str, position: int, *, ends: bool = False) -> None:
        """Leave out a dataset from a position on; `ends`: use it again. Raises ValueError for an unknown one."""
        number = [*self._named].index(label)
        part = self._mixed().parts[number] if ends else 0
        self._mixing = ChangedMixing(self._mixing, number, part, position)

    def group_request(self, position: int, row: PromptRow, seeds: Sequence[int], run_seed: int) -> GroupRequest:
        dataset = self._named[row.source]
        if dataset.play is None:
            prompt = self.encoded(row)
            return GroupRequest(position, prompt.tokens, tuple(seeds), media=prompt.media)
        return episode_request(position, row, dataset.encoder, seeds, episode_seed(run_seed, position))

    def encoded(self, row: PromptRow) -> EncodedPrompt:
        """Return a prompt as the model reads it, with its images and the environment's first messages."""
        dataset = self._named[row.source]
        play, encoder = dataset.play, dataset.encoder
        return self._fitting(row, encoder.prompt(row) if play is None else play.opened(row, encoder))

    def text(self, row: PromptRow) -> str:
        """Return a prompt as the model reads it, with the environment's first messages."""
        dataset = self._named[row.source]
        play, encoder = dataset.play, dataset.encoder
        return encoder.text(row) if play is None else str(encoder.tokenizer.decode(play.measured(row, encoder)))

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
        dataset = self._named[row.source]
        play, encoder = dataset.play, dataset.encoder
        return encoder.encode(row) if play is None else play.measured(row, encoder)

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
            rows = (self._row(dataset, index) for index in range(len(every)))
            long = np.fromiter((self._too_long(row, limit) for row in rows), bool, len(every))
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
        if self._named[row.source].play is not None:
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

    def _first(self, limit: int, *, every: bool = False) -> Iterator[PromptRow]:
        """Yield the rows of the first positions; of large files only those `ahead`, unless `every` row is needed."""
        turns = self._mixing.turns(min(self.planned, limit))
        for dataset, count in zip(self.datasets, turns, strict=True):
            ahead = None if every else dataset.prompts.ahead
            for turn in range(min(count, len(dataset.prompts), ahead or count)):
                yield self._row(dataset, dataset.order.at(turn))

    def _row(self, dataset: OpenedDataset, index: int) -> PromptRow:
        row = dataset.prompts[index]
        return replace(row, source=dataset.label) if dataset.label else row


def _opened(source: SourceSettings, seed: int) -> PromptDataset:
    if source.makes_tasks:
        return open_episodes(str(source.environment.name), source.data.size)
    return open_prompts(source.data, seed=seed)


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
        self._ends = lru_cache(maxsize=ORDERS_KEPT)(self._ends_of_parts)
        self._part = lru_cache(maxsize=ORDERS_KEPT)(self._rows_of_part)

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
        if self.size <= PART_ROWS or not self.shuffle or self.difficulty is not None:
            return int(self._rows(epoch)[offset])
        ends = self._ends(epoch)
        part = int(np.searchsorted(ends, offset, side="right"))
        return int(self._part(epoch, part)[offset - (ends[part - 1] if part else 0)])

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
            rows = np.argsort(np.concatenate([*self._draws(epoch)]), kind="stable")
        return rows if self.difficulty is None else rows[np.argsort(self.difficulty[rows], kind="stable")]

    def _draws(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield a random uint64 for each row, by whose size an epoch is shuffled, in arrays of at most PART_ROWS."""
        # numpy keeps the streams of bit generators stable between versions, but not `Generator.permutation`. A
        # trailing 0 (the first source) does not change a SeedSequence.
        generator = np.random.PCG64(np.random.SeedSequence((self.seed, epoch, self.number)))
        for first in range(0, self.size, PART_ROWS):
            yield generator.random_raw(min(PART_ROWS, self.size - first))

    # `_epoch` of a large shuffled dataset in parts by the size of the draws, so that memory holds few of its rows.

    def _parts_of(self, draws: np.ndarray) -> np.ndarray:
        parts = -(-self.size // PART_ROWS)
        return ((draws >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int64)

    def _ends_of_parts(self, epoch: int) -> np.ndarray:
        """Return the places in the epoch before which its parts end, int64 [parts]."""
        parts = -(-self.size // PART_ROWS)
        counts = sum(np.bincount(self._parts_of(draws), minlength=parts) for draws in self._draws(epoch))
        return np.cumsum(counts)

    def _rows_of_part(self, epoch: int, part: int) -> np.ndarray:
        """Return the order of the rows of one part of an epoch."""
        rows, chosen, first = list[np.ndarray](), list[np.ndarray](), 0
        for draws in self._draws(epoch):
            places = np.flatnonzero(self._parts_of(draws) == part)
            rows.append(places + first)
            chosen.append(draws[places])
            first += len(draws)
        return np.concatenate(rows)[np.argsort(np.concatenate(chosen), kind="stable")]


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
