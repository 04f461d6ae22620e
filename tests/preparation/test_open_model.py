"""A model is trained with the positions that the configuration gives it, whatever its own config.json says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlctl.checkpoints.hf.safetensors_files import INDEX
from rlctl.errors import InputError
from rlctl.preparation.open_model import open_model, published_facts
from rlctl.settings.data import ModelConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5000.0}


@pytest.fixture(autouse=True)
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "converted"))


@pytest.fixture
def own_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "own"))


def test_another_rotary_embedding_is_that_of_transformers_with_the_same_parameters(tiny_llama: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = ModelConfig(name=str(tiny_llama), rope_scaling=YARN)
    found = open_model(wanted)
    assert found.facts == published_facts(wanted)
    assert (found.facts.max_length, found.facts.rope.theta) == (256, 5000.0)
    config = AutoConfig.from_pretrained(tiny_llama)
    config.rope_parameters = dict(YARN)
    tokens = torch.arange(100)[None] % config.vocab_size
    expected = AutoModelForCausalLM.from_pretrained(tiny_llama, config=config, dtype=torch.float64)
    opened = AutoModelForCausalLM.from_pretrained(found.files.directory, dtype=torch.float64)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    with torch.no_grad():
        logits, own, other = (model(tokens).logits for model in (expected, opened, plain))
    torch.testing.assert_close(own, logits, rtol=0, atol=0)
    assert (other - logits).abs().max() > 1e-4
    assert open_model(wanted).files.directory == found.files.directory  # made once
    assert "rope_scaling" not in json.loads((tiny_llama / "config.json").read_text())


def test_a_larger_number_of_positions_leaves_all_else_as_it_is(tiny_llama: Path) -> None:
    plain, longer = (
        open_model(ModelConfig(name=str(tiny_llama), max_position_embeddings=most)) for most in (None, 1 << 16)
    )
    assert longer.facts.max_length == 1 << 16
    assert longer.facts.rope == plain.facts.rope
    assert plain.files.directory == tiny_llama


def test_texts_may_be_longer_than_the_model_was_published_for(tiny_llama: Path) -> None:
    own = json.loads((tiny_llama / "config.json").read_text())["max_position_embeddings"]
    said: list[str] = []
    longer = ModelConfig(name=str(tiny_llama), max_length=4 * own, extend_positions=True)
    found = open_model(longer, said.append)
    assert found.facts == published_facts(longer)
    assert found.facts.max_length == 4 * own
    assert f"{own:,} positions, and is extended to {4 * own:,}" in said[0]
    made = json.loads((found.files.directory / "config.json").read_text())
    assert made["max_position_embeddings"] == 4 * own
    assert published_facts(longer.model_copy(update={"extend_positions": False})).max_length == own
    enough = open_model(longer.model_copy(update={"max_length": own}))
    assert (enough.files.directory, enough.facts.max_length) == (tiny_llama, own)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_more_positions_leave_a_yarn_without_an_original_length_as_it_was(own_llama: Path, key: str) -> None:
    """transformers takes the original length from the number of positions."""
    from transformers import AutoConfig

    config = json.loads((own_llama / "config.json").read_text()) | {key: {"rope_type": "yarn", "factor": 4.0}}
    (own_llama / "config.json").write_text(json.dumps(config))
    before = AutoConfig.from_pretrained(own_llama).rope_parameters["original_max_position_embeddings"]
    found = open_model(ModelConfig(name=str(own_llama), max_length=4 * before, extend_positions=True))
    after = AutoConfig.from_pretrained(found.files.directory)
    assert found.facts.rope.scaling["original_max_position_embeddings"] == before
    assert (after.rope_parameters["original_max_position_embeddings"], after.max_position_embeddings) == (
        before,
        4 * before,
    )


def test_an_index_of_an_earlier_save_is_refused_where_vllm_reads_the_files_itself(own_llama: Path) -> None:
    (own_llama / INDEX).write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}})
    )
    wanted = ModelConfig(name=str(own_llama))
    open_model(wanted)
    with pytest.raises(InputError, match=r"index\.json of an earlier save names other files"):
        open_model(wanted, engines_alone=True)
