"""Models that transformers builds without memory: buffers are those of the real model, and a family without a file in
`models/` is described by them or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlctl.backends.base import PolicySpec
from rlctl.backends.lookup import policy_backend
from rlctl.checkpoints.hf.model_facts import WATCHED, describe, facts_in
from rlctl.checkpoints.hf.transformers_model import computed_buffers, meta_model
from rlctl.checkpoints.rank_loading import load_rank
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError, InputError, RlctlError
from rlctl.methods.configuration import resolve
from rlctl.models.catalog import facts_of
from rlctl.models.facts import ListedTensor, RopeFacts
from rlctl.models.families import weights_of
from rlctl.planner.costs.parameters import count
from rlctl.planner.from_config import completions_workload
from rlctl.planner.make_plan import Plan
from rlctl.settings.training import LoraConfig, OptimizerConfig
from rlctl.weights.dtensor import DTensorWorld
from support.family_models import FAMILIES, OTHERS, SEPARATE, hf_model
from support.plans import plan_of
from support.pool import slowly

TRAINED = [*OTHERS, *SEPARATE]
QUICK = ("gemma3", "gpt-oss", "deepseek-v3", "granite", "minicpm3", "gptj")


@pytest.mark.parametrize("family", slowly([*FAMILIES, *TRAINED], *QUICK))
def test_buffers_that_no_file_holds_are_computed(family: str, tmp_path: Path) -> None:
    plain = hf_model(family)
    plain.config.save_pretrained(tmp_path)
    inner = meta_model(tmp_path, "eager", buffers=True)
    assert {parameter.device.type for parameter in inner.parameters()} == {"meta"}
    stored, expected = plain.state_dict().keys(), dict(plain.named_buffers())
    found = computed_buffers(inner)
    assert found.keys() == {name for name in expected if name not in stored}
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    "family", slowly([*TRAINED], "starcoder2", "qwen2-moe", "granite-hybrid", "gpt-neox", "lfm2-moe")
)
def test_a_family_without_a_file_is_loaded_by_its_modules(family: str, tmp_path: Path) -> None:
    """Every rank's part of what transformers itself loads, and nothing else; counted as transformers counts."""
    plain = hf_model(family)
    plain.save_pretrained(tmp_path)
    facts = facts_in(tmp_path)
    stored = plain.state_dict().keys()
    theirs = dict(plain.named_parameters()) | {n: value for n, value in plain.named_buffers() if n in stored}
    assert weights_of(facts).parameters == sum(value.numel() for value in theirs.values())
    # Layers are counted as large as the largest one, and positions that are learned are not counted.
    assert count(facts).total == pytest.approx(weights_of(facts).parameters, rel=0.5 if facts.unpacked else 0.2)
    world = DTensorWorld(facts, ParallelSpec())
    params = {name: torch.full(spec.shape, torch.nan) for name, spec in world.layout(0).params.items()}
    load_rank(tmp_path, world, 0, params, facts)
    assert params.keys() == theirs.keys()
    for name, value in params.items():
        assert torch.equal(value.view(theirs[name].shape), theirs[name]), name


def test_a_family_without_a_file_is_planned_for_the_backend_that_takes_it(tmp_path: Path) -> None:
    hf_model("qwen2-moe").save_pretrained(tmp_path)
    facts = facts_in(tmp_path)
    node = {"cluster.gpu": "cpu"}

    def planned(backend: str, **more: int) -> Plan:
        flags = node | {"training.backend": backend} | {f"training.{key}": value for key, value in more.items()}
        return plan_of(resolve(flags=flags, environment={}).config, facts)

    assert planned("dtensor").runnable
    (why,) = planned("megatron").not_runnable_because
    assert "family Qwen2MoeForCausalLM has no weight map" in why
    assert "--backend dtensor needs none" in why
    engines = completions_workload(resolve(flags=node, environment={}).config, facts, [16], 1)
    assert plan_of(resolve(flags=node, environment={}).config, facts, workload=engines).runnable
    with pytest.raises(RlctlError, match="how Qwen2MoeForCausalLM divides over ranks is not known"):
        planned("dtensor", tp=2)
    spec = PolicySpec(facts, ParallelSpec(), optimizer=OptimizerConfig(), temperature=1.0, router_replay=True)
    with pytest.raises(ConfigError, match="how routers of Qwen2MoeForCausalLM weigh experts") as raised:
        policy_backend("dtensor").refuse(spec)
    assert raised.value.hint == "Remove it."
    policy_backend("dtensor").refuse(replace(spec, router_replay=False, lora=LoraConfig(rank=4)))


