"""Plain Hugging Face layouts: whole tensors under their published names, or stacked as transformers' modules are."""

from __future__ import annotations

import re

from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import FLOAT32_ROLES, Matrix, Role
from rlctl.models.registry import weights_of
from rlctl.weights.layout import Layout, ParamSpec, Piece, Span, whole
from rlctl.weights.pieces import piece
from rlctl.weights.plan import SingleWorld

_STACKED = {
    Role.EXPERT_GATE: ("gate_up_proj", 0),
    Role.EXPERT_UP: ("gate_up_proj", 1),
    Role.EXPERT_DOWN: ("down_proj", 0),
}
_ONE_EXPERT = re.compile(r"\.experts\.\d+\..*$")


def layout(facts: ModelFacts, dtype: str, copies: bool = False) -> Layout:
    """Every published tensor, whole; the router's correction bias stays in float32.

    `copies` adds tensors that published files repeat (embedding and head beside multi-token-prediction layers).
    """
    weights = weights_of(facts)
    wide = {matrix.tensor for matrix in weights.matrices if matrix.role in FLOAT32_ROLES}
    params = {name: ParamSpec(shape, "float32" if name in wide else dtype) for name, shape in weights.tensors.items()}
    pieces = [_whole_piece(name, name, spec) for name, spec in params.items()]
    for copy, name in weights.copies.items() if copies else ():
        params[copy] = params[name]
        pieces.append(_whole_piece(name, copy, params[name], primary=False))
    return Layout(0, params, tuple(pieces))


def world(facts: ModelFacts, dtype: str) -> SingleWorld:
    """The one-rank world of `layout`."""
    return SingleWorld(layout(facts, dtype))


def module_layout(facts: ModelFacts, dtype: str) -> Layout:
    """As transformers 5 holds the model: experts of a layer in `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]."""
    plain = layout(facts, dtype)
    stacked = {m.tensor: m for m in weights_of(facts).matrices if m.role in _STACKED and len(m.tensor_shape) == 2}
    params = {name: spec for name, spec in plain.params.items() if name not in stacked}
    pieces = [p for p in plain.pieces if p.tensor not in stacked]
    for matrix in stacked.values():
        name, spec, own = _stack(facts, matrix, dtype)
        params[name] = spec
        pieces.append(own)
    return Layout(0, params, tuple(pieces))


def _stack(facts: ModelFacts, matrix: Matrix, dtype: str) -> tuple[str, ParamSpec, Piece]:
    assert facts.moe is not None
    assert matrix.expert is not None
    module, part = _STACKED[matrix.role]
    name = _ONE_EXPERT.sub(f".experts.{module}", matrix.tensor).replace("block_sparse_moe", "mlp")
    rows, columns = matrix.shape
    spec = ParamSpec((facts.moe.experts, rows * (2 if module == "gate_up_proj" else 1), columns), dtype)
    own = piece(matrix, (Span(0, rows), Span(0, columns)), name, (matrix.expert, rows * part, 0))
    return name, spec, own


def _whole_piece(tensor: str, param: str, spec: ParamSpec, primary: bool = True) -> Piece:
    box = whole(spec.shape)
    return Piece(tensor, box, param, box, tuple(range(len(box))), primary=primary)
