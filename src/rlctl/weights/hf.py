"""The plain Hugging Face layout: whole tensors under their published names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import FLOAT32_ROLES
from rlctl.weights.layout import Layout, ParamSpec, whole_piece


def layout(
    facts: ModelFacts, dtype: str, copies: bool = False, published: Mapping[str, str] = MappingProxyType({})
) -> Layout:
    """Return all published tensors, whole; router correction biases stay float32. `copies` adds repeated embedding and
    head; `published` has other dtypes."""
    weights = weights_of(facts)
    wide = {matrix.tensor: "float32" for matrix in weights.matrices if matrix.role in FLOAT32_ROLES}
    special_dtypes = {matrix.tensor: matrix.dtype for matrix in weights.matrices if matrix.dtype}
    dtypes = wide | special_dtypes | dict(published)
    params = {name: ParamSpec(shape, dtypes.get(name, dtype)) for name, shape in weights.tensors.items()}
    pieces = [whole_piece(name, name, spec.shape) for name, spec in params.items()]
    for copy, name in weights.copies.items() if copies else ():
        params[copy] = params[name]
        pieces.append(whole_piece(name, copy, params[name].shape, primary=False))
    return Layout(0, params, tuple(pieces))
