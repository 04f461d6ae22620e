"""Images from outside: texts with image parts, whose tokens have three positions, and a model that takes both.

The toy puts a row of an image's data in the place of each of its tokens, and adds what it makes of the second and third
position to every embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.backends.batching.packed_rows import PackedRow
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import MediaPart
from rlctl.data.texts import TrainedText
from rlctl.rollouts.dataset import TextBatch, columns_of, group_of

PLACEHOLDER, VOCAB, SIDE = 5, 61, 2


def image(seed: int, start: int) -> MediaPart:
    """An image of 2 x 3 tokens with a few numbers each."""
    data = np.random.default_rng(seed).standard_normal((SIDE, SIDE + 1, 4)).astype(np.float32)
    return MediaPart("image", data, start, SIDE * (SIDE + 1), (PLACEHOLDER,))


def grid_positions(tokens_T: np.ndarray, media: Sequence[MediaPart]) -> np.ndarray:
    """Return positions [3, T]: the count, the row and the column; inside an image, row and column in its grid."""
    counts = np.arange(len(tokens_T))
    found = np.stack([counts, counts, counts])
    for part in media:
        height, width = part.data.shape[:2]
        place = slice(part.start, part.start + part.tokens)
        found[1:, place] = part.start + np.indices((height, width)).reshape(2, -1)
        found[1:, place.stop :] += max(height, width) - part.tokens
    return found


def text(seed: int, sample: int, images: int) -> TrainedText:
    """A text of a pair: a prompt with some images, which both begin with, and an answer."""
    rng = np.random.default_rng(seed)
    pieces: list[np.ndarray] = [rng.integers(6, VOCAB, 2)]
    media = []
    for number in range(images):
        media.append(image(10 * seed + number, sum(map(len, pieces))))
        pieces += [np.full(media[-1].tokens, PLACEHOLDER), rng.integers(6, VOCAB, 2)]
    prompt = sum(map(len, pieces))
    answer = np.random.default_rng(100 * seed + sample).integers(6, VOCAB, 3 + seed + sample)
    tokens_T = np.concatenate([*pieces, answer]).astype(np.int32)
    return TrainedText(tokens_T, np.arange(len(tokens_T)) >= prompt, media=tuple(media))


@dataclass
class ImageSource:
    """Pairs with no, one and two images; `put` makes handles of columns."""

    put: Any

    def next(self, version: int) -> TextBatch:
        found = []
        for position in range(4):
            texts = [text(position, sample, position % 3) for sample in range(2)]
            row = PromptRow(0, "toy", "", None)
            found.append(group_of(position, row, texts, self.put(columns_of(texts))))
        return TextBatch(tuple(found))

    def state(self) -> dict[str, Any]:
        return {}

    def write(self, directory: Path) -> None: ...

    def restore(self, state: Mapping[str, Any], directory: Path) -> None: ...


def embedded(embeddings: Any, part: PackedRow) -> Tensor:
    """The embeddings [1, T, H] of a row, or of a rank's part of it."""
    found: Tensor = embeddings(part.tokens_T[None])
    hidden = found.shape[-1]
    scale = torch.linspace(0.1, 1.0, hidden)
    found = found + 0.1 * torch.sin(
        part.positions_kT[1:, :, None] * scale * torch.tensor([1.0, 2.0])[:, None, None]
    ).sum(0)
    if part.media_T is None:
        return found
    tokens = torch.from_numpy(np.concatenate([one.data.reshape(one.tokens, -1) for one in part.media]))
    seen_MH = 0.1 * torch.nn.functional.pad(tokens, (0, hidden - tokens.shape[1])).to(found.dtype)
    return torch.where((part.media_T >= 0)[None, :, None], seen_MH[part.media_T.clamp(0)], found)


class ImageWorker(DTensorWorker):
    """A rank of the toy model."""

    def positions(self, tokens_T: np.ndarray, media: Sequence[MediaPart]) -> np.ndarray:
        return grid_positions(tokens_T, media)

    def build_model(self) -> None:
        super().build_model()
        self.model.inputs = self._inputs

    def _inputs(self, part: PackedRow) -> dict[str, Tensor]:
        embeds = embedded(self.model.inner.get_input_embeddings(), part)
        return {"inputs_embeds": embeds, "position_ids": part.positions_kT[:1]}
