"""Images in rows: files, URLs and encoded bytes, within limits, decoded when a prompt needs them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.files import cache_directory, user_path
from rlctl.errors import InputError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "image"
"""Kind of a `MediaPart`, as vLLM calls it."""
IMAGES = "images"
"""Key of a message, and column of a row, with several images."""
MARK = "\ufdd2"
"""Place of an image in the text of a message: a code point that Unicode keeps out of texts."""
FETCH_TIMEOUT_S = 30.0
MOST_PIXELS, MOST_BYTES = 50_000_000, 50_000_000
"""Pixels and encoded bytes of an image by default (`data.image_pixels`, `data.image_bytes`)."""
_ORIENTATION = 0x0112
_TURNED = range(5, 9)
"""Tag of EXIF, and its values that swap width and height."""
_PNG_EXIF = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""Names of a PNG file's parts that may have an orientation."""
_DAMAGED = (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, MemoryError)
"""What PIL raises for damaged images."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits of an image, checked before decoding."""

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
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            raise InputError(
                f"{self.where}: {reason}.", "Paths are relative to the data file, or to data.image_folder."
            ) from error

    def size(self) -> tuple[int, int]:
        """Return (height, width) after its EXIF orientation, from the header. Raises InputError."""
        return _known_size(self) if self.place else _size(self)

    def decoded(self) -> Image:
        """Return the image, upright and in its mode. Raises InputError if it is broken or too large."""
        from PIL import ImageOps

        image = self._opened(self.encoded())
        try:
            image.load()
            upright = ImageOps.exif_transpose(image)
        except _DAMAGED as error:
            raise self._broken(error) from error
        return upright

    def rgb(self) -> Image:
        return self.decoded().convert("RGB")

    def turned(self, image: Image, data: bytes) -> bool:
        """Return whether its EXIF orientation swaps width and height. Raises InputError where it is broken."""
        if image.format == "PNG" and not any(name in data for name in _PNG_EXIF):
            return False  # PIL would decode the whole image to search for one after the pixels
        if image.format == "TIFF":
            return False  # PIL gives the size after it
        try:
            return image.getexif().get(_ORIENTATION) in _TURNED
        except _DAMAGED as error:
            raise self._broken(error) from error

    def _opened(self, data: bytes) -> Image:
        from PIL import Image, UnidentifiedImageError

        # PIL refuses at twice its limit; its default would refuse images that rlctl's limit allows.
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, self.limits.pixels)
        try:
            image = Image.open(io.BytesIO(data))
        except Image.DecompressionBombError as error:
            raise self._too_large(f"far more than {self.limits.pixels:,} pixels") from error
        except UnidentifiedImageError as error:
            problem = "is empty" if not data else "is not an image that PIL can read"
            self._forget()
            raise InputError(f"{self.where}: it {problem}.", "Write it as PNG, JPEG or WebP.") from error
        except _DAMAGED as error:
            raise self._broken(error) from error
        if image.width * image.height > self.limits.pixels:
            raise self._too_large(f"{image.width:,} x {image.height:,} pixels")
        return image

    def _too_large(self, has: str) -> InputError:
        hint = f"data.image_pixels allows {self.limits.pixels:,}: scale it down, or raise that."
        return InputError(f"{self.where}: it has {has}.", hint)

    def _broken(self, error: Exception) -> InputError:
        self._forget()
        return InputError(f"{self.where}: the image is damaged ({first_line(error)}).", "Replace the file.")

    def _within(self, data: bytes) -> bytes:
        if len(data) > self.limits.bytes:
            hint = f"data.image_bytes allows {self.limits.bytes:,}: scale it down, or raise that."
            raise InputError(f"{self.where}: it has more bytes than an image may have.", hint)
        return data

    @property
    def _kept(self) -> Path:
        return cache_directory() / IMAGES / hashlib.sha256(self.place.encode()).hexdigest()

    def _forget(self) -> None:
        """Remove a cached file that is not an image, so that the next run fetches it again."""
        if _is_url(self.place):
            self._kept.unlink(missing_ok=True)

    def _fetched(self) -> bytes:
        """Return the URL's content, cached on disk."""
        kept = self._kept
        if kept.is_file():
            return self._within(kept.read_bytes())
        # Most rows have no images, and these imports take 20 ms.
        import urllib.parse
        import urllib.request
        from http.client import HTTPException

        address = urllib.parse.quote(self.place, safe=string.punctuation)  # people write spaces and accents
        request = urllib.request.Request(address, headers={"User-Agent": "rlctl"})
        try:
            with urllib.request.urlopen(request, timeout=FETCH_TIMEOUT_S) as answer:
                data = self._within(answer.read(self.limits.bytes + 1))
                if answer.length:
                    raise OSError(f"{answer.length:,} bytes of it did not come")
        except (OSError, ValueError, HTTPException) as error:  # URLError and timeouts are OSErrors
            raise InputError(
                f"{self.where}: it cannot be fetched ({error}).", "Check the URL and the network."
            ) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(kept)
        return data


def _size(source: ImageSource) -> tuple[int, int]:
    data = source.encoded()
    image = source._opened(data)
    return (image.width, image.height) if source.turned(image, data) else (image.height, image.width)


@lru_cache(maxsize=1_000_000)
def _known_size(source: ImageSource) -> tuple[int, int]:
    return _size(source)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def image_source(value: Any, where: str, folder: Path, limits: ImageLimits = ImageLimits()) -> ImageSource:
    """Return the image of a row's value: a path relative to `folder`, an http(s) or data URL, base64, bytes, a PIL
    image, or an object with `bytes`, `path`, `url`, `image_url`, `image`, `base64` or `data`. Raises InputError
    otherwise."""
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
        if len(value) > _LONGEST_PATH or (len(value) > 64 and value.startswith(_ENCODED) and not path.is_file()):
            return ImageSource(where, data=_from_base64(value, where), limits=limits)
        return ImageSource(f"{where}, {value}", place=str(path), limits=limits)
    if (file_source := saved(value)) is not None:
        return ImageSource(where, data=file_source, limits=limits)
    raise InputError(f"{where}: an image is of type {type(value).__name__}.", _FORMS)


def of_pil(value: Any) -> bool:
    """Return whether a value is an image of PIL, which whoever has one has imported."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def saved(value: Any) -> bytes | None:
    """Return an image of PIL as a file without loss; None: the value is none."""
    if not of_pil(value):
        return None
    file, kind = io.BytesIO(), "PNG" if value.mode in _PNG_MODES else "TIFF"
    converted = value.convert("RGB") if value.mode in _UNSAVED else value
    converted.save(file, format=kind)
    return file.getvalue()


_KEYS = ("bytes", "image", "image_url", "url", "base64", "data", "path")
_FORMS = "An image is a path, a URL, a data URL, base64, or an object with `bytes` or `path`."
_LONGEST_PATH = 4096
_PNG_MODES, _UNSAVED = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), ("HSV", "RGBa", "RGBX")
"""Modes of PIL images that PNG stores without loss, and modes that neither PNG nor TIFF stores."""
_ENCODED = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A")
"""How PNG, JPEG, GIF, WebP, BMP and TIFF files begin in base64."""


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: an image is neither a path nor base64 ({error}).", _FORMS) from error


def images_of(messages: str | Sequence[Mapping[str, Any]]) -> tuple[ImageSource, ...]:
    if isinstance(messages, str):
        return ()
    return tuple(image for message in messages for image in message.get(IMAGES, ()))


def without_marks(text: str) -> str:
    return text.replace(MARK, "").strip() if MARK in text else text
