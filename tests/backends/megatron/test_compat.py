"""Gaps of Megatron-Core without TransformerEngine are filled on GPUs, too, where nothing else of it is touched."""

from __future__ import annotations

import subprocess
import sys

# A process of its own: what is patched stays patched.
CODE = """
import torch
torch.cuda.is_available = lambda: True
from megatron.core import optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
before = DistributedOptimizer._get_main_param_and_optimizer_states
from rlctl.backends.megatron import cpu
for _ in range(2):
    cpu.install()
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.moe import moe_utils
assert optimizer.Adam is torch.optim.AdamW
assert DistributedOptimizer._get_main_param_and_optimizer_states is not before
assert CheckpointWithoutOutput().fp8 is False
assert isinstance(mla.Linear, type)
assert hasattr(moe_utils, "te_general_gemm")
assert optimizer.torch is torch
print("filled")
"""


def test_gaps_are_filled_where_there_is_a_gpu_and_no_transformer_engine() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "filled\n", done.stderr
