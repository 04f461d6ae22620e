"""A Hugging Face model directory as a source of weights: its configuration checked against its tensors, as a layout."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hf_files import read_config, refuse_quantized
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.packed_layers import PackedLayers
from rlctl.checkpoints.hf.reward_models import SCORE
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory, StoredTensor
from rlctl.errors import InputError, listed
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Role
from rlctl.models.quantized_base import quantized_base
from rlctl.models.vision import VISION_FAMILIES
from rlctl.weights import hf
from rlctl.weights.dtensor import module_layout
from rlctl.weights.layout import Layout, ParamSpec, Piece, Shape, Span, whole, whole_piece
from rlctl.weights.transfer_plan import SingleWorld, World
from rlctl.weights.transforms import Dequantize, ReadThrough

if TYPE_CHECKING:
    import torch

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
SCALE = "_scale_inv"
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|up|down|w1|w2|w3)(?:_proj)?\.weight$")
_MTP = re.compile(r"(?:model\.)?mtp\.")
PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
"""Mixtral's names of an expert's matrices."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """A directory with exactly the tensors that its configuration requires."""

    config: dict[str, Any]
    facts: ModelFacts
    files: SafetensorsDirectory
    source: PublishedFiles
    """The source of the layout's params."""
    layout: Layout
    predicting: Layout
    """Tensors of multi-token prediction, which transformers has no modules for."""

    @property
    def world(self) -> World:
        return SingleWorld(self.layout)

    @property
    def dtype(self) -> str:
        """The floating dtype of most elements; bfloat16 for block-scaled float8."""
        stored = next((d for d in self.files.dtypes if d in FLOATS), "bfloat16")
        return "bfloat16" if next(iter(self.files.dtypes), "") not in FLOATS else stored

    def published(self, dtype: str) -> dict[str, str]:
        """Return file dtypes that differ from a checkpoint in `dtype`; empty if `dtype` recasts the model."""
        if dtype != self.dtype:
            return {}
        kept = hf.layout(self.facts, dtype).params
        dtypes = {name: self.files.tensors[name].dtype for name in kept if name in self.files.tensors}
        return {name: dtype for name, dtype in dtypes.items() if dtype in FLOATS and dtype != kept[name].dtype}


def open_hf_model(directory: Path, facts: ModelFacts | None = None) -> HuggingFaceModel:
    """Open a model directory and check tensors against its configuration (`facts`, if known). Raises InputError for an
    unknown architecture, missing or damaged files, and missing or different tensors."""
    config = read_config(directory)
    facts = facts or facts_in(directory)
    files = SafetensorsDirectory.open(directory)
    refuse_quantized(directory, files.tensors)
    base = quantized_base(config)
    facts = replace(without_absent_mtp(facts, files.tensors), quantized=None)  # all weights are read as numbers
    expected = weights_of(facts).tensors
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    params: dict[str, ParamSpec] = {}
    pieces: list[Piece] = []
    packed: set[str] = set()
    stacks: set[str] = set()
    layers = PackedLayers(files, base)
    for name, shape in expected.items():
        if parts := layers.add(name, shape):
            packed.update(parts)
            params[name] = ParamSpec(shape, "bfloat16")
            pieces.append(whole_piece(name, name, shape))
            continue
        if piece := _unsaved_form(name, shape, files.tensors):
            stored = files.tensors[piece.param]
            pieces.append(piece)
            stacks.update([stored.name] if len(stored.shape) > len(shape) else ())
            params[stored.name] = ParamSpec(_flat(directory, stored, facts, len(shape)), stored.dtype)
            continue
        if len(shape) == 3 and name not in files.tensors and name + BLOCKS in files.tensors:
            unpacked, parts, used = packed_params(name, shape, files)
            params |= unpacked
            pieces += parts
            packed.update(used)
            continue
        own_dtype = weights_of(facts).by_tensor[name][0].dtype
        stored = _checked(directory, _stored_name(name, facts, files), shape, own_dtype, files)
        pieces.append(_whole(name, stored, files, block, params))
    extra = sorted(files.tensors.keys() - params.keys() - packed)
    _refuse_others(directory, facts, files, extra)
    source, layout = PublishedFiles(files, frozenset(stacks), layers), Layout(0, params, tuple(pieces))
    further: dict[str, ParamSpec] = {}
    heads = tuple(_whole(name, files.tensors[name], files, block, further) for name in predicting(facts, extra))
    return HuggingFaceModel(config, facts, files, source, layout, Layout(0, further, heads))


