"""The text part of a model that takes images or sound as well, as a source of weights, and put back into the model."""

from __future__ import annotations

import torch

from rlctl.checkpoints.hf.hf_model import FLOATS
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.checkpoints.hf.text_part import TextPart
from rlctl.errors import InputError, listed
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.weights.layout import Layout, ParamSpec, Piece, whole_piece

OTHER = "whole:"
"""How the names of tensors begin that are not of the text part."""


class RawTensors:
    """Stored tensors as a source of params; float8 as bytes."""

    def __init__(self, files: SafetensorsDirectory) -> None:
        self._files = files

    def read(self, param: str) -> torch.Tensor:
        values = self._files.read(param.removeprefix(OTHER))
        return values.view(torch.uint8) if "float8" in str(values.dtype) else values

    def drop(self, param: str) -> None:
        self._files.drop(param.removeprefix(OTHER))


def text_layouts(part: TextPart) -> tuple[Layout, Layout]:
    """Return the stored text part, and as a separate model, bit for bit."""
    stored = {name: copied(spec) for name, spec in part.stored.items()}
    pieces = [Piece(name, p.tensor_box, p.param, p.param_box, p.axes) for name, p in part.pieces.items()]
    text_layout = {name: copied(spec) for name, spec in part.specs.items()}
    as_they_are = tuple(whole_piece(name, name, spec.shape) for name, spec in text_layout.items())
    return Layout(0, stored, tuple(pieces)), Layout(0, text_layout, as_they_are)


def whole_layouts(part: TextPart, facts: ModelFacts, text_layout: Layout) -> tuple[Layout, Layout]:
    """Return layouts of text weights `text_layout` and the whole model's other tensors, and the files. Raises
    InputError if the whole is quantized or its text part differs."""
    directory, ours, theirs = part.files.directory, weights_of(facts).tensors, weights_of(part.facts).tensors
    if packed := [name for name, spec in part.specs.items() if spec.dtype not in FLOATS]:
        reason = (
            f"--into {directory}: its text part is quantized (tensor {packed[0]} is {part.specs[packed[0]].dtype})."
        )
        raise InputError(reason, "Name the same model in plain weights, or export only the text model.")
    if different := sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)):
        reason = f"--into {directory}: its text part is another model than this one, by {listed(different)}."
        raise InputError(reason, "Name the model that the run began with.")
    specs = {t.name: ParamSpec(t.shape, t.dtype) for t in part.files.in_order()}
    others = {name: copied(spec) for name, spec in specs.items() if name not in part.stored}
    params = {name: others.get(name) or part.stored[name] for name in specs}
    at = [whole_piece(OTHER + name, name, spec.shape) for name, spec in others.items()]
    source = [whole_piece(OTHER + name, OTHER + name, spec.shape) for name, spec in others.items()]
    own_params = text_layout.params | {OTHER + name: spec for name, spec in others.items()}
    return (
        Layout(0, own_params, (*text_layout.pieces, *source), text_layout.fills),
        Layout(0, params, (*part.pieces.values(), *at)),
    )


def copied(spec: ParamSpec) -> ParamSpec:
    """A tensor whose bytes are copied. Nothing computes with float8."""
    return ParamSpec(spec.shape, "uint8" if "float8" in spec.dtype else spec.dtype)
