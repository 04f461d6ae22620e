"""Plans prove what they say, choose replicas alike on both sides, and name what is wrong."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.parallel import ParallelSpec
from rlctl.errors import VerificationError
from rlctl.weights import hf
from rlctl.weights.layout import Layout, Piece, Span, meet, overlaps
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.transfer_plan import RememberingWorld, SingleWorld, TransferPlan, receive_plan
from rlctl.weights.vllm import VllmParallel, VllmWorld
from support.layout_families import FAMILIES, problems

FACTS = FAMILIES["qwen3_moe"]
TRAINING = MegatronWorld(FACTS, ParallelSpec(tp=2, pp=2, dp=4, ep=4, etp=1), "te", "bfloat16")
GENERATION = VllmWorld(FACTS, VllmParallel(tp=2, dp=2, ep=True))

spans = st.builds(Span, st.integers(0, 30), st.integers(1, 12), st.integers(1, 7))


@given(spans, spans)
def test_meet_is_the_intersection_of_two_progressions(a: Span, b: Span) -> None:
    one, two = (list(range(s.start, s.start + s.count * s.step, s.step)) for s in (a, b))
    common = sorted(set(one) & set(two))
    hit = meet(a, b)
    if hit is None:
        assert not common
        return
    first_a, every_a, first_b, every_b, count = hit
    assert [one[first_a + i * every_a] for i in range(count)] == common
    assert [two[first_b + i * every_b] for i in range(count)] == common


@given(st.lists(st.tuples(spans, spans), max_size=6))
def test_overlaps_finds_a_pair_exactly_when_an_element_is_shared(boxes: list[tuple[Span, Span]]) -> None:
    cells = Counter(
        (x, y)
        for rows, columns in boxes
        for x in range(rows.start, rows.last + 1, rows.step)
        for y in range(columns.start, columns.last + 1, columns.step)
    )
    assert bool(list(overlaps(boxes))) == (max(cells.values(), default=0) > 1)


def test_the_copies_of_each_source_alone_are_those_of_the_whole_plan() -> None:
    for rank in range(GENERATION.size):
        plan = receive_plan(TRAINING, GENERATION.layout(rank)).prove()
        for source in range(TRAINING.size):
            alone = receive_plan(TRAINING, GENERATION.layout(rank), only=source)
            assert list(alone.copies) == plan.from_rank(source)


def test_replicas_share_the_load() -> None:
    dense = MegatronWorld(FAMILIES["llama"], ParallelSpec(dp=8), "te", "bfloat16")
    target = VllmWorld(FAMILIES["llama"], VllmParallel(tp=2, dp=4))
    sent = Counter(
        c.source_rank for rank in range(target.size) for c in receive_plan(dense, target.layout(rank)).copies
    )
    assert set(sent) == set(range(8))
    assert max(sent.values()) < 2 * min(sent.values())


def test_the_nearest_replica_sends() -> None:
    dense = MegatronWorld(FAMILIES["llama"], ParallelSpec(dp=4))
    layout = VllmWorld(FAMILIES["llama"], VllmParallel()).layout(0)
    used = [set(receive_plan(dense, layout, distances).sources) for distances in ((0, 1, 2, 2), (2, 2, 1, 1), ())]
    assert used == [{0}, {2, 3}, {0, 1, 2, 3}]


def test_messages_are_one_a_peer() -> None:
    plan = receive_plan(TRAINING, GENERATION.layout(0))
    assert len(plan.sources) <= TRAINING.size
    assert sum(len(plan.from_rank(source)) for source in plan.sources) == len(plan.copies)
    assert sum(copy.elements for copy in plan.copies) == sum(
        spec.size for spec in plan.layout.params.values()
    ) - padding(plan)


def padding(plan: TransferPlan) -> int:
    sizes = [[span.count for span in fill.box] for fill in plan.fills]
    return sum(rows * columns for rows, columns in sizes)


# --- what is wrong is named ---


def source_without(name: str) -> SingleWorld:
    plain = hf.layout(FACTS, "bfloat16")
    return SingleWorld(Layout(0, plain.params, tuple(p for p in plain.pieces if p.tensor != name)))


def test_a_missing_tensor_is_named() -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    rank = next(r for r in range(GENERATION.size) if 3 in GENERATION.local_experts(r))
    plan = receive_plan(source_without(name), GENERATION.layout(rank))
    assert any(name in line for line in plan.problems())
    with pytest.raises(VerificationError, match="no source holds it"):
        plan.prove()


def test_half_a_tensor_is_missing() -> None:
    plain = hf.layout(FACTS, "bfloat16")
    name = "model.layers.0.self_attn.o_proj.weight"
    half = [p if p.tensor != name else upper_half(p) for p in plain.pieces]
    plan = receive_plan(SingleWorld(Layout(0, plain.params, tuple(half))), plain)
    assert plan.problems() == [f"{name}: 256 of 512 elements missing"]


def upper_half(piece: Piece) -> Piece:
    rows = Span(0, piece.tensor_box[0].count // 2)
    return replace(piece, tensor_box=(rows, *piece.tensor_box[1:]), param_box=(rows, *piece.param_box[1:]))


def test_two_sources_of_one_element_are_written_twice() -> None:
    plain = hf.layout(FACTS, "bfloat16")
    name = "model.norm.weight"
    doubled = Layout(0, plain.params, (*plain.pieces, plain.by_tensor[name][0]))
    (problem,) = receive_plan(SingleWorld(doubled), plain).problems()
    assert problem.startswith(f"{name}: written twice")


def test_a_box_outside_of_its_param_is_extra() -> None:
    plain = hf.layout(FACTS, "bfloat16")
    stray = replace(plain.by_tensor["model.norm.weight"][0], param_box=(Span(1, 16),))
    layout = Layout(0, plain.params, (*(p for p in plain.pieces if p.tensor != "model.norm.weight"), stray))
    assert [line for line in problems(layout) if "extra" in line]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_is_the_same_after_pickling(name: str) -> None:
    for layout in (hf.layout(FAMILIES[name], "bfloat16"), MegatronWorld(FAMILIES[name], ParallelSpec()).layout(0)):
        found = pickle.loads(pickle.dumps(layout))
        assert found == layout
        assert list(found.params) == list(layout.params)
        assert found.by_tensor == layout.by_tensor


def test_a_world_that_remembers_answers_alike_and_asks_once() -> None:
    class Counting(SingleWorld):
        asked = 0

        def shards(self, tensor: str) -> object:
            type(self).asked += 1
            return super().shards(tensor)

    world = Counting(hf.layout(FACTS, "bfloat16"))
    remembering = RememberingWorld(world)
    tensors = list(world.only.by_tensor)
    for _ in range(2):
        assert [remembering.shards(t) for t in tensors] == [SingleWorld(world.only).shards(t) for t in tensors]
    assert Counting.asked == len(tensors)
    plans = [receive_plan(one, GENERATION.layout(1)).copies for one in (TRAINING, RememberingWorld(TRAINING))]
    assert plans[0] == plans[1]
