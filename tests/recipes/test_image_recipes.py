"""NeMo-RL's recipes with images: imported and planned, and what becomes of their data, rewards and frozen parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.config.recipes import Import
from rlctl.config.schema import nest
from rlctl.data.image_rows import holds_images
from rlctl.data.image_sources import MARK, images_of
from rlctl.data.prompts import open_prompts
from rlctl.errors import AbsentError, ConfigError, InputError
from rlctl.methods.configuration import resolve
from rlctl.preparation.located import Located
from rlctl.preparation.named import name_run
from rlctl.preparation.open_model import published_facts
from rlctl.preparation.planned import plan_run
from rlctl.recipes.nemo_rl.recipe import import_recipe
from rlctl.settings.data import DataConfig
from rlctl.tiny_models.vision import square
from support.image_recipes import IMAGE_RECIPES, write_image_recipe

WITH_IMAGES = [name for name, asked in IMAGE_RECIPES.items() if "refused" not in asked]
REFUSED = {name: asked["refused"] for name, asked in IMAGE_RECIPES.items() if "refused" in asked}


def recipe(tmp_path: Path, **changes: Any) -> Import:
    """The GRPO recipe of Qwen2.5-VL-3B with changes by dotted key (`__` for a dot)."""
    path = write_image_recipe(tmp_path, "vlm_grpo_3B")
    changed = tmp_path / "changed.yaml"
    values = nest({key.replace("__", "."): value for key, value in changes.items()})
    changed.write_text(yaml.safe_dump({"defaults": str(path)} | values))
    return import_recipe(changed)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_recipe_with_images_is_imported_and_planned(name: str, tmp_path: Path) -> None:
    """As `rlctl train --config RECIPE --dry-run` does. Those of Megatron run on dtensor, which one line says, with the
    learning rate and the schedule of Megatron's block."""
    asked = IMAGE_RECIPES[name]
    resolved = resolve(files=[write_image_recipe(tmp_path, name)], environment={})
    assert not resolved.refusals, resolved.refusals
    config, policy = resolved.config, asked["policy"]
    assert config.model.images is True
    named = name_run(resolved, lambda _: None)
    planned = plan_run(Located(named.resolved, named.method, published_facts(config.model), (), "h100"))
    resolved, plan = planned.resolved, planned.early
    assert plan.facts.vision is not None
    assert plan.facts.vision.kind == "qwen2_5_vl"
    assert plan.training is not None
    assert (plan.backend, plan.training.parallel.dp) == ("dtensor", asked["cluster"]["gpus_per_node"])
    megatron = policy.get("megatron_cfg")
    told = [note for note in resolved.notes if "Megatron trains no images here" in note]
    assert len(told) == (megatron is not None)
    if megatron:
        assert config.optimizer.lr == megatron["optimizer"]["lr"]
        assert config.scheduler.warmup_steps == megatron["scheduler"]["lr_warmup_iters"]
    elif "sft" not in asked:
        assert config.optimizer.lr == 5e-7
    assert config.data.name == "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex"
    assert config.validation.data.name == "MMInstruction/Clevr_CoGenT_ValA"
    assert (config.data.split, config.validation.data.split) == ("train", "train")
    if asked.get("grpo"):
        terms = [(term.name, term.weight) for term in config.reward.terms]  # type: ignore[attr-defined]
        assert terms == [("format", 0.2), ("exact_alnum", 0.8)]
    else:  # NeMo-RL renders by the processor, whose template a recipe does not replace
        assert (config.run.algorithm, config.model.chat_template) == ("sft", None)


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_of_sound_or_video_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    resolved = resolve(files=[write_image_recipe(tmp_path, name)], environment={})
    for one in (resolved, resolved.allowing_differences()):
        with pytest.raises(ConfigError) as caught:
            one.require_supported()
        assert REFUSED[name] in caught.value.message
        assert ("video" if "avlm" in name or "video" in name or "intent" in name else "sound") in caught.value.message


