"""Reading a Megatron checkpoint as a source of weights, and the files that rlctl writes next to its shards."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hf_model import without_absent_mtp
from rlctl.checkpoints.megatron.lora_weights import adapter_keys
from rlctl.checkpoints.megatron.megatron_directory import MegatronDirectory
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.weights import torch_dist as keys
from rlctl.weights.dtensor import module_layout
from rlctl.weights.layout import Layout
from rlctl.weights.transfer_plan import SingleWorld, World

if TYPE_CHECKING:
    import torch

MODULE_PREFIXES = ("model.", "lm_head.")
"""Weights by the names of transformers' modules, as the dtensor backend saves them."""
VALUE_HEADS = ("output_layer.weight", "value_head.weight")
"""The head of values: Megatron's key, and the dtensor backend's."""
STEP = "optimizer.step"
"""The number of optimizer steps, where the dtensor backend saved."""
MASTERS = "optimizer.state.param."
"""How the keys of Megatron's float32 weights begin."""
MODEL_PREFIXES = ("decoder.", "embedding.", "output_layer.", "mtp.", *MODULE_PREFIXES)


@dataclass(frozen=True)
class MegatronModel:
    """An opened checkpoint; every block is a param, so a plan reads only needed blocks."""

    directory: MegatronDirectory
    facts: ModelFacts
    reader: TorchDistReader
    whole: Layout
    """The keys with their contents."""
    layout: Layout
    """The blocks of the writer."""
    blocks: dict[str, keys.StoredBlock]
    dtype: str

    @property
    def world(self) -> World:
        return SingleWorld(self.layout)

    def masters(self) -> tuple[Layout, dict[str, keys.StoredBlock]]:
        """Return float32 weights and their blocks: the optimizer's, or the model's if equal or frozen."""
        shapes = self.reader.shapes
        master_keys = {
            p.param: MASTERS + p.param if MASTERS + p.param in shapes else p.param for p in self.whole.pieces
        }
        pieces = tuple(replace(piece, param=master_keys[piece.param]) for piece in self.whole.pieces)
        params = {piece.param: shapes[piece.param] for piece in pieces}
        blocks = [chunk for key in params for chunk in self.reader.chunks(key)]
        return keys.chunked(Layout(0, params, pieces), blocks), {chunk.name: chunk for chunk in blocks}


def value_head(reader: TorchDistReader) -> str | None:
    """The key of the value head; None: the model has logits, or adapters only."""
    return next((key for key in VALUE_HEADS if key in reader.shapes and reader.shapes[key].shape[0] == 1), None)


def steps_in(value: Any) -> float:
    """The most steps that the param groups of Megatron's optimizers name, however these are nested; 0 for none."""
    if not isinstance(value, dict):
        return 0.0
    groups = [float(group.get("step") or 0) for group in value.get("param_groups", ())]
    return max([*groups, *map(steps_in, value.values())], default=0.0)


def names_modules(directory: Path) -> bool:
    """Whether a policy checkpoint has the keys of transformers' modules, and not Megatron's."""
    return are_of_modules(TorchDistReader.open(directory).shapes)


def are_of_modules(stored: Collection[str]) -> bool:
    """Whether a checkpoint's keys are transformers' modules, by majority prefix."""
    return STEP in stored or any(key.startswith(MODULE_PREFIXES) for key in stored)


