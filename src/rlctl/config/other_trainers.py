"""Names of other trainers, Megatron-Core and vLLM for keys and flags of rlctl. They are in `names.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
KEYS: dict[str, str] = NAMES["keys"]
"""Other trainers' keys and rlctl's counterparts, for suggestions."""


def counterpart(key: str) -> str | None:
    """Return rlctl's key for another trainer's key or for the last part of one, in any section and with hyphens too."""
    name = key.rpartition(".")[2].replace("-", "_")
    return KEYS.get(key) or KEYS.get(name) or NAMES["flags_of_keys"].get(f"--{name.replace('_', '-')}")


def reason_against(key: str) -> str | None:
    """Return why rlctl has no such key for adapters (DoRA or biases, by its names or PEFT's)."""
    section, _, name = key.rpartition(".")
    reasons = NAMES["no_adapters"] if section.startswith("training") else {}
    return reasons.get(name if section == "training.lora" else None) or reasons.get(
        {"use_dora": "dora", "lora_bias": "bias"}.get(name)
    )
