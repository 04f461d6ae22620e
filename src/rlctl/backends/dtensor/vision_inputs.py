"""Rows with images: pixels from the model's processor, token positions, and the language part's embeddings.

The tower runs once for all images of a row. Each tensor-parallel rank runs it whole and inserts the embeddings of its
part of the row; gradients are partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.backends.batching.packed_rows import PackedRow, counted_positions
from rlctl.backends.dtensor.tensor_parallel import local_view
from rlctl.data.images import ImageProcessor
from rlctl.data.rollouts import MediaPart
from rlctl.errors import InputError
from rlctl.models.facts import VisionFacts
from rlctl.models.vision import VISION_FAMILIES

GRID = "image_grid_thw"
"""The input of models whose tokens have positions in time, height and width: patches of each image along these."""
TILES_AXIS = 1
"""The axis of an image's tiles in inputs that have one of samples in front."""


class RowImages:
    """A rank's inputs for the images of rows."""

    def __init__(self, inner: Any, directory: Path, vision: VisionFacts, group: Any, *, mutual: bool = False) -> None:
        """`group`: the tensor-parallel ranks. `mutual`: the tokens of an image attend to each other in both
        directions."""
        self._inner, self._group, self._token = inner, group, vision.image_token
        self._directory = directory
        self.mutual = mutual
        family = VISION_FAMILIES[vision.kind]
        names = (name for name, _ in inner.named_parameters() if family.part_of(name) in ("vision", "projector"))
        self._seeing = [tuple(name.rpartition(".")[::2]) for name in names]
        """Module and name of each parameter of tower and projector."""
        language = inner.get_submodule(family.language)
        self._by_layer = language if getattr(language, "hidden_size_per_layer_input", 0) else None
        """The language part, where each of its layers takes embeddings of the tokens."""
        self._made: dict[int, tuple[np.ndarray, dict[str, Tensor]]] = {}

    def forget(self) -> None:
        self._made.clear()

    def positions(self, tokens_T: np.ndarray, media: Sequence[MediaPart]) -> np.ndarray:
        """Return positions of a rollout's tokens (`Positions`): [4, T] for time, height and width after the count, else
        [1, T]."""
        counted_1T = counted_positions(tokens_T, media)
        self._require_own_tokens(tokens_T, media)
        index = getattr(self._inner.model, "get_rope_index", None)
        if index is None:
            return counted_1T
        if not media:
            return np.repeat(counted_1T, 4, 0)
        kinds_1T = torch.from_numpy(tokens_T == self._token).int()[None]
        grids = torch.cat([self._pixels(part)[GRID] for part in media])
        tokens_1T = torch.from_numpy(tokens_T.astype(np.int64))[None]
        found_31T, _ = index(tokens_1T, mm_token_type_ids=kinds_1T, image_grid_thw=grids)
        return np.concatenate([counted_1T, found_31T[:, 0].numpy()])

    def mutual_tokens(self, row: PackedRow) -> np.ndarray | None:
        """Return the number of the image of each token [T], as `RowAttention` takes them; -1: text. None: attention is
        causal."""
        if not (self.mutual and row.media):
            return None
        tokens_T, found_T = row.tokens_T.cpu().numpy(), np.full(len(row.tokens_T), -1)
        for number, part in enumerate(row.media):
            tokens_of_part = slice(part.start, part.start + part.tokens)
            found_T[tokens_of_part][tokens_T[tokens_of_part] == self._token] = number
        return found_T

    def inputs(self, row: PackedRow) -> dict[str, Any]:
        """Return the language part's inputs of a row: embeddings [1, T / ranks, H], positions, and Qwen3-VL's layer
        additions."""
        seen_T = row.tokens_T == self._token
        embeds_1TH = self._inner.get_input_embeddings()(row.tokens_T.masked_fill(seen_T, 0)[None])
        arguments: dict[str, Any] = {"position_ids": _model_positions(row.positions_kT)}
        if self._by_layer is not None:  # tokens of images are padding to it
            tokens_T = row.tokens_T.masked_fill(seen_T, self._by_layer.config.pad_token_id or 0)
            arguments["per_layer_inputs"] = self._by_layer.get_per_layer_inputs(tokens_T[None], None)
        if not row.media:
            return arguments | {"inputs_embeds": self._with_every_parameter(embeds_1TH)}
        pixels = {name: value.to(embeds_1TH.device) for name, value in self._joined(row.media).items()}
        image_features = self._inner.model.get_image_features(**pixels)
        features_MH = _flat(image_features.pooler_output)
        if len(features_MH) != int(seen_T.sum()):
            raise InputError(
                f"The images of a row have {int(seen_T.sum())} tokens, and the model makes {len(features_MH)} "
                f"embeddings of them with the processor in {self._directory}.",
                "Give engine and trainer the same processor files.",
            )
        own_T, where = self._own_part(seen_T)
        embeds_1TH = embeds_1TH.masked_scatter(own_T[None, :, None], features_MH[where].to(embeds_1TH.dtype))
        if (deep := getattr(image_features, "deepstack_features", None)) is not None:
            arguments["visual_pos_masks"] = own_T[None]
            arguments["deepstack_visual_embeds"] = [_flat(layer)[where] for layer in deep]
        return arguments | {"inputs_embeds": embeds_1TH}

    def sequences(self, row: PackedRow, units: int) -> dict[str, Any]:
        """Return `inputs` of a row with `units` padded texts, one sequence each: [units, T / units, H]. Position ids
        are given only for models with several positions a token."""
        inputs = self.inputs(row)
        inputs["inputs_embeds"] = inputs["inputs_embeds"].unflatten(1, (units, -1))[0]
        positions = inputs.pop("position_ids")
        if len(positions) > 1:
            inputs["position_ids"] = positions.unflatten(2, (units, -1))[:, 0]
        return inputs

    def _own_part(self, seen_T: Tensor) -> tuple[Tensor, slice]:
        """Return this rank's image tokens [T / ranks] and their places among the row's."""
        size, rank = self._group.size(), self._group.rank()
        local_count = len(seen_T) // size
        before, own_T = int(seen_T[: local_count * rank].sum()), seen_T[local_count * rank : local_count * (rank + 1)]
        return own_T, slice(before, before + int(own_T.sum()))

    def _with_every_parameter(self, embeds: Tensor) -> Tensor:
        """Add 0 times each trained tower and projector parameter, so FSDP2 ranks without images have gradients too."""
        nothing = embeds.new_zeros(())
        for path, name in self._seeing:
            parameter = self._inner.get_submodule(path)._parameters[name]
            if parameter.requires_grad and torch.is_grad_enabled():
                nothing = nothing + 0 * local_view(parameter).reshape(-1)[:1].sum()
        return embeds + nothing.to(embeds.dtype)

    def _require_own_tokens(self, tokens_T: np.ndarray, media: Sequence[MediaPart]) -> None:
        outside_T = tokens_T == self._token
        for part in media:
            outside_T[part.start : part.start + part.tokens] = False
        if outside_T.any():
            raise InputError(
                f"A rollout has the token {self._token} at place {int(outside_T.argmax())}, which stands for an image, "
                "and there is no image.",
                "Take its text out of the row, or give the row an image.",
            )

    def _pixels(self, part: MediaPart) -> dict[str, Tensor]:
        kept = self._made.get(id(part.data))
        if kept is None:
            kept = part.data, ImageProcessor.open(self._directory).pixels([part.data])
            self._made[id(part.data)] = kept  # with the image, so that no other one gets its number
        return kept[1]

    def _joined(self, media: Sequence[MediaPart]) -> dict[str, Tensor]:
        each = [self._pixels(part) for part in media]
        return {name: _side_by_side(name, [arguments[name] for arguments in each]) for name in each[0]}


def _model_positions(positions_kT: Tensor) -> Tensor:
    """[1, T], or [3, 1, T] in time, height and width."""
    return positions_kT if len(positions_kT) == 1 else positions_kT[1:, None]


def _side_by_side(name: str, values: Sequence[Tensor]) -> Tensor:
    """Inputs of several images as one. Tiles [1, tiles, 3, H, W] of idefics3 are padded to the largest."""
    tiled = values[0].dim() >= 4 + (name == "pixel_values")
    if not tiled:
        return torch.cat(list(values))
    height, width = (max(value.shape[axis] for value in values) for axis in (-2, -1))
    padded = [F.pad(value, (0, width - value.shape[-1], 0, height - value.shape[-2])) for value in values]
    return torch.cat(padded, TILES_AXIS)


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Embeddings [M, H] of all images, which models give by image."""
    joined = features if isinstance(features, Tensor) else torch.cat([feature.flatten(0, -2) for feature in features])
    return joined.flatten(0, -2)
