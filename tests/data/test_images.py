"""Images of rows: how they are read, and the tokens and pixels that a model reads them as."""

from __future__ import annotations

import base64
import http.server
import io
import threading
import urllib.parse
from pathlib import Path
from typing import Any, ClassVar

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


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_images_are_turned_upright_as_their_exif_says(kind: str, processor: ImageProcessor) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        image = square("red", (60, 20))
        image.putpixel((0, 0), (0, 0, 255))
        source = ImageSource("row", data=encoded(image, kind, exif=exif))
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


def test_sizes_come_from_headers() -> None:
    """Of a PNG file PIL would decode all pixels in search of an orientation behind them."""
    assert ImageSource("row", data=encoded(square("red", (60, 20)))[:-60]).size() == (20, 60)


def test_images_of_pil_are_the_same_in_all_modes(processor: ImageProcessor) -> None:
    color = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    others = {mode: color.convert(mode) for mode in ("CMYK", "YCbCr", "HSV", "F", "I", "RGBa", "RGBX", "PA")}
    for mode, image in (modes() | others).items():
        read = processor.rgb(image_source(image, "row", Path()).decoded())
        assert (read == processor.rgb(image)).all(), mode


def test_only_the_limit_of_the_configuration_refuses_a_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert ImageSource("row", data=encoded(square("red")), limits=ImageLimits(64 * 64)).decoded().size == (64, 64)


class Gallery(http.server.BaseHTTPRequestHandler):
    """Serves what `shown` has of a path: a body, and the length that it announces."""

    shown: ClassVar[dict[str, tuple[bytes, int]]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(path := urllib.parse.unquote(self.path))
        body, length = self.shown[path]
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


def test_images_of_urls_are_fetched_once_unless_they_are_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(tmp_path))
    data, page = encoded(square("red")), b"<html>Sign in</html>"
    Gallery.asked.clear()
    Gallery.shown = {
        "/r\u00e9d one.png": (data, len(data)), "/half.png": (data[:90], len(data)), "/page.png": (page, len(page)),
        "/cut.png": (data[:-60], len(data) - 60),
    }  # fmt: skip
    server = http.server.HTTPServer(("127.0.0.1", 0), Gallery)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_port}"

    def read(name: str) -> Image.Image:
        return image_source(f"{at}/{name}", "row 3", Path()).decoded()

    try:
        for _ in range(2):
            assert np.array(read("r\u00e9d one.png")).tolist() == np.array(square("red")).tolist()
        assert Gallery.asked == ["/r\u00e9d one.png"]
        whys = {"half.png": "cannot be fetched .*bytes of it did not come", "page.png": "not an image that PIL can"}
        for name, why in (whys | {"cut.png": "damaged"}).items():
            with pytest.raises(InputError, match=rf"row 3, {at}/{name}: .*{why}"):
                read(name)
            Gallery.shown[f"/{name}"] = data, len(data)  # it is repaired there
            assert read(name).size == (64, 64)
        with pytest.raises(InputError, match=r"row 3, http://127.0.0.1:port/a: it cannot be fetched"):
            image_source("http://127.0.0.1:port/a", "row 3", Path()).decoded()
    finally:
        server.shutdown()
        server.server_close()


def test_a_shape_that_the_processor_refuses_names_its_row(tmp_path: Path) -> None:
    """transformers refuses to enlarge a side to more than 200 times the other."""
    processor = ImageProcessor.open(write_vision_model(tmp_path, "qwen2_5_vl"))
    thin = np.zeros((1000, 4, 3), np.uint8)
    with pytest.raises(ValueError, match="aspect ratio"):
        processor.processor.image_processor([thin])
    with pytest.raises(InputError, match=r"row 3: the model's processor refuses an image of 4 x 1,000 pixels \(abs"):
        processor.expand([processor.placeholder_id], [thin], "row 3")


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
