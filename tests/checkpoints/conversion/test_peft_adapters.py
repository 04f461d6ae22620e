"""Names of adapters' targets; tests/parallel/test_lora.py has the adapters of trained policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rlctl.checkpoints.conversion.peft_adapters import adapter_config, named_for_peft, targets
from rlctl.checkpoints.megatron.megatron_directory import Base
from support.peft_models import base_model, engine_logprobs, logprobs

LAYER = "model.layers.0."


def test_targets_are_short_names_where_these_fit_nothing_else() -> None:
    dense = [f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.up_proj"]
    assert targets(dense, [f"{name}.weight" for name in [*dense, f"{LAYER}mlp.norm"]]) == (["q_proj", "up_proj"], [])
    named = [f"{LAYER}feed_forward.shared_expert.fc"]
    others = [f"{named[0]}.weight", f"{LAYER}feed_forward.experts.0.fc.weight"]
    assert targets(named, others, experts=True) == (named, [])  # routed experts have no adapters


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen2_moe"])
def test_no_adapter_has_a_name_that_peft_gives_to_routed_experts(family: str) -> None:
    """PEFT 0.21.2 (`_MOE_TARGET_MODULE_MAPPING` of utils/transformers_weight_conversion.py) takes these last parts of
    `target_modules` away from the linear layers of any mixture-of-experts model; with it and transformers 5.19.0 the
    logits of these three models with adapters in `target_parameters` are the merged models' within 2e-5."""
    renamed = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    config = transformers.AutoConfig.for_model(family)
    config.num_hidden_layers, config.first_k_dense_replace, config.decoder_sparse_step = 2, 1, 2
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "layers." in name]
    modules, parameters = targets(linear, dict(model.named_parameters()), experts=True)
    assert not renamed & {name.rpartition(".")[2] for name in modules}
    assert {"down_proj", "gate_proj", "up_proj"} == {name.split(".")[-2] for name in parameters}
    covered = {name for name in linear if name in modules or name.rpartition(".")[2] in modules}
    assert covered | {name.removesuffix(".weight") for name in parameters} == set(linear)
    numbers = {"training.lora.rank": {"value": 4}, "training.lora.alpha": {"value": 8.0}}
    config = adapter_config(Base(Path("/m"), Path("/m"), numbers), modules, parameters)
    assert config["target_parameters"] == parameters


def test_peft_makes_of_the_adapters_what_merging_does(tiny_llama: Path, tmp_path: Path) -> None:
    """Random adapters of a published model; PEFT itself reads them where it is installed."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    names = [
        name for name in model.state_dict() if name.endswith(("q_proj.weight", "o_proj.weight", "down_proj.weight"))
    ]
    pairs = {}
    for name in names:
        rows, columns = model.state_dict()[name].shape
        pairs[name] = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
    config = {"training.lora.rank": {"value": 4}, "training.lora.alpha": {"value": 8.0}}
    base = Base(tiny_llama, tiny_llama, config)
    modules, parameters = targets([name.removesuffix(".weight") for name in names], model.state_dict())
    assert not parameters
    assert modules == ["down_proj", "o_proj", "q_proj"]
    written = named_for_peft({name.removesuffix(".weight"): pair for name, pair in pairs.items()}, "float32")
    save_file(written, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(base, modules)))
    expected = {name: model.state_dict()[name] + 2.0 * b @ a for name, (a, b) in pairs.items()}
    for name, value in expected.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        torch.testing.assert_close(
            model.state_dict()[name] + 2.0 * written[f"{module}.lora_B.weight"] @ written[f"{module}.lora_A.weight"],
            value,
        )
    peft = pytest.importorskip("peft")
    merged = peft.PeftModel.from_pretrained(model, tmp_path).merge_and_unload().state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value)


def test_the_configuration_names_the_model_that_the_run_began_with() -> None:
    config = {"training.lora.rank": {"value": 8}, "training.lora.alpha": {"value": 32.0}}
    found = adapter_config(Base(Path("/m"), Path("/m"), config | {"model.name": {"value": "me/base"}}), ["q_proj"])
    assert (found["base_model_name_or_path"], found["r"], found["lora_alpha"]) == ("me/base", 8, 32.0)
    assert adapter_config(Base(Path("/m"), Path("/m"), config), [])["base_model_name_or_path"] == "/m"


@pytest.mark.slow
def test_an_engine_computes_the_merged_weights_log_probs_with_written_adapters(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """vLLM's LoRA slots, against transformers with W + 2 B A in float32."""
    model, generator = base_model(tiny_llama), torch.Generator().manual_seed(0)
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "layers" in name]
    pairs = {}
    for name in linear:
        rows, columns = model.get_submodule(name).weight.shape
        a, b = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
        pairs[name] = 0.2 * a, 0.2 * b
    config = {"training.lora.rank": {"value": 4}, "training.lora.alpha": {"value": 8.0}}
    modules, _ = targets(linear, model.state_dict())
    save_file(named_for_peft(pairs, "float32"), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(adapter_config(Base(tiny_llama, tiny_llama, config), modules))
    )
    plain = logprobs(model)
    for name, (a, b) in pairs.items():
        model.get_submodule(name).weight.data += 2.0 * b @ a
    wanted = logprobs(model)
    assert float((wanted - plain).abs().max()) > 0.1
    torch.testing.assert_close(*engine_logprobs(tiny_llama, [tmp_path]), wanted, rtol=0, atol=1e-5)
