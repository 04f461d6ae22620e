"""Router replay: the experts that a generation engine chose for a token, used again when the policy computes with it.

Engine and trainer round differently, and so now and then choose other experts for the same token, which changes its
log-prob by far more than rounding does. With the engine's choice given, the policy's router still computes the weight
of each chosen expert, so that gradients flow as ever ("Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", 2025). Megatron-Core asks an object of each router for its choice; here that object is `Replay`.

Suffixes: T tokens of a row, L layers of the model, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TopK = Callable[..., tuple[Tensor, Tensor]]


class Replay:
    """The experts that one router has to choose."""

    def __init__(self, layer: int) -> None:
        """`layer` counts from 0 over the whole model."""
        self.layer = layer
        self._given: Tensor | None = None
        self._waiting: list[Tensor | None] = []
        """Choices of the micro-batches whose layer is computed again in the backward pass, in their order."""
        self._training = False

    def begin(self, *, training: bool) -> None:
        """A schedule starts."""
        self._given, self._waiting, self._training = None, [], training

    def give(self, chosen_TLK: Tensor | None) -> None:
        """The choice of the micro-batch whose forward pass comes next; None, or -1 for a token: the router's own."""
        self._given = None if chosen_TLK is None else chosen_TLK[:, self.layer].long()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) of each token, both [T, K]; Megatron's router calls it in place of its top-k."""
        own_values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self._next()
        if given is None:
            return own_values, own
        chosen = torch.where(given >= 0, given, own)
        return scores.gather(1, chosen), chosen

    def _next(self) -> Tensor | None:
        """The choice for this call. A checkpointed layer runs without gradients first, and again with them in the
        backward pass, where micro-batches come in the order of their forward passes."""
        if not self._training:
            return self._given
        if not torch.is_grad_enabled():
            self._waiting.append(self._given)
            return self._given
        return self._waiting.pop(0) if self._waiting else self._given


def install(chunk: nn.Module) -> list[Replay]:
    """Give every router of a model chunk its `Replay`."""
    from megatron.core.transformer.moe.router import TopKRouter

    routers: list[Any] = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        router.router_replay = Replay(router.layer_number - 1)
    return [router.router_replay for router in routers]


def hand_out(replays: list[Replay], chosen_TLK: Tensor | None, config: Any) -> None:
    """Give the routers of a chunk their part of a micro-batch's row, already that of this context-parallel rank."""
    from megatron.core import parallel_state

    if chosen_TLK is not None and config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        chosen_TLK = chosen_TLK.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    for replay in replays:
        replay.give(chosen_TLK)
