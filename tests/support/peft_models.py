"""Random adapters that PEFT writes, and what PEFT computes with adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
base, adapters, tokens = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
llm = LLM(base, skip_tokenizer_init=True, dtype="float32", max_model_len=64, block_size=32, enforce_eager=True,
          kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, enable_lora=True, max_loras=2, max_lora_rank=8)
params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
for number, adapter in enumerate(adapters, 1):
    slot = LoRARequest(f"adapter-{number}", number, adapter)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, lora_request=slot)
    found = [place[token].logprob for token, place in zip(tokens[1:], output.prompt_logprobs[1:])]
    print("LOGPROBS", json.dumps(found))
"""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def engine_logprobs(base: Path, adapters: list[Path], tokens: tuple[int, ...] = TOKENS) -> list[Tensor]:
    """Return the log-prob of each token but the first by vLLM with each adapter in a LoRA slot. Starting the engine
    takes ten seconds."""
    command = [sys.executable, "-c", ENGINE, str(base), json.dumps([*map(str, adapters)]), json.dumps(tokens)]
    run = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert len(lines) == len(adapters)
    return [torch.tensor(json.loads(line.removeprefix("LOGPROBS "))) for line in lines]
