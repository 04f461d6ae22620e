"""What transformers computes for a batch: log-probs, loss and gradients of a model."""

from __future__ import annotations

from typing import Any

import torch

from rlctl.data.rollouts import RolloutColumns
from support.parallel_cases import WEIGHT
from support.reference_policy import Reference, advantage, token_loss


def expected(model: Any, batch: dict[int, RolloutColumns]) -> Reference:
    """Log-probs, loss and gradients of a model, a rollout at a time."""
    out, total = Reference(), torch.zeros(())
    for group, columns in batch.items():
        for row in range(columns.rollouts):
            span = columns.slice(row)
            tokens, chosen = (torch.from_numpy(x[span]).long() for x in (columns.tokens_T, columns.loss_mask_T))
            logits = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)[chosen[1:].bool()]
            logprobs = logits.gather(1, tokens[1:][chosen[1:].bool()][:, None])[:, 0]
            entropy = -(logits.exp() * logits).sum(-1)
            out.logprobs[group, row] = logprobs.detach()
            zeros, weight = torch.zeros_like(logprobs), torch.tensor(WEIGHT)
            total = total + token_loss(logprobs, entropy, zeros, torch.tensor(advantage(group, row)), weight)
    total.backward()
    out.losses = [float(total.detach())]
    out.module_grads = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return out
