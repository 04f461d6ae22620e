#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.19.0: an adapter with the output layer among its targets replaces the base model's weights.
#
# Input: two random tiny Llamas, A and B, of the same shapes, such as a model and its next version. Adapters of A, saved by
# PEFT before any step (B = 0), with target_modules q_proj, q_proj and lm_head, or q_proj and embed_tokens. Each is
# loaded onto B, and disabled.
# Guess, written down first: with disable_adapter(), the model computes what B computes.
# Behavior: for lm_head and embed_tokens, adapter_model.safetensors also has the whole base matrix (lm_head.base_layer.weight);
# saving warns that it stores the layer. PeftModel.from_pretrained copies it into B without a warning. It stays there in
# disable_adapter(), which trainers use for the reference policy, and after unload().
# Output seen (largest difference of log-probs from B with the adapter disabled, and after unload):
#   q_proj: 0.00, 0.00
#   q_proj, lm_head: 8.11, 8.11
#   q_proj, embed_tokens: 8.65, 8.65
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "torch==2.13.0" "numpy<3" "peft==0.21.2" "transformers==5.19.0" "tokenizers==0.23.3"
"$place/venv/bin/python" - "$place" <<'PYTHON'
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.2}  # fmt: skip


def llama(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@torch.no_grad()
def logprobs(model):
    return model(input_ids=torch.arange(24)[None]).logits.log_softmax(-1)


differences, told = [], []
for targets in (["q_proj"], ["q_proj", "lm_head"], ["q_proj", "embed_tokens"]):
    adapter = Path(sys.argv[1]) / targets[-1]
    get_peft_model(llama(0), LoraConfig(task_type="CAUSAL_LM", target_modules=targets)).save_pretrained(adapter)
    expected = logprobs(llama(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(llama(1), adapter)
    told += [str(warning.message) for warning in caught]
    with model.disable_adapter():
        disabled = float((logprobs(model) - expected).abs().max())
    unloaded = float((logprobs(model.unload()) - expected).abs().max())
    print(f"{', '.join(targets)}: {disabled:.2f}, {unloaded:.2f}")
    differences.append((disabled, unloaded))
assert differences[0] == (0.0, 0.0)
assert all(min(pair) > 1 for pair in differences[1:])
assert not told, told
PYTHON
