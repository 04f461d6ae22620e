"""Tool results as message contents: a text, or parts if the result is an image or lists some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.data.image_rows import PART_TYPES
from rlctl.data.image_sources import IMAGE, of_pil
from rlctl.environments.tools import as_text

Content = str | list[dict[str, Any]]
PARTS = ({"type", "image"}, {"type", "image_url"})
"""Keys of an image part; results with other keys are data."""
BLANK_LINE = "\n\n"


def content_of(result: Any) -> Content:
    """Return the message content of a result, with images of PIL or as message parts."""
    items = result if isinstance(result, list | tuple) else [result]
    return [_part(item) for item in items] if any(map(_is_image, items)) else as_text(result)


def joined(contents: Sequence[Content]) -> Content:
    """Join contents with blank lines."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return BLANK_LINE.join(texts)
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [_text(BLANK_LINE)] if parts else []
        parts += [_text(content)] if isinstance(content, str) else content
    return parts


def _part(item: Any) -> dict[str, Any]:
    if _is_image(item):
        return item if isinstance(item, dict) else {"type": IMAGE, IMAGE: item}
    text = item.get("text") if isinstance(item, dict) and item.get("type") == "text" else None
    return _text(text if isinstance(text, str) else as_text(item))


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _is_image(item: Any) -> bool:
    return of_pil(item) or (isinstance(item, dict) and item.keys() in PARTS and item["type"] in PART_TYPES)
