"""What the framework makes of an algorithm's loss and metrics."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import MinibatchResult, TokenBatch
from rlctl.errors import InputError
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.telemetry.metrics import Metric
from rlctl.training.run_loss import RunLoss
from support.token_batches import token_batch


class Toy(Algorithm):
    """Counts tokens and measures what it is told to."""

    metrics = (Metric("toy/mean", "mean"), Metric("toy/total", "sum"), Metric("largest", "max"), Metric("calls", "sum"))

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray:
        return rewards_G

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        return -batch.logprobs_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        half_R = torch.full_like(batch.logprobs_R, 0.5)
        return {"toy/mean": half_R, "toy/total": half_R, "largest": batch.entropy_R, "calls": torch.tensor(1.0)}


def result(loss: RunLoss, batch: TokenBatch) -> MinibatchResult:
    output = loss(batch)
    sums = {name: float(value) for name, value in output.sums.items()}
    maxima = {name: float(value) for name, value in output.maxima.items()}
    return MinibatchResult(float(output.loss), sums, maxima, 1.0, False)


def test_declared_metrics_are_reduced_over_the_tokens_of_all_steps_that_count() -> None:
    one = token_batch(tokens=6, counted_R=torch.arange(6) != 5)
    other = token_batch(tokens=4, seed=1)
    loss = RunLoss(Toy(RlConfig()))
    metrics = loss.metrics([result(loss, one), result(loss, other)])
    assert metrics["toy"] == {"mean": pytest.approx(0.5), "total": pytest.approx(4.5)}
    assert metrics["calls"] == 2
    assert metrics["largest"] == pytest.approx(max(one.entropy_R[:5].max().item(), other.entropy_R.max().item()))
    entropy = (one.entropy_R[:5].sum() + other.entropy_R.sum()) / 9
    assert metrics["entropy"] == pytest.approx(entropy.item())
    difference = torch.cat([(b.old_logprobs_R - b.rollout_logprobs_R)[b.counted_R].abs() for b in (one, other)])
    assert metrics["logprob_diff"]["mean"] == pytest.approx(difference.mean().item())
    assert metrics["logprob_diff"]["max"] == pytest.approx(difference.max().item())


def test_the_loss_is_the_weighted_sum_over_tokens_that_count() -> None:
    batch = token_batch(tokens=6, counted_R=torch.arange(6) != 2)
    expected = sum(-batch.token_weights_R[i] * batch.logprobs_R[i] for i in range(6) if i != 2)
    torch.testing.assert_close(RunLoss(Toy(RlConfig()))(batch).loss, expected)


@pytest.mark.parametrize(("thinking", "call"), [(-5.0, None), (None, -3.0), (-5.0, -3.0)])
def test_turns_with_a_fault_have_an_advantage_of_their_own(thinking: float | None, call: float | None) -> None:
    """NeMo-RL: that of an invalid call, else that of malformed thinking, in place of the episode's."""
    advantage = {"malformed_thinking": thinking, "invalid_tool_call": call, "normalize_std": False}
    config = RlConfig.model_validate({"advantage": advantage, "environment": {"name": "guess-number"}})
    faults = [0, 1, 2, 3, 0, 1]
    batch = token_batch(tokens=6, extra_R={"turn_faults": torch.tensor(faults, dtype=torch.float32)})
    expected = [
        call if fault & 2 and call is not None else thinking if fault & 1 and thinking is not None else own
        for fault, own in zip(faults, batch.advantages_R.tolist(), strict=True)
    ]
    algorithm = Grpo(config)
    given = replace(batch, advantages_R=torch.tensor(expected, dtype=torch.float64), extra_R={})
    torch.testing.assert_close(RunLoss(algorithm)(batch).loss, RunLoss(Grpo(RlConfig()))(given).loss)
    assert algorithm.learns_without_advantage
    assert not Grpo(RlConfig()).learns_without_advantage


def test_measuring_something_else_than_declared_is_refused() -> None:
    class Odd(Toy):
        metrics = (Metric("other", "mean"),)

    with pytest.raises(InputError, match=r"measures 'calls', which its `metrics` do not declare"):
        RunLoss(Odd(RlConfig()))(token_batch())


def test_a_step_without_tokens_has_measured_nothing() -> None:
    loss = RunLoss(Toy(RlConfig()))
    for empty in ({"tokens": 0.0}, {}):  # of rollouts that are left out, and without any
        assert loss.metrics([MinibatchResult(0.0, empty, {}, 0.0, False)]) == {}


def test_the_driver_does_without_torch_and_vllm() -> None:
    """What launches runs, and what workers answer with."""
    code = (
        "import sys, rlctl.jobs.train, rlctl.backends.messages, rlctl.refit.records, rlctl.backends.base\n"
        "import rlctl.training.loop, rlctl.methods.rl.grpo, rlctl.rollouts.synchronous\n"
        "sys.exit(' '.join({'torch', 'vllm', 'transformers', 'ray', 'megatron'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
