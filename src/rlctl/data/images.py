"""A model's image pixels and tokens, from the processor in its directory, for trainer and engine alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.data.image_sources import IMAGE, ImageSource
from rlctl.data.rollouts import MediaPart
from rlctl.errors import InputError, MachineError, first_line

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

MODEL_INPUTS = (
    "pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes", "spatial_shapes", "image_position_ids",
)  # fmt: skip
"""Outputs of processors that models take as the pixels of images."""
KEPT_BYTES = 256 << 20
"""Decoded images cached by a process, reused for the prompt's length, its request and its next turn."""


@dataclass(frozen=True)
class Place:
    """Where an image stands among expanded tokens, as in a `MediaPart`."""

    start: int
    tokens: int
    written: tuple[int, ...]


@dataclass(frozen=True)
class ImageProcessor:
    """The processor of a model's directory. Make it with `open`."""

    processor: Any
    """transformers' processor. vLLM opens the same directory, so both use one backend."""
    _expansions: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Tokens of an image by its (height, width), which determine them."""
    _read: OrderedDict[ImageSource, np.ndarray] = field(default_factory=OrderedDict)
    """The images that were read last."""

    @classmethod
    def open(cls, directory: Path | str, *, trust_remote_code: bool = False) -> ImageProcessor:
        """Open the processor of a model. Raises InputError where it has none that reads images."""
        return _opened_processor(str(directory), trust_remote_code)

    @cached_property
    def placeholder(self) -> str:
        return str(self.processor.image_token)

    @cached_property
    def placeholder_id(self) -> int:
        return int(self.processor.tokenizer.convert_tokens_to_ids(self.placeholder))

    @cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """Tokens that represent images, sound or video. In a completion they would be read as inputs."""
        kinds = ("image", "video", "audio", "boi", "eoi", "boa", "eoa", "context_image", "start_image", "end_image",
                 "vision_start", "vision_end", "fake_image", "global_image")  # fmt: skip
        tokenizer, token_ids = self.processor.tokenizer, set[int]()
        for holder in (self.processor, tokenizer):
            attributes = (getattr(holder, f"{kind}_token", None) for kind in kinds)
            texts = [str(text) for text in attributes if text is not None]
            token_ids |= {tokenizer.convert_tokens_to_ids(text) for text in texts}
        special = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        token_ids |= {*self.expansion((32, 32))} & special
        unknown = {None, tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        return tuple(sorted(token_ids - unknown))

    def rgb(self, image: Image) -> np.ndarray:
        """Return a PIL image as uint8 [height, width, 3], converted as the processor does."""
        converts = getattr(self.processor.image_processor, "convert_to_rgb", None)
        converted = converts(image) if converts is not None else image
        return np.array(converted if converted.mode == "RGB" else converted.convert("RGB"))

    def read(self, source: ImageSource) -> np.ndarray:
        """Return an image of a row as `rgb` gives it. Raises InputError that names the row."""
        decoded = self._read.pop(source, None)
        self._read[source] = decoded = self.rgb(source.decoded()) if decoded is None else decoded
        while len(self._read) > 1 and sum(image.nbytes for image in self._read.values()) > KEPT_BYTES:
            self._read.popitem(last=False)
        return decoded

    def expansion(self, size: tuple[int, int], where: str = "an image") -> tuple[int, ...]:
        """Return the tokens of an image of (height, width). Raises InputError for a size that the processor refuses."""
        if size not in self._expansions:
            blank = np.zeros((*size, 3), np.uint8)
            try:
                self._expansions[size] = tuple(self._processed([blank])["input_ids"][0])
            except (ValueError, ArithmeticError, RuntimeError) as error:
                raise InputError(
                    f"{where}: the model's processor refuses an image of {size[1]:,} x {size[0]:,} pixels "
                    f"({first_line(error)}).",
                    "Give the image another shape, or leave such rows out with --set data.broken_images=drop.",
                ) from error
        return self._expansions[size]

    def layout(
        self, tokens: Sequence[int], sizes: Sequence[tuple[int, int]], where: str = "a prompt"
    ) -> tuple[list[int], list[Place]]:
        """Replace placeholders by the tokens of images of these sizes, and return their positions. Raises InputError if
        the numbers of placeholders and images differ."""
        placeholder = self.placeholder_id
        if (count := sum(token == placeholder for token in tokens)) != len(sizes):
            raise InputError(
                f"{where}: {len(sizes)} image{'s' * (len(sizes) != 1)}, and the prompt has {count} of the token "
                f"{self.placeholder!r}, which stands for one.",
                "The chat template writes it for a part of type image: give another with --chat-template.",
            )
        pieces, images = list[Piece](), iter(enumerate(sizes))
        for token in tokens:
            if token != placeholder:
                pieces.append(Piece(token, (token,), None))
                continue
            number, size = next(images)
            expanded = self.expansion(size, where)
            at = expanded.index(placeholder) if placeholder in expanded else 0
            pieces += [
                Piece(token, (placeholder,) if place == at else (), number) for place, token in enumerate(expanded)
            ]
        for first, second, merged in self._merges:
            pieces = joined(pieces, first, second, merged)
        return [piece.token for piece in pieces], _places(pieces, len(sizes))

    def expand(
        self, tokens: Sequence[int], images: Sequence[np.ndarray], where: str = "a prompt"
    ) -> tuple[list[int], tuple[MediaPart, ...]]:
        """Return the model's tokens and images (uint8 [height, width, 3]). `tokens` have one placeholder per image; do
        not expand twice."""
        sizes = [(int(image.shape[0]), int(image.shape[1])) for image in images]
        expanded, places = self.layout(tokens, sizes, where)
        placed = zip(images, places, strict=True)
        return expanded, tuple(MediaPart(IMAGE, source, at.start, at.tokens, at.written) for source, at in placed)

    def pixels(self, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        made = self._processed(images, return_tensors="pt")
        return {name: made[name] for name in MODEL_INPUTS if name in made}

    @cached_property
    def _merges(self) -> list[tuple[int, int, int]]:
        """Pairs of tokens that are one token where an image's blank lines meet others (Gemma 3), as vLLM joins them."""
        expanded = self.expansion((32, 32))
        lines = [self.processor.tokenizer.convert_tokens_to_ids("\n" * count) for count in range(1, 5)]
        unknown = self.processor.tokenizer.unk_token_id
        if expanded[0] != lines[1] or any(line is None or line == unknown for line in lines):
            return []
        return line_merges(*lines)

    def _processed(self, images: Sequence[np.ndarray], **options: Any) -> Any:
        from PIL import Image

        inputs = [Image.fromarray(image) for image in images]
        text = self.placeholder * len(inputs)
        return self.processor(text=[text], images=[inputs], add_special_tokens=False, **options)


