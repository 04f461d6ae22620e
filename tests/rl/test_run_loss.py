"""The driver's stand-in for the loss."""

from __future__ import annotations

import pickle
import subprocess
import sys

import torch

from rlctl.backends.base import TokenBatch
from rlctl.config.schema import GrpoConfig
from rlctl.rl.losses import GrpoLoss
from rlctl.rl.run_loss import RunLoss


def batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    columns = {name: torch.rand(6, generator=generator, dtype=torch.float64) for name in ("a", "b", "c", "d", "e")}
    return TokenBatch(
        rollout_T=torch.arange(6), logprobs_T=-columns["a"], entropy_T=columns["b"], old_logprobs_T=-columns["c"],
        rollout_logprobs_T=-columns["d"], advantages_T=columns["e"] - 0.5, token_weights_T=torch.full((6,), 1 / 6),
        loss_mask_T=torch.ones(6, dtype=torch.bool),
    )  # fmt: skip


def test_what_reaches_the_worker_computes_the_configured_loss():
    grpo = GrpoConfig(clip_low=0.1, clip_high=0.3, importance_correction="masked")
    arrived = pickle.loads(pickle.dumps(RunLoss(grpo)))
    assert torch.equal(arrived(batch()).loss, GrpoLoss.from_config(grpo)(batch()).loss)
    assert not torch.equal(RunLoss(GrpoConfig(clip_low=0.9))(batch()).loss, arrived(batch()).loss)


def test_the_driver_does_without_torch_and_vllm():
    """What launches runs, and what workers answer with."""
    code = (
        "import sys, rlctl.rl.launch, rlctl.backends.vllm.messages, rlctl.refit.records, rlctl.backends.base\n"
        "sys.exit(' '.join({'torch', 'vllm', 'transformers', 'ray', 'megatron'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
