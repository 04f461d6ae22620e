"""What is known of models that read images before any of their files is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.backends.vllm.args import refuse_unsupported
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError, InputError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.catalog import lookup
from rlctl.models.constraints import family_problem, fsdp_problems
from rlctl.models.facts import ListedTensor, VisionFacts
from rlctl.models.vision import VISION_FAMILIES, vision_family
from rlctl.preparation.open_model import published_facts
from rlctl.settings.data import ModelConfig


@pytest.mark.parametrize(
    ("kind", "module", "part"),
    [
        ("idefics3", "model.vision_model.encoder.layers.0.mlp.fc1.weight", "vision"),
        ("idefics3", "model.connector.modality_projection.proj.weight", "projector"),
        ("idefics3", "lm_head.weight", "language"),
        ("qwen2_5_vl", "model.visual.merger.mlp.0.weight", "projector"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.0.norm.weight", "projector"),
        ("qwen3_vl", "model.visual.pos_embed.weight", "vision"),
        ("gemma3", "model.multi_modal_projector.mm_soft_emb_norm.weight", "projector"),
        ("internvl", "model.language_model.layers.0.mlp.up_proj.weight", "language"),
        ("qwen3_5", "model.visual.merger.linear_fc1.weight", "projector"),
        ("qwen3_5_moe", "model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("gemma4", "model.embed_vision.embedding_projection.weight", "projector"),
        ("gemma4", "model.audio_tower.layers.0.norm_out.weight", "sound"),
        ("gemma4", "model.embed_audio.embedding_projection.weight", "sound"),
    ],
)
def test_every_parameter_is_of_one_part(kind: str, module: str, part: str) -> None:
    assert VISION_FAMILIES[kind].part_of(module) == part


def test_a_text_part_reads_no_images() -> None:
    assert vision_family({"model_type": "gemma3", "vision_config": {"hidden_size": 8}}) is VISION_FAMILIES["gemma3"]
    assert vision_family({"model_type": "gemma3_text"}) is None
    assert vision_family({"model_type": "llava", "vision_config": {}}) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("google/gemma-4-31B-it", "attend to later ones (use_bidirectional_attention: vision)"),
        ("nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16", "transformers and vLLM read different configurations"),
    ],
)
def test_a_model_whose_images_are_not_trained_on_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        published_facts(ModelConfig(name=name, images=True))
    assert name in caught.value.message
    assert why in caught.value.message


def test_a_gated_delta_rule_needs_gpus() -> None:
    text = lookup("Qwen/Qwen2.5-7B")
    assert text is not None
    rate = ListedTensor("model.layers.{layer}.linear_attn.A_log", (32,), layers=(0,))
    facts = replace(text, family="Qwen3_5ForCausalLM", listed=(rate,))
    refuse_unsupported(RlConfig(), facts, "cuda")
    with pytest.raises(ConfigError, match="layers of a gated delta rule"):
        refuse_unsupported(RlConfig(), facts, "cpu")


def test_what_cannot_be_trained_with_images_is_refused_with_the_reason() -> None:
    text = lookup("Qwen/Qwen2.5-7B")
    assert text is not None
    vision = VisionFacts("qwen2_5_vl", 151655, 1280, 32, 14, 4, "qwen2")
    facts = replace(text, family="Qwen2_5_VLForConditionalGeneration", vision=vision)
    assert not fsdp_problems(facts, ParallelSpec(tp=2, sequence_parallel=True))
    [problem] = fsdp_problems(facts, ParallelSpec(cp=2))
    assert (problem.key, "the tokens of an image are not cut" in problem.message) == ("training.cp", True)
    assert "--backend dtensor does" in str(family_problem(facts, "megatron"))
