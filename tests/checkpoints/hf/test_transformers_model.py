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

from rlctl.backends.base import PolicySpec
from rlctl.backends.lookup import policy_backend
from rlctl.checkpoints.hf.transformers_model import WATCHED, describe, facts_in, fill_buffers, meta_model
from rlctl.checkpoints.rank_loading import load_rank
from rlctl.config.load import resolve
from rlctl.config.parallel import ParallelSpec
from rlctl.config.schema import LoraConfig, OptimizerConfig
from rlctl.errors import ConfigError, InputError, RlctlError
from rlctl.models.families import weights_of
from rlctl.planner.costs.parameters import count
from rlctl.planner.from_config import completions_workload, plan_from_config
from rlctl.planner.make_plan import Plan
from rlctl.weights.dtensor import DTensorWorld
from support.parallel_families import FAMILIES, OTHERS, REFUSED, hf_model

TRAINED = [family for family in OTHERS if family not in REFUSED]
QUICK = ("gemma3", "gpt-oss", "deepseek-v3", "granite", "minicpm3")


def slowly(families: list[str], *quick: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in families]


@pytest.mark.parametrize("family", slowly([*FAMILIES, *TRAINED], *QUICK))
def test_buffers_that_no_file_holds_are_computed_again(family: str, tmp_path: Path) -> None:
    plain = hf_model(family)
    plain.config.save_pretrained(tmp_path)
    inner = meta_model(tmp_path, "eager").to_empty(device="cpu")
    fill_buffers(inner)
    stored, expected = plain.state_dict().keys(), dict(plain.named_buffers())
    found = {name: value for name, value in inner.named_buffers() if name not in stored}
    assert found.keys() == {name for name in expected if name not in stored} != set()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_buffer_that_transformers_cannot_compute_again_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    hf_model("llama").config.save_pretrained(tmp_path)
    inner = meta_model(tmp_path, "eager")
    inner.model.norm.register_buffer("table", torch.empty(3, device="meta", dtype=dtype), persistent=False)
    with pytest.raises(InputError, match="how to compute model\\.norm\\.table"):
        fill_buffers(inner.to_empty(device="cpu"))


class Masked(torch.nn.Module):
    """A model with a table of truth values, which it computes as transformers' models do theirs."""

    causal: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", torch.empty(3, 3, dtype=torch.bool), persistent=False)

    def _init_weights(self, module: Any) -> None:
        module.causal.copy_(torch.ones(3, 3).tril())


def test_truth_values_that_are_computed_again_are_not_refused() -> None:
    model = Masked()
    fill_buffers(model)
    assert model.causal.tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("family", slowly(TRAINED, "phi3", "qwen2-moe", "granite-hybrid"))
def test_a_family_without_a_file_is_loaded_by_its_modules(family: str, tmp_path: Path) -> None:
    """Every rank's part of what transformers itself loads, and nothing else; counted as transformers counts."""
    plain = hf_model(family)
    plain.save_pretrained(tmp_path)
    facts = facts_in(tmp_path)
    theirs = dict(plain.named_parameters())
    assert weights_of(facts).parameters == sum(value.numel() for value in theirs.values())
    assert count(facts).total == pytest.approx(weights_of(facts).parameters, rel=0.2)  # layers as large as the largest
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
        return plan_from_config(resolve(flags=flags, environment={}).config, facts)

    assert planned("dtensor").runnable
    (why,) = planned("megatron").not_runnable_because
    assert "family Qwen2MoeForCausalLM has no weight map" in why
    assert "--backend dtensor trains it without one" in why
    engines = completions_workload(resolve(flags=node, environment={}).config, facts, [16], 1)
    assert plan_from_config(resolve(flags=node, environment={}).config, facts, workload=engines).runnable
    with pytest.raises(RlctlError, match="how Qwen2MoeForCausalLM divides over ranks is not known"):
        planned("dtensor", tp=2)
    spec = PolicySpec(facts, ParallelSpec(), optimizer=OptimizerConfig(), temperature=1.0, router_replay=True)
    with pytest.raises(ConfigError, match="how routers of Qwen2MoeForCausalLM weigh experts") as raised:
        policy_backend("dtensor").refuse(spec)
    assert raised.value.hint == "Remove it."
    with pytest.raises(ConfigError, match="layers of Qwen2MoeForCausalLM are not known as such"):
        policy_backend("dtensor").refuse(replace(spec, router_replay=False, lora=LoraConfig(rank=4)))


@pytest.mark.parametrize("name", ["mlp.gate.weight", "mlp.router.gate.weight", "mlp.gate.wg.weight"])
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
    "stablelm": ({"architectures": ["StableLmForCausalLM"]}, "do not hand on to the attention"),
    "phi3": ({"architectures": ["Phi3ForCausalLM"], "rope_parameters": LONG, "pad_token_id": 0}, "longrope"),
    "gpt2": ({"architectures": ["GPT2LMHeadModel"]}, "not where most models have them"),
    "lfm2": (
        {"architectures": ["Lfm2ForCausalLM"], "pad_token_id": 0, "layer_types": ["conv", "full_attention"]},
        "mix tokens by",
    ),
    "falcon": ({"architectures": ["FalconForCausalLM"]}, "do not go through transformers' attention interface"),
    "llama4_text": (
        {"architectures": ["Llama4ForCausalLM"], "pad_token_id": 0, "attention_chunk_size": 8},
        "mix tokens by chunked_attention",
    ),
    "granitemoe": ({"architectures": ["GraniteMoeForCausalLM"]}, "which rlctl does not follow"),
}


@pytest.mark.parametrize("model_type", NOT_TRAINED)
def test_what_cannot_be_trained_on_packed_rows_is_refused(model_type: str, tmp_path: Path) -> None:
    values, why = NOT_TRAINED[model_type]
    with pytest.raises(InputError, match=why) as raised:
        facts_in(config(tmp_path, model_type=model_type, **TINY, **values))
    assert values["architectures"][0] in raised.value.message  # type: ignore[index]
    assert "docs/adding_a_model.md" in (raised.value.hint or "")


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
        "import sys; from pathlib import Path; from rlctl.checkpoints.hf.transformers_model import facts_in\n"
        "print(repr(facts_in(Path(sys.argv[1])))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(describe(tmp_path))
    assert WATCHED not in done.stdout
