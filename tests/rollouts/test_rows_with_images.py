"""Rows with images before a run: those that cannot be read, and the tokens that they take."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.checkpoints.hf.model_facts import known_facts
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.images import ImageProcessor
from rlctl.data.prompt_records import row_from_record
from rlctl.errors import InputError
from rlctl.jobs.episodes_job import EpisodesJob, episodes_job
from rlctl.jobs.first_look import FirstLook
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.facts import ModelFacts
from rlctl.planner.costs.vision_tower import image_share
from rlctl.preparation.job import prepare_job
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.validation import ValidationSet
from rlctl.settings.data import DataConfig
from support.vision_models import square, write_vision_model


def test_rows_with_broken_images_are_refused_or_left_out(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen2_5_vl")
    square("red").save(tmp_path / "red.png")
    square("red", (1000, 4)).save(tmp_path / "thin.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "red.png").read_bytes()[:-60])
    names = ("red.png", "cut.png", "gone.png", "thin.png", "red.png")
    rows = [*({"prompt": "what?", "image": name} for name in names), {"prompt": "is <image> so?"}]
    rows = [{"answer": "red", **row} for row in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def opened(how: str) -> PromptStream:
        data = {"name": str(path), "broken_images": how}
        return PromptStream.open_rollouts(RlConfig.model_validate({"data": data}), model)

    with pytest.raises(InputError, match=r"rows.jsonl, line 2, cut.png: the image is damaged"):
        opened("stop")
    stream = opened("drop")
    assert [row.where.rpartition(" ")[2] for row in (stream.datasets[0].prompts[place] for place in range(3))] == [
        "1",
        "5",
        "6",
    ]
    assert len(stream.datasets[0].prompts) == 3
    validation = {"every": 1, "data": {"name": str(path)}}
    data = {"name": str(path), "broken_images": "drop"}
    reward = {"terms": [{"name": "exact-match"}]}
    config = RlConfig.model_validate({"data": data, "validation": validation, "reward": reward})
    validated = ValidationSet.open(config, stream, model)
    assert validated is not None
    assert sorted(row.where.rpartition(" ")[2] for row in validated.rows) == ["1", "5", "6"]
    assert "3 with broken images left out" in validated.describe(config)
    with pytest.raises(InputError, match=r"rows.jsonl, line \d, .*png"):
        ValidationSet.open(config.model_copy(update={"data": DataConfig(name=str(path))}), stream, model)
    assert any("1 row says <image> without an image" in note and "line 6" in note for note in stream.notes())
    assert any("3 of 6 rows are left out (data.broken_images=drop)" in note for note in stream.notes())


def test_plans_count_the_image_tokens_of_the_data(tmp_path: Path) -> None:
    """As transformers' processor writes them: an image of two tiles, and a small one in every second prompt."""
    from transformers import AutoProcessor

    model = write_vision_model(tmp_path / "model", "qwen2_5_vl")
    images = {"wide.png": square("red", (120, 60)), "small.png": square("blue", (40, 40))}
    for name, image in images.items():
        image.save(tmp_path / name)
    rows: list[dict[str, Any]] = [{"prompt": "what?", "images": [*images]}, {"prompt": "what is it?"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    processor: Any = AutoProcessor.from_pretrained(model)
    lengths, seen = [], 0
    for row, shown in zip(rows, ([*images.values()], []), strict=True):
        content = [*({"type": "image"} for _ in shown), {"type": "text", "text": row["prompt"]}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        ids = processor(text=[text], images=[shown] if shown else None).input_ids[0]
        lengths.append(len(ids))
        marks = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
        seen += sum(ids.count(mark) for mark in marks[1:2])
    stream = PromptStream.open_rollouts(RlConfig.model_validate({"data": {"name": str(path)}}), model)
    assert sorted(stream.lengths()[:2]) == sorted(lengths)
    assert stream.image_share() == pytest.approx(seen / sum(lengths))


def test_more_images_than_engines_take_are_refused_before_the_run(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model")
    square("red").save(tmp_path / "red.png")
    rows = [
        {"prompt": "one?", "image": "red.png", "answer": "x"},
        {"prompt": "two?", "images": ["red.png"] * 2, "answer": "x"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [f"model.name={model}", f"data.name={path}", "reward.terms=[{name: exact-match}]", "cluster.gpu=cpu"]
    for limit in ("{image: 1}", "{image: {count: 1}}"):
        resolved = resolve(None, sets=[*asked, f"vllm.limit_mm_per_prompt={limit}"], environment={})
        with pytest.raises(InputError, match=r"line 2: 2 images, and vllm.limit_mm_per_prompt allows 1") as caught:
            prepare_job(resolved)
        assert "limit_mm_per_prompt={image: 2}" in (caught.value.hint or "")


def test_a_plan_without_data_assumes_an_image_in_each_prompt() -> None:
    config = resolve("1node", sets=["model.images=true"], environment={}).config
    whole, text = (known_facts("Qwen/Qwen2.5-VL-7B-Instruct", images=images) for images in (True, False))
    assert isinstance(whole, ModelFacts)
    assert isinstance(text, ModelFacts)
    method = method_from_config(config, tries_loss=False)
    work = method.workload(whole)
    assert (work.prompt_tokens, work.image_tokens) == (512, 384)
    assert method.workload(text).image_tokens == 0
    assert image_share(text, work, 0.5) == 0.0


def test_a_reward_model_is_not_trained_on_images(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model")
    asked = [f"model.name={model}", "data.name=drawn-shapes", "cluster.gpu=cpu"]
    resolved = resolve(None, flags={"run.algorithm": "rm"}, sets=asked, environment={})
    with pytest.raises(InputError, match=r"`train rm` trains reward models of texts"):
        prepare_job(resolved)


def test_a_dry_run_shows_all_images_of_a_text(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    for color, size in (("red", (64, 64)), ("blue", (112, 48))):
        square(color, size).save(tmp_path / f"{color}.png")
    turns: list[Any] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "Where?"},
        {"role": "user", "content": [{"type": "text", "text": "At "}, {"type": "image", "image": "red.png"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "image", "image": "blue.png"}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns[:4]}) + "\n" + json.dumps({"messages": turns}) + "\n")
    asked = [f"model.name={model}", f"data.name={path}", "cluster.gpu=cpu", "batch.prompts=2"]
    resolved = resolve(None, flags={"run.algorithm": "sft"}, sets=asked, environment={})
    [shown] = FirstLook.of(prepare_job(resolved)).prompts
    tokens = ImageProcessor.open(model).expansion((64, 64))
    begun = "<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\nWhere?<|im_end|>\n<|im_start|>user\nAt "
    image = f"<|vision_start|>[image of 64 x 64 pixels, {len(tokens)} tokens]<|vision_end|>"
    assert shown.text == f"{begun}{image}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>"
    assert (shown.images, shown.image_tokens) == (1, len(tokens))


@pytest.mark.guard
@pytest.mark.slow
def test_episodes_of_rows_with_images_are_played_by_the_whole_model(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model")
    square("red").save(tmp_path / "red.png")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "what?", "image": "red.png", "answer": "red"}) + "\n")
    asked = [f"model.name={model}", f"data.name={path}", "reward.terms=[{name: exact-match}]", "cluster.gpu=cpu"]

    def job(*more: str) -> EpisodesJob:
        return episodes_job(resolve(None, sets=[*asked, *more], environment={}), None, 1, False, lambda _: None)

    whole = job()
    assert whole.completions.facts.vision is not None
    assert len(whole.prompts.encoded(whole.prompts.prompt_at(0)).media) == 1
    with pytest.raises(InputError, match=r"rows.jsonl: it has images, and the model is one of text"):
        job("model.images=false")


def test_a_context_with_images_keeps_its_thoughts(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    environment = {"name": f"{Path(__file__).parents[1] / 'support' / 'toy_environments.py'}:Counting"}
    config = RlConfig.model_validate({"environment": environment | {"thinking": "template"}})
    encoder = PromptEncoder.build(load_tokenizer(model, config.model), config.model, config.data, model)
    said = "m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content']"
    without = str(encoder.template).replace("{{ m['content'] }}", f"{{{{ {said} }}}}")
    encoder = replace(encoder, template=without)
    image = io.BytesIO()
    square("red").save(image, "PNG")
    row = row_from_record({"prompt": "what?", "image": image.getvalue()}, 0, "row 3", DataConfig())
    with pytest.raises(InputError, match=r"environment.thinking = template: row 3 has images"):
        EnvironmentEpisodes.open(config, encoder, row)
    assert EnvironmentEpisodes.open(config, encoder, replace(row, prompt="what?")) is not None
