"""Faults that are planted in tiny models, and what a policy's ranks record of sequences with each of them.

A fault is a published model that differs from the reference's in config.json or in some tensors, as a wrong reading or
a wrong conversion makes it, or a change of the live modules.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.hidden_states import Paths, States
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.config.parallel import ParallelSpec
from rlctl.data.rollouts import RolloutColumns
from support.parallel_cases import Case, load_batch, make_worker

SEQUENCES = [[(7 * i + 13) % 240 + 1 for i in range(40)], [(11 * i * i + 5) % 240 + 1 for i in range(27)]]
PREDICTED = 12
ALONE = ParallelSpec()
EARLIER = "the model before the refit"

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """What is wrong, and what is to be found."""

    family: str
    point: str
    operation: str
    words: str
    """Part of the cause's words."""
    config: dict[str, Any] | None = None
    """Other values in config.json."""
    tensors: Callable[[Tensors], Tensors] | None = None
    """Other tensors."""
    module: str = ""
    """A change of live modules, by name."""


def layer(number: int, leaf: str) -> str:
    return f"model.layers.{number}.{leaf}"


def exchanged(*pairs: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {a: tensors[b] for pair in pairs for a, b in (pair, pair[::-1])}


def changed(names: list[str], change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(tensors[name]).contiguous() for name in names}


def _experts_shifted(tensors: Tensors) -> Tensors:
    prefix, count = layer(2, "mlp.experts."), 4
    return {
        name: tensors[f"{prefix}{(int(name.removeprefix(prefix).split('.')[0]) + 1) % count}."
                      + name.removeprefix(prefix).split(".", 1)[1]]
        for name in tensors if name.startswith(prefix)
    }  # fmt: skip


def _of_layer(number: int, source: int) -> Callable[[Tensors], Tensors]:
    here, there = layer(number, "mlp."), layer(source, "mlp.")
    return lambda tensors: {
        name: tensors[name.replace(here, there)].clone() for name in tensors if name.startswith(here)
    }


def earlier(tensors: Tensors) -> Tensors:
    """The model before the refit: every weight has moved since."""
    generator = torch.Generator().manual_seed(5)
    return {name: value + 0.003 * torch.randn(value.shape, generator=generator) for name, value in tensors.items()}


def _stale(tensors: Tensors) -> Tensors:
    return {name: value for name, value in earlier(tensors).items() if name.startswith(layer(3, "mlp."))}


YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
QKV_BIASES = [layer(1, f"self_attn.{name}_proj.bias") for name in "qkv"]
GATE_UP = [layer(1, f"mlp.experts.gate_up_proj{end}") for end in ("", "_bias")]

FAULTS = {
    "rope scaling": Fault(
        "llama3", "layers.0.attention", "rotary embedding", "without its scaling", {"rope_parameters": PLAIN}
    ),
    "theta": Fault(
        "qwen3", "layers.0.attention", "rotary embedding", "theta 500000",
        {"rope_parameters": PLAIN | {"rope_theta": 500000.0}},
    ),
    "yarn factor": Fault(
        "qwen2-yarn", "layers.0.attention", "rotary embedding", "without its factor",
        {"rope_parameters": YARN | {"attention_factor": 1.0}},
    ),
    "gate and up": Fault(
        "llama", "layers.2.mlp", "matrix", "mlp.gate_proj and mlp.up_proj are exchanged",
        tensors=exchanged((layer(2, "mlp.gate_proj.weight"), layer(2, "mlp.up_proj.weight"))),
    ),
    "transposed": Fault(
        "llama", "layers.1.attention", "matrix", "self_attn.o_proj is transposed",
        tensors=changed([layer(1, "self_attn.o_proj.weight")], lambda weight: weight.T),
    ),
    "keys and values": Fault(
        "qwen3", "layers.2.attention", "matrix", "k_proj and self_attn.v_proj are exchanged",
        tensors=exchanged((layer(2, "self_attn.k_proj.weight"), layer(2, "self_attn.v_proj.weight"))),
    ),
    "epsilon": Fault("llama", "layers.0.attention", "norm", "the epsilon 1e-05", {"rms_norm_eps": 1e-5}),
    "epsilon of one norm": Fault(
        "llama", "layers.2.mlp", "norm", "post_attention_layernorm has the epsilon 0.001", module="epsilon"
    ),
    "attention scale": Fault(
        "gemma3", "layers.0.attention", "attention scale", "1 / sqrt(head width)", {"query_pre_attn_scalar": 16}
    ),
    "scale of one layer": Fault(
        "llama", "layers.3.attention", "attention scale", "2 times the model's", module="scale"
    ),
    "window off": Fault(
        "mistral-windowed", "layers.0.attention", "sliding window", "no sliding window", {"sliding_window": None}
    ),
    "window of one more": Fault(
        "mistral-windowed", "layers.0.attention", "sliding window", "a sliding window of 6", {"sliding_window": 6}
    ),
    "window off in a layer": Fault(
        "gemma3", "layers.2.attention", "sliding window", "no sliding window", module="window"
    ),
    "router without normalization": Fault(
        "qwen3-moe", "layers.0.mlp", "router", "does not normalize", {"norm_topk_prob": False}
    ),
    "one expert less": Fault(
        "qwen3-moe", "layers.0.mlp", "router", "chooses one expert less", {"num_experts_per_tok": 1}
    ),
    "permuted experts": Fault(
        "qwen3-moe", "layers.2.mlp", "experts", "experts are shifted by 1", tensors=_experts_shifted
    ),
    "router scale": Fault(
        "deepseek-v3", "layers.1.mlp", "router", "does not scale", {"routed_scaling_factor": 1.0}
    ),
    "router bias": Fault(
        "deepseek-v3", "layers.3.mlp", "router", "without its bias",
        tensors=changed([layer(3, "mlp.gate.e_score_correction_bias")], torch.zeros_like),
    ),
    "shared experts": Fault(
        "deepseek-v3", "layers.2.mlp", "shared experts", "missing",
        tensors=changed([layer(2, "mlp.shared_experts.down_proj.weight")], torch.zeros_like),
    ),
    "latent norm": Fault(
        "deepseek-v3", "layers.2.attention", "norm", "one is added to the weight of self_attn.kv_a_layernorm",
        tensors=changed([layer(2, "self_attn.kv_a_layernorm.weight")], lambda weight: weight + 1),
    ),
    "stale layer": Fault(
        "qwen3", "layers.3.mlp", "weights", f"has the weights of {EARLIER}", tensors=_stale
    ),
    "another layer's weights": Fault(
        "llama", "layers.2.mlp", "weights", "has the weights of layer 1", tensors=_of_layer(2, 1)
    ),
    "missing bias": Fault(
        "qwen2-yarn", "layers.1.attention", "bias", "without bias", tensors=changed(QKV_BIASES, torch.zeros_like)
    ),
    "norm without one": Fault(
        "gemma3", "layers.2.mlp", "norm", "one is subtracted from the weight of pre_feedforward_layernorm",
        tensors=changed([layer(2, "pre_feedforward_layernorm.weight")], lambda weight: weight - 1),
    ),
    "norms of queries and keys": Fault(
        "qwen3", "layers.1.attention", "norm", "q_norm and self_attn.k_norm are missing", module="qk_norms"
    ),
    "sinks": Fault(
        "gpt-oss", "layers.2.attention", "attention", "sinks are missing",
        tensors=changed([layer(2, "self_attn.sinks")], lambda sinks: torch.full_like(sinks, -1e4)),
    ),
    "gate and up of experts": Fault(
        "gpt-oss", "layers.1.mlp", "experts", "gate and up of the experts are exchanged",
        tensors=changed(GATE_UP, lambda values: values.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
    ),
    "limit": Fault("gpt-oss", "layers.0.mlp", "activation", "no limit", {"swiglu_limit": 1e6}),
    "residual multiplier": Fault(
        "granite", "layers.0.attention.sum", "residual sum", "added 1 times", {"residual_multiplier": 1.0}
    ),
    "embedding scale": Fault(
        "gemma3", "embedding", "scale", "one over the root of the hidden size", module="embedding"
    ),
    "head of the embedding": Fault(
        "llama", "logits", "output layer", "the weights of the embedding",
        tensors=lambda tensors: {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    ),
    "dtype of the head": Fault("llama", "logits", "dtype", "bfloat16", module="head"),
}  # fmt: skip


def plant(directory: Path, fault: Fault) -> Path:
    """Write the model with the fault next to the reference's; each rank its own."""
    place = directory.parent / f"{directory.name}-faulty-{os.getpid()}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(directory, place)
    if fault.config is not None:
        config = json.loads((place / "config.json").read_text()) | fault.config
        (place / "config.json").write_text(json.dumps(config))
    if fault.tensors is not None:
        tensors = load_file(place / "model.safetensors")
        save_file(tensors | fault.tensors(tensors), place / "model.safetensors", {"format": "pt"})
    return place


def columns_of(sequence: list[int]) -> RolloutColumns:
    tokens = np.array(sequence, np.int32)
    chosen = np.arange(len(tokens)) >= len(tokens) - PREDICTED
    offsets = np.array([0, len(tokens)], np.int32)
    return RolloutColumns(tokens, offsets, chosen, np.zeros(len(tokens), np.float32), np.where(chosen, 0, -1))


def record(
    rank: int, backend: str, directory: Path, paths: Paths, faults: list[str], dtype: Any = "float32",
    parallel: ParallelSpec = ALONE,
) -> dict[str, list[States]]:  # fmt: skip
    """Fault -> what this rank recorded with it; the empty one is none."""
    torch.set_num_threads(1)
    return {fault: _recorded(rank, backend, directory, paths, FAULTS.get(fault), dtype, parallel) for fault in faults}


def _recorded(
    rank: int, backend: str, directory: Path, paths: Paths, fault: Fault | None, dtype: Any, parallel: ParallelSpec
) -> list[States]:
    if fault is not None and not fault.module:
        directory = plant(directory, fault)
    facts = facts_in(directory)
    rows = {"packing": False, "dynamic": True} if facts.unpacked else {}
    case = Case(parallel=parallel, dtype=dtype, share_prompts=False, micro_batch_tokens=80, backend=backend, **rows)
    worker = make_worker(rank, case, directory, own_facts=facts)
    batch = {number: columns_of(sequence) for number, sequence in enumerate(SEQUENCES)}
    rows = [
        WeightedSequence(number, 0, len(sequence) - PREDICTED, len(sequence), 0.0, 1.0)
        for number, sequence in enumerate(SEQUENCES)
    ]
    load_batch(worker, rank, case, batch, rows)
    if fault is not None and fault.module:
        getattr(IN_MODULES[backend], fault.module)(worker)
    return worker.hidden_states(paths)


def _identity(module: Any) -> None:
    module.forward = lambda hidden: hidden


def _narrow_product(layer: Any) -> None:
    """Compute the output layer's product in bfloat16."""

    def forward(hidden: Tensor, *args: Any, weight: Tensor | None = None, **kwargs: Any) -> Any:
        matrix = layer.weight if weight is None else weight
        logits = (hidden.bfloat16() @ matrix.bfloat16().T).to(hidden.dtype)
        return (logits, None) if hasattr(layer, "sequence_parallel") else logits

    layer.forward = forward


class InMegatron:
    """Changes of Megatron's modules."""

    @staticmethod
    def layers(worker: Any) -> Any:
        return worker._cores()[0].decoder.layers

    @classmethod
    def epsilon(cls, worker: Any) -> None:
        cls.layers(worker)[2].pre_mlp_layernorm.eps = 1e-3

    @classmethod
    def scale(cls, worker: Any) -> None:
        attention = cls.layers(worker)[3].self_attention.core_attention
        attention.scale = 2 * (attention.scale or 16**-0.5)

    @classmethod
    def window(cls, worker: Any) -> None:
        cls.layers(worker)[2].self_attention.core_attention.window = None

    @classmethod
    def qk_norms(cls, worker: Any) -> None:
        attention = cls.layers(worker)[1].self_attention
        _identity(attention.q_layernorm)
        _identity(attention.k_layernorm)

    @staticmethod
    def embedding(worker: Any) -> None:
        worker._cores()[0].embedding._forward_hooks.clear()

    @staticmethod
    def head(worker: Any) -> None:
        _narrow_product(worker._cores()[0].output_layer)


class InModules:
    """Changes of transformers' modules."""

    @staticmethod
    def layers(worker: Any) -> Any:
        return worker.model.inner.model.layers

    @classmethod
    def epsilon(cls, worker: Any) -> None:
        cls.layers(worker)[2].post_attention_layernorm.variance_epsilon = 1e-3

    @classmethod
    def scale(cls, worker: Any) -> None:
        cls.layers(worker)[3].self_attn.scaling *= 2

    @classmethod
    def window(cls, worker: Any) -> None:
        cls.layers(worker)[2].self_attn.sliding_window = None

    @classmethod
    def qk_norms(cls, worker: Any) -> None:
        attention = cls.layers(worker)[1].self_attn
        _identity(attention.q_norm)
        _identity(attention.k_norm)

    @staticmethod
    def embedding(worker: Any) -> None:
        worker.model.inner.model.embed_tokens.embed_scale.fill_(1.0)

    @staticmethod
    def head(worker: Any) -> None:
        _narrow_product(worker.model.inner.lm_head)


IN_MODULES: dict[str, Any] = {"megatron": InMegatron, "dtensor": InModules}
