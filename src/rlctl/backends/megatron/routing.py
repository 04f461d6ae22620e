"""Router replay, and expert weights where Megatron's differ from the model's.

Engine and trainer round differently and sometimes choose other experts, which changes log-probs far more than rounding.
Router replay uses the engine's experts; the policy's router still computes their weights, so gradients flow
("Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", 2025). Megatron-Core asks a
`Replay` of each router for its choice.

Suffixes: T tokens of a row, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.models.facts import MoeFacts

TopK = Callable[..., tuple[Tensor, Tensor]]


class OfMicroBatch:
    """A tensor of each micro-batch for one router, also where its layer is computed again in the backward pass."""

    def __init__(self) -> None:
        self._given: Tensor | None = None
        self._waiting: list[Tensor | None] = []
        """Tensors of the micro-batches whose layer is computed again in the backward pass, in their order."""
        self.training = False

    def begin(self, *, training: bool) -> None:
        self._given, self._waiting, self.training = None, [], training

    def give(self, value: Tensor | None) -> None:
        """The tensor of the micro-batch whose forward pass comes next."""
        self._given = value

    def take(self) -> Tensor | None:
        """Return the tensor for this call. Recomputed layers run again in the backward pass, in the order of forward
        passes."""
        if not self.training:
            return self._given
        if not torch.is_grad_enabled():
            self._waiting.append(self._given)
            return self._given
        return self._waiting.pop(0) if self._waiting else self._given


class Replay(OfMicroBatch):
    """The experts that one router has to choose."""

    def __init__(self, layer: int) -> None:
        """`layer` counts from 0 over the whole model."""
        super().__init__()
        self.layer = layer

    def give(self, value: Tensor | None) -> None:
        """Take the choices [T, L, K] of all layers; None, or -1 for a token: the router chooses."""
        super().give(None if value is None else value[:, self.layer].long())

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) of each token, both [T, K]; Megatron's router calls it in place of its top-k."""
        router_scores, routed = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replayed = self.take()
        if replayed is None:
            return router_scores, routed
        chosen = torch.where(replayed >= 0, replayed, routed)
        return scores.gather(1, chosen), chosen


def routers_of(chunk: nn.Module) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in chunk.modules() if isinstance(module, TopKRouter)]


def install(chunk: nn.Module) -> list[Replay]:
    for router in routers_of(chunk):
        router.router_replay = Replay(router.layer_number - 1)
    return [router.router_replay for router in routers_of(chunk)]


def hand_out(receivers: Sequence[OfMicroBatch], value: Tensor | None, config: Any) -> None:
    """Give the routers of a chunk their part of a micro-batch's tensor [T, ...] of this context-parallel rank."""
    from megatron.core import parallel_state

    if value is not None and config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        value = value.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    for receiver in receivers:
        receiver.give(value)


def weigh_as_published(router: Any, moe: MoeFacts) -> None:
    """Weigh chosen experts like the published model; Megatron always normalizes sigmoid scores of several experts."""
    divides = moe.experts_per_token > 1 and (moe.normalize_topk or moe.score == "sigmoid")
    if divides == moe.normalize_topk:
        return
    routing = router.routing

    def weighed(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights_TE, chosen_TE = routing(logits, *args, **kwargs)
        logits_TE = logits.float().view(chosen_TE.shape)
        scores_TE = logits_TE.sigmoid() if moe.score == "sigmoid" else logits_TE.softmax(-1)
        total_T = (scores_TE * chosen_TE).sum(-1, keepdim=True) + 1e-20
        return (weights_TE / total_T if moe.normalize_topk else weights_TE * total_T).type_as(weights_TE), chosen_TE

    router.routing = weighed
