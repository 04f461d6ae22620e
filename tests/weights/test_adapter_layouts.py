"""Adapters of sharded policies arrive whole: the parts that ranks hold, by the layout of their weights."""

from __future__ import annotations

import pytest
import torch

from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.transport.rounds import whole_tensors
from rlctl.weights.adapters import A, AdapterRow, AdapterWorld, adapter_table
from rlctl.weights.dtensor import DTensorWorld
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.plan_execution import execute
from rlctl.weights.transfer_plan import receive_plan

FACTS = ModelFacts("llama", 4, 64, 4, 2, 16, 96, 97, 256)
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MATRICES += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def rows() -> tuple[AdapterRow, ...]:
    """Adapters of every matrix, with ranks that differ between layers; fused parts share A."""
    found = []
    for layer in range(FACTS.layers):
        for matrix in MATRICES:
            first = matrix
            for name, other in SHARED.items():
                first = first.replace(name, other)
            names = [f"model.layers.{layer}.{one}.weight" for one in (matrix, first)]
            found.append(AdapterRow(names[0], names[1] + A, 2 + layer, 1.5))
    return tuple(found)


@pytest.mark.parametrize(
    "weights",
    [
        MegatronWorld(FACTS, ParallelSpec(tp=2)),
        MegatronWorld(FACTS, ParallelSpec(tp=2, pp=2, dp=2)),
        MegatronWorld(FACTS, ParallelSpec(pp=2, vpp=2, cp=2)),
        DTensorWorld(FACTS, ParallelSpec(dp=2)),
        DTensorWorld(FACTS, ParallelSpec(tp=2, dp=2)),
    ],
)
def test_the_parts_of_all_ranks_are_every_adapter_once(weights: MegatronWorld | DTensorWorld) -> None:
    """Each rank cuts its parts out of known tensors by its weights' layout, independently of the adapters' layout."""
    world, shapes = AdapterWorld(weights, rows(), "float32"), dict(weights_of(FACTS).tensors)
    table = adapter_table(world.rows, shapes, "float32")
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, _, shape in table}
    owner = {row.tensor: row for row in world.rows}
    held: list[dict[str, torch.Tensor]] = []
    for rank in range(weights.size):
        layout, params = weights.layout(rank), dict[str, torch.Tensor]()
        for piece in layout.pieces:
            if (row := owner.get(piece.tensor)) is None:
                continue
            outputs, inputs = layout.params[piece.param].shape
            a = params.setdefault(f"{row.a} in {piece.param}", torch.full((row.rank, inputs), float("nan")))
            b = params.setdefault(f"{piece.param}.lora_b", torch.full((outputs, row.rank), float("nan")))
            (r, c), (pr, pc) = piece.tensor_box, piece.param_box
            a[:, pc.start : pc.start + pc.count] = whole[row.a][:, c.start : c.start + c.count]
            b[pr.start : pr.start + pr.count] = whole[row.b][r.start : r.start + r.count]
        held.append(params)
        for name, spec in world.layout(rank).params.items():
            assert params[name].shape == spec.shape
    plan = receive_plan(world, whole_tensors(table)).prove()
    arrived = {name: torch.full(shape, float("nan")) for name, _, shape in table}
    for copy in plan.copies:
        execute(copy, held[copy.source_rank][copy.source_param], arrived[copy.destination_param])
    assert all(torch.equal(arrived[name], value) for name, value in whole.items())
    assert sum(copy.elements for copy in plan.copies) == sum(value.numel() for value in whole.values())
