"""The images of a row, from columns or message parts. A message has `MARK` for each image in its content, and sources
under the key `images`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.config.files import user_path
from rlctl.data.image_sources import IMAGE, IMAGES, MARK, ImageLimits, ImageSource, image_source
from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig

COLUMNS = (IMAGES, IMAGE)
"""Columns of a row with its images."""
REFCOCO = frozenset(("image_path", "captions", "bbox"))
"""Columns of rows of RefCOCO as published, which have no prompt and no answer."""
IN_TEXT = "<image>"
"""Placeholder of an image in a text prompt, as in LLaVA's rows."""
PART_TYPES = ("image", "image_url", "input_image")
"""Types of a part that is an image, of Hugging Face and OpenAI."""
FOLLOWS = object()
"""Stands for an image that a column holds, which its message does not name."""


def part_image(part: Mapping[str, Any]) -> Any:
    names = ("image", "image_url", "url", "path", "base64", "bytes", "data")
    return next((part[name] for name in names if part.get(name)), FOLLOWS)


def with_images(row: PromptRow, record: Mapping[str, Any], data: DataConfig) -> PromptRow:
    """Return a row with its record's images in its messages. Raises InputError if places and images do not match."""
    cells = _in_columns(record)
    answers = row.answer if isinstance(row.answer, tuple) else ()
    content = [row.prompt, *answers]
    if not cells and not any(_places(message) for message in content):
        return row
    if row.answer == ():
        raise InputError(f"{row.where}: a plain `text` has no place for images.", "Give `messages`, or a `prompt`.")
    sources = [image_in(value, row.where, data) for value in cells]
    prompt = (
        _marked(row.prompt, len(sources), row.where) if not any(_places(message) for message in content) else row.prompt
    )
    prompt, rest = _filled(prompt, sources, row.where, data)
    completions = [_filled(completion, rest, row.where, data) for completion in answers]
    if rest and (not completions or any(left for _, left in completions)):
        raise InputError(
            f"{row.where}: {len(sources)} image{'s' * (len(sources) > 1)}, and {len(sources) - len(rest)} places for "
            "one in the messages.",
            'Write {"type": "image"} into the content for each image of the row.',
        )
    answer = tuple(message for message, _ in completions) if answers else row.answer
    fields = {name: value for name, value in row.fields.items() if name not in COLUMNS}
    return replace(row, prompt=prompt, answer=answer, fields=fields)


def require_images(rows: Iterable[PromptRow], most: int) -> None:
    """Raise InputError for a row with more images than engines take in a prompt."""
    for row in rows:
        if (count := len(row.images)) > most:
            raise InputError(
                f"{row.where}: {count} images, and vllm.limit_mm_per_prompt allows {most} in a prompt.",
                f"Set vllm.limit_mm_per_prompt={{image: {count}}}, or leave it out: engines then take all.",
            )


def in_parts(message: Mapping[str, Any], *, always: bool = False) -> dict[str, Any]:
    """Return a message as chat templates take it: the content of one with images is a list of parts."""
    message_copy = {key: value for key, value in message.items() if key != IMAGES}
    content = message["content"]
    if IMAGES not in message:
        return {**message_copy, "content": [{"type": "text", "text": content}]} if always else message_copy
    first, *others = content.split(MARK)
    parts: list[dict[str, str]] = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts += [{"type": IMAGE}, *([{"type": "text", "text": text}] if text else [])]
    return {**message_copy, "content": parts}


def shown_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> Any:
    """Return a prompt as functions of the user read it."""
    return prompt if isinstance(prompt, str) else [in_parts(message) for message in prompt]


def holds_images(record: Mapping[str, Any]) -> bool:
    return bool(_in_columns(record)) or is_refcoco(record) or any(_names_images(value) for value in record.values())


def is_refcoco(columns: Iterable[str]) -> bool:
    """Return whether rows with these columns are of RefCOCO."""
    present = frozenset(columns)
    return present >= REFCOCO and not present & {"prompt", "answer", "messages"}


def _names_images(value: Any) -> bool:
    if isinstance(value, str):  # messages in a text column
        return value.lstrip().startswith("[") and any(f'"type": "{kind}"' in value for kind in PART_TYPES)
    parts = [
        part
        for message in (value if isinstance(value, list) else ())
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return any(isinstance(part, Mapping) and part.get("type") in PART_TYPES for part in parts)


def _in_columns(record: Mapping[str, Any]) -> list[Any]:
    cells: list[Any] = []
    for name in COLUMNS:
        value = record.get(name)
        if value is None or (isinstance(value, str | list) and not value):
            continue
        cells += value if isinstance(value, list | tuple) else [value]
    return cells


def image_in(value: Any, where: str, data: DataConfig) -> ImageSource:
    """Return the image that a value of a row names. Raises InputError if it names none."""
    path = Path(data.name or "")
    base = path.parent if path.is_file() else path if path.is_dir() else Path()
    folder = user_path(data.image_folder) if data.image_folder else base
    return image_source(value, where, folder, ImageLimits(data.image_pixels, data.image_bytes))


def _places(content: Any) -> int:
    return sum(len(message.get(IMAGES, ())) for message in content) if isinstance(content, list) else 0


def _marked(prompt: Any, images: int, where: str) -> Any:
    """Return messages with image places: at `<image>` in the text, or before the last user text."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    written = sum(message["content"].count(IN_TEXT) for message in messages)
    if written == images:
        return [_with_places(message, message["content"].replace(IN_TEXT, MARK)) for message in messages]
    if written:
        raise InputError(
            f"{where}: {images} image{'s' * (images > 1)}, and the prompt says {IN_TEXT} {written} times.",
            f"Write {IN_TEXT} once for each image, or leave it out: the images then stand before the text.",
        )
    at = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    messages[at] = _with_places(messages[at], MARK * images + messages[at]["content"])
    return messages


def _with_places(message: Mapping[str, Any], content: str) -> dict[str, Any]:
    count = content.count(MARK)
    return {**message, "content": content, **({IMAGES: [FOLLOWS] * count} if count else {})}


def _filled(content: Any, sources: list[ImageSource], where: str, data: DataConfig) -> tuple[Any, list[ImageSource]]:
    """Return messages with sources in their image places, and the sources left over. Raises InputError for too few."""
    if not isinstance(content, list):
        return content, sources
    left = iter(sources)
    filled = [
        {**message, IMAGES: [*_taken(message[IMAGES], left, where, data)]} if IMAGES in message else message
        for message in content
    ]
    return filled, [*left]


def _taken(values: Sequence[Any], left: Iterator[ImageSource], where: str, data: DataConfig) -> Iterator[ImageSource]:
    for value in values:
        if isinstance(value, ImageSource):
            yield value
        elif value is not FOLLOWS:
            yield image_in(value, where, data)
        elif (source := next(left, None)) is not None:
            yield source
        else:
            raise InputError(
                f"{where}: a message has a part of type image, and the row has no image for it.",
                "Name it in the part, or in a column `images` with one for each.",
            )
