"""Costs of a vision tower: operations, activations and the engine's cache. `Workload.image_share` is the share of
image tokens, counted in the data or assumed."""

from __future__ import annotations

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs.parameters import seeing_parameters
from rlctl.planner.inputs.request import Workload

LAYER_WIDTHS = 16
"""Values per patch and tower layer kept for the backward pass, in hidden sizes: residuals, norms, queries, keys,
values, outputs and an MLP of four times the width, without scores."""


def image_share(facts: ModelFacts, workload: Workload, sigma: float) -> float:
    """Return the share of image tokens in a row."""
    if facts.vision is None or not workload.rollouts:
        return workload.image_share if facts.vision is not None else 0.0
    shared = workload.packing and workload.share_prompts
    prompts = workload.prompts * (1 if shared else workload.generations) * workload.prompt_tokens
    return workload.image_share * prompts / workload.trained_tokens(sigma)


def tower_operations(facts: ModelFacts) -> float:
    """Return the operations of a forward pass per image token."""
    return 2.0 * facts.vision.merge * seeing_parameters(facts) if facts.vision is not None else 0.0


def tower_activation_bytes(facts: ModelFacts, choice: TrainingChoice, element: float) -> float:
    """Return the bytes that the tower keeps for its backward pass, for each token of an image."""
    if facts.vision is None:
        return 0.0
    layers, layer = facts.vision.layers, LAYER_WIDTHS
    kept = layers + layer if choice.recompute == "full" else layers * layer
    return element * facts.vision.merge * facts.vision.hidden * kept


def encoder_cache_bytes(facts: ModelFacts, max_batched_tokens: int) -> float:
    """Return bytes of vLLM's image embedding cache, sized for a step."""
    return 2.0 * max_batched_tokens * facts.hidden if facts.vision is not None else 0.0
