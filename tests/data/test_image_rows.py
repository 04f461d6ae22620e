"""Rows with images: where the images of a row stand in its messages, and the tokens of prompts and texts with them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.image_sources import IMAGES, MARK, image_source
from rlctl.data.prompt_records import row_from_record
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.prompts import open_prompts, shows_images
from rlctl.data.texts import pair_from_record, text_from_record, trained_texts
from rlctl.data.turns import TurnEncoder
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig, ModelConfig
from support.vision_models import FAMILIES, square, write_vision_model

IMAGE = {"type": "image"}


def say(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def png(color: str = "red", size: tuple[int, int] = (64, 64)) -> bytes:
    file = io.BytesIO()
    square(color, size).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl", "gemma3"])
def model(request: Any, tmp_path_factory: Any) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


def encoder_of(model: Path, **data: Any) -> PromptEncoder:
    config = ModelConfig(name=str(model))
    return PromptEncoder.build(load_tokenizer(model, config), config, DataConfig(**data), model)


def theirs(model: Path, messages: list[dict[str, Any]], images: list[Any], **options: Any) -> list[int]:
    """The tokens that transformers makes of messages and images."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    text = processor.apply_chat_template(messages, **{"add_generation_prompt": True} | options)
    return processor(text=[text], images=[images] if images else None, add_special_tokens=False).input_ids[0]


ROWS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"prompt": "What is it?", "image": png()}, [IMAGE, say("What is it?")]),
    ({"prompt": "Same?", "images": [png(), png("blue", (40, 90))]}, [IMAGE, IMAGE, say("Same?")]),
    (
        {"prompt": "Is <image> like <image>?", "images": [png(), png("blue", (40, 90))]},
        [say("Is "), IMAGE, say(" like "), IMAGE, say("?")],
    ),
    (
        {"prompt": [{"role": "user", "content": [say("See "), IMAGE]}], "images": [{"bytes": png(), "path": "a.png"}]},
        [say("See "), IMAGE],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": png()}, say("Now?")]}]},
        [IMAGE, say("Now?")],
    ),
]


@pytest.mark.parametrize(("record", "content"), ROWS)
def test_prompts_have_the_tokens_of_the_processor(
    record: dict[str, Any], content: list[dict[str, str]], model: Path
) -> None:
    row, encoder = row_from_record(record, 0, "row 0", DataConfig()), encoder_of(model)
    images = [np.array(one.decoded()) for one in row.images]
    expected = theirs(model, [{"role": "user", "content": content}], images)
    prompt = encoder.prompt(row)
    assert list(prompt.tokens) == expected == list(encoder.encode(row))
    assert [part.data.tolist() for part in prompt.media] == [image.tolist() for image in images]


