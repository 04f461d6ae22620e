"""The endless order of prompts: the prompt at each position, as a row for the rewards and as tokens for the engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from rlctl.config.schema import RlctlConfig
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.holdout import hold_out
from rlctl.data.prompt_rows import PromptRow, PromptSource
from rlctl.data.prompts import open_prompts
from rlctl.errors import InputError

SCANNED_PROMPTS = 2048
# What a tokenizer puts around a text: no token of the text itself stands for less than a byte of it.
TOKENS_AROUND = 2


class PromptStream:
    """The prompt at each position: a pure function of the position, so that prompts can be taken in any order."""

    def __init__(
        self,
        source: PromptSource,
        encoder: PromptEncoder,
        config: RlctlConfig,
        held_out: PromptSource | None = None,
    ) -> None:
        self.source, self.encoder, self.held_out = source, encoder, held_out
        rounds = config.filter.max_rounds if config.filter.groups == "replace" else 1
        self._planned = config.batch.prompts * config.run.steps * rounds  # at most
        self._order = PromptOrder(len(source), config.run.seed, config.data.shuffle)
        self.limit: int | None = None
        """Most tokens of a prompt; set once the plan is known."""

    @classmethod
    def open(cls, config: RlctlConfig, model_dir: Path) -> PromptStream:
        """Open data and tokenizer. Raises InputError for what is wrong with either."""
        opened = open_prompts(config.data, seed=config.run.seed)
        source, held_out = hold_out(opened, config.validation.holdout, config.run.seed)
        tokenizer = load_tokenizer(model_dir, config.model)
        return cls(source, PromptEncoder.build(tokenizer, config.model, config.data, model_dir), config, held_out)

    def prompt_at(self, position: int) -> PromptRow:
        """Return the row of the data at `position`."""
        return self.source[self._order.at(position)]

    def tokens(self, row: PromptRow) -> Sequence[int]:
        """Return the token ids of a prompt. Raises InputError when it is too long for the run."""
        tokens = self.encoder.encode(row)
        if self.limit is not None and len(tokens) > self.limit:
            raise InputError(
                f"{row.where}: the prompt has {len(tokens)} tokens, and {self.limit} leave room for a completion.",
                "Raise --max-length, or leave the row out.",
            )
        return tokens

    def lengths(self) -> list[int]:
        """Return the number of tokens of each of the first prompts that the run will use."""
        return [len(self.tokens(self.prompt_at(position))) for position in self._positions(SCANNED_PROMPTS)]

    def require_fit(self) -> None:
        """Raise InputError for a prompt that is too long for the run: better now than at its step."""
        for row in map(self.prompt_at, self._positions(len(self.source))):
            if self.limit is None or len(self.encoder.text(row).encode()) + TOKENS_AROUND > self.limit:
                self.tokens(row)

    def _positions(self, limit: int) -> range:
        """Return the first positions that the run will use, at most `limit`, each prompt once."""
        return range(min(self._planned, limit, len(self.source)))


class PromptOrder:
    """Epoch after epoch over `size` prompts; every epoch holds each prompt once, in an order that the seed fixes."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError("an order needs at least one prompt")
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def at(self, position: int) -> int:
        """Return the row of the source at `position`."""
        epoch, offset = divmod(position, self.size)
        return int(_permutation(self.size, self.seed, epoch)[offset]) if self.shuffle else offset


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return order of one epoch, int64 [size].

    Sorts raw 64-bit draws: numpy keeps the streams of its bit generators the same between versions, but not what
    `Generator.permutation` makes of them.
    """
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(draws, kind="stable")
