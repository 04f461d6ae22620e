"""Thumbnails of images in samples, in the terminal and in the report."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
from PIL import Image

from rlctl.data.rollouts import MediaPart
from rlctl.report.page import page
from rlctl.report.reported_run import ReportedRun
from rlctl.runs.samples import sample_text
from rlctl.runs.thumbnails import COLUMNS, MOST_BYTES, MOST_IMAGES, SIDE, TALLEST, drawn, thumbnails


def part(pixels: np.ndarray) -> MediaPart:
    return MediaPart("image", pixels, 0, 4, (7,))


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def decoded(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    assert len(base64.b64decode(data)) <= MOST_BYTES
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_thumbnails_are_small_and_few() -> None:
    assert thumbnails([]) == {}
    found = thumbnails([part(noise(900, 1600)), *[part(noise(30, 20))] * 5])
    assert found["more_images"] == 6 - MOST_IMAGES
    large, small, *_ = found["images"]
    assert (large["width"], large["height"]) == (1600, 900)
    assert decoded(large["thumbnail"]).size == (SIDE, SIDE * 9 // 16)
    assert np.array_equal(np.array(decoded(small["thumbnail"])), noise(30, 20))
    assert len(json.dumps(found)) < MOST_IMAGES * (MOST_BYTES * 4 / 3 + 100)


def test_a_sample_shows_its_images_next_to_the_completion() -> None:
    half = np.full((40, 40, 3), 255, np.uint8)
    half[:20] = (215, 40, 40)
    sample = {"step": 1, "prompt": "What color?", "rendered": "<image>What color?", "completion": "red", "reward": 1.0}
    sample |= thumbnails([part(half)])
    plain = sample_text(sample).splitlines()
    assert plain[-3:] == ["  image of 40 x 40 pixels", "  completion", "    red"]
    drawn = sample_text(sample, draws=True)
    assert drawn.count("\x1b[38;2;215;40;40;48;2;215;40;40m") == drawn.count("\x1b[38;2;255;255;255;48;2;255;255;255m")
    elsewhere = {**sample, "images": [{"thumbnail": "https://elsewhere/a.png"}]}
    text = page([ReportedRun(name="a run", lines=[{"step": 1}], steps=1, samples=[(1, [sample, elsewhere])])])
    assert text.count("<img ") == 1
    assert f'src="{sample["images"][0]["thumbnail"]}"' in text
    assert text.index("What color?</pre>") < text.index("<img ") < text.index("red</pre>")


def test_a_tall_image_has_as_many_lines_as_fit_a_terminal() -> None:
    for height, width in ((1000, 10), (10, 1000), (300, 200)):
        [image] = thumbnails([part(noise(height, width))])["images"]
        lines = drawn(image)
        assert 1 <= len(lines) <= TALLEST // 2
        assert {line.count("▀") for line in lines} == {min(COLUMNS, max(1, round(TALLEST * width / height)))}
