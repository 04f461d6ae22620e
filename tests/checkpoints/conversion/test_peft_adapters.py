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

LAYER = "model.layers.0."


def test_targets_are_short_names_where_these_fit_nothing_else() -> None:
    dense = [f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.up_proj"]
    assert targets(dense, [f"{name}.weight" for name in [*dense, f"{LAYER}mlp.norm"]]) == ["q_proj", "up_proj"]
    shared = [f"{LAYER}mlp.shared_experts.up_proj"]
    routed = f"{LAYER}mlp.experts.0.up_proj.weight"
    assert targets(shared, [f"{shared[0]}.weight", routed]) == shared  # routed experts have no adapters


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
    modules = targets([name.removesuffix(".weight") for name in names], model.state_dict())
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
