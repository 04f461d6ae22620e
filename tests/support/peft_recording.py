"""Record which layers of tiny models PEFT adapts, by settings: `python tests/support/peft_recording.py` writes
`tests/weights/peft_sites.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.family_models import hf_model

RECORDING = Path(__file__).parents[1] / "weights" / "peft_sites.json"
PROJECTIONS = ["q_proj", "v_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": PROJECTIONS},
    "whole-names": {"target_modules": ["model.layers.1.self_attn.q_proj", "self_attn.o_proj", "0.self_attn.k_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "expression": {"target_modules": r".*\.layers\.[02]\..*(q|o)_proj"},
    "exclude-names": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["1.self_attn.q_proj"]},
    "exclude-expression": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*\.[1-3]\..*q_proj"},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "rank_pattern": {
            "^model.layers.0.self_attn.q_proj": 7, "q_proj": 2, "self_attn.k_proj": 3, r"layers\.[23]\..*": 5,
        },
        "alpha_pattern": {r"layers.1.self_attn.\w_proj": 3, "v_proj": 10},
    },
    "rslora": {
        "target_modules": PROJECTIONS, "use_rslora": True, "rank_pattern": {"q_proj": 16},
        "alpha_pattern": {"v_proj": 9},
    },
    "experts-by-names": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "experts-by-parameters": {
        "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {r"experts\.down_proj": 2},
    },
    "experts-rslora": {"target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
    "fused": {"target_modules": ["qkv_proj", "gate_up_proj"]},
    "unnamed": {},
    "unnamed-with-parameters": {"target_parameters": ["experts.down_proj"]},
}  # fmt: skip
"""Keyword arguments of PEFT's LoraConfig beside r = 4 and lora_alpha = 8."""
CASES = {
    "llama": ("names", "whole-names", "all-linear", "expression", "exclude-names", "exclude-expression", "patterns",
              "rslora", "unnamed"),
    "qwen3-moe": ("names", "all-linear", "experts-by-names", "experts-by-parameters", "experts-rslora", "patterns"),
    "deepseek-v3": ("all-linear", "exclude-names") ,
    "gpt-oss": ("names", "all-linear", "experts-by-parameters"),
    "gpt-neox": ("all-linear", "unnamed"),
    "gemma3": ("unnamed",),
    "mixtral": ("unnamed-with-parameters",),
    "phi3": ("fused", "all-linear"),
}  # fmt: skip


def adapted(family: str, name: str) -> dict[str, list[float]]:
    """Return rank and scale by the name of the layer or parameter that PEFT adapts."""
    import copy

    import peft

    values = SETTINGS[name]
    if family == "deepseek-v3" and name == "exclude-names":
        values = {"target_modules": ["q_a_proj", "kv_b_proj", "o_proj"], "exclude_modules": ["1.self_attn.o_proj"]}
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **values)
    model = peft.get_peft_model(copy.deepcopy(hf_model(family)), config)
    found = {}
    for module, layer in model.base_model.model.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            parameter = getattr(layer, "parameter_name", None)
            module = module.replace(".base_layer", "")
            target = module if parameter in (None, "weight") else f"{module}.{parameter}"
            found[target] = [layer.r["default"], layer.scaling["default"]]
    return found


def record() -> dict[str, dict[str, dict[str, list[float]]]]:
    return {family: {name: adapted(family, name) for name in names} for family, names in CASES.items()}


if __name__ == "__main__":
    RECORDING.write_text(json.dumps(record(), indent=1, sort_keys=True) + "\n")
