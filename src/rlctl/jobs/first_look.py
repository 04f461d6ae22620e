"""A run's first rows as the model reads them, and their rewards."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import Any

from rlctl.data.chat import EncodedPrompt, PromptEncoder
from rlctl.planner.views.render import columns, wrapped
from rlctl.preparation.job import Job
from rlctl.rewards.reward_plan import Trial
from rlctl.rollouts.dataset import TextStream

SHOWN_LINES = 8
"""Number of lines shown from the start of a long prompt, and from its end."""
SHOWN_COLUMNS = 60
"""Maximum number of columns of a shown completion."""


@dataclass(frozen=True)
class FirstLook:
    """The first prompt or text of each dataset as the model reads it, its rewards, and the lengths of prompts."""

    prompts: tuple[FirstPrompt, ...]
    prompt_tokens: tuple[int, ...]
    """Lengths of the run's first prompts or texts."""
    kind: str = "prompt"
    """Word for a row of the data."""

    @classmethod
    def of(cls, job: Job) -> FirstLook:
        prompts = []
        for dataset in job.prompts.datasets:
            row = replace(dataset.prompts[0], source=dataset.label)
            plan = job.rewards.of(dataset.label) if job.rewards else None
            read = job.prompts.encoded(row)
            trained = None
            if isinstance(job.prompts, TextStream):
                trained = max((int(text.mask_T.sum()) for text in job.prompts.texts(row)), default=0)
            text, trials = _with_images_named(read, dataset.encoder), plan.trials if plan else ()
            images, seen = len(read.media), sum(part.tokens for part in read.media)
            prompts.append(FirstPrompt(row.where, len(read.tokens), text, trials, trained, images, seen))
        return cls(tuple(prompts), job.prompt_tokens, job.prompts.kind)

    def text(self) -> list[str]:
        """Return lines for the terminal. Long prompts are cut in the middle."""
        lines = []
        for prompt in self.prompts:
            trained = "" if prompt.trained is None else f", {prompt.trained:,} of them with a loss"
            several = "s" * (prompt.images > 1)
            images = f", {prompt.image_tokens:,} of {prompt.images} image{several}" if prompt.images else ""
            lines += [f"  {f'first {self.kind}':<12}  {prompt.where}, {prompt.tokens:,} tokens{images}{trained}"]
            lines += _shown(prompt.text)
            lines += [line for trial in prompt.trials for line in trial_lines(trial)]
        ordered = sorted(self.prompt_tokens)
        shares = {"shortest": 0.0, "median": 0.5, "95%": 0.95, "longest": 1.0}
        quantiles = (f"{name} {ordered[round(share * (len(ordered) - 1))]:,}" for name, share in shares.items())
        return [*lines, f"  tokens of the first {len(ordered):,} {self.kind}s  {', '.join(quantiles)}"]


@dataclass(frozen=True)
class FirstPrompt:
    """A prompt as the model reads it, and the rewards of its trial completions."""

    where: str
    tokens: int
    text: str
    """The prompt with its special tokens."""
    trials: tuple[Trial, ...]
    """Scores of the reference answer, and of the user's trial completion if there is one."""
    trained: int | None = None
    """Number of tokens with a loss; None: the row is a prompt."""
    images: int = 0
    image_tokens: int = 0
    """Number of tokens of the prompt's images."""


def _with_images_named(read: EncodedPrompt, encoder: PromptEncoder) -> str:
    """Return a prompt as text with each image replaced by its size."""
    pieces, after, decode = list[Any](), 0, encoder.tokenizer.decode
    for part in read.media:
        before = decode(list(read.tokens[after : part.start]), skip_special_tokens=False)
        height, width = part.data.shape[:2]
        pieces += [before, f"[image of {width} x {height} pixels, {part.tokens:,} tokens]"]
        after = part.start + part.tokens
    return "".join(map(str, [*pieces, decode(list(read.tokens[after:]), skip_special_tokens=False)]))


def _shown(text: str) -> list[str]:
    lines = [
        f"    | {line}".rstrip()
        for paragraph in text.split("\n")
        for line in textwrap.wrap(paragraph, columns() - 6, drop_whitespace=False, replace_whitespace=False) or [""]
    ]
    left_out = len(lines) - 2 * SHOWN_LINES
    if left_out <= 0:
        return lines
    return [*lines[:SHOWN_LINES], f"    ... {left_out:,} more lines ...", *lines[-SHOWN_LINES:]]


def trial_lines(trial: Trial) -> list[str]:
    each = ", ".join(f"{name} {'does not apply' if value is None else f'{value:g}'}"
                     for name, value in trial.scores.items())  # fmt: skip
    total = "none" if trial.reward is None else f"{trial.reward:g}"
    short = textwrap.shorten(trial.completion, SHOWN_COLUMNS, placeholder=" ...")
    return wrapped(f"{total} for {short!r} ({each})", "  reward        ", " " * 16)
