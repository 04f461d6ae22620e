"""Experts of transformers' models: expert parallelism and router replay. Suffixes: N tokens of a rank, H hidden, S
token-expert pairs, K experts per token, L layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single

from rlctl.models.facts import MoeFacts
from rlctl.models.matrices import Role
from rlctl.weights.dtensor import DTensorWorld


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Exchange rows between a group's ranks, `sent` to each; backward sends back."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    return all_to_all_single(out, x.contiguous(), received, sent, group=group)


def experts_of(inner: Any, world: DTensorWorld) -> dict[str, nn.Module]:
    return {
        path: module
        for path, module in inner.named_modules()
        if any(world.is_expert(f"{path}.{name}") for name in module._parameters)
    }


def spread(inner: Any, world: DTensorWorld, group: Any) -> None:
    """Have tokens sent to the ranks of `group` among which `divide` has divided the experts."""
    for module in experts_of(inner, world).values():
        module.num_experts //= group.size()
        module.forward = partial(_on_the_experts_ranks, module.forward, group, module.num_experts)


def _on_the_experts_ranks(
    forward: Callable[..., Tensor],
    group: Any,
    local_experts: int,
    tokens_NH: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
) -> Tensor:
    """[N, H]: the weighted sum over each token's experts. Each pair goes to the expert's rank and comes back."""
    experts_S = experts_NK.flatten()
    order_S = torch.argsort(experts_S // local_experts, stable=True)
    counts = torch.bincount(experts_S // local_experts, minlength=group.size())
    theirs = torch.empty_like(counts)
    torch.distributed.all_to_all_single(theirs, counts, group=group)
    sent, received = counts.tolist(), theirs.tolist()
    token_S = order_S // experts_NK.shape[1]
    arrived_SH = _exchanged(tokens_NH[token_S], sent, received, group)
    experts = _exchanged(experts_S[order_S] % local_experts, sent, received, group)
    found_SH = forward(arrived_SH, experts[:, None], arrived_SH.new_ones((len(experts), 1)))
    back_SH = _exchanged(found_SH, received, sent, group)
    weighted_SH = back_SH * weights_NK.flatten()[order_S, None].to(back_SH.dtype)
    return torch.zeros_like(tokens_NH).index_add(0, token_S, weighted_SH)


class Replay:
    """A router with given experts. It computes their weights, so gradients flow (see
    `backends/megatron/routing.py`)."""

    def __init__(self, layer: int, moe: MoeFacts, forward: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
        """`layer` counts from 0; `forward` is the router's own: logits, and weights and experts [N, K]."""
        self.layer, self._moe, self._forward = layer, moe, forward
        self._given: Tensor | None = None

    def give(self, chosen_TLK: Tensor | None) -> None:
        """Set the experts of the next row; None, or -1 for a token, keeps the router's choice. A recomputed layer reads
        them twice."""
        self._given = None if chosen_TLK is None else chosen_TLK[:, self.layer].long()

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, routing = self._forward(hidden)
        if self._given is None:
            return logits, weights, routing
        chosen = torch.where(self._given >= 0, self._given, routing)
        wide = logits.float()
        scores = (wide.sigmoid() if self._moe.score == "sigmoid" else wide.softmax(-1)).gather(1, chosen)
        if self._moe.normalize_topk:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, (scores * self._moe.scaling).to(weights.dtype), chosen


def install_replay(inner: Any, world: DTensorWorld) -> list[Replay]:
    """Make every router use given experts; return the objects that receive them."""
    moe, gates = world.facts.moe, []
    assert moe is not None
    for name, role in world.roles.items():
        if role is Role.ROUTER:
            router: nn.Module = inner.get_submodule(name.rpartition(".")[0])
            replay = Replay(int(name.split(".")[2]), moe, router.forward)
            router.forward = replay
            gates.append(replay)
    return gates
