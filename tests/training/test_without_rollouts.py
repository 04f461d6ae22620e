"""A run without engines: a policy, a source of texts, and a loss that differs from token to token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle

from rlctl.methods.sft import SftConfig
from rlctl.preparation.run_workers import start_run_workers
from rlctl.preparation.worker_specs import planned_workers
from rlctl.telemetry.phases import StepTimer
from rlctl.training.health import Health
from rlctl.training.loop import Loop, Parts
from support import toy_texts
from support.engines import tiny_facts
from support.plans import plan_of
from support.toy_texts import PROMPT, Quiet, Stop, ToySource, TwoLosses, extra, text


def expected_loss(model: Path) -> float:
    """The loss of the first batch, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total, count = 0.0, 0
    for position in range(3):
        tokens, columns = text(position).tokens_T.tolist(), extra(position)
        with torch.no_grad():
            logprobs = policy(torch.tensor([tokens])).logits[0].log_softmax(-1)
        for place in range(PROMPT, len(tokens)):
            logprob = float(logprobs[place - 1, tokens[place]])
            imitated = bool(columns) and columns["imitated"][place] > 0
            weight = float(columns["loss_weights"][place]) if columns else 1.0
            total += weight * (-logprob if imitated else 0.5 * torch.tensor(logprob).exp().item())
            count += 1
    return total / count


@pytest.mark.long
@pytest.mark.guard
def test_a_run_without_rollouts_has_a_policy_alone_and_a_loss_of_its_own_for_each_token(
    placement: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    cloudpickle.register_pickle_by_value(toy_texts)  # workers do not find the tests' own modules
    config = SftConfig.model_validate(
        {
            "batch": {"prompts": 3},
            "optimizer": {"lr": 1e-2},
            "model": {"max_length": 64},
            "training": {"dp": 1, "threads": 1, "backend": "megatron"},
            "cluster": {"gpu": "cpu"},
            "run": {"steps": 3, "algorithm": "sft"},
        }
    )
    facts = tiny_facts(tied=False)
    plan = plan_of(config, facts)
    assert plan.generation is None
    assert plan.mover is None
    method = TwoLosses(config)
    spec = planned_workers(config, facts, plan, tiny_llama, None, method)
    assert spec.engines is None
    quiet: Any = Quiet()
    stop: Any = Stop()
    with start_run_workers(spec, tmp_path) as workers:
        assert workers.engines is None
        assert set(workers.groups) == {"policy"}
        workers.policy.load_model(tiny_llama)
        parts = Parts(ToySource(), method, workers.policy, quiet, quiet, Health(config.checks), StepTimer())
        Loop(config, parts).run(stop)
    first, last = quiet.logged[0], quiet.logged[-1]
    assert first["loss"] == pytest.approx(expected_loss(tiny_llama), rel=1e-5)
    assert last["loss"] < first["loss"]
    assert first["imitated_tokens"] == sum(int(extra(place)["imitated"][PROMPT:].sum()) for place in (0, 1))
    assert first["tokens"] == sum(len(text(place).tokens_T) for place in range(3))
    assert not {"staleness", "logprob_diff", "reward_mean", "stop_reasons", "refit_seconds"} & first.keys()
