"""Model cards, and uploads to a hub that is not there or only writes down what it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import run as rlctl
from rlctl.errors import InputError, RlctlError
from rlctl.jobs import publish
from support.run_directories import made_run


def test_the_card_of_a_run_tells_its_base_its_data_and_what_came_of_it(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", data__name="openai/gsm8k", run__algorithm="grpo", generation__max_new_tokens=64)
    model = tmp_path / "model"
    model.mkdir()
    publish.write_card(model, "me/better", run)
    text = (model / "README.md").read_text()
    head, body = text.split("---\n")[1:]
    for part in ('base_model: "tiny"', 'datasets: ["openai/gsm8k"]', 'library_name: "transformers"', '"grpo"'):
        assert part in head
    for part in ("# better", "after 5 steps", "training reward: 0.150 ± 0.050 in steps 1 to 2, 0.450 ± 0.050",
                 "64 tokens", "torch 2.13", "rlctl train 'a b'",
                 'AutoModelForCausalLM.from_pretrained("me/better")'):  # fmt: skip
        assert part in body
    publish.write_card(model, "me/another", run)
    assert (model / "README.md").read_text() == text  # a card that is there stays


def test_the_card_of_adapters_loads_them_with_peft_and_one_without_a_run_says_little(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    text = publish.card(tmp_path, "me/adapters", None)
    assert 'library_name: "peft"' in text
    assert "AutoPeftModelForCausalLM" in text
    assert "base_model" not in text


def test_the_card_of_a_model_that_takes_images_loads_it_by_its_class(tmp_path: Path) -> None:
    config = '{"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 8}}'
    (tmp_path / "config.json").write_text(config)
    text = publish.card(tmp_path, "me/seeing", None)
    assert 'Gemma3ForConditionalGeneration.from_pretrained("me/seeing")' in text
    assert "AutoModelForCausalLM" not in text
    assert "pipeline_tag" not in text


def test_the_run_of_a_checkpoint_is_found_above_it(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    policy = run.path / "checkpoints" / "step_1" / "policy"
    policy.mkdir(parents=True)
    for place in (run.path, policy.parent, policy):
        found = publish.run_of(place)
        assert found is not None
        assert found.path == run.path
    assert publish.run_of(tmp_path) is None


def test_without_a_token_or_with_an_impossible_name_nothing_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    asked = ["convert", "megatron-to-hf", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--push-to-hub"]
    assert rlctl([*asked, "me/model"]) == 2
    assert "no token for the Hugging Face hub" in capfd.readouterr().err
    assert rlctl([*asked, "not a name"]) == 2
    assert "Write OWNER/NAME" in capfd.readouterr().err
    assert rlctl([*asked[:-1], "--private"]) == 2
    assert "--private applies to --push-to-hub" in capfd.readouterr().err
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_token")
    publish.require_hub("me/model")
    with pytest.raises(InputError):
        publish.require_hub("a/b/c")


def test_a_hub_that_takes_it_gets_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Hub:
        def __init__(self, **options: Any) -> None: ...

        def create_repo(self, name: str, **options: Any) -> str:
            asked.append((name, options))
            return f"https://hub/{name}"

        def upload_folder(self, **options: Any) -> None:
            asked.append((options["repo_id"], options["folder_path"]))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert publish.publish(tmp_path, "me/model", private=True) == "https://hub/me/model"
    assert asked == [("me/model", {"private": True, "exist_ok": True}), ("me/model", tmp_path)]


def test_a_hub_that_cannot_be_reached_leaves_the_model_and_how_to_upload_it(tmp_path: Path) -> None:
    """The tests' own environment has HF_HUB_OFFLINE=1."""
    with pytest.raises(RlctlError, match=r"the hub did not take it.*hf upload me/model") as error:
        publish.publish(tmp_path, "me/model", private=False)
    assert error.value.exit_code == 1