@pytest.mark.parametrize(
    "name", ["mlp.gate.weight", "mlp.router.gate.weight", "mlp.gate.wg.weight", "block_sparse_moe.gate.weight"]
)
def test_routers_are_frozen_by_their_names_or_not_at_all(name: str, tmp_path: Path) -> None:
    hf_model("qwen2-moe").save_pretrained(tmp_path)
    facts = facts_in(tmp_path)

    def called(router: str) -> PolicySpec:
        listed = tuple(replace(t, name=t.name.replace("mlp.gate.weight", router)) for t in facts.listed)
        own = replace(facts, listed=listed)
        return PolicySpec(own, ParallelSpec(), optimizer=OptimizerConfig(), temperature=1.0, freeze_router=True)

    policy_backend("dtensor").refuse(called(name))
    policy_backend("dtensor").refuse(replace(called("mlp.chooser.weight"), freeze_router=False))
    with pytest.raises(ConfigError, match="training\\.freeze_router is refused: which of its tensors"):
        policy_backend("dtensor").refuse(called("mlp.chooser.weight"))
    adapted = replace(called("mlp.chooser.weight"), freeze_router=False, lora=LoraConfig(rank=4))
    with pytest.raises(
        ConfigError,
        match=r"training\.lora\.rank is refused: which of its tensors routers .* training\.lora\.targets tells",
    ):
        policy_backend("dtensor").refuse(adapted)


def test_adapters_are_refused_by_the_plan_where_no_layer_takes_them(tmp_path: Path) -> None:
    hf_model("gpt2").config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    facts = facts_in(config(tmp_path, **written))
    spec = PolicySpec(facts, ParallelSpec(), optimizer=OptimizerConfig(), temperature=1.0)
    policy_backend("dtensor").refuse(spec)
    with pytest.raises(ConfigError, match=r"training\.lora\.rank is refused: layers of GPT2LMHeadModel hold no linear"):
        policy_backend("dtensor").refuse(replace(spec, lora=LoraConfig(rank=4)))


