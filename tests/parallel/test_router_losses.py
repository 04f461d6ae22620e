"""The auxiliary losses of routers have the gradient of their published formulas under every layout, in float64 on
transformers' model."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from support.parallel_cases import WEIGHT, Case, assemble, model_of, plan_of, run_case
from support.pool import Pools, Published, slowly
from support.reference_policy import (
    Optim,
    advantage,
    close,
    facts,
    hf_model,
    make_batch,
    megatron_weights,
    prompt_tokens,
    token_loss,
)

BALANCE, Z = 0.3, 0.02
GIVEN = {"moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": Z}
CASES = {
    "packed": Case("qwen3moe", megatron=GIVEN),
    "one-rollout-a-row": Case("qwen3moe", megatron=GIVEN, packing=False, share_prompts=False),
    "padded-inside": Case("qwen3moe", megatron=GIVEN, packing=False, share_prompts=False, dynamic=True),
    "sigmoid-recompute": Case("deepseek", megatron=GIVEN, recompute="full"),
    "recompute-moe": Case("qwen3moe", recompute="selective",
                          megatron=GIVEN | {"recompute_modules": ["moe", "core_attn"]}),
    "z-alone": Case("qwen3moe", megatron={"moe_z_loss_coeff": Z}),
    "dp2": Case("qwen3moe", ParallelSpec(dp=2), megatron=GIVEN),
    "tp2": Case("qwen3moe", ParallelSpec(tp=2), megatron=GIVEN, recompute="full"),
    "cp2": Case("qwen3moe", ParallelSpec(cp=2), megatron=GIVEN, share_prompts=False),
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2), megatron=GIVEN),
    "pp2": Case("qwen3moe", ParallelSpec(pp=2), megatron=GIVEN),
    "tp2-cp2-ep2": Case("qwen3moe", ParallelSpec(tp=2, cp=2, ep=2), megatron=GIVEN),
}  # fmt: skip


def reference(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Gradients by Megatron's names; the load-balance and the z-loss; tokens of each expert in each layer."""
    model, batch, moe = hf_model(case.kind).double(), make_batch(), facts(case.kind).moe
    model.config._experts_implementation = "eager"  # the grouped product takes no float64
    assert moe is not None
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    heard: list[torch.Tensor] = []

    def hear(gate: Any, inputs: tuple[torch.Tensor]) -> None:
        heard.append(inputs[0].reshape(-1, inputs[0].shape[-1]) @ gate.weight.T)

    for gate in gates:
        gate.register_forward_pre_hook(partial(hear))
    plan = plan_of(case, batch)
    micros = [micro for shard in plan.shards for micro in shard.minibatches[0] if micro]
    total, rows = torch.zeros((), dtype=torch.float64), []
    for micro in micros:
        layers: list[list[torch.Tensor]] = [[] for _ in gates]
        seen: set[int] = set()
        for rollout in micro:
            columns, heard[:] = batch[rollout.position], []
            span = columns.slice(rollout.sample)
            tokens = torch.from_numpy(columns.tokens_T[span].astype(np.int64))
            mask = torch.from_numpy(columns.loss_mask_T[span])
            table = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            logprobs, entropy = table.gather(1, tokens[1:, None])[:, 0][mask[1:]], -(table.exp() * table).sum(-1)
            engine = torch.from_numpy(columns.logprobs_T[span])[mask].double()
            own = torch.tensor(advantage(rollout.position, rollout.sample), dtype=torch.float64)
            total = total + token_loss(logprobs, entropy[mask[1:]], engine, own, torch.tensor(WEIGHT).double())
            again = case.share_prompts and rollout.position in seen
            seen.add(rollout.position)
            for layer, logits in zip(layers, heard, strict=True):
                layer.append(logits[prompt_tokens(columns) if again else 0 :])
        rows.append([torch.cat(parts) for parts in layers])
    tokens_of_batch = sum(len(row[0]) for row in rows)
    losses, load = torch.zeros(2, dtype=torch.float64), torch.zeros(len(gates), moe.experts)
    for row in rows:
        for number, logits in enumerate(row):
            scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(moe.experts_per_token).indices, 1.0)
            share = chosen.sum(0) / (moe.experts_per_token * len(logits))
            switch = moe.experts * (share * scores.mean(0)).sum()
            z = logits.logsumexp(-1).square().mean()
            losses = losses + torch.stack([switch, z]) * len(logits) / tokens_of_batch
            load[number] += chosen.sum(0)
    coefficients = torch.tensor([case.megatron.get("moe_aux_loss_coeff", 0.0), Z], dtype=torch.float64)
    (total + (losses * coefficients).sum()).backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    return megatron_weights(case.kind, buffers | grads), losses.detach() / len(gates), load


@pytest.mark.parametrize("case", slowly(CASES, "packed", "sigmoid-recompute", "tp2", "cp2"))
def test_gradients_are_those_of_the_formulas(pools: Pools, published: Published, case: Case) -> None:
    ranks = pools(case.parallel.world_size).run(run_case, case, model_of(case, published), make_batch())
    result = only_result([rank.results[0] for rank in ranks])
    grads, _ = assemble([rank.grads for rank in ranks])
    expected, losses, load = reference(case)
    unclip = (result.grad_norm + 1e-6) / Optim().clip
    for name, value in expected.items():
        if name.endswith("expert_bias"):
            continue
        assert close(grads[name] * unclip, value.float(), 2e-6), (name, (grads[name] * unclip - value).abs().max())
    routers = result.routers
    assert routers is not None
    assert (routers.balance_loss, routers.z_loss) == pytest.approx(losses.tolist(), rel=1e-5)
    if case.kind == "qwen3moe":  # others choose by a bias as well
        assert routers.busiest == pytest.approx(float((load.max(1).values / load.mean(1)).max()))


def test_runs_without_the_losses_measure_nothing(pools: Pools, published: Published) -> None:
    case = Case("qwen3moe", megatron={"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": ["aux_loss"]})
    (rank,) = pools(1).run(run_case, case, model_of(case, published), make_batch())
    assert rank.results[0] is not None
    assert rank.results[0].routers is None
