"""The published tensors one behind the other in a single buffer: what a refit sends through shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlctl.models.facts import ModelFacts
from rlctl.weights import hf
from rlctl.weights.layout import Layout
from rlctl.weights.plan import SingleWorld

BUFFER = "flat"
ALIGNMENT = 64  # bytes: a cache line, and a multiple of every item size


@dataclass(frozen=True)
class FlatBuffer:
    """Whole tensors at byte offsets (`params[name].offset_bytes`) of one buffer of `bytes` bytes."""

    layout: Layout
    bytes: int

    @property
    def world(self) -> SingleWorld:
        return SingleWorld(self.layout)


def flat(facts: ModelFacts, dtype: str, alignment: int = ALIGNMENT) -> FlatBuffer:
    """Layout of all tensors of a model in one buffer, in the order of the model."""
    plain = hf.layout(facts, dtype)
    offset, params = 0, {}
    for name, spec in plain.params.items():
        params[name] = replace(spec, buffer=BUFFER, offset_bytes=offset)
        offset += -(-spec.bytes // alignment) * alignment
    return FlatBuffer(Layout(0, params, plain.pieces), offset)
