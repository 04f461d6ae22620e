"""Images of prompts: where a row holds them, their pixels, and the tokens that a model reads them as.

A message with images has a mark in its text for each, and the images under the key `images`. The processor in the
model's directory decides on pixels and tokens, for trainer and engine alike.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.config.files import cache_directory, user_path
from rlctl.data.rollouts import MediaPart
from rlctl.errors import InputError, MachineError, first_line

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

IMAGE = "image"
"""Kind of a `MediaPart`, as vLLM calls it."""
IMAGES = "images"
"""Key of a message, and column of a row, with several images."""
MARK = "\ufdd0"
"""Place of an image in the text of a message: a code point that Unicode keeps out of texts."""
FETCH_TIMEOUT_S = 30.0
MOST_PIXELS, MOST_BYTES = 50_000_000, 50_000_000
"""Pixels and encoded bytes of an image by default (`data.image_pixels`, `data.image_bytes`)."""
_ORIENTATION = 0x0112
_TURNED = range(5, 9)
"""Tag of EXIF, and its values that swap width and height."""
MODEL_INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes", "spatial_shapes")
"""Outputs of processors that models take as the pixels of images."""
KEPT_IMAGES = 64
"""Decoded images that a process keeps: an image comes again with the length of its prompt, its request, and its next
turn."""


@dataclass(frozen=True)
class ImageLimits:
    """What an image may hold at most, before it is decoded."""

    pixels: int = MOST_PIXELS
    bytes: int = MOST_BYTES


@dataclass(frozen=True)
class ImageSource:
    """An image of a row that was not read yet."""

    where: str
    """How to name it in a message, for example `rows.jsonl, line 3, cat.png`."""
    place: str = ""
    """Path or URL; empty: `data` holds it."""
    data: bytes = field(default=b"", repr=False)
    """An encoded image, such as the bytes of a PNG file."""
    limits: ImageLimits = ImageLimits()

    def encoded(self) -> bytes:
        """Return the bytes of the file. Raises InputError that names the row."""
        if not self.place:
            return self._within(self.data)
        if _is_url(self.place):
            return self._fetched()
        try:
            with open(self.place, "rb") as file:
                return self._within(file.read(self.limits.bytes + 1))
        except OSError as error:
            why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            raise InputError(f"{self.where}: {why}.", "Paths are relative to the data file.") from error

    def size(self) -> tuple[int, int]:
        """Return (height, width) after its EXIF orientation, from the header. Raises InputError."""
        return _size(self)

    def decoded(self) -> Image:
        """Return the image, upright and in its own mode. Raises InputError where it is broken or too large."""
        from PIL import ImageOps

        image = self._opened()
        try:
            image.load()
            upright = ImageOps.exif_transpose(image)
        except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, MemoryError) as error:
            raise self._broken(error) from error
        return upright

    def _opened(self) -> Image:
        """Return the image with its header read."""
        from PIL import Image, UnidentifiedImageError

        data = self.encoded()
        try:
            image = Image.open(io.BytesIO(data))
        except Image.DecompressionBombError as error:
            raise self._too_large(f"far more than {self.limits.pixels:,} pixels") from error
        except UnidentifiedImageError as error:
            what = "is empty" if not data else "is not an image that PIL can read"
            raise InputError(f"{self.where}: it {what}.", "Write it as PNG, JPEG or WebP.") from error
        except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError) as error:
            raise self._broken(error) from error
        if image.width * image.height > self.limits.pixels:
            raise self._too_large(f"{image.width:,} x {image.height:,} pixels")
        return image

    def _too_large(self, has: str) -> InputError:
        hint = f"data.image_pixels allows {self.limits.pixels:,}: scale it down, or raise that."
        return InputError(f"{self.where}: it has {has}.", hint)

    def _broken(self, error: Exception) -> InputError:
        return InputError(f"{self.where}: the image is damaged ({first_line(error)}).", "Replace the file.")

    def _within(self, data: bytes) -> bytes:
        if len(data) > self.limits.bytes:
            hint = f"data.image_bytes allows {self.limits.bytes:,}: scale it down, or raise that."
            raise InputError(f"{self.where}: it has more bytes than an image may have.", hint)
        return data

    def _fetched(self) -> bytes:
        """Return what is at the URL, which is kept on disk."""
        kept = cache_directory() / IMAGES / hashlib.sha256(self.place.encode()).hexdigest()
        if kept.is_file():
            return self._within(kept.read_bytes())
        request = urllib.request.Request(self.place, headers={"User-Agent": "rlctl"})
        try:
            with urllib.request.urlopen(request, timeout=FETCH_TIMEOUT_S) as answer:
                data = self._within(answer.read(self.limits.bytes + 1))
        except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
            raise InputError(
                f"{self.where}: it cannot be fetched ({error}).", "Check the URL and the network."
            ) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(kept)
        return data


@lru_cache(maxsize=1_000_000)
def _size(source: ImageSource) -> tuple[int, int]:
    image = source._opened()
    turned = image.getexif().get(_ORIENTATION) in _TURNED
    return (image.width, image.height) if turned else (image.height, image.width)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def image_source(value: Any, where: str, folder: Path, limits: ImageLimits = ImageLimits()) -> ImageSource:
    """Return the image that a value of a row stands for.

    A value is a path relative to `folder`, a URL of http(s), a data URL, base64, bytes, an image of PIL, or an object
    with `bytes`, `path`, `url`, `image_url`, `image`, `base64` or `data`. Raises InputError for anything else.
    """
    if isinstance(value, Mapping):
        inner = next((value[key] for key in _KEYS if value.get(key)), None)
        if inner is None:
            raise InputError(f"{where}: an image has neither `bytes` nor `path` nor `url`.", _FORMS)
        if isinstance(inner, bytes) and isinstance(value.get("path"), str):
            where = f"{where}, {value['path']}"
        return image_source(inner, where, folder, limits)
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageSource(where, data=bytes(value), limits=limits)
    if isinstance(value, str) and value.startswith("data:"):
        return ImageSource(where, data=_from_base64(value.partition(",")[2], where), limits=limits)
    if isinstance(value, str) and _is_url(value):
        return ImageSource(f"{where}, {value}", place=value, limits=limits)
    if isinstance(value, str) and value:
        path = folder / user_path(value.removeprefix("file://"))
        if len(value) > _LONGEST_PATH or (_looks_encoded(value) and not path.is_file()):
            return ImageSource(where, data=_from_base64(value, where), limits=limits)
        return ImageSource(f"{where}, {value}", place=str(path), limits=limits)
    if (held := _saved(value)) is not None:
        return ImageSource(where, data=held, limits=limits)
    raise InputError(f"{where}: an image is of type {type(value).__name__}.", _FORMS)


def _saved(value: Any) -> bytes | None:
    """Return an image of PIL as a file without loss; None: the value is none."""
    from PIL import Image

    if not isinstance(value, Image.Image):
        return None
    file = io.BytesIO()
    value.save(file, format="TIFF" if value.mode == "CMYK" else "PNG")
    return file.getvalue()


_KEYS = ("bytes", "image", "image_url", "url", "base64", "data", "path")
_FORMS = "An image is a path, a URL, a data URL, base64, or an object with `bytes` or `path`."
_LONGEST_PATH = 4096
_ENCODED = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A")
"""How PNG, JPEG, GIF, WebP, BMP and TIFF files begin in base64."""


def _looks_encoded(text: str) -> bool:
    return len(text) > 64 and text.startswith(_ENCODED)


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: an image is neither a path nor base64 ({error}).", _FORMS) from error


# Tokens and pixels


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
    """The one of transformers. vLLM opens the same directory in the same way, so that both have one backend."""
    _expansions: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Tokens of an image by its (height, width): nothing else of it matters."""

    @classmethod
    def open(cls, directory: Path | str, *, trust_remote_code: bool = False) -> ImageProcessor:
        """Open the processor of a model. Raises InputError where it has none that reads images."""
        return _opened_processor(str(directory), trust_remote_code)

    @cached_property
    def placeholder(self) -> str:
        """The text that the chat template writes for an image."""
        return str(self.processor.image_token)

    @cached_property
    def placeholder_id(self) -> int:
        """Its token, which the processor replaces."""
        return int(self.processor.tokenizer.convert_tokens_to_ids(self.placeholder))

    @cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """Tokens that stand for images, sound or video: a completion with one would be taken for an input."""
        kinds = ("image", "video", "audio", "boi", "eoi", "context_image", "start_image", "end_image", "vision_start",
                 "vision_end", "fake_image", "global_image")  # fmt: skip
        tokenizer, known = self.processor.tokenizer, set[int]()
        for holder in (self.processor, tokenizer):
            named = (getattr(holder, f"{kind}_token", None) for kind in kinds)
            texts = [str(one) for one in named if one is not None]
            known |= {tokenizer.convert_tokens_to_ids(one) for one in texts}
        special = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
        known |= {*self.expansion((32, 32))} & special
        unknown = {None, tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        return tuple(sorted(known - unknown))

    def rgb(self, image: Image) -> np.ndarray:
        """Return an image of PIL as uint8 [height, width, 3], converted from other modes as the processor does."""
        converts = getattr(self.processor.image_processor, "convert_to_rgb", None)
        found = converts(image) if converts is not None else image
        return np.array(found if found.mode == "RGB" else found.convert("RGB"))

    def expansion(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the tokens that stand for an image of (height, width)."""
        if size not in self._expansions:
            blank = np.zeros((*size, 3), np.uint8)
            self._expansions[size] = tuple(self._processed([blank])["input_ids"][0])
        return self._expansions[size]

    def layout(
        self, tokens: Sequence[int], sizes: Sequence[tuple[int, int]], where: str = "a prompt"
    ) -> tuple[list[int], list[Place]]:
        """Return tokens with images of these sizes in the places of the placeholders, and where the images are. Raises
        InputError where there are not as many of both."""
        placeholder = self.placeholder_id
        if (count := sum(token == placeholder for token in tokens)) != len(sizes):
            raise InputError(
                f"{where}: {len(sizes)} image{'s' * (len(sizes) != 1)}, and the prompt has {count} of the token "
                f"{self.placeholder!r}, which stands for one.",
                "The chat template writes it for a part of type image: give another with --chat-template.",
            )
        pieces, images = list[_Piece](), iter(enumerate(sizes))
        for token in tokens:
            if token != placeholder:
                pieces.append(_Piece(token, (token,), None))
                continue
            number, size = next(images)
            expanded = self.expansion(size)
            at = expanded.index(placeholder) if placeholder in expanded else 0
            pieces += [_Piece(one, (placeholder,) if place == at else (), number) for place, one in enumerate(expanded)]
        for first, second, merged in self._merges:
            pieces = _merged(pieces, first, second, merged)
        return [piece.token for piece in pieces], _places(pieces, len(sizes))

    def expand(
        self, tokens: Sequence[int], images: Sequence[np.ndarray], where: str = "a prompt"
    ) -> tuple[list[int], tuple[MediaPart, ...]]:
        """Return tokens as the model reads them, and the images (uint8 [height, width, 3]) among them. `tokens` have a
        placeholder for each image; what has been expanded must not be expanded again."""
        sizes = [(int(image.shape[0]), int(image.shape[1])) for image in images]
        expanded, places = self.layout(tokens, sizes, where)
        found = zip(images, places, strict=True)
        return expanded, tuple(MediaPart(IMAGE, one, at.start, at.tokens, at.written) for one, at in found)

    def pixels(self, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model for images of one sample, as the processor of transformers gives them."""
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
        one, two, three, four = lines
        return [(one, two, three), (two, one, three), (two, two, four)]

    def _processed(self, images: Sequence[np.ndarray], **options: Any) -> Any:
        from PIL import Image

        shown = [Image.fromarray(image) for image in images]
        text = self.placeholder * len(shown)
        return self.processor(text=[text], images=[shown], add_special_tokens=False, **options)


@dataclass(frozen=True)
class _Piece:
    """A token, what stands for it before the expansion, and the number of the image that it is of."""

    token: int
    written: tuple[int, ...]
    image: int | None


def _merged(pieces: list[_Piece], first: int, second: int, merged: int) -> list[_Piece]:
    """Return pieces with one token in the place of each pair, which belongs to an image if one of the pair does."""
    found: list[_Piece] = []
    for piece in pieces:
        before = found[-1] if found else None
        if before is not None and (before.token, piece.token) == (first, second):
            image = piece.image if before.image is None else before.image
            found[-1] = _Piece(merged, before.written + piece.written, image)
        else:
            found.append(piece)
    return found


def _places(pieces: list[_Piece], images: int) -> list[Place]:
    of_images: list[list[int]] = [[] for _ in range(images)]
    for at, piece in enumerate(pieces):
        if piece.image is not None:
            of_images[piece.image].append(at)
    written = [tuple(token for at in places for token in pieces[at].written) for places in of_images]
    return [Place(places[0], len(places), own) for places, own in zip(of_images, written, strict=True)]


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