@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({}, None),
        ({"policy__dtensor_cfg__automodel_kwargs__freeze_config":
          {"freeze_vision_tower": True, "freeze_audio_tower": True, "freeze_language_model": False}},
         ["vision", "projector"]),  # Automodel freezes the whole of Qwen's `visual`
        ({"policy__model_name": "google/gemma-3-4b-it",
          "policy__dtensor_cfg__automodel_kwargs__freeze_config": {"freeze_vision_tower": True}}, ["vision"]),
        ({"policy__dtensor_cfg__automodel_kwargs__freeze_config": {"freeze_language_model": True}}, ["language"]),
        ({"policy__megatron_cfg__enabled": True, "policy__megatron_cfg__freeze_config":
          {"freeze_vision_model": True, "freeze_vision_projection": False, "freeze_language_model": True}},
         ["vision", "language"]),
        ({"policy__megatron_cfg__enabled": True, "policy__megatron_cfg__freeze_vision_model": True,
          "policy__megatron_cfg__freeze_vision_projection": True, "policy__megatron_cfg__freeze_sound_encoder": True},
         ["vision", "projector"]),
    ],
)  # fmt: skip
def test_frozen_parts_are_those_of_the_recipe(tmp_path: Path, changes: dict[str, Any], frozen: Any) -> None:
    result = recipe(tmp_path, **changes)
    assert result.values.get("model.freeze") == frozen
    assert not result.unsupported
    assert not result.of("not known")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": {"dataset_name": "clevr-cogent", "split": "valB"}},
         {"data.name": "MMInstruction/Clevr_CoGenT_ValB", "data.split": "train", "data.prompt_field": "problem"}),
        ({"train": {"dataset_name": "clevr-cogent", "split": "trainA"}},
         {"data.name": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", "data.split": "train"}),
        ({"train": {"dataset_name": "clevr_cogent", "split": "trainA"}},
         {"data.name": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", "data.answer_field": "solution"}),
        ({"train": {"dataset_name": "geometry3k", "split": "train"},
          "validation": {"dataset_name": "geometry3k", "split": "test"}},
         {"data.name": "hiyouga/geometry3k", "data.prompt_field": "problem", "data.answer_field": "answer",
          "validation.data.name": "hiyouga/geometry3k", "validation.data.split": "test"}),
        ({"train": {"dataset_name": "refcoco", "split": "train", "download_dir": "./pictures"}},
         {"data.name": "jxu124/refcoco", "data.split": "train", "data.image_folder": "./pictures"}),
        ({"train": {"dataset_name": "mmpr-tiny", "download_dir": "here"}},
         {"data.name": "here/mmpr_tiny.parquet", "data.prompt_field": "extra_info.question",
          "data.answer_field": "reward_model.ground_truth"}),
    ],
)  # fmt: skip
def test_data_sets_have_their_names_on_the_hub(tmp_path: Path, data: dict[str, Any], expected: dict[str, Any]) -> None:
    result = recipe(tmp_path, data={"default": {"prompt_file": None}, **data})
    assert {key: result.values.get(key) for key in expected} == expected
    assert not result.unsupported


@pytest.mark.parametrize(
    ("functions", "terms"),
    [
        ([{"name": "format", "weight": 1}, {"name": "bbox_giou", "weight": 3, "kwargs": {"giou_penalty_thres": 0.5}}],
         [{"name": "format", "weight": 0.25},
          {"name": "bbox_giou", "weight": 0.75, "params": {"giou_penalty_thres": 0.5}}]),
        ([{"name": "geo3k", "weight": 2.0, "kwargs": {"format_score": 0.1}}],
         [{"name": "geo3k", "weight": 1.0, "params": {"format_score": 0.1}}]),
        ([{"name": "math_expr", "weight": 0.9}, {"name": "format", "weight": 0.1}],
         [{"name": "math_expr", "weight": 0.9}, {"name": "format", "weight": 0.1}]),
    ],
)  # fmt: skip
def test_weights_of_rewards_are_divided_by_their_sum(tmp_path: Path, functions: Any, terms: Any) -> None:
    result = recipe(tmp_path, env={"clevr-cogent": {"reward_functions": functions}})
    assert result.values["reward.terms"] == terms
    assert not result.unsupported


def test_what_of_images_cannot_run_is_named(tmp_path: Path) -> None:
    unknown = {"clevr-cogent": {"reward_functions": [{"name": "iou", "weight": 1.0}]}}
    [line] = recipe(tmp_path, env=unknown).unsupported
    assert "bbox_giou" in line
    image_tokens = ["<image>", "<img>", "</img>", "<so_embedding>", "<|image_pad|>"]
    assert not recipe(tmp_path, policy__generation__bad_words=image_tokens).unsupported
    [line] = recipe(tmp_path, policy__generation__bad_words=[*image_tokens, "hello"]).unsupported
    assert "hello" in line
    limited = recipe(tmp_path, policy__generation__vllm_kwargs__limit_mm_per_prompt={"image": 2, "video": 0})
    assert limited.values["vllm.limit_mm_per_prompt"] == {"image": 2}
    assert resolve(files=[limited.path], environment={}).config.vllm.passed["limit_mm_per_prompt"] == {"image": 2}
    [line] = recipe(tmp_path, data__train__split="valC").unsupported
    assert "dataset_name" in line


CLEVR = [{"problem": f"How many items are there in image {n}?", "solution": f"<answer> {n} </answer>"} for n in (3, 5)]


def table(folder: Path, split: str, rows: list[dict[str, Any]], images: str) -> Path:
    """A directory in the layout of a data set of the hub, with drawn images in a column `image` or `images`."""
    import datasets

    feature = datasets.Image()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    drawn = [square(color, (32, 24)) for color in ("red", "blue", "green")[: len(rows)]]
    columns[images] = drawn if images == "image" else [[one] for one in drawn]
    made = datasets.Dataset.from_dict(columns)
    made = made.cast_column(images, feature if images == "image" else datasets.List(feature))
    (folder / "data").mkdir(parents=True, exist_ok=True)
    made.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("name", ["vlm_grpo_3B", "sft_vlm_3B"])
def test_rows_of_clevr_are_read_where_they_are_at_hand(name: str, tmp_path: Path) -> None:
    """The image stands in front of the prompt file's text, and the answer is what stands between the tags."""
    folder = table(tmp_path / "clevr", "train", CLEVR, "image")
    path = write_image_recipe(tmp_path, name)
    resolved = resolve(files=[path], sets=[f"data.name={folder}"], environment={})
    config = resolved.config
    source = open_prompts(config.data, rows=name_run(resolved, lambda _: None).method.rows)
    row = source[1]
    assert len(source) == 2
    assert row.answer == ("5" if name == "vlm_grpo_3B" else ("5",))
    [image] = row.images
    assert image.decoded().size == (32, 24)
    [message] = row.prompt  # type: ignore[misc]
    assert message["content"] == f"{MARK}How many items are there in image 5?"


def test_rows_of_geometry3k_are_read_where_they_are_at_hand(tmp_path: Path) -> None:
    rows = [{"problem": "<image>Find $x$.", "answer": r"2 \sqrt { 3 }"}, {"problem": "<image>Find y.", "answer": "47"}]
    folder = table(tmp_path / "geometry3k", "test", rows, "images")
    data = DataConfig(name=str(folder), split="test", prompt_field="problem", answer_field="answer")
    row = open_prompts(data)[0]
    assert row.answer == r"2 \sqrt { 3 }"
    assert row.prompt[0]["content"] == f"{MARK}Find $x$."  # type: ignore[index]
    assert len(images_of(row.prompt)) == 1


def test_rows_of_refcoco_ask_for_the_box_in_thousandths(tmp_path: Path) -> None:
    """Their pictures are files of COCO, whose archive is named where they are not here."""
    import datasets

    folder = tmp_path / "pictures" / "train2014"
    folder.mkdir(parents=True)
    square("red", (640, 480)).save(folder / "a.jpg")
    row = {"image_path": "coco/train2014/a.jpg", "captions": ["red box", "the big red box"],
           "bbox": [64.0, 120.0, 320.4, 479.9], "split": "train", "sent_ids": [1, 2]}  # fmt: skip
    rows = [row, row, row | {"split": "val"}, row | {"image_path": "coco/val2014/b.jpg"}]
    datasets.Dataset.from_list(rows[:3]).to_parquet(tmp_path / "rows.parquet")
    data = DataConfig(name=str(tmp_path / "rows.parquet"), image_folder=str(tmp_path / "pictures"))
    source = open_prompts(data)
    # 64 of 640 and 120 of 480; 320.4 of 640 and 479.9 of 480, in thousandths
    assert [source[index].answer for index in range(3)] == ["[100, 250, 501, 1000]"] * 3
    texts = [source[index].prompt[0]["content"] for index in range(3)]  # type: ignore[index]
    asked = f"{MARK}Please provide the bounding box coordinate of the region described by the following phrase: "
    assert texts == [f"{asked}red box", f"{asked}the big red box", f"{asked}the big red box"]
    assert holds_images(row)
    assert not holds_images({"image_path": "a.jpg", "prompt": "q", "answer": "1"})
    (tmp_path / "absent.jsonl").write_text(json.dumps(rows[3]) + "\n")
    with pytest.raises(InputError) as caught:
        open_prompts(data.model_copy(update={"name": str(tmp_path / "absent.jsonl")}))
    assert "http://images.cocodataset.org/zips/val2014.zip" in (caught.value.hint or "")


def test_rows_of_mmpr_tiny_are_read_where_they_are_at_hand(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "images").mkdir()
    square("red").save(tmp_path / "images" / "a.png")
    row = {"images": [{"path": "images/a.png"}], "prompt": [{"role": "user", "content": "<image>\nask"}],
           "extra_info": {"question": "Which color?"}, "reward_model": {"ground_truth": "red"}}  # fmt: skip
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "mmpr_tiny.parquet")
    result = recipe(
        tmp_path, data__train={"dataset_name": "mmpr-tiny", "download_dir": str(tmp_path)},
        data__default__prompt_file=None,
    )  # fmt: skip
    data = resolve(files=[result.path], environment={}).config.data
    [found] = [open_prompts(data)[0]]
    assert found.answer == "red"
    assert found.prompt[0]["content"] == f"{MARK}Which color?"  # type: ignore[index]
    assert len(found.images) == 1


def test_data_that_is_not_at_hand_says_what_to_download(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(AbsentError) as caught:
        open_prompts(DataConfig(name="MMInstruction/Clevr_CoGenT_ValA"))
    assert "hf download MMInstruction/Clevr_CoGenT_ValA --repo-type dataset" in (caught.value.hint or "")


@pytest.mark.parametrize("pattern", ["<answer>(", "<answer>.*"])
def test_a_pattern_without_a_group_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"regular expression|no group"):
        DataConfig(answer_pattern=pattern)
