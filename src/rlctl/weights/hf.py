"""Plain Hugging Face layouts: whole tensors under their published names, in one process or one set of files."""

from __future__ import annotations

from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import FLOAT32_ROLES
from rlctl.models.registry import weights_of
from rlctl.weights.layout import Layout, ParamSpec, Piece, whole
from rlctl.weights.plan import SingleWorld


def layout(facts: ModelFacts, dtype: str) -> Layout:
    """Every published tensor, whole; the router's correction bias stays in float32."""
    weights = weights_of(facts)
    wide = {matrix.tensor for matrix in weights.matrices if matrix.role in FLOAT32_ROLES}
    params = {name: ParamSpec(shape, "float32" if name in wide else dtype) for name, shape in weights.tensors.items()}
    return Layout(0, params, tuple(_whole_piece(name, spec) for name, spec in params.items()))


def world(facts: ModelFacts, dtype: str) -> SingleWorld:
    """The one-rank world of `layout`."""
    return SingleWorld(layout(facts, dtype))


def _whole_piece(name: str, spec: ParamSpec) -> Piece:
    box = whole(spec.shape)
    return Piece(name, box, name, box, tuple(range(len(box))))