def _whole(
    name: str, stored: StoredTensor, files: SafetensorsDirectory, block: Any, params: dict[str, ParamSpec]
) -> Piece:
    """Return the piece of a stored tensor and add its params; block-scaled float8 is read through its scales."""
    params[stored.name] = ParamSpec(stored.shape, stored.dtype)
    if stored.dtype != "float8_e4m3fn":
        return whole_piece(name, stored.name, stored.shape)
    scale, size = files.tensors.get(stored.name + SCALE), tuple(block or (128, 128))
    if scale is None:
        raise InputError(f"{stored.file.name}: tensor {stored.name} is float8, but {stored.name}{SCALE} is missing.")
    if scale.shape != (expected := tuple(-(-n // b) for n, b in zip(stored.shape, size, strict=True))):
        mismatch = f"{scale.name} has shape {list(scale.shape)}, expected {list(expected)}."
        raise InputError(f"{stored.file.name}: {mismatch}")
    params[scale.name] = ParamSpec(scale.shape, scale.dtype)
    return whole_piece(name, stored.name, stored.shape, (ReadThrough(Dequantize(scale.name, size)),))


def predicting(facts: ModelFacts, names: Iterable[str]) -> list[str]:
    """Return the tensors among `names` that predict further tokens and that transformers' class ignores: `mtp.*`, or
    layers behind the last one."""
    ignored = [name for name in names if any(re.search(each, name) for each in facts.left_out)]
    behind = [(name, re.search(r"(?:^|\.)layers\.(\d+)\.", name)) for name in ignored if not name.endswith(SCALE)]
    return [name for name, at in behind if _MTP.match(name) or (at and int(at[1]) >= facts.layers)]


def _flat(directory: Path, stored: StoredTensor, facts: ModelFacts, axes: int) -> Shape:
    """Return a tensor's shape, expert stacks as stacked matrices. Raises InputError for a wrong number of experts."""
    if len(stored.shape) == axes:
        return stored.shape
    if facts.moe is not None and stored.shape[0] != facts.moe.experts:
        has = f"tensor {stored.name} has {stored.shape[0]} experts, but config.json says {facts.moe.experts}"
        raise InputError(f"{directory}: {has}.", "Download it again.")
    return (stored.shape[0] * stored.shape[1], *stored.shape[2:])


def in_stack(name: str, stacked: str, shape: Shape, stored: Mapping[str, StoredTensor]) -> Piece | None:
    """Locate one expert's tensor in a stack [E, O, I] or [E, I, O] (gate and up concatenated); None: no stack. A square
    stack follows the layer's other stack."""
    match = EXPERT.search(stacked)
    if match is None:
        return None
    expert, part = int(match[1]), PARTS.get(match[2], match[2])
    both = [f"{stacked[: match.start()]}.experts.{end}_proj" for end in ("gate_up", "down")]
    stack, other = both[::-1] if part == "down" else both
    outputs, inputs = shape if part == "down" else (2 * shape[0], shape[1])
    first = shape[0] if part == "up" else 0
    sizes = stored[stack].shape[1:] if stack in stored else ()
    inputs_first = other in stored and stored[other].shape[1] == shape[0]
    if sizes == (outputs, inputs) and not (outputs == inputs and inputs_first):
        return Piece(name, whole(shape), stack, (Span(expert * outputs + first, shape[0]), Span(0, inputs)), (0, 1))
    if sizes == (inputs, outputs):
        return Piece(name, whole(shape), stack, (Span(expert * inputs, inputs), Span(first, shape[0])), (1, 0))
    return None


def without_absent_mtp(facts: ModelFacts, names: Collection[str]) -> ModelFacts:
    """Return the facts without multi-token-prediction layers if the checkpoint lacks them (transformers drops them)."""
    first = f"model.layers.{facts.layers}."
    has_mtp = any(name.startswith((first, "mtp.")) for name in names)
    return facts if has_mtp or not facts.mtp_layers else replace(facts, mtp_layers=0)


def _unsaved_form(name: str, shape: Shape, stored: Mapping[str, StoredTensor]) -> Piece | None:
    """Locate a tensor in files saved from transformers' modules instead of `save_pretrained`; None: published name."""
    renamed = name.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's
    if name in stored:
        return None
    if renamed in stored and stored[renamed].shape == shape:
        return whole_piece(name, renamed, shape)
    piece = in_stack(name, renamed, shape, stored)
    return piece if piece and stored[piece.param].dtype in FLOATS else None


def _stored_name(name: str, facts: ModelFacts, files: SafetensorsDirectory) -> str:
    """Return a tensor's name in the files; early GPT-2 files start below the head (`h.0.` for `transformer.h.0.`)."""
    if not facts.listed or name in files.tensors:
        return name
    others = [name.partition(".")[2]]
    if facts.vision is not None:  # saved by transformers, or as its modules are called
        others += [ours + name.removeprefix(hub) for ours, hub in VISION_FAMILIES[facts.vision.kind].published]
        others += [piece.param for piece in module_layout(facts, "float32").by_tensor[name]]
    return next((other for other in others if other in files.tensors), name)


def _checked(
    directory: Path, name: str, shape: tuple[int, ...], own_dtype: str, files: SafetensorsDirectory
) -> StoredTensor:
    stored = files.tensors.get(name)
    if stored is None:
        hint = "The configuration calls for it; is a shard absent?"
        raise InputError(f"{directory}: tensor {name} is missing.", hint)
    if stored.shape != shape:
        found_shape = list(stored.shape)
        raise InputError(f"{directory}: tensor {name} has shape {found_shape}, but config.json implies {list(shape)}.")
    if stored.dtype not in FLOATS and stored.dtype not in ("float8_e4m3fn", own_dtype):
        raise InputError(
            f"{directory}: tensor {name} has dtype {stored.dtype}, which is not a weight format rlctl reads."
        )
    return stored


def _refuse_others(directory: Path, facts: ModelFacts, files: SafetensorsDirectory, extra: list[str]) -> None:
    """Refuse tensors that would be dropped, except known duplicates, tables and reward scores. A tied head must equal
    the embeddings."""
    computed_names = (".rotary_emb.inv_freq", SCALE, SCORE)
    heads = {"lm_head.weight", "language_model.lm_head.weight"}
    repeated = {*weights_of(facts).copies, *(heads if facts.tied_embeddings else ())}
    kept = [name for name in extra if not any(re.search(pattern, name) for pattern in facts.left_out)]
    if lost := [name for name in kept if not name.endswith(computed_names) and name not in repeated]:
        reason = f"{directory}: a {facts.family} with this config.json has no tensor {listed(lost)}."
        raise InputError(reason, "The configuration contradicts the weights; converting would drop them.")
    embeddings = next((m.tensor for m in weights_of(facts).outer if m.role is Role.EMBEDDING), "")
    head, embedding = files.tensors.get("lm_head.weight"), files.tensors.get(_stored_name(embeddings, facts, files))
    if facts.tied_embeddings and head and embedding and not files.same(head.name, embedding.name):
        reason = f"{head.name} differs from {embedding.name}, but config.json says tie_word_embeddings: true."
        hint = "Set it to false where the head is the model's own, or remove the tensor."
        raise InputError(f"{directory}: {reason}", hint)


BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32
HELD = 2
"""Unpacked experts kept in memory: gate and up rows are read in sequence."""


def packed_params(
    name: str, shape: Shape, files: SafetensorsDirectory
) -> tuple[dict[str, ParamSpec], list[Piece], tuple[str, str]]:
    """Return params and pieces of a packed tensor, and the stored tensors. gpt-oss's X [E, in, out] is published as
    X_blocks [E, out, in / 32, 16] and X_scales [E, out, in / 32]. Each expert is a param `X@e` [out, in], unpacked on
    reading. Raises InputError for missing scales or wrong shapes."""
    blocks, scales = files.tensors[name + BLOCKS], files.tensors.get(name + SCALES)
    if scales is None:
        raise InputError(f"{blocks.file.name}: {name}{BLOCKS} is there, but {name}{SCALES} is missing.")
    experts, width, rows = shape
    groups = (experts, rows, width // GROUP)
    if width % GROUP or blocks.shape != (*groups, GROUP // 2) or scales.shape != groups:
        shapes = f"{list(blocks.shape)} with scales {list(scales.shape)}"
        raise InputError(f"{blocks.file.name}: {name}{BLOCKS} has shape {shapes}; config.json implies {list(shape)}.")
    params, pieces = {}, []
    for expert in range(experts):
        param = f"{name}@{expert}"
        params[param] = ParamSpec((rows, width), "bfloat16")
        box = (Span(expert, 1), Span(0, width), Span(0, rows))
        pieces.append(Piece(name, box, param, whole((rows, width)), (2, 1)))
    return params, pieces, (blocks.name, scales.name)


class PublishedFiles:
    """The stored tensors of a directory as a source, packed experts and packed layers among them."""

    def __init__(
        self, files: SafetensorsDirectory, stacks: frozenset[str] = frozenset(), layers: PackedLayers | None = None
    ) -> None:
        """`stacks`: tensors [E, O, I] of all experts, whose params are [E x O, I]."""
        self.files, self._stacks, self.layers = files, stacks, layers or PackedLayers(files, None)
        self._unpacked: OrderedDict[str, torch.Tensor] = OrderedDict()

    def read(self, param: str) -> torch.Tensor:
        import torch

        from rlctl.weights.plan_execution import unpack_mxfp4

        if param in self.layers:
            return self.layers.read(param).scaled_in(torch.bfloat16).dequantized()
        if param in self.files.tensors:
            stored = self.files.read(param)
            return stored.flatten(0, 1) if param in self._stacks else stored
        if param not in self._unpacked:
            name, expert = _expert(param)
            blocks, scales = (self.files.read(name + part)[expert] for part in (BLOCKS, SCALES))
            self._unpacked[param] = unpack_mxfp4(blocks, scales, torch.bfloat16)
            while len(self._unpacked) > HELD:
                self._unpacked.popitem(last=False)
        return self._unpacked[param]

    def drop(self, param: str) -> None:
        if param in self.layers:
            self.layers.drop(param)
            return
        self.files.drop(param if param in self.files.tensors else _expert(param)[0] + BLOCKS)

    def place(self, param: str) -> tuple[str, int, int]:
        """Where a param lies, for reading in order: its file, its position in it, and the expert."""
        if param in self.layers:
            param = self.layers.codes(param)
        name, expert = (param, 0) if param in self.files.tensors else _expert(param)
        stored = self.files.tensors.get(name) or self.files.tensors[name + BLOCKS]
        return stored.file.name, stored.position, expert


def _expert(param: str) -> tuple[str, int]:
    name, _, expert = param.rpartition("@")
    return name, int(expert)