def test_openai_s_images_and_a_table_s(tmp_path: Path) -> None:
    import base64

    import pyarrow as pa
    import pyarrow.parquet as pq

    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, say("What?")]}
    row = row_from_record({"messages": json.dumps([message])}, 0, "row 0", DataConfig())
    assert row.images[0].data == png()
    assert row.question == "What?"
    table = pa.table({"prompt": ["What?"], "image": [{"bytes": png(), "path": None}], "answer": ["red"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    data = DataConfig(name=str(tmp_path / "rows.parquet"))
    assert open_prompts(data)[0].images[0].data == png()
    assert shows_images(data)


def test_a_dataset_s_image_column(tmp_path: Path) -> None:
    import datasets

    held = datasets.Dataset.from_dict({"prompt": ["What?"], "images": [[square(), square("blue")]]})
    held.cast_column("images", datasets.List(datasets.Image())).save_to_disk(tmp_path / "saved")
    data = DataConfig(name=str(tmp_path / "saved"))
    (row,) = [open_prompts(data)[0]]
    assert [np.array(one.decoded()).tolist() for one in row.images] == [
        np.array(one).tolist() for one in (square(), square("blue"))
    ]
    assert shows_images(data)


def test_paths_are_relative_to_the_data_file(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png())
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What?", "image": "red.png"}\n{"prompt": "And?"}\n')
    source = open_prompts(DataConfig(name=str(tmp_path / "rows.jsonl")))
    assert source[0].images[0].encoded() == png()
    assert source[1].images == ()


def test_paths_are_relative_to_a_dataset_s_directory_or_to_the_folder_that_is_named(tmp_path: Path) -> None:
    from rlctl.jobs.given_prompts import read_prompts

    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "red.png").write_bytes(png())
    (tmp_path / "train.jsonl").write_text('{"prompt": "What?", "image": "shown/red.png"}\n')
    assert open_prompts(DataConfig(name=str(tmp_path)))[0].images[0].encoded() == png()
    (tmp_path / "asked.jsonl").write_text('{"prompt": "What?", "image": "red.png"}\n')
    named = DataConfig(image_folder=str(tmp_path / "shown"), image_bytes=100_000)
    [row] = read_prompts([], str(tmp_path / "asked.jsonl"), named)
    assert row.images[0].encoded() == png()
    assert row.images[0].limits.bytes == 100_000


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "<image> and <image>", "image": png()}, "row 3: 1 image, and the prompt says <image> 2 times"),
        ({"prompt": [{"role": "user", "content": [IMAGE]}]}, "row 3: a message has a part of type image, and the row"),
        (
            {"prompt": [{"role": "user", "content": [IMAGE]}], "images": [png(), png()]},
            "row 3: 2 images, and 1 places",
        ),
        ({"prompt": "?", "video": "a.mp4"}, "row 3: field 'video' holds a video"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "part of type 'video'"),
    ],
)
def test_rows_whose_images_do_not_fit_are_refused(record: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        row_from_record(record, 0, "row 3", DataConfig())


def test_a_template_goes_around_the_text_and_images_stay_in_front(model: Path) -> None:
    data = {"prompt_template": "Think. {prompt}", "prompt_suffix": " Answer:"}
    row = row_from_record({"prompt": "What?", "image": png()}, 0, "row 0", DataConfig(**data))
    expected = theirs(model, [{"role": "user", "content": [IMAGE, say("Think. What? Answer:")]}], [np.array(square())])
    assert list(encoder_of(model, **data).encode(row)) == expected


def test_a_cut_takes_no_part_of_an_image(model: Path) -> None:
    row = row_from_record({"prompt": "Is <image> like <image>?", "images": [png(), png()]}, 0, "row", DataConfig())
    prompt = encoder_of(model).prompt(row)
    first, second = prompt.media
    for kept in range(1, len(prompt.tokens) + 1):
        cut = prompt.last(kept)
        assert len(cut.tokens) <= kept
        assert cut.tokens == prompt.tokens[len(prompt.tokens) - len(cut.tokens) :]
        begin = len(prompt.tokens) - len(cut.tokens)
        whole = [part for part in (first, second) if part.start >= begin]
        assert [part.start + begin for part in cut.media] == [part.start for part in whole]
        assert not any(part.start < begin < part.start + part.tokens for part in (first, second))


def test_an_image_is_appended_as_the_template_writes_it(model: Path) -> None:
    """Also where texts of an environment are appended without a template."""
    from transformers import AutoProcessor

    encoder = encoder_of(model)
    source = image_source(png("red", (96, 48)), "an image", Path())
    messages = [{"role": "user", "content": f"see {MARK}!", IMAGES: [source]}]
    given = encoder.with_images(TurnEncoder.build(encoder, raw=True).between(None, messages), messages, "row 0")
    images = [[square("red", (96, 48))]]
    text = f"see {FAMILIES[model.name][0]}!"
    whole = AutoProcessor.from_pretrained(model)(text=[text], images=images, add_special_tokens=False)
    assert list(given.tokens) == whole.input_ids[0]
    assert len(given.media) == 1


def test_texts_have_images_without_a_loss(model: Path) -> None:
    encoder = encoder_of(model)
    record = {"prompt": "What is <image>?", "image": png(), "completion": "red"}
    (text,) = trained_texts(encoder, text_from_record(record, 0, "row", DataConfig()))
    content = [say("What is "), IMAGE, say("?")]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]
    whole = theirs(model, messages, [np.array(square())], add_generation_prompt=False)
    asked = theirs(model, messages[:1], [np.array(square())])
    length = len(text.tokens_T)
    assert text.tokens_T.tolist() == whole[:length]
    assert text.mask_T.tolist() == [False] * len(asked) + [True] * (length - len(asked))
    assert len(text.media) == 1


