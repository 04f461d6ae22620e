"""Megatron checkpoint directories: where shards, iteration and configuration are, and reading one as a source.

Known arrangements: Megatron-LM and Megatron-Bridge (`latest_checkpointed_iteration.txt` beside `release/` or
`iter_0000100/`), one of their iterations, a bare torch_dist directory, and rlctl's runs (`checkpoints/step_N/policy`).
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.checkpoints.huggingface import without_absent_mtp
from rlctl.checkpoints.torch_dist import TorchDistReader
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.weights import torch_dist as keys
from rlctl.weights.layout import Layout
from rlctl.weights.plan import SingleWorld, World

LATEST = "latest_checkpointed_iteration.txt"
HF_FOLDER = "huggingface"
"""Where configuration and tokenizer lie beside the shards."""
MODEL_PREFIXES = ("decoder.", "embedding.", "output_layer.", "mtp.")


@dataclass(frozen=True)
class MegatronDirectory:
    """A checkpoint on disk."""

    root: Path
    shards: Path
    iteration: int | None
    """None: a release, that is, converted and not trained."""

    def huggingface(self) -> Path | None:
        """The nearest directory with the model's `config.json`: beside the shards, then upwards."""
        for base in (self.shards, *self.shards.parents[:4]):
            for candidate in (base / HF_FOLDER, base / "tokenizer", base / "hf_metadata", base):
                if (candidate / "config.json").is_file():
                    return candidate
        return None


def find(path: Path) -> MegatronDirectory | None:
    """The Megatron checkpoint at `path`, the latest iteration where there are several; None: it is none."""
    if (path / "metadata.json").is_file() and (path / ".metadata").is_file():
        return MegatronDirectory(path, path, _iteration_of(path.name))
    if (path / LATEST).is_file():
        return _tracked(path)
    for shards in (path / "policy", *sorted(path.glob("checkpoints/step_*/policy"), key=_step)[::-1]):
        if (shards / "metadata.json").is_file():
            return MegatronDirectory(path, shards, _step(shards))
    return None


def _tracked(root: Path) -> MegatronDirectory:
    text = (root / LATEST).read_text().strip()
    name = "release" if text == "release" else f"iter_{int(text):07d}" if text.isdigit() else None
    if name is None:
        raise InputError(f"{root / LATEST} says `{text}`; expected `release` or a number.")
    if not (root / name).is_dir():
        raise InputError(f"{root / LATEST} names {name}, which is missing.", "Copy the checkpoint again.")
    return MegatronDirectory(root, root / name, None if name == "release" else int(text))


def _iteration_of(name: str) -> int | None:
    digits = name.removeprefix("iter_").removeprefix("step_")
    return int(digits) if digits.isdigit() else None


def _step(shards: Path) -> int:
    return _iteration_of(shards.parent.name) or 0


@dataclass(frozen=True)
class MegatronModel:
    """An opened checkpoint: every block a param, so that a plan reads only what it needs."""

    directory: MegatronDirectory
    facts: ModelFacts
    reader: TorchDistReader
    layout: Layout
    blocks: dict[str, keys.Chunk]
    dtype: str

    @property
    def world(self) -> World:
        return SingleWorld(self.layout)


def open_model(directory: MegatronDirectory, facts: ModelFacts) -> MegatronModel:
    """Open a checkpoint of the model and check its keys against the model's.

    Raises:
        InputError: keys that are missing, have other shapes, or that the model does not have.
    """
    reader = TorchDistReader.open(directory.shards)
    facts = without_absent_mtp(facts, reader.shapes)
    style = keys.style_of(reader.shapes)
    rows = [reader.shapes[key].shape[0] for key in keys.VOCAB_KEYS if key in reader.shapes]
    if not rows or min(rows) < facts.vocab:
        raise InputError(
            f"{directory.shards} holds no embedding of {facts.vocab} rows.", "Is it another model's checkpoint?"
        )
    plain = keys.layout(facts, "float32", style, rows[0], holds=reader.shapes.__contains__)
    for key, spec in plain.params.items():
        _check_key(directory.shards, key, spec.shape, reader)
    _refuse_unknown(directory.shards, plain, reader)
    params = {key: replace(spec, dtype=reader.shapes[key].dtype) for key, spec in plain.params.items()}
    blocks = [chunk for key in params for chunk in reader.chunks(key)]
    layout = keys.chunked(Layout(0, params, plain.pieces), blocks)
    dtype = reader.shapes[keys.VOCAB_KEYS[0]].dtype
    return MegatronModel(directory, facts, reader, layout, {chunk.name: chunk for chunk in blocks}, dtype)


def _check_key(shards: Path, key: str, shape: tuple[int, ...], reader: TorchDistReader) -> None:
    if key not in reader.shapes:
        raise InputError(f"{shards}: {key} is missing.", "The configuration calls for it; is it this model's?")
    if reader.shapes[key].shape != shape:
        found = list(reader.shapes[key].shape)
        raise InputError(f"{shards}: {key} has shape {found}, but the configuration implies {list(shape)}.")


def _refuse_unknown(shards: Path, plain: Layout, reader: TorchDistReader) -> None:
    """Weights that the model does not have would be lost. The other spelling of a norm is no loss."""
    for key in reader.shapes:
        if key.startswith(MODEL_PREFIXES) and key not in plain.params and not key.endswith(keys.NORM_KEYS):
            raise InputError(f"{shards}: {key} belongs to no part of a {reader.directory.name} of this configuration.")


def common_values(facts: ModelFacts, dtype: str) -> dict[str, Any]:
    """What `common.pt` holds: Megatron-LM's `args` as far as they follow from the model, version and iteration."""
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
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        iteration=0,
        consumed_train_samples=0,
    )
    return {"args": args, "checkpoint_version": 3.0, "iteration": 0}


def write_tracker(root: Path) -> None:
    """Mark `release/` as the checkpoint to load."""
    (root / LATEST).write_text("release")


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON file; {} where there is none."""
    return json.loads(path.read_text()) if path.is_file() else {}
