"""A Hugging Face model directory as a source of weights: its configuration checked against its tensors, as a layout."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hf_files import read_config, refuse_quantised
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory, StoredTensor
from rlctl.errors import InputError, listed
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Role
from rlctl.weights import hf
from rlctl.weights.layout import Layout, ParamSpec, Piece, Shape, Span, whole
from rlctl.weights.transfer_plan import SingleWorld, World
from rlctl.weights.transforms import Dequantize, ReadThrough, Transform

if TYPE_CHECKING:
    import torch

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
SCALE = "_scale_inv"


@dataclass(frozen=True)
class HuggingFaceModel:
    """A directory whose tensors are those that its configuration calls for."""

    config: dict[str, Any]
    facts: ModelFacts
    files: SafetensorsDirectory
    source: PublishedFiles
    """The source of the layout's params."""
    layout: Layout

    @property
    def world(self) -> World:
        return SingleWorld(self.layout)

    @property
    def dtype(self) -> str:
        """The floating dtype of most elements; bfloat16 for block-scaled float8."""
        named = next((d for d in self.files.dtypes if d in FLOATS), "bfloat16")
        return "bfloat16" if next(iter(self.files.dtypes), "") not in FLOATS else named

    def published(self, dtype: str) -> dict[str, str]:
        """The dtypes of tensors that the files hold in another one than a checkpoint in `dtype` does. Empty where
        `dtype` is not the files' own: they are recast as a whole then."""
        if dtype != self.dtype:
            return {}
        kept = hf.layout(self.facts, dtype).params
        held = {name: self.files.tensors[name].dtype for name in kept if name in self.files.tensors}
        return {name: own for name, own in held.items() if own in FLOATS and own != kept[name].dtype}


def open_hf_model(directory: Path, facts: ModelFacts | None = None) -> HuggingFaceModel:
    """Open a model directory and check configuration against tensors; `facts`: those of its configuration, if known.

    Raises InputError for an unknown architecture, missing or damaged files, and for a tensor that is missing or has
    another shape or dtype than the configuration implies.
    """
    config = read_config(directory)
    facts = facts or facts_in(directory)
    files = SafetensorsDirectory.open(directory)
    refuse_quantised(directory, files.tensors)
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
        own_dtype = weights_of(facts).by_tensor[name][0].dtype
        stored = _checked(directory, _stored_name(name, facts, files), shape, own_dtype, files)
        params[stored.name] = ParamSpec(stored.shape, stored.dtype)
        box = whole(shape)
        transforms = _readers(stored, files, block)
        for transform in transforms:
            params.update({n: ParamSpec(files.tensors[n].shape, files.tensors[n].dtype) for n in transform.reads})
        pieces.append(Piece(name, box, stored.name, box, tuple(range(len(shape))), transforms))
    extra = sorted(set(files.tensors) - set(params) - read)
    _refuse_extra(directory, facts, extra)
    _refuse_other_head(directory, facts, files)
    return HuggingFaceModel(config, facts, files, PublishedFiles(files), Layout(0, params, tuple(pieces)))


def without_absent_mtp(facts: ModelFacts, names: Collection[str]) -> ModelFacts:
    """The facts without multi-token-prediction layers where a checkpoint has none of them (transformers drops them)."""
    first = f"model.layers.{facts.layers}."
    held = any(name.startswith((first, "mtp.")) for name in names)
    return facts if held or not facts.mtp_layers else replace(facts, mtp_layers=0)


def _stored_name(name: str, facts: ModelFacts, files: SafetensorsDirectory) -> str:
    """The name of a tensor in the files. Those of the first GPT-2 and its like were written from the model without its
    head, where names begin below it (`h.0.` for `transformer.h.0.`)."""
    below = name.partition(".")[2]
    return below if facts.listed and name not in files.tensors and below in files.tensors else name


def _checked(
    directory: Path, name: str, shape: tuple[int, ...], own_dtype: str, files: SafetensorsDirectory
) -> StoredTensor:
    stored = files.tensors.get(name)
    if stored is None:
        hint = "The configuration calls for it; is a shard absent?"
        raise InputError(f"{directory}: tensor {name} is missing.", hint)
    if stored.shape != shape:
        found = list(stored.shape)
        raise InputError(f"{directory}: tensor {name} has shape {found}, but config.json implies {list(shape)}.")
    if stored.dtype not in FLOATS and stored.dtype not in ("float8_e4m3fn", own_dtype):
        raise InputError(f"{directory}: tensor {name} has dtype {stored.dtype}, which is no weight format rlctl reads.")
    return stored