def test_both_texts_of_a_pair_and_all_turns_of_messages_have_the_images(model: Path) -> None:
    encoder = encoder_of(model)
    record = {"prompt": "What?", "image": png(), "chosen": "red", "rejected": "blue"}
    pair = trained_texts(encoder, pair_from_record(record, 0, "row", DataConfig()))
    assert [len(text.media) for text in pair] == [1, 1]
    turns = [
        {"role": "user", "content": [IMAGE, say("What?")]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [say("And "), IMAGE]},
        {"role": "assistant", "content": "blue"},
    ]
    row = text_from_record({"messages": turns, "images": [png(), png("blue", (40, 90))]}, 0, "row", DataConfig())
    (text,) = trained_texts(encoder, row)
    shown = [np.array(square()), np.array(square("blue", (40, 90)))]
    whole = theirs(model, turns, shown, add_generation_prompt=False)
    assert text.tokens_T.tolist() == whole[: len(text.tokens_T)]
    answers = encoder.tokenizer.decode(text.tokens_T[text.mask_T])
    assert answers == "red<|im_end|>blue<|im_end|>"
    assert [part.data.tolist() for part in text.media] == [one.tolist() for one in shown]


def test_marked_answers_stand_behind_images_and_what_follows_the_last_is_left_out(model: Path) -> None:
    """Images that follow the last answer go with their message."""
    encoder = encoder_of(model)
    assert encoder.template is not None
    ends = "<|im_end|>\n{% endfor %}"
    marked = encoder.template.replace(
        "<|im_start|>{{ m['role'] }}\n",
        "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
        "{% endgeneration %}\n{% else %}",
    ).replace(ends, "<|im_end|>\n{% endif %}{% endfor %}")
    turns = [
        {"role": "user", "content": [IMAGE, say("What?")]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [say("And "), IMAGE]},
    ]
    shown = [np.array(square()), np.array(square("blue", (40, 90)))]
    row = text_from_record({"messages": turns, "images": [png(), png("blue", (40, 90))]}, 0, "row", DataConfig())
    whole = theirs(model, turns[:2], shown[:1], add_generation_prompt=False)
    for one, marks in ((encoder, False), (replace(encoder, template=marked), True)):
        (text,) = trained_texts(one, row, marked=marks)
        assert text.tokens_T.tolist() == whole[: len(text.tokens_T)]
        assert encoder.tokenizer.decode(text.tokens_T[text.mask_T]) == "red<|im_end|>"
        assert len(text.media) == 1


def test_the_beginning_of_a_text_takes_no_part_of_an_image(model: Path) -> None:
    record = {"prompt": "Is <image> like <image>?", "images": [png(), png()], "completion": "red"}
    (text,) = trained_texts(encoder_of(model), text_from_record(record, 0, "row", DataConfig()))
    for kept in range(1, len(text.tokens_T) + 1):
        cut = text.first(kept)
        end = next((p.start for p in text.media if p.start < kept < p.start + p.tokens), kept)
        assert cut.tokens_T.tolist() == text.tokens_T[:end].tolist()
        assert len(cut.mask_T) == end
        assert [part.start for part in cut.media] == [p.start for p in text.media if p.start + p.tokens <= end]


def test_text_that_says_what_stands_for_an_image_stays_text(model: Path) -> None:
    written = FAMILIES[model.name][0]
    encoder = encoder_of(model)
    row = PromptRow(0, "row", f"Why {written}?", None)
    assert encoder.images().placeholder_id not in encoder.encode(row)
    assert written in encoder.tokenizer.decode(encoder.encode(row))
    for asked in (text_from_record({"text": f"See {written}."}, 0, "row 7", DataConfig()), replace(row, where="row 7")):
        kept = encoder_of(model, special_tokens="tokens")
        with pytest.raises(InputError, match=r"row 7: the token .* stands for an image, and there is no image"):
            kept.encode(asked) if asked.answer is None else trained_texts(kept, asked)
    if written != "<image>":  # which is a place for the image of a row
        row = row_from_record({"prompt": f"Why {written}?", "images": [png()]}, 0, "row", DataConfig())
        assert len(encoder.prompt(row).media) == 1
