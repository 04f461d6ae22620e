"""A defect of vLLM's CPU build, shown and mended: its rotary kernel turns three-dimensional queries wrongly."""

from __future__ import annotations

import json
import subprocess
import sys

# In a process of its own: vLLM binds the memory of the one that imports it.
PROGRAM = """
import json
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from rlctl.backends.vllm import compat

tokens, heads, size = 7, 4, 64
torch.manual_seed(0)
queries, key = torch.randn(tokens, heads, 128 + size), torch.randn(tokens, 1, size)
positions = torch.arange(3, 3 + tokens)

def turned(x):  # interleaved pairs, Su et al. 2021
    angles = torch.outer(positions.double(), 1 / 10000 ** (torch.arange(0, size, 2).double() / size))[:, None]
    a, b = x[..., 0::2].double(), x[..., 1::2].double()
    return torch.stack([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).flatten(-2)

def errors(rotary):
    whole, k = queries.clone(), key.clone()
    query, out = rotary.forward_cpu(positions, whole[..., 128:], k)
    same = bool((whole[..., :128] == queries[..., :128]).all())
    return [float((query - turned(queries[..., 128:])).abs().max()), float((out - turned(key)).abs().max()), same,
            float((whole[..., 128:] - turned(queries[..., 128:])).abs().max())]

with set_current_vllm_config(VllmConfig()):
    rotary = RotaryEmbedding(size, size, 64, 10000.0, False, torch.float32)
before = errors(rotary)
compat.rotate_every_head()
compat.rotate_every_head()
print(json.dumps([before, errors(rotary)]))
"""


def test_the_kernel_is_wrong_by_itself_and_right_by_head() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before[0] > 0.1, "mended in this version of vLLM: take compat.rotate_every_head away"
    query, key, rest_untouched, in_place = after
    assert max(query, key, in_place) < 1e-5
    assert rest_untouched
