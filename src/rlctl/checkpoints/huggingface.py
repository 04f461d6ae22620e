"""A Hugging Face model directory as a source of weights: its configuration checked against its tensors, as a layout."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.checkpoints.mxfp4 import PublishedFiles, is_packed, packed_params
from rlctl.checkpoints.safetensors import SafetensorsDirectory, StoredTensor
from rlctl.errors import InputError, listed
from rlctl.models.facts import ModelFacts
from rlctl.models.registry import facts_from_hf_config, weights_of
from rlctl.weights.layout import Layout, ParamSpec, Piece, whole
from rlctl.weights.plan import SingleWorld, World
from rlctl.weights.transforms import Dequantize, Stored, Transform

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
SCALE = "_scale_inv"


@dataclass(frozen=True)
class HuggingFaceModel:
    """A directory whose tensors are those that its configuration calls for."""

    directory: Path
    config: dict[str, Any]
    facts: ModelFacts
    files: SafetensorsDirectory
    source: PublishedFiles
    """What the layout's params are read from."""
    layout: Layout
    extra: tuple[str, ...]
    """Tensors that the family does not have (rotary tables of old files, a tied head)."""

    @property
    def world(self) -> World:
        return SingleWorld(self.layout)

    @property
    def dtype(self) -> str:
        """The floating dtype of most elements; bfloat16 for block-scaled float8."""
        named = next((d for d in self.files.dtypes if d in FLOATS), "bfloat16")
        return "bfloat16" if next(iter(self.files.dtypes), "") not in FLOATS else named


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` as a dict; InputError where there is none."""
    path = directory / "config.json"
    if not path.is_file():
        raise InputError(f"{directory} has no config.json.", "Name a Hugging Face model directory.")
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}).") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no JSON object.")
    return config


def open_model(directory: Path) -> HuggingFaceModel:
    """Open a model directory and check configuration against tensors.

    Raises:
        InputError: an unknown architecture, missing or damaged files, a tensor that is missing or has another shape or
            dtype than the configuration implies.
    """
    config = read_config(directory)
    facts = facts_from_hf_config(config)
    files = SafetensorsDirectory.open(directory)
    _refuse_packed(directory, config, files)
    facts = without_absent_mtp(facts, files.tensors)
    wanted = weights_of(facts).tensors
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    params: dict[str, ParamSpec] = {}
    pieces: list[Piece] = []
    read: set[str] = set()
    for name, shape in wanted.items():
        if len(shape) == 3 and is_packed(name, files):
            own, parts, used = packed_params(name, shape, files)
            params |= own
            pieces += parts
            read.update(used)
            continue
        stored = _checked(directory, name, shape, files)
        params[name] = ParamSpec(stored.shape, stored.dtype)
        box = whole(shape)
        transforms = _readers(stored, files, block)
        for transform in transforms:
            params.update({n: ParamSpec(files.tensors[n].shape, files.tensors[n].dtype) for n in transform.reads})
        pieces.append(Piece(name, box, name, box, tuple(range(len(shape))), transforms))
    extra = tuple(sorted(set(files.tensors) - set(params) - read))
    _refuse_extra(directory, facts, extra)
    _refuse_other_head(directory, facts, files)
    return HuggingFaceModel(
        directory, config, facts, files, PublishedFiles(files), Layout(0, params, tuple(pieces)), extra
    )


def without_absent_mtp(facts: ModelFacts, names: Collection[str]) -> ModelFacts:
    """The facts without multi-token-prediction layers where a checkpoint has none of them (transformers drops them)."""
    first = f"model.layers.{facts.layers}."
    held = any(name.startswith((first, "mtp.")) for name in names)
    return facts if held or not facts.mtp_layers else replace(facts, mtp_layers=0)


def _checked(directory: Path, name: str, shape: tuple[int, ...], files: SafetensorsDirectory) -> StoredTensor:
    stored = files.tensors.get(name)
    if stored is None:
        raise InputError(
            f"{directory}: tensor {name} is missing.", "The configuration calls for it; is a shard absent?"
        )
    if stored.shape != shape:
        raise InputError(
            f"{directory}: tensor {name} has shape {list(stored.shape)}, but config.json implies {list(shape)}."
        )
    if stored.dtype not in FLOATS and stored.dtype != "float8_e4m3fn":
        raise InputError(f"{directory}: tensor {name} has dtype {stored.dtype}, which is no weight format rlctl reads.")
    return stored


def _readers(stored: StoredTensor, files: SafetensorsDirectory, block: list[int] | None) -> tuple[Transform, ...]:
    """Block-scaled float8 (`X.weight` beside `X.weight_scale_inv`) is read through its scales."""
    if stored.dtype in FLOATS:
        return ()
    scale = files.tensors.get(stored.name + SCALE)
    if scale is None:
        raise InputError(f"{stored.file.name}: tensor {stored.name} is float8, but {stored.name}{SCALE} is missing.")
    size = tuple(block or (128, 128))
    expected = tuple(-(-n // b) for n, b in zip(stored.shape, size, strict=True))
    if scale.shape != expected:
        raise InputError(f"{stored.file.name}: {scale.name} has shape {list(scale.shape)}, expected {list(expected)}.")
    return (Stored(Dequantize(scale.name, size)),)


def _refuse_extra(directory: Path, facts: ModelFacts, extra: tuple[str, ...]) -> None:
    """Tensors that would be dropped silently are refused; known duplicates and tables are not."""
    known = (".rotary_emb.inv_freq", SCALE)
    repeated = {*weights_of(facts).copies, *({"lm_head.weight"} if facts.tied_embeddings else ())}
    lost = [name for name in extra if not name.endswith(known) and name not in repeated]
    if lost:
        raise InputError(
            f"{directory}: {listed(lost)} is no tensor of a {facts.family} with this config.json.",
            "The configuration contradicts the weights; converting would drop them.",
        )


def _refuse_other_head(directory: Path, facts: ModelFacts, files: SafetensorsDirectory) -> None:
    """A head beside embeddings that are said to be it would be dropped: it has to be the same."""
    head, embedding = files.tensors.get("lm_head.weight"), files.tensors.get("model.embed_tokens.weight")
    if not (facts.tied_embeddings and head and embedding) or files.same(head.name, embedding.name):
        return
    raise InputError(
        f"{directory}: {head.name} differs from {embedding.name}, but config.json says tie_word_embeddings: true.",
        "Set it to false where the head is the model's own, or remove the tensor.",
    )


def _refuse_packed(directory: Path, config: dict[str, Any], files: SafetensorsDirectory) -> None:
    """Weights packed by a quantiser (GPTQ, AWQ, bitsandbytes) have names and shapes of their own."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    packed = next((n for n in files.tensors if n.endswith((".qweight", ".weight_packed", ".absmax"))), None)
    if packed is not None:
        raise InputError(
            f"{directory}: its weights are quantised ({method or 'no quant_method'}; tensor {packed}), and not read.",
            "Use the model's unquantised weights.",
        )
