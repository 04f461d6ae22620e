"""The prompts of each step, as rows for the rewards and as token ids for the engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rlctl.config.schema import RlctlConfig
from rlctl.data.chat import PromptEncoder
from rlctl.data.order import PromptOrder
from rlctl.data.prompts import open_prompts
from rlctl.data.rows import PromptRow, PromptSource
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import InputError

SCANNED_PROMPTS = 2048
# What a tokenizer puts around a text: no token of the text itself stands for less than a byte of it.
TOKENS_AROUND = 2


class StepPrompts:
    """Which prompts a step has: a pure function of the step, so that a resumed run goes on where it was."""

    def __init__(self, source: PromptSource, encoder: PromptEncoder, config: RlctlConfig) -> None:
        self.source, self.encoder = source, encoder
        self.per_step, self.steps = config.grpo.prompts, config.grpo.steps
        self._order = PromptOrder(len(source), config.run.seed, config.data.shuffle)
        self.rows = lru_cache(maxsize=2)(self._rows)
        self.limit: int | None = None
        """Most tokens of a prompt; set once the plan is known."""

    @classmethod
    def open(cls, config: RlctlConfig, model_dir: Path) -> StepPrompts:
        """Open data and tokenizer. Raises InputError for what is wrong with either."""
        source = open_prompts(config.data, seed=config.run.seed)
        tokenizer = load_tokenizer(model_dir, config.model)
        return cls(source, PromptEncoder.build(tokenizer, config.model, config.data, model_dir), config)

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a completion in this chat format."""
        return tuple(self.encoder.stop)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion in this chat format, besides the model's own."""
        return tuple(self.encoder.stop_token_ids)

    def _rows(self, step: int) -> list[PromptRow]:
        """The rows of `step`, in the order of its groups."""
        return [self.source[index] for index in self._order.step(step, self.per_step)]

    def tokens(self, step: int) -> list[Sequence[int]]:
        """Token ids of each prompt of `step`. Raises InputError when one is too long for the run."""
        return [self._encode(row) for row in self.rows(step)]

    def _encode(self, row: PromptRow) -> Sequence[int]:
        tokens = self.encoder.encode(row)
        if self.limit is not None and len(tokens) > self.limit:
            raise InputError(
                f"{row.where}: the prompt has {len(tokens)} tokens, and {self.limit} leave room for a completion.",
                "Raise --max-length, or leave the row out.",
            )
        return tokens

    def lengths(self) -> list[int]:
        """Tokens of each of the first prompts that the run will use."""
        return [len(tokens) for step in self._steps(SCANNED_PROMPTS) for tokens in self.tokens(step)]

    def require_fit(self) -> None:
        """Raise InputError for a prompt of any step that is too long for the run: better now than at its step."""
        for step in self._steps(len(self.source)):
            for row in self._rows(step):
                if self.limit is None or len(self.encoder.text(row).encode()) + TOKENS_AROUND > self.limit:
                    self._encode(row)

    def _steps(self, prompts: int) -> range:
        """The steps that use the first `prompts` prompts, or all of them where there are fewer."""
        return range(min(self.steps, -(-min(prompts, len(self.source)) // self.per_step)))
