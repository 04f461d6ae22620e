"""The stored tensors of a multimodal model's text part, under their prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.checkpoints.hf.hf_model import EXPERT, SCALE, in_stack, without_absent_mtp
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.checkpoints.hf.text_config import HEAD, text_directory
from rlctl.errors import InputError, listed
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Role
from rlctl.weights.layout import ParamSpec, Piece, view_of, whole_piece

if TYPE_CHECKING:
    import torch

COMPUTED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class TextPart:
    """The files of a whole model, and where the tensors of its text part lie in them."""

    files: SafetensorsDirectory
    facts: ModelFacts
    pieces: dict[str, Piece]
    """By published text tensor, in file order. Params are stored tensors; an expert stack [E, O, I] counts as [E * O,
    I]. A tied output layer copies the embedding."""

    @staticmethod
    def open(directory: Path) -> TextPart:
        """Find the text part's tensors. Raises InputError for missing, misshapen or unknown tensors."""
        files = SafetensorsDirectory.open(directory)
        return _located(directory, files, facts_in(text_directory(directory)))

    def at(self, directory: Path) -> TextPart:
        """The same tensors in other files of the same names."""
        return replace(self, files=SafetensorsDirectory.open(directory))

    @cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """Shape and dtype of each tensor."""
        return {
            name: ParamSpec(tuple(span.count for span in piece.tensor_box), self.files.tensors[piece.param].dtype)
            for name, piece in self.pieces.items()
        }

    @cached_property
    def stored(self) -> dict[str, ParamSpec]:
        """The stored tensors that belong to it, in the shapes that the pieces count in."""
        tensors = {piece.param: self.files.tensors[piece.param] for piece in self.pieces.values()}
        stacks = {piece.param for name, piece in self.pieces.items() if EXPERT.search(name)}
        return {
            name: ParamSpec(
                (prod(tensor.shape[:-1]), tensor.shape[-1]) if name in stacks else tensor.shape, tensor.dtype
            )
            for name, tensor in tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """A tensor, contiguous."""
        from rlctl.weights.plan_execution import strided

        piece = self.pieces[name]
        values = strided(self.files.read(piece.param), view_of(self.stored[piece.param], piece.param_box))
        return (values.T if piece.axes == (1, 0) else values).contiguous()


def _located(directory: Path, files: SafetensorsDirectory, facts: ModelFacts) -> TextPart:
    """Locate each text tensor under its prefix in the files."""
    stored = files.tensors
    outer = {matrix.role: matrix.tensor for matrix in weights_of(facts).outer}
    embedding, head = outer[Role.EMBEDDING], outer.get(Role.HEAD, HEAD)
    section = embedding.partition(".")[0] + "."
    ends = [name.removeprefix(section) for name in weights_of(facts).tensors if name != head]
    table = embedding.removeprefix(section)
    prefixes = [name.removesuffix(table) for name in stored if f".{name}".endswith(f".{table}")]
    prefix = max(prefixes, key=lambda outside: sum(outside + end in stored for end in ends), default=section)
    heads = [name for name in stored if name.endswith(head) and prefix.startswith(name.removesuffix(head))]
    at_head = max(heads, key=len, default=head)
    facts = without_absent_mtp(facts, [section + name.removeprefix(prefix) for name in stored])
    expected = dict(weights_of(facts).tensors)
    if head not in expected and at_head in stored:
        expected[head] = expected[embedding]
    pieces: dict[str, Piece] = {}
    for name, shape in expected.items():
        source_name = at_head if name == head else prefix + name.removeprefix(section)
        if source_name in stored:
            tensor = embedding if name == head and Role.HEAD not in outer else name
            pieces[name] = whole_piece(tensor, source_name, stored[source_name].shape, primary=tensor == name)
            if source_name + SCALE in stored:
                pieces[name + SCALE] = whole_piece(name + SCALE, source_name + SCALE, stored[source_name + SCALE].shape)
        elif piece := in_stack(name, source_name, shape, stored):
            pieces[name] = piece
    if absent := sorted(expected.keys() - pieces.keys()):
        reason = f"{directory}: the text part lacks {listed(absent)}."
        raise InputError(reason, "Is a shard absent, or does config.json belong to another model? Download it again.")
    for name, shape in expected.items():
        if (actual := tuple(span.count for span in pieces[name].tensor_box)) != shape:
            problem = f"tensor {pieces[name].param} has shape {list(actual)}"
            raise InputError(f"{directory}: {problem}, but config.json implies {list(shape)}.", "Download it again.")
    used, parts = {piece.param for piece in pieces.values()}, tuple({prefix + end.partition(".")[0] for end in ends})
    ignored = (SCALE, *COMPUTED)
    extra = sorted(
        name for name in stored if name.startswith(parts) and name not in used and not name.endswith(ignored)
    )
    if lost := [name for name in extra if not any(re.search(each, name) for each in facts.left_out)]:
        reason = (
            f"{directory}: {listed(lost)} belongs to the text part, but transformers' text model has no such tensor."
        )
        raise InputError(reason, "A newer transformers may know it; without it the text part would not be the same.")
    places = {name: (stored[p.param].file.name, stored[p.param].position, p.param_box) for name, p in pieces.items()}
    return TextPart(files, facts, {name: pieces[name] for name in sorted(pieces, key=places.__getitem__)})
