"""Auxiliary router losses: load balancing (Switch Transformer) and z-loss (ST-MoE).

Megatron-Core's versions scale by tokens of a micro-batch and count padding. These have the same definitions
(`megatron.moe_aux_loss_coeff`, `moe_z_loss_coeff`) and the gradient of coefficient x sum over micro-batches of (tokens
of the micro-batch / tokens of the batch) x loss, per layer and under every layout. "Batch" is a mini-batch over all
data-parallel ranks; tensor- and context-parallel ranks add up their counts.

Suffixes: T tokens of this rank's part of a row, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.backends.batching.batch import RouterLoad
from rlctl.backends.megatron.routing import OfMicroBatch, routers_of


@dataclass(frozen=True)
class Coefficients:
    """Weights of the two losses."""

    balance: float
    z: float

    def __bool__(self) -> bool:
        return self.balance > 0 or self.z > 0


class _Attached(torch.autograd.Function):
    """The logits, with a loss in their backward pass. `scale`: float16's loss scale."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grads[0], ctx.scale(torch.ones_like(loss)), None


class Balance(OfMicroBatch):
    """The auxiliary losses of one router; each micro-batch gives it the mask of its tokens, padding left out."""

    def __init__(self, router: Any, coefficients: Coefficients, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = router.layer_number - 1
        self._router, self._coefficients, self._scale = router, coefficients, scale
        self._own_routing = router.routing
        self.begin_batch(1.0)

    def begin_batch(self, tokens: float) -> None:
        """Begin a mini-batch of `tokens` over all data-parallel ranks."""
        weight_EH, self._batch_tokens = self._router.weight, max(1.0, tokens)
        self.losses = torch.zeros(2, dtype=torch.float64, device=weight_EH.device)
        self.load_E = torch.zeros(len(weight_EH), dtype=torch.float64, device=weight_EH.device)

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stand in for the `routing` of Megatron's router."""
        counted_T = self.take()
        if counted_T is None or not (self.training and torch.is_grad_enabled()):
            return self._own_routing(logits, *args, **kwargs)
        loss, parts = self._loss(logits.view(-1, logits.shape[-1]), counted_T)
        probs, chosen_TE = self._own_routing(_Attached.apply(logits, loss, self._scale), *args, **kwargs)
        self.losses += parts
        self.load_E += (chosen_TE.bool() & counted_T[:, None]).sum(0)
        return probs, chosen_TE

    def _loss(self, logits_TE: Tensor, counted_T: Tensor) -> tuple[Tensor, Tensor]:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

        experts, chosen = logits_TE.shape[-1], self._router.topk
        best_TE, scores_TE = compute_routing_scores_for_aux_loss(logits_TE, chosen, self._router.score_function)
        mask_T1 = counted_T[:, None]
        counts = torch.cat([(best_TE.bool() & mask_T1).sum(0), counted_T.sum()[None]]).to(logits_TE.dtype)
        group: Any = parallel_state.get_tensor_and_context_parallel_group()
        if group.size() > 1:
            torch.distributed.all_reduce(counts, group=group)
        counts_E, tokens = counts[:-1], counts[-1].clamp(min=1)
        balance = experts * (counts_E * (scores_TE * mask_T1).sum(0)).sum() / (chosen * tokens * self._batch_tokens)
        z = (logits_TE.logsumexp(-1).square() * counted_T).sum() / self._batch_tokens
        loss = self._coefficients.balance * balance + self._coefficients.z * z
        return loss, torch.stack([balance, z]).detach()


def install(chunk: nn.Module, coefficients: Coefficients, scale: Callable[[Tensor], Tensor]) -> list[Balance]:
    """Give every router of a model chunk its losses."""
    balances = [Balance(router, coefficients, scale) for router in routers_of(chunk)]
    for balance, router in zip(balances, routers_of(chunk), strict=True):
        router.routing = balance.routing
    return balances


def router_load(balances: Sequence[Balance], layers: int, experts: int, device: torch.device) -> RouterLoad:
    """Return the losses and the load of all routers in the mini-batch. Collective over all ranks."""
    table = torch.zeros(layers, 2 + experts, dtype=torch.float64, device=device)
    for balance in balances:
        table[balance.layer] = torch.cat([balance.losses, balance.load_E])
    torch.distributed.all_reduce(table)
    table = table[table[:, 2:].sum(1) > 0].cpu()  # layers with experts
    if not len(table):
        return RouterLoad(0.0, 0.0, 0.0)
    load = table[:, 2:]
    busiest = (load.max(1).values / load.mean(1)).max()
    return RouterLoad(*(float(value) for value in (*table[:, :2].mean(0), busiest)))
