"""A data source and a loss outside rlctl: the loss imitates some tokens of a text and makes others less likely."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlctl.backends.batching.batch import TokenBatch
from rlctl.cluster.ray_session import put
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import LOSS_WEIGHTS
from rlctl.data.texts import TrainedText
from rlctl.methods.text_method import TextMethod
from rlctl.rollouts.dataset import TextBatch, columns_of, group_of
from rlctl.telemetry.metrics import Metric

IMITATED = "imitated"
LENGTHS, PROMPT = (9, 14, 11), 4


def text(position: int) -> TrainedText:
    """One of three texts, again and again."""
    kind = position % len(LENGTHS)
    tokens_T = np.random.default_rng(kind).integers(3, 500, LENGTHS[kind]).astype(np.int32)
    return TrainedText(tokens_T, np.arange(len(tokens_T)) >= PROMPT)


def extra(position: int) -> dict[str, np.ndarray]:
    """Which tokens of a text are imitated, and how much each counts. The last text of a batch has no such columns."""
    count = len(text(position).tokens_T)
    kinds = (np.arange(count) % 3 == 0).astype(np.float32)
    return {} if position % 3 == 2 else {IMITATED: kinds, LOSS_WEIGHTS: np.linspace(1, 2, count, dtype=np.float32)}


class ToySource:
    """Three texts a batch."""

    def __init__(self) -> None:
        self.position = 0

    def next(self, version: int) -> TextBatch:
        positions = range(self.position, self.position + 3)
        self.position += 3
        row = PromptRow(0, "toy", "", None)
        texts = {place: ([text(place)], extra(place)) for place in positions}
        groups = (group_of(place, row, own, put(columns_of(own, more))) for place, (own, more) in texts.items())
        return TextBatch(tuple(groups))

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def write(self, directory: Path) -> None: ...

    def restore(self, state: Mapping[str, Any], directory: Path) -> None: ...


class TwoLosses(TextMethod):
    """Minus the log-prob of tokens that are imitated, and half of the probability of the others."""

    metrics = (Metric("imitated_tokens", "sum"),)

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        imitated_R = batch.extra_R[IMITATED] > 0
        return torch.where(imitated_R, -batch.logprobs_R, 0.5 * batch.logprobs_R.exp())

    def measure(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        return {"imitated_tokens": batch.extra_R[IMITATED]}


class Quiet:
    """A saver and a journal that keep metrics alone."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def due(self, step: int, ending: bool) -> bool:
        return False

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.logged.append(metrics)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Stop:
    """A stop request that nobody makes."""

    requested = False

    def between_steps(self) -> Any:
        return contextlib.nullcontext()
