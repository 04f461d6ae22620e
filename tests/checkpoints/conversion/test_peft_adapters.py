"""Names of adapters' targets; tests/parallel/test_lora.py has the adapters of trained policies."""

from __future__ import annotations

from pathlib import Path

from rlctl.checkpoints.conversion.peft_adapters import adapter_config, targets
from rlctl.checkpoints.megatron.megatron_directory import Base

LAYER = "model.layers.0."


def test_targets_are_short_names_where_these_fit_nothing_else() -> None:
    dense = [f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.up_proj"]
    assert targets(dense, [f"{name}.weight" for name in [*dense, f"{LAYER}mlp.norm"]]) == ["q_proj", "up_proj"]
    shared = [f"{LAYER}mlp.shared_experts.up_proj"]
    routed = f"{LAYER}mlp.experts.0.up_proj.weight"
    assert targets(shared, [f"{shared[0]}.weight", routed]) == shared  # routed experts have no adapters


def test_the_configuration_names_the_model_that_the_run_began_with() -> None:
    config = {"training.lora.rank": {"value": 8}, "training.lora.alpha": {"value": 32.0}}
    found = adapter_config(Base(Path("/m"), Path("/m"), config | {"model.name": {"value": "me/base"}}), ["q_proj"])
    assert (found["base_model_name_or_path"], found["r"], found["lora_alpha"]) == ("me/base", 8, 32.0)
    assert adapter_config(Base(Path("/m"), Path("/m"), config), [])["base_model_name_or_path"] == "/m"
