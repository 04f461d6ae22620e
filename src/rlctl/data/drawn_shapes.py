"""A task of drawn pictures: shapes, and a question about their color, their number or their place.

Row i follows from the seed and i alone. Nothing is stored: a picture is drawn when its row is read.
"""

from __future__ import annotations

import functools
import io
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.data.image_sources import IMAGE
from rlctl.data.prompt_rows import PromptDataset, PromptRow, instructions
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.settings.data import DataConfig

if TYPE_CHECKING:
    from PIL import ImageDraw

DRAWN_SHAPES = "drawn-shapes"
"""Name of the task as `data.name`."""
DEFAULT_ROWS = 2000
SIDE, CELL = 64, 32
"""Pixels of a side of a picture, and of the cells that hold one shape each."""
INK = {"red": (215, 40, 40), "green": (40, 150, 60), "blue": (50, 90, 215), "yellow": (240, 195, 40)}
SHAPES = ("circle", "square", "triangle")
QUESTIONS = {
    "What color?": tuple(INK),
    "How many?": ("one", "two", "three", "four"),
    "Where?": ("left", "right", "top", "bottom"),
}
"""Questions, and the possible answers of each."""
HOW_MANY, WHERE = "How many?", "Where?"


@dataclass(frozen=True)
class Picture:
    """A picture with a question about it."""

    png: bytes
    question: str
    answer: str
    description: str
    """Number and color, and the edge if the shape is at one. Without spaces, words are the tokens that answers are."""

    @property
    def wrong(self) -> str:
        """Another answer to the question."""
        words = QUESTIONS[self.question]
        return words[(words.index(self.answer) + 1) % len(words)]


@functools.lru_cache(maxsize=2 * DEFAULT_ROWS)
def picture(seed: int, index: int) -> Picture:
    """Draw the picture of a row: one to four shapes of one color and kind, or one at an edge."""
    from PIL import Image, ImageDraw

    rng = random.Random(f"{seed}/{index}")
    question, color, shape = rng.choice([*QUESTIONS]), rng.choice([*INK]), rng.choice(SHAPES)
    image = Image.new("RGB", (SIDE, SIDE), "white")
    boxes, place = _at_an_edge(rng) if question == WHERE else _in_cells(rng)
    for box in boxes:
        _draw(ImageDraw.Draw(image), shape, box, INK[color])
    file = io.BytesIO()
    image.save(file, "PNG")
    answer = color if question == "What color?" else QUESTIONS[question][place]
    number = QUESTIONS[HOW_MANY][len(boxes) - 1]
    words = [number, color, *([answer] if question == WHERE else [])]
    return Picture(file.getvalue(), question, answer, ",".join(words))


Box = tuple[int, int, int]
"""Left, top and side."""


def _in_cells(rng: random.Random) -> tuple[list[Box], int]:
    """Return one to four boxes in separate cells, and their number from 0."""
    count, boxes = rng.randrange(4), list[Box]()
    for cell in rng.sample(range(4), count + 1):
        side = rng.randint(16, 26)
        left, top = (CELL * (cell % 2) + rng.randint(1, CELL - 2 - side) for cell in (cell, cell // 2))
        boxes.append((left, top, side))
    return boxes, count


def _at_an_edge(rng: random.Random) -> tuple[list[Box], int]:
    """Return a box at the left, right, upper or lower edge, and the number of the edge."""
    edge, side = rng.randrange(4), rng.randint(16, 22)
    across = (SIDE - side) // 2 + rng.randint(-6, 6)
    along = rng.randint(1, 4) if edge in (0, 2) else SIDE - side - rng.randint(2, 5)
    return [(along, across, side) if edge < 2 else (across, along, side)], edge


def _draw(canvas: ImageDraw.ImageDraw, shape: str, box: Box, ink: tuple[int, int, int]) -> None:
    left, top, side = box
    right, bottom = left + side, top + side
    if shape == "circle":
        canvas.ellipse([left, top, right, bottom], fill=ink)
    elif shape == "square":
        canvas.rectangle([left, top, right, bottom], fill=ink)
    else:
        canvas.polygon([(left + side // 2, top), (left, bottom), (right, bottom)], fill=ink)


def open_shapes(data: DataConfig, seed: int = 0, rows: RowType = PROMPTS) -> PromptDataset:
    """Return the rows of the task, with what training on texts, pairs and labels reads as well."""

    def row(index: int) -> PromptRow:
        shapes = picture(seed, index)
        answered = rows.example(shapes.answer, shapes.wrong, index, data)
        record = {data.prompt_field: shapes.question, IMAGE: shapes.png} | answered
        return rows.read(record, index, f"{DRAWN_SHAPES}, picture {index}", data)

    identity = {"source": DRAWN_SHAPES, "seed": seed}
    return PromptDataset(DRAWN_SHAPES, data.size or DEFAULT_ROWS, row, identity, instructions(data))