def _readers(stored: StoredTensor, files: SafetensorsDirectory, block: list[int] | None) -> tuple[Transform, ...]:
    """Block-scaled float8 (`X.weight` with `X.weight_scale_inv`) is read through its scales."""
    if stored.dtype != "float8_e4m3fn":
        return ()
    scale = files.tensors.get(stored.name + SCALE)
    if scale is None:
        raise InputError(f"{stored.file.name}: tensor {stored.name} is float8, but {stored.name}{SCALE} is missing.")
    size = tuple(block or (128, 128))
    expected = tuple(-(-n // b) for n, b in zip(stored.shape, size, strict=True))
    if scale.shape != expected:
        raise InputError(f"{stored.file.name}: {scale.name} has shape {list(scale.shape)}, expected {list(expected)}.")
    return (ReadThrough(Dequantize(scale.name, size)),)


def _refuse_extra(directory: Path, facts: ModelFacts, extra: list[str]) -> None:
    """Tensors that would be dropped silently are refused; known duplicates and tables are not."""
    known = (".rotary_emb.inv_freq", SCALE)
    repeated = {*weights_of(facts).copies, *({"lm_head.weight"} if facts.tied_embeddings else ())}
    kept = [name for name in extra if not any(re.search(pattern, name) for pattern in facts.left_out)]
    lost = [name for name in kept if not name.endswith(known) and name not in repeated]
    if lost:
        why = f"{directory}: {listed(lost)} is no tensor of a {facts.family} with this config.json."
        raise InputError(why, "The configuration contradicts the weights; converting would drop them.")


def _refuse_other_head(directory: Path, facts: ModelFacts, files: SafetensorsDirectory) -> None:
    """A head that is stored although it is tied to the embeddings would be dropped: both have to be the same."""
    own = next((m.tensor for m in weights_of(facts).outer if m.role is Role.EMBEDDING), "")
    head, embedding = files.tensors.get("lm_head.weight"), files.tensors.get(_stored_name(own, facts, files))
    if not (facts.tied_embeddings and head and embedding) or files.same(head.name, embedding.name):
        return
    why = f"{directory}: {head.name} differs from {embedding.name}, but config.json says tie_word_embeddings: true."
    raise InputError(why, "Set it to false where the head is the model's own, or remove the tensor.")


BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32
HELD = 2
"""Unpacked experts kept: the gate's rows and the up-projection's are asked for one after the other."""


def is_packed(name: str, files: SafetensorsDirectory) -> bool:
    """Whether the tensor is published in four bits."""
    return name not in files.tensors and name + BLOCKS in files.tensors


def packed_params(
    name: str, shape: Shape, files: SafetensorsDirectory
) -> tuple[dict[str, ParamSpec], list[Piece], tuple[str, str]]:
    """Params and pieces of a packed tensor, and the stored tensors they are read from.

    gpt-oss's X [E, in, out] is published as X_blocks [E, out, in / 32, 16] and X_scales [E, out, in / 32]. Each expert
    is a param of its own, `X@e` [out, in], unpacked when it is read, so that memory holds one expert and not a layer.
    Raises InputError where there are no scales, or shapes that do not make up `shape`.
    """
    blocks, scales = files.tensors[name + BLOCKS], files.tensors.get(name + SCALES)
    if scales is None:
        raise InputError(f"{blocks.file.name}: {name}{BLOCKS} is there, but {name}{SCALES} is missing.")
    experts, width, rows = shape
    groups = (experts, rows, width // GROUP)
    if width % GROUP or blocks.shape != (*groups, GROUP // 2) or scales.shape != groups:
        found = f"{list(blocks.shape)} with scales {list(scales.shape)}"
        raise InputError(f"{blocks.file.name}: {name}{BLOCKS} has shape {found}; config.json implies {list(shape)}.")
    params, pieces = {}, []
    for expert in range(experts):
        param = f"{name}@{expert}"
        params[param] = ParamSpec((rows, width), "bfloat16")
        box = (Span(expert, 1), Span(0, width), Span(0, rows))
        pieces.append(Piece(name, box, param, whole((rows, width)), (2, 1)))
    return params, pieces, (blocks.name, scales.name)


class PublishedFiles:
    """The stored tensors of a directory as a source, packed experts among them."""

    def __init__(self, files: SafetensorsDirectory) -> None:
        self.files = files
        self._unpacked: OrderedDict[str, torch.Tensor] = OrderedDict()

    def read(self, param: str) -> torch.Tensor:
        if param in self.files.tensors:
            return self.files.read(param)
        if param not in self._unpacked:
            self._unpacked[param] = self._unpack(*_expert(param))
            while len(self._unpacked) > HELD:
                self._unpacked.popitem(last=False)
        return self._unpacked[param]

    def drop(self, param: str) -> None:
        if param in self.files.tensors:
            self.files.drop(param)
            return
        name, _ = _expert(param)
        self.files.drop(name + BLOCKS)

    def place(self, param: str) -> tuple[str, int, int]:
        """Where a param lies, for reading in order: its file, its position in it, and the expert."""
        name, expert = (param, 0) if param in self.files.tensors else _expert(param)
        stored = self.files.tensors.get(name) or self.files.tensors[name + BLOCKS]
        return stored.file.name, stored.position, expert

    def _unpack(self, name: str, expert: int) -> torch.Tensor:
        import torch

        from rlctl.checkpoints.plan_execution import unpack_mxfp4

        blocks, scales = self.files.read(name + BLOCKS)[expert], self.files.read(name + SCALES)[expert]
        return unpack_mxfp4(blocks, scales, torch.bfloat16)


def _expert(param: str) -> tuple[str, int]:
    name, _, expert = param.rpartition("@")
    return name, int(expert)
