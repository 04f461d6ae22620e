"""Settings of adapters in a rehearsal, whose model has fewer layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.methods.configuration import resolve
from rlctl.rehearsal.shrink import adapter_values
from rlctl.settings.training import LoraConfig
from rlctl.weights.adapter_sites import sites
from support.catalog_models import model


@pytest.mark.parametrize(
    ("name", "sets", "ends"),
    [
        ("DeepSeek-V3", ["lora.rank_pattern={'layers.60.self_attn.o_proj': 4}"], {
            "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("Llama-3.1-8B", ["lora.targets=model.layers.(20|31).*.(q|v)_proj"], {"q_proj", "v_proj"}),
        ("Qwen3-30B-A3B", ["lora.targets=all-linear", "lora.exclude=[layers.40.mlp.gate]"], {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "down_proj"}),
    ],
)  # fmt: skip
def test_names_of_layers_become_ends_of_names(name: str, sets: list[str], ends: set[str]) -> None:
    resolved = resolve(sets=["run.method=sft", "training.lora.rank=8", *(f"training.{each}" for each in sets)])
    values = adapter_values(resolved.config, model(name))
    small = replace(model(name), layers=4, mtp_layers=0)
    lora = LoraConfig(rank=8, **{key: values[f"training.lora.{key}"] for key in ("targets", "exclude")})
    assert {site.module.rpartition(".")[2] for site in sites(small, lora).all} == ends
    assert any(site.place.is_expert for site in sites(small, lora).all) == ("gate_up_proj" in ends)
    assert values["training.lora.rank_pattern"] == {}


def test_settings_without_numbers_stay() -> None:
    resolved = resolve(sets=["run.method=sft", "training.lora.rank=8", "training.lora.rank_pattern={o_proj: 4}"])
    assert adapter_values(resolved.config, model("Llama-3.1-8B")) == {}
