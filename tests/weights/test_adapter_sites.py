"""The layers that settings name are those that PEFT adapts, with its ranks and scales (`support/peft_recording.py`)."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import families
from rlctl.models.peft_defaults import TARGETS, peft_targets
from rlctl.settings.training import LoraConfig
from rlctl.weights.adapter_sites import places, saved_whole, sites
from support.family_models import hf_model
from support.peft_recording import CASES, RECORDING, SETTINGS, adapted


@pytest.fixture(scope="module")
def facts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFacts]:
    @cache
    def facts(family: str) -> ModelFacts:
        directory = tmp_path_factory.mktemp(family)
        hf_model(family).save_pretrained(directory)
        return facts_in(directory)

    return facts


def settings(family: str, name: str) -> LoraConfig:
    values = dict(SETTINGS[name])
    if family == "deepseek-v3" and name == "exclude-names":
        values = {"target_modules": ["q_a_proj", "kv_b_proj", "o_proj"], "exclude_modules": ["1.self_attn.o_proj"]}
    targets = values.pop("target_modules", ["peft-default"])
    targets = [*targets, *values.pop("target_parameters", ())] if isinstance(targets, list) else targets
    renamed = {"exclude_modules": "exclude", "use_rslora": "rslora"}
    ours: dict[str, Any] = {renamed.get(key, key): value for key, value in values.items()}
    return LoraConfig(rank=4, alpha=8.0, targets=targets, **ours)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in CASES.items() for name in names])
def test_sites_are_those_of_peft(family: str, name: str, facts_of: Callable[[str], ModelFacts]) -> None:
    recorded = json.loads(RECORDING.read_text())[family][name]
    found = {site.module: [site.rank, site.scale] for site in sites(facts_of(family), settings(family, name)).all}
    # PEFT takes these names for routed experts in any model that has them, and drops dense layers and shared experts.
    dense = {module for module in found if re.search(r"\.(gate|up|down)_proj$", module) and ".experts." not in module}
    dropped = dense if family == "deepseek-v3" else set()
    assert found.keys() - dropped == recorded.keys()
    assert {module: pytest.approx(numbers) for module, numbers in recorded.items()} == {
        module: numbers for module, numbers in found.items() if module not in dropped
    }
    assert bool(dropped) == (family == "deepseek-v3" and name == "all-linear")


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_a_family_without_a_default_of_peft_is_refused(family: str, facts_of: Callable[[str], ModelFacts]) -> None:
    """PEFT's table has Mixtral, and PEFT 0.21.2 on transformers 5 finds no layers for it."""
    peft = pytest.importorskip("peft")
    with pytest.raises(
        ConfigError, match=r"targets = peft-default: PEFT has no default layers for (qwen3_moe|mixtral)"
    ):
        sites(facts_of(family), LoraConfig(rank=4, targets="peft-default"))
    with pytest.raises(ValueError, match="target_modules"):
        peft.get_peft_model(copy.deepcopy(hf_model(family)), peft.LoraConfig(r=4, task_type="CAUSAL_LM"))