def line_merges(one: int, two: int, three: int, four: int) -> list[tuple[int, int, int]]:
    """Return the merges (left, right, merged) of tokens for one to four newlines."""
    return [(one, two, three), (two, one, three), (two, two, four)]


@dataclass(frozen=True)
class Piece:
    """A token, its form before the expansion, and the number of its image."""

    token: int
    written: tuple[int, ...]
    image: int | None


def joined(pieces: list[Piece], first: int, second: int, merged: int) -> list[Piece]:
    """Return pieces with each pair that touches an image merged into one token of that image. Pairs of text stay: the
    model may have sampled them."""
    result: list[Piece] = []
    for piece in pieces:
        before = result[-1] if result else None
        of_image = before is not None and (before.image, piece.image) != (None, None)
        if before is not None and of_image and (before.token, piece.token) == (first, second):
            image = piece.image if before.image is None else before.image
            result[-1] = Piece(merged, before.written + piece.written, image)
        else:
            result.append(piece)
    return result


def _places(pieces: list[Piece], images: int) -> list[Place]:
    of_images: list[list[int]] = [[] for _ in range(images)]
    for at, piece in enumerate(pieces):
        if piece.image is not None:
            of_images[piece.image].append(at)
    written = [tuple(token for at in places for token in pieces[at].written) for places in of_images]
    return [Place(places[0], len(places), pixels) for places, pixels in zip(of_images, written, strict=True)]


@lru_cache(maxsize=4)
def _opened_processor(directory: str, trust_remote_code: bool) -> ImageProcessor:
    from transformers import AutoProcessor

    try:
        processor: Any = AutoProcessor.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise MachineError(
            f"The processor of {directory} needs a package that is not installed: {first_line(error)}",
            "Install torchvision, pillow and num2words; `make venv` does.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{directory} has no processor that can be loaded: {first_line(error)}",
            "A vision-language model has preprocessor_config.json or processor_config.json next to its weights.",
        ) from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "image_token", None) is None:
        raise InputError(
            f"The model {directory} reads no images.", "Name a vision-language model, or leave images out."
        )
    return ImageProcessor(processor)
