"""Faults of an engine for `rlctl diverge`: of vLLM's modules, and of the tensors that a refit sends. They are pickled
by their names."""

from __future__ import annotations

from typing import Any

import torch

from support.divergence_cases import earlier

Tensors = dict[str, torch.Tensor]


def layers(worker: Any) -> Any:
    return worker.model_runner.get_model().model.layers


def scale(worker: Any) -> None:
    layers(worker)[1].self_attn.attn.impl.scale *= 2


def epsilon(worker: Any) -> None:
    layers(worker)[1].post_attention_layernorm.variance_epsilon = 1e-3


def theta(worker: Any) -> None:
    for layer in layers(worker):
        cache = layer.self_attn.rotary_emb.cos_sin_cache
        width = cache.shape[1]
        turns = torch.arange(len(cache))[:, None] / 5e5 ** (torch.arange(0, width, 2) / width)
        cache.copy_(torch.cat((turns.cos(), turns.sin()), -1))


def not_normalized(worker: Any) -> None:
    from rlctl.backends.vllm import compat

    compat.routers(worker.model_runner.get_model())[1].renormalize = False


def without_window(worker: Any) -> None:
    layers(worker)[0].self_attn.attn.impl.sliding_window = -1  # what vLLM's CPU kernel takes for none


def exchange(tensors: Tensors, *names: str) -> None:
    first, second = (tensors[name].clone() for name in names)
    tensors[names[0]].copy_(second)
    tensors[names[1]].copy_(first)


def gate_and_up(tensors: Tensors) -> None:
    exchange(tensors, *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")))


def transposed(tensors: Tensors) -> None:
    weight = tensors["model.layers.0.self_attn.o_proj.weight"]
    weight.copy_(weight.T.clone())


def permuted(tensors: Tensors) -> None:
    for leaf in ("gate", "up", "down"):
        exchange(tensors, *(f"model.layers.0.mlp.experts.{expert}.{leaf}_proj.weight" for expert in (1, 3)))


def stale(tensors: Tensors) -> None:
    """A refit that leaves a layer's MLP out."""
    for name, value in earlier(tensors).items():
        if name.startswith("model.layers.1.mlp."):
            tensors[name].copy_(value)
