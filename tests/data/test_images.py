"""Images of rows: how they are read, and the tokens and pixels that a model reads them as."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from rlctl.data.image_sources import ImageLimits, ImageSource, image_source
from rlctl.data.images import ImageProcessor
from rlctl.errors import InputError
from support.vision_models import FAMILIES, square, write_vision_model


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def directory(request: Any, tmp_path_factory: Any) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


def test_tokens_and_pixels_are_those_of_the_processor(directory: Path) -> None:
    from transformers import AutoProcessor

    theirs, ours = AutoProcessor.from_pretrained(directory), ImageProcessor.open(directory)
    image = FAMILIES[directory.name][0]
    images = [np.array(square("red")), np.array(square("blue", (100, 60))), np.array(square("green", (40, 130)))]
    for text, count in ((f"user\n{image}what{image}\nis {image}", 3), (f"{image}{image}\n\nsee", 2), ("hello", 0)):
        written = theirs.tokenizer(text, add_special_tokens=False).input_ids
        shown = images[:count]
        expected = theirs(text=[text], images=[shown] if shown else None, add_special_tokens=False, return_tensors="pt")
        tokens, parts = ours.expand(written, shown)
        assert tokens == expected.input_ids[0].tolist()
        asked, after = list[int](), 0
        for part in parts:  # what an engine is asked is what the chat template wrote
            asked += [*tokens[after : part.start], *part.written]
            after = part.start + part.tokens
        assert [*asked, *tokens[after:]] == written
        for name, pixels in (ours.pixels(shown) if shown else {}).items():
            assert (pixels == expected[name]).all()
    assert ours.placeholder_id in ours.never_sampled
    assert theirs.tokenizer.eos_token_id not in ours.never_sampled
    with pytest.raises(InputError, match="1 image, and the prompt has 0 of the token"):
        ours.expand(theirs.tokenizer("hello").input_ids, images[:1], "row 3")


@pytest.fixture(scope="module")
def processor(tmp_path_factory: Any) -> ImageProcessor:
    return ImageProcessor.open(write_vision_model(tmp_path_factory.mktemp("vision") / "idefics3"))


def modes() -> dict[str, Image.Image]:
    red = square("red", (40, 30))
    clear = red.convert("RGBA")
    clear.putalpha(128)
    deep = Image.fromarray((np.arange(1200, dtype=np.uint16) * 50).reshape(30, 40))
    palette = red.convert("P")
    palette.info["transparency"] = 0
    bits = red.convert("1")
    return {
        "RGB": red, "RGBA": clear, "L": red.convert("L"), "LA": clear.convert("LA"), "P": palette, "1": bits,
        "I;16": deep,
    }  # fmt: skip


@pytest.mark.parametrize("mode", [*modes(), "CMYK"])
def test_modes_are_converted_as_the_processor_converts_them(mode: str, processor: ImageProcessor) -> None:
    image = square("red", (40, 30)).convert("CMYK") if mode == "CMYK" else modes()[mode]
    kind = "JPEG" if mode == "CMYK" else "PNG"
    data = encoded(image, kind)
    ours = processor.rgb(ImageSource("row", data=data).decoded())
    read = Image.open(io.BytesIO(data))
    assert read.mode == mode
    theirs = processor.processor.image_processor([read], return_tensors="pt", do_convert_rgb=True)["pixel_values"]
    assert (processor.pixels([ours])["pixel_values"] == theirs).all()


def test_images_are_turned_upright_as_their_exif_says(processor: ImageProcessor) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        image = square("red", (60, 20))
        image.putpixel((0, 0), (0, 0, 255))
        source = ImageSource("row", data=encoded(image, exif=exif))
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(source.data)))
        assert (processor.rgb(source.decoded()) == np.array(upright)).all()
        assert source.size() == (upright.height, upright.width)


def test_rows_hold_images_in_many_ways(tmp_path: Path) -> None:
    data = encoded(square("red"))
    (tmp_path / "red.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    values: list[Any] = [
        "red.png", str(tmp_path / "red.png"), f"file://{tmp_path}/red.png", data, text, f"data:image/png;base64,{text}",
        {"bytes": data, "path": "red.png"}, {"bytes": None, "path": "red.png"}, square("red"),
        {"url": f"data:image/png;base64,{text}"},
    ]  # fmt: skip
    for value in values:
        assert np.array(image_source(value, "row", tmp_path).decoded()).tolist() == np.array(square("red")).tolist()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("gone.png", "row 3, gone.png: there is no such file"),
        ("cut.png", "row 3, cut.png: the image is damaged"),
        ("words.png", "row 3, words.png: it is not an image that PIL can read"),
        ("empty.png", "row 3, empty.png: it is empty"),
        ("wide.png", r"row 3, wide.png: it has 400 x 30 pixels.*data.image_pixels allows 10,000"),
        ("long.png", r"row 3, long.png: it has more bytes.*data.image_bytes allows 3,000"),
        ({"caption": "a cat"}, "row 3: an image has neither"),
        (7, "row 3: an image is of type int"),
    ],
)
def test_an_image_that_cannot_be_read_names_its_row(value: Any, why: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    (tmp_path / "cut.png").write_bytes(encoded(square("red"))[:-60])
    (tmp_path / "words.png").write_text("not an image")
    (tmp_path / "empty.png").touch()
    (tmp_path / "wide.png").write_bytes(encoded(square("red", (400, 30))))
    (tmp_path / "long.png").write_bytes(encoded(Image.fromarray(noise)))
    with pytest.raises(InputError, match=why):
        image_source(value, "row 3", tmp_path, ImageLimits(10_000, 3_000)).decoded()
