"""Dataset rows with images that cannot be decoded, or that the model's image processor refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rlctl.data.chat import PromptEncoder
from rlctl.data.image_sources import ImageSource
from rlctl.data.prompt_rows import PromptDataset, PromptRow
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig

if TYPE_CHECKING:
    from rlctl.data.images import ImageProcessor


def broken_images(
    rows: Sequence[PromptRow] | PromptDataset, most: int, processor: ImageProcessor
) -> dict[int, InputError]:
    """Return the error of each of the first `most` rows that has an image which cannot be decoded, or which the
    processor refuses, by its place."""

    def undecoded(place: int) -> InputError | None:
        return _trouble(ImageSource.decoded, rows[place].images)

    def refused(place: int) -> InputError | None:
        return _trouble(lambda image: processor.expansion(image.size(), image.where), rows[place].images)

    places = range(min(len(rows), most))
    with ThreadPoolExecutor() as pool:  # PIL decodes without Python's lock
        undecodable = {place: error for place, error in zip(places, pool.map(undecoded, places), strict=True) if error}
    others = (place for place in places if place not in undecodable)
    return dict(sorted((undecodable | {place: error for place in others if (error := refused(place))}).items()))


def readable(rows: Sequence[PromptRow], data: DataConfig, encoder: PromptEncoder) -> tuple[PromptRow, ...]:
    """Drop rows with broken images if configured. Raises InputError for other broken rows, and if no row is left."""
    if not any(row.images for row in rows):
        return tuple(rows)
    broken = broken_images(rows, len(rows), encoder.images())
    if broken and (data.broken_images == "stop" or len(broken) == len(rows)):
        raise next(iter(broken.values()))
    return tuple(row for place, row in enumerate(rows) if place not in broken)


def _trouble(read: Callable[[ImageSource], Any], images: Iterable[ImageSource]) -> InputError | None:
    try:
        for image in images:
            read(image)
    except InputError as error:
        return error
    return None