def open_megatron_model(
    directory: MegatronDirectory, facts: ModelFacts, without_mtp: bool = False, valued: bool = False
) -> MegatronModel:
    """Open a checkpoint and check its keys against the model. `without_mtp`: ignore multi-token-prediction layers;
    `valued`: open all but the value head. Raises InputError for missing, misshapen or unknown keys."""
    reader = TorchDistReader.open(directory.shards)
    if adapter_keys(reader.shapes):
        raise InputError(
            f"{directory.shards} holds adapters and not the weights they belong to.",
            f"Merge them first: rlctl convert megatron-to-hf {directory.root} DIR.",
        )
    facts = without_absent_mtp(facts, reader.shapes)
    facts = replace(facts, tied_embeddings=True) if valued else facts  # no output layer is expected
    shards, hint = directory.shards, "The configuration calls for it; is it this model's?"
    plain = _whole_layout(shards, facts, reader)
    for key, spec in plain.params.items():
        stored_spec, shape = reader.shapes.get(key), spec.shape
        if stored_spec is None:
            raise InputError(f"{shards}: {key} is missing.", hint)
        if stored_spec.shape != shape:
            reason = f"{key} has shape {list(stored_spec.shape)}, but the configuration implies {list(shape)}."
            raise InputError(f"{shards}: {reason}")
        if (elements := sum(prod(span.count for span in chunk.box) for chunk in reader.chunks(key))) != prod(shape):
            reason = f"{shards}: the blocks of {key} hold {elements:,} of its {prod(shape):,} elements."
            raise InputError(reason, "Copy the checkpoint again.")
    # Weights that the model does not have would be lost. The other spelling of a norm is no loss.
    allowed = (*(("mtp.",) if without_mtp else ()), *(VALUE_HEADS if valued else ()))
    for key in reader.shapes:
        lost = not (key in plain.params or key.endswith(keys.NORM_KEYS) or key.startswith(allowed))
        if key.startswith(MODEL_PREFIXES) and lost:
            raise InputError(f"{shards}: {key} belongs to no part of a {shards.name} of this configuration.")
    params = {key: replace(spec, dtype=reader.shapes[key].dtype) for key, spec in plain.params.items()}
    blocks = [chunk for key in params for chunk in reader.chunks(key)]
    whole = Layout(0, params, plain.pieces)
    layout = keys.chunked(whole, blocks)
    embedding = next((key for key in plain.params if "embed" in key), next(iter(plain.params)))
    dtype = reader.shapes[embedding].dtype
    return MegatronModel(directory, facts, reader, whole, layout, {chunk.name: chunk for chunk in blocks}, dtype)


def _whole_layout(shards: Path, facts: ModelFacts, reader: TorchDistReader) -> Layout:
    if are_of_modules(reader.shapes):
        return module_layout(facts, "float32")
    embeddings = [key for key in keys.VOCAB_KEYS if key in reader.shapes and reader.shapes[key].shape[0] > 1]
    rows = [reader.shapes[key].shape[0] for key in embeddings]
    if not rows or min(rows) < facts.vocab:
        reason = f"{shards} holds no embedding of {facts.vocab} rows."
        raise InputError(reason, "Is it another model's checkpoint?")
    return keys.layout(facts, "float32", keys.style_of(reader.shapes), rows[0], holds=reader.shapes.__contains__)


class Blocks:
    """The blocks of a torch_dist checkpoint by param name: a source of `stream`."""

    def __init__(self, reader: TorchDistReader, blocks: dict[str, keys.StoredBlock]) -> None:
        self._reader, self._blocks = reader, blocks

    def read(self, param: str) -> torch.Tensor:
        return self._reader.read(self._blocks[param])

    def drop(self, param: str) -> None:
        """The reader limits its memory itself."""


def common_values(facts: ModelFacts, dtype: str) -> dict[str, Any]:
    """Return `common.pt`: Megatron-LM's `args` from the model, version and iteration."""
    args = Namespace(
        num_layers=facts.layers,
        hidden_size=facts.hidden,
        ffn_hidden_size=facts.intermediate,
        num_attention_heads=facts.heads,
        group_query_attention=facts.kv_heads != facts.heads,
        num_query_groups=facts.kv_heads,
        kv_channels=facts.head_dim,
        max_position_embeddings=facts.max_length,
        seq_length=facts.max_length,
        padded_vocab_size=facts.vocab,
        make_vocab_size_divisible_by=1,
        untie_embeddings_and_output_weights=not facts.tied_embeddings,
        normalization="RMSNorm",
        norm_epsilon=facts.norm_eps,
        swiglu=facts.activation == "silu",
        add_bias_linear=False,
        add_qkv_bias=facts.qkv_bias,
        qk_layernorm=facts.qk_norm,
        position_embedding_type="rope",
        use_rotary_position_embeddings=True,
        rotary_base=int(facts.rope.theta),
        num_experts=facts.moe.experts if facts.moe else None,
        params_dtype=dtype,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        iteration=0,
        consumed_train_samples=0,
    )
    return {"args": args, "checkpoint_version": 3.0, "iteration": 0}
