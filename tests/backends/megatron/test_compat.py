"""Gaps of Megatron-Core without TransformerEngine are filled on GPUs, where nothing else of it is touched: where it is
absent, and where it cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A process of its own: what is patched stays patched.
CODE = """
import dataclasses, torch
torch.cuda.is_available = lambda: True
from rlctl.backends.base import PolicySpec
from rlctl.backends.megatron import cpu
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.errors import MachineError
from rlctl.models.catalog import lookup

rank = MegatronWorker.__new__(MegatronWorker)
rank.spec = PolicySpec(lookup("Qwen/Qwen3-8B"), device="cuda")
try:
    rank.prepare()
except MachineError as error:
    print(error.message, error.hint)
rank.spec = dataclasses.replace(rank.spec, megatron={"transformer_impl": "local"})
rank.prepare()
cpu.install()
from megatron.core import optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.moe import moe_utils
assert optimizer.Adam is torch.optim.AdamW
assert DistributedOptimizer._get_main_param_and_optimizer_states.__module__ == "rlctl.backends.megatron.compat"
assert CheckpointWithoutOutput().fp8 is False
assert isinstance(mla.Linear, type)
assert hasattr(moe_utils, "te_general_gemm")
assert optimizer.torch is torch
print("filled")
"""


@pytest.mark.guard
@pytest.mark.slow
def test_megatrons_own_layers_do_without_a_transformer_engine_that_cannot_be_imported(tmp_path: Path) -> None:
    """As one is that was built for another torch, on a machine with a GPU. Where its layers are wanted, it is named."""
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").write_text("raise ImportError('te.so: undefined symbol: _ZN3c10')\n")
    found = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=found, capture_output=True, text=True, timeout=300)
    said, _, filled = done.stdout.partition("\n")
    assert filled == "filled\n", done.stderr
    assert "TransformerEngine is installed and cannot be imported with torch" in said
    assert "undefined symbol: _ZN3c10" in said
    assert "--set megatron.transformer_impl=local" in said
