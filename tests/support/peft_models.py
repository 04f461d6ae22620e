"""Random adapters that PEFT writes, and what PEFT computes with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

TOKENS = tuple((7 * step * step + 3 * step) % 250 + 1 for step in range(24))


def peft_library() -> Any:
    return pytest.importorskip("peft")


def base_model(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def write_adapter(
    directory: Path, base: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **lora: Any
) -> Path:
    """Write a random adapter of the model in `base` with PEFT; B counts too."""
    peft = peft_library()
    model = peft.get_peft_model(base_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data = (0.2 * torch.randn(value.shape, generator=generator)).to(dtype)
    model.save_pretrained(directory)
    return directory


def with_adapter(base: Path, adapter: Path) -> Any:
    """Return PEFT's model of an adapter on its base."""
    return peft_library().PeftModel.from_pretrained(base_model(base), adapter).eval()


@torch.no_grad()
def logprobs(model: Any, tokens: tuple[int, ...] = TOKENS) -> Tensor:
    """Return the log-prob of each token but the first."""
    ids = torch.tensor([tokens])
    scores = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0]