def test_default_layers_of_families_are_those_of_peft() -> None:
    """`model_type` of each family's tiny model, in the table of PEFT."""
    table = pytest.importorskip("peft.utils").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    for family in families():
        model_type = family.tiny.get("model_type", "llama")
        assert peft_targets(family.name) == tuple(table.get(model_type, ())) or family.name == "mixtral", family.name
    assert {name: list(names) for name, names in TARGETS.items()} == {name: table.get(name) for name in TARGETS}


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_the_recording_is_what_peft_does(family: str) -> None:
    pytest.importorskip("peft")
    recorded = json.loads(RECORDING.read_text())[family]
    assert recorded == {name: adapted(family, name) for name in CASES[family]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"targets": ["q_porj"]},
            r"lora\.targets: q_porj names no linear layer .*Name some of q_proj, k_proj",
        ),
        ({"targets": "q_proj"}, r"training\.lora\.targets: q_proj names no linear layer"),
        ({"targets": ["q_proj"], "exclude": ["wq"]}, r"training\.lora\.exclude: wq names no linear layer"),
        ({"targets": ["q_proj"], "exclude": ["q_proj"]}, r"no layers for adapters of this name \(q_proj\)"),
        (
            {"targets": ["q_proj"], "rank_pattern": {"k_proj": 2}},
            r"lora\.rank_pattern: k_proj matches the end",
        ),
        ({"rank_pattern": {"proj": 2}}, r"training\.lora\.rank_pattern: proj matches the end of no name"),
        ({"alpha_pattern": {"lm_head": 2}}, r"training\.lora\.alpha_pattern: lm_head matches the end"),
        ({"targets": ["gate_proj"]}, r"names \S+experts\.gate_proj without \S+experts\.up_proj, .* in one matrix"),
        ({"targets": ["embed_tokens"]}, r"training\.lora\.targets: embed_tokens names no linear layer"),
    ],
)
def test_names_and_patterns_of_no_layer_are_refused(
    values: dict[str, Any], said: str, facts_of: Callable[[str], ModelFacts]
) -> None:
    facts = facts_of("qwen3-moe")
    with pytest.raises(ConfigError) as caught:
        sites(facts, LoraConfig(rank=4, **values))
    assert re.search(said, f"{caught.value} {caught.value.hint}", re.DOTALL), caught.value


@pytest.mark.parametrize("key", ["targets", "exclude"])
@pytest.mark.parametrize("pattern", ["(q_proj", "q_proj(?i)"])
def test_what_is_no_regular_expression_is_refused_by_its_key(key: str, pattern: str) -> None:
    with pytest.raises(ValueError, match="is no regular expression"):
        LoraConfig.model_validate({"rank": 4, key: pattern})
    with pytest.raises(ValueError, match="is no regular expression"):
        LoraConfig.model_validate({"rank": 4, "rank_pattern": {pattern: 2}})


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (("norm",), r"norm names model\.layers\.0\.\S+norm"),
        (("q_proj",), "q_proj names"),
        (("wte",), "wte names no module"),
    ],
)
def test_other_modules_are_not_trained_whole(
    modules: tuple[str, ...], said: str, facts_of: Callable[[str], ModelFacts]
) -> None:
    """PEFT takes plain ends of names: `norm` is also each norm of a layer."""
    with pytest.raises(ConfigError, match=said):
        saved_whole(facts_of("llama"), LoraConfig(rank=4, modules_to_save=modules))
    assert saved_whole(facts_of("llama"), LoraConfig(rank=4, modules_to_save=("tokens", "head"))) == {
        name: name for name in ("model.embed_tokens.weight", "lm_head.weight")
    }


def test_words_shell_patterns_and_megatrons_names_mean_groups(facts_of: Callable[[str], ModelFacts]) -> None:
    facts = facts_of("deepseek-v3")

    def modules(**values: Any) -> set[str]:
        return {site.module for site in sites(facts, LoraConfig(rank=4, **values)).all}

    attention, latent = modules(targets=("attention",)), {"q_a_proj", "kv_a_proj_with_mqa"}
    assert {name.rpartition(".")[2] for name in attention} == {"q_b_proj", "kv_b_proj", "o_proj"}
    assert modules(targets=("attention", "mlp")) == modules()
    assert modules(targets=["attention", *latent]) == modules(targets=["*self_attn*"])
    assert modules(targets=["linear_q_up_proj"]) == modules(targets=["q_b_proj"])
    assert modules(targets=["linear_fc1"]) == {name for name in modules() if name.endswith(("gate_proj", "up_proj"))}
    assert modules(exclude=["*.shared_experts.*"]) == {name for name in modules() if "shared" not in name}
    assert not {place.layer for place in places(facts)} - set(range(facts.layers))
