"""Results of tools as contents of messages: a text, or parts where a result is an image or lists some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.data.image_rows import PART_TYPES
from rlctl.data.image_sources import IMAGE, of_pil
from rlctl.environments.tools import as_text

Content = str | list[dict[str, Any]]
PARTS = ({"type", "image"}, {"type", "image_url"})
"""Keys of a part of a message that is an image; results with others are data."""
BLANK_LINE = "\n\n"


def content_of(result: Any) -> Content:
    """Return the content of a message for a result. Images are PIL's, or parts of messages."""
    listed = result if isinstance(result, list | tuple) else [result]
    return [_part(one) for one in listed] if any(map(_is_image, listed)) else as_text(result)


def joined(contents: Sequence[Content]) -> Content:
    """Return several contents as one, with blank lines between."""
    texts = [one for one in contents if isinstance(one, str)]
    if len(texts) == len(contents):
        return BLANK_LINE.join(texts)
    found: list[dict[str, Any]] = []
    for one in contents:
        found += [_text(BLANK_LINE)] if found else []
        found += [_text(one)] if isinstance(one, str) else one
    return found


def _part(one: Any) -> dict[str, Any]:
    if _is_image(one):
        return one if isinstance(one, dict) else {"type": IMAGE, IMAGE: one}
    said = one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None
    return _text(said if isinstance(said, str) else as_text(one))


def _text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def _is_image(one: Any) -> bool:
    return of_pil(one) or (isinstance(one, dict) and one.keys() in PARTS and one["type"] in PART_TYPES)
