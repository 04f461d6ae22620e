"""Filling the live weights of one rank from a model directory, Hugging Face's or Megatron's, without the other form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.checkpoints.megatron_directory import find
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.weights.layout import Layout
from rlctl.weights.plan import World, receive_plan

if TYPE_CHECKING:
    import torch

    from rlctl.checkpoints.stream import Source


@dataclass(frozen=True)
class _Opened:
    """A directory as a source: its world, its params, and where a param lies (files are read front to back)."""

    world: World
    source: Source
    order: dict[str, int]


def load_rank(
    directory: Path, world: World, rank: int, params: dict[str, torch.Tensor], facts: ModelFacts | None = None
) -> int:
    """Stream a model directory into the live params of one rank; returns bytes read.

    `params` are contiguous tensors under the names of `world.layout(rank)`; each gets every element exactly once
    (proven beforehand). Each rank reads only what it holds. `facts` are the policy's: a Megatron checkpoint is checked
    against them, a Hugging Face directory against its own configuration.

    Raises:
        InputError: a damaged directory or one of another model, or a param of the layout that the engine does not
            have, or of another shape.
    """
    from rlctl.checkpoints.tensors import execute, fill

    opened = _open(directory, facts)
    plan = receive_plan(opened.world, world, rank).prove()
    check_params(plan.layout, params)
    fill(plan.fills, params, plan.layout.params)
    read = 0
    for copy in sorted(plan.copies, key=lambda c: opened.order[c.source_param]):
        source = opened.source.read(copy.source_param)
        execute(copy, source, params[copy.destination_param], opened.source.read)
        opened.source.drop(copy.source_param)
        read += copy.elements * params[copy.destination_param].element_size()
    return read


def _open(directory: Path, facts: ModelFacts | None) -> _Opened:
    from rlctl.checkpoints import huggingface

    found = find(directory)
    if found is None or facts is None:
        model = huggingface.open_model(directory)
        names = sorted(model.layout.params, key=model.source.place)
        return _Opened(model.world, model.source, {name: i for i, name in enumerate(names)})
    from rlctl.checkpoints.megatron import Blocks, open_model

    checkpoint = open_model(found, facts, without_mtp=not facts.mtp_layers)
    order = {name: i for i, name in enumerate(checkpoint.blocks)}
    return _Opened(checkpoint.world, Blocks(checkpoint.reader, checkpoint.blocks), order)


def check_params(layout: Layout, params: dict[str, torch.Tensor]) -> None:
    """Raise InputError unless the engine's params are the layout's, name by name and shape by shape."""
    for name, spec in layout.params.items():
        if name not in params:
            raise InputError(f"The engine has no parameter {name}, which the layout expects.")
        shape, expected = tuple(params[name].shape), spec.memory_shape or spec.shape
        if shape != expected:
            raise InputError(f"{name} has shape {list(shape)} in the engine, but {list(expected)} in the layout.")
        if not params[name].is_contiguous():
            raise InputError(f"{name} is not stored contiguously.")
    extra = sorted(set(params) - set(layout.params))
    if extra:
        raise InputError(f"The engine's parameter {extra[0]} is in no layout: it would keep its random values.")
