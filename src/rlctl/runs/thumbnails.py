"""Thumbnails of the images of a sample: small files inside the sample itself, and their picture in a terminal."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlctl.data.rollouts import MediaPart

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES, MORE_IMAGES = "images", "more_images"
"""Fields of a sample: its first images, and the number of the others."""
MOST_IMAGES = 4
SIDE = 80
"""Longest side of a thumbnail, in pixels."""
MOST_BYTES = 6000
COLUMNS, TALLEST = 24, 64
"""Most width of a picture in a terminal, in characters, and its height in half characters."""
_DATA = "data:image/{};base64,"


def thumbnails(media: Sequence[MediaPart]) -> dict[str, Any]:
    """Return the fields of a sample with thumbnails of its first images; empty without images."""
    from PIL import Image

    content: dict[str, Any] = {IMAGES: [_thumbnail(Image.fromarray(part.data)) for part in media[:MOST_IMAGES]]}
    more = {MORE_IMAGES: len(media) - MOST_IMAGES} if len(media) > MOST_IMAGES else {}
    return content | more if media else {}


def _thumbnail(image: Image) -> dict[str, Any]:
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 75}), ("jpeg", {"quality": 40})):
        file = io.BytesIO()
        small.save(file, kind, **options)
        if file.tell() <= MOST_BYTES:
            break
    encoded = base64.b64encode(file.getvalue()).decode()
    return {"width": image.width, "height": image.height, "thumbnail": _DATA.format(kind) + encoded}


def caption(image: dict[str, Any]) -> str:
    """Return the size of an image in words."""
    return f"image of {image['width']} x {image['height']} pixels"


def drawn(image: dict[str, Any]) -> list[str]:
    """Return the lines of a thumbnail in a terminal with 24-bit colors: two pixels to a character."""
    from PIL import Image

    data = base64.b64decode(image["thumbnail"].partition(",")[2])
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    width = max(1, min(COLUMNS, round(TALLEST * picture.width / picture.height)))
    height = min(TALLEST, max(2, round(width * picture.height / picture.width / 2) * 2))
    pixels = picture.resize((width, height), Image.Resampling.BOX).load()
    assert pixels is not None
    return [
        "".join(
            f"\x1b[38;2;{_color(pixels[column, row])};48;2;{_color(pixels[column, row + 1])}m\N{UPPER HALF BLOCK}"
            for column in range(width)
        )
        + "\x1b[0m"
        for row in range(0, height, 2)
    ]


def _color(pixel: Any) -> str:
    return ";".join(map(str, pixel))