def config(directory: Path, **values: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64, "factor": 2.0,
}  # fmt: skip
NOT_TRAINED = {
    "gpt_neo": (
        {"architectures": ["GPTNeoForCausalLM"], "num_layers": 2, "attention_types": [[["global", "local"], 2]]},
        "transformers cannot build this model: .*len\\(config.attention_layers\\)",
    ),
    "hrm_text": ({"architectures": ["HrmTextForCausalLM"]}, "not causal in a prompt \\(prefix_lm\\)"),
    "bert": ({"architectures": ["BertLMHeadModel"]}, "its attention is not causal"),
    "big_bird": ({"architectures": ["BigBirdForCausalLM"]}, "its attention is not causal"),
    "cpmant": ({"architectures": ["CpmAntForCausalLM"]}, "not causal in a prompt \\(prompt_types\\)"),
    "reformer": (
        {
            "architectures": ["ReformerModelWithLMHead"], "is_decoder": True, "axial_pos_embds": False,
            "attn_layers": ["local", "local"], "attention_head_size": 16,
        },
        "compute their gradients themselves",
    ),
    "longcat_flash": (
        {"architectures": ["LongcatFlashForCausalLM"], "num_layers": 2, "n_routed_experts": 4, "zero_expert_num": 2},
        "its parameters are of 4 experts and of 6",
    ),
    "deepseek_v2": (
        {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": None},
        "how many experts a token has \\(num_experts_per_tok\\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", NOT_TRAINED)
def test_what_cannot_be_trained_from_transformers_modules_is_refused(model_type: str, tmp_path: Path) -> None:
    values, why = NOT_TRAINED[model_type]
    with pytest.raises(InputError, match=why) as raised:
        facts_in(config(tmp_path, model_type=model_type, **TINY | values))
    named = "transformers cannot build this model" in why or values["architectures"][0] in raised.value.message  # type: ignore[index]
    assert named
    assert "docs/adding_a_model.md" in (raised.value.hint or "")


NOT_PACKED = {
    "falcon": ({"architectures": ["FalconForCausalLM"]}, "do not go through transformers' attention interface"),
    "stablelm": ({"architectures": ["StableLmForCausalLM"]}, "do not hand on to the attention"),
    "lfm2": (
        {"architectures": ["Lfm2ForCausalLM"], "pad_token_id": 0, "layer_types": ["conv", "full_attention"]},
        "mix tokens by",
    ),
    "llama4_text": (
        {"architectures": ["Llama4ForCausalLM"], "pad_token_id": 0, "attention_chunk_size": 8},
        "mix tokens by chunked_attention",
    ),
}


@pytest.mark.parametrize("model_type", slowly(list(NOT_PACKED), "falcon"))
def test_the_reason_is_said_where_rollouts_cannot_be_packed(model_type: str, tmp_path: Path) -> None:
    values, why = NOT_PACKED[model_type]
    facts = facts_in(config(tmp_path, model_type=model_type, **TINY | values))
    assert why in facts.unpacked


def test_frequencies_that_change_beyond_the_longest_length_are_told_to_the_engine(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    values = {"architectures": ["Olmo2ForCausalLM"], "pad_token_id": 0, "rope_parameters": rope}
    facts = facts_in(config(tmp_path, model_type="olmo2", **TINY | values))
    assert (facts.rope, facts.max_length) == (RopeFacts(10000.0, "dynamic", {"factor": 2.0}), 128)


def test_longrope_is_trained_up_to_the_length_from_which_its_frequencies_change(tmp_path: Path) -> None:
    values = {"architectures": ["Phi3ForCausalLM"], "rope_parameters": LONG, "pad_token_id": 0}
    values |= {"original_max_position_embeddings": 64}
    assert facts_in(config(tmp_path, model_type="phi3", **TINY | values)).max_length == 64


def test_positions_that_a_model_counts_itself_are_left_to_it(tmp_path: Path) -> None:
    """RoBERTa's first two positions are no token's: rows are not packed, and rollouts are shorter by two."""
    values = {"architectures": ["RobertaForCausalLM"], "is_decoder": True, "pad_token_id": 1}
    facts = facts_in(config(tmp_path, model_type="roberta", **TINY | values))
    assert "counts positions from its padding token's number on" in facts.unpacked
    assert facts.max_length == 126


HUNYUAN = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
PUBLISHED = {
    "hunyuan_v1_moe": {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": [2, 2], "head_dim": 16,
        "moe_intermediate_size": [32, 32], "rope_scaling": HUNYUAN, "rope_theta": 10000.0, "pad_token_id": 0,
    },
    "phimoe": {
        "architectures": ["PhiMoEForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"},
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", slowly(list(PUBLISHED), "phimoe"))
def test_configurations_of_a_form_of_their_own_are_read_as_published(model_type: str, tmp_path: Path) -> None:
    """Sizes by layer, rotary frequencies that are fixed by `alpha`, and the name of a repository's own class."""
    values = PUBLISHED[model_type]
    facts = facts_in(config(tmp_path, model_type=model_type, **TINY | values))
    assert facts.listed
    assert (facts.layers, facts.max_length) == (2, 128)
    assert facts.family.lower() == str(values["architectures"][0]).lower()  # type: ignore[index]


@pytest.mark.slow
def test_convolutions_are_as_wide_as_what_they_convolve(tmp_path: Path) -> None:
    """transformers gives them back in equal parts, whatever their widths are."""
    values = {
        "architectures": ["OlmoHybridForCausalLM"], "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32, "pad_token_id": 0,
    }  # fmt: skip
    listed = facts_in(config(tmp_path, model_type="olmo_hybrid", **TINY | values)).listed
    found = {
        tensor.name.split(".")[-2]: (tensor.shape, tensor.module_start) for tensor in listed if "conv" in tensor.name
    }
    assert found == {
        "q_conv1d": ((32, 1, 4), (0, 0, 0)),
        "k_conv1d": ((32, 1, 4), (32, 0, 0)),
        "v_conv1d": ((64, 1, 4), (64, 0, 0)),
    }


FALCON = facts_of(
    {
        "family": "FalconForCausalLM", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
        "intermediate": 128, "vocab": 64, "max_length": 128, "unpacked": "its layers are its own",
        "listed": (ListedTensor("transformer.word_embeddings.weight", (64, 64)),),
    }
)  # fmt: skip


def test_a_model_that_packs_no_rollouts_is_planned_so_and_the_plan_says_why() -> None:
    resolved = resolve(flags={"cluster.gpu": "cpu"}, environment={})
    plan = plan_of(resolved.config, FALCON)
    assert plan.runnable
    batching = resolved.with_values(plan.config_values()).config.training
    assert (batching.packing, batching.dynamic_batching, batching.share_prompts) == (False, True, False)
    (why,) = (reason.rule for reason in plan.reasons if reason.value == "training.packing=false")
    assert why.endswith("FalconForCausalLM as a separate sequence, because its layers are its own.")
    packed = plan_of(resolved.config, replace(FALCON, unpacked=""))
    assert "training.packing" not in packed.config_values()
    one_by_one = resolve(flags={"cluster.gpu": "cpu", "training.packing": False}, environment={})
    plan = plan_of(one_by_one.config, FALCON)
    assert not one_by_one.with_values(plan.config_values()).config.training.dynamic_batching


@pytest.mark.parametrize("key", ["training.packing", "training.share_prompts", "training.cp"])
def test_what_needs_packed_rows_is_refused_by_its_key(key: str) -> None:
    values = {"cluster.gpu": "cpu", "training.backend": "dtensor", key: 2 if key == "training.cp" else True}
    resolved = resolve(flags=values, environment={})
    with pytest.raises(RlctlError, match="as a separate sequence, because its layers are its own") as raised:
        plan_of(resolved.config, FALCON)
    assert key in raised.value.message
    plan_of(resolved.config, replace(FALCON, unpacked=""))


def test_files_written_from_the_model_without_its_head_are_read(tmp_path: Path) -> None:
    """The first GPT-2's names begin below `transformer.`, and its files hold the masks of attention."""
    plain = hf_model("gpt2")
    plain.save_pretrained(tmp_path)
    facts, masks = facts_in(tmp_path), {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}
    below = {name.removeprefix("transformer."): p.detach().clone() for name, p in plain.named_parameters()}
    save_file(below | masks, tmp_path / "model.safetensors", metadata={"format": "pt"})
    world = DTensorWorld(facts, ParallelSpec())
    params = {name: torch.full(spec.shape, torch.nan) for name, spec in world.layout(0).params.items()}
    load_rank(tmp_path, world, 0, params, facts)
    for name, value in plain.named_parameters():
        assert torch.equal(params[name], value), name
    save_file(below | {"h.0.strange": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="has no tensor h\\.0\\.strange"):
        load_rank(tmp_path, world, 0, params, facts)


def test_an_architecture_that_transformers_does_not_have_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Unknown architecture `NewForCausalLM`"):
        facts_in(config(tmp_path, model_type="new", architectures=["NewForCausalLM"]))
    with pytest.raises(InputError, match="Unknown architecture `OlmoForCausalLM`"):
        facts_in(config(tmp_path, model_type="new", architectures=["OlmoForCausalLM"]))


@pytest.mark.slow
def test_a_driver_without_torch_is_told_the_same_by_a_process(tmp_path: Path) -> None:
    hf_model("qwen2-moe").config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen2MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    code = (
        "import sys; from pathlib import Path; from rlctl.checkpoints.hf.model_facts import facts_in\n"
        "print(repr(facts_in(Path(sys.argv[1])))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(describe(tmp_path))
    assert WATCHED not in done.stdout
