"""The task of drawn pictures: every answer is what an image shows, by its pixels."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageDraw

from rlctl.data.drawn_shapes import DRAWN_SHAPES, INK, QUESTIONS, picture
from rlctl.data.holdout import open_validation
from rlctl.data.prompts import open_prompts, shows_images
from rlctl.data.row_types import PairRows, TextRows
from rlctl.errors import InputError
from rlctl.methods.configuration import resolve
from rlctl.methods.kto import LabelRows
from rlctl.settings.data import DataConfig

DATA = DataConfig(name=DRAWN_SHAPES)


def parts(inked: np.ndarray) -> int:
    """The connected parts of an image: each is filled and counted."""
    left, count = Image.fromarray(inked.astype(np.uint8)).copy(), 0
    while (where := np.argwhere(np.array(left) == 1)).size:
        row, column = where[0].tolist()
        ImageDraw.floodfill(left, (column, row), 0)
        count += 1
    return count


def seen(png: bytes, question: str) -> str:
    """The answer by the pixels: the ink, the connected parts, or the direction of the middle of the ink."""
    pixels = np.array(Image.open(io.BytesIO(png)).convert("RGB"))
    inked = (pixels != 255).any(-1)
    if question == "What color?":
        [ink] = {tuple(one) for one in pixels[inked].tolist()}
        return next(name for name, known in INK.items() if known == ink)
    if question == "How many?":
        return ("none", "one", "two", "three", "four")[parts(inked)]
    down, right = np.argwhere(inked).mean(0) - (np.array(inked.shape) - 1) / 2
    if abs(right) > abs(down):
        return "right" if right > 0 else "left"
    return "bottom" if down > 0 else "top"


def test_answers_are_what_the_pictures_show() -> None:
    shown = [picture(3, index) for index in range(300)]
    assert [one.answer for one in shown] == [seen(one.png, one.question) for one in shown]
    assert all(one.wrong != one.answer and one.wrong in QUESTIONS[one.question] for one in shown)
    asked = Counter((one.question, one.answer) for one in shown)
    assert asked.keys() == {(question, answer) for question, answers in QUESTIONS.items() for answer in answers}
    assert min(asked.values()) > 10  # of 25 each, so that no answer is a good guess


def test_rows_follow_from_seed_and_number() -> None:
    first, again, other = (open_prompts(DATA, seed) for seed in (1, 1, 2))
    assert shows_images(DATA)
    assert [first[index] for index in range(20)] == [again[index] for index in range(20)]
    assert first.fingerprint() != other.fingerprint()
    assert first[0].images[0].data == picture(1, 0).png
    assert open_prompts(DATA.model_copy(update={"size": 5})).size == 5
    with pytest.raises(InputError, match=r"data\.params .* belong to a reasoning-gym task"):
        open_prompts(DATA.model_copy(update={"params": {"max_terms": 2}}))


def test_validation_draws_other_pictures() -> None:
    config = resolve("laptop-vision", environment={}).config
    trained = {open_prompts(config.data, config.run.seed)[index].images[0].data for index in range(200)}
    validated, _ = open_validation(config, None)
    assert not trained & {validated[index].images[0].data for index in range(100)}


def test_texts_pairs_and_labels_are_trained_on_them() -> None:
    text, pair = open_prompts(DATA, 0, TextRows())[1], open_prompts(DATA, 0, PairRows())[1]
    shown = picture(0, 1)
    assert text.answer == (shown.answer,)
    assert pair.answer == (shown.answer, shown.wrong)
    good, bad = (open_prompts(DATA, 0, LabelRows())[index] for index in (0, 1))
    assert (good.answer, good.fields["label"]) == ((picture(0, 0).answer,), True)
    assert (bad.answer, bad.fields["label"]) == ((shown.wrong,), False)
    assert all(len(row.images) == 1 for row in (text, pair, good, bad))
