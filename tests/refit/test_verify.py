"""Comparing weights: unreadable tensors, buffers, copies that disagree; and each planted mistake is named."""

from __future__ import annotations

import numpy as np
import pytest

from rlctl.refit.verify import assemble, compare, guess
from rlctl.weights.readings import Reading

NORM, UP, DOWN = "model.layers.0.norm.weight", "model.layers.0.mlp.experts.0.up.weight", "model.layers.0.o.weight"
SOURCE = {NORM: 5, UP: 7, DOWN: 9}


def whole(tensor: str, value: int, holder: str = "") -> Reading:
    return Reading(tensor, (4,), (0,), (4,), value, holder or tensor)


def unreadable(parameter: str) -> Reading:
    return Reading(parameter, (), (), (), 0, parameter, unreadable="is kept in the order of a kernel")


def test_an_unreadable_parameter_excuses_its_own_tensors_alone() -> None:
    found = compare(SOURCE, [whole(NORM, 5), unreadable("model.layers.0.mlp.experts.routed_experts.w13_weight")])
    assert found.unread == (
        (UP, "model.layers.0.mlp.experts.routed_experts.w13_weight is kept in the order of a kernel"),
    )
    assert found.missing == (DOWN,)
    assert not found.equal
    rest = compare(
        SOURCE, [whole(NORM, 5), whole(DOWN, 9), unreadable("model.layers.0.mlp.experts.routed_experts.w13_weight")]
    )
    assert rest.equal
    assert rest.tensors == 2
    wrong = compare(
        SOURCE, [whole(NORM, 6), whole(DOWN, 9), unreadable("model.layers.0.mlp.experts.routed_experts.w13_weight")]
    )
    assert wrong.mismatched == (NORM,)


def test_a_buffer_is_compared_with_what_it_must_hold() -> None:
    readings = [whole(name, value) for name, value in SOURCE.items()]
    table = Reading("model.rotary.cos_sin_cache", (2,), (0,), (2,), 11, "model.rotary.cos_sin_cache", expected=11)
    found = compare(SOURCE, [*readings, table])
    assert found.equal
    assert found.buffers == 1
    changed = Reading("model.rotary.cos_sin_cache", (2,), (0,), (2,), 12, "model.rotary.cos_sin_cache", expected=11)
    assert compare(SOURCE, [*readings, changed]).mismatched == ("model.rotary.cos_sin_cache",)


def test_every_copy_of_a_tensor_must_agree() -> None:
    readings = [whole(name, value) for name, value in SOURCE.items()]
    assert compare(SOURCE, [*readings, whole(UP, 7, "absorbed")]).equal
    assert compare(SOURCE, [*readings, whole(UP, 8, "absorbed")]).mismatched == (UP,)


def test_a_sample_is_compared_alone_and_unreadable_parameters_excuse_it_too() -> None:
    kernel = unreadable("model.layers.0.mlp.experts.routed_experts.w13_weight")
    read_with_it = whole(DOWN, 1)  # of the same fused matrix, and not asked for
    found = compare({NORM: 5, UP: 7}, [whole(NORM, 5), read_with_it, kernel], [NORM, UP])
    assert found.equal
    assert [name for name, _ in found.unread] == [UP]
    assert compare({NORM: 5}, [whole(NORM, 6), kernel], [NORM]).mismatched == (NORM,)


RNG = np.random.default_rng(0)
WIDE = RNG.standard_normal((12, 8), dtype=np.float32)
PLANTED = {
    "missing: all zeros": np.zeros_like(WIDE),
    "missing: never written": np.full_like(WIDE, np.nan),
    "missing in part: 50%": np.where(np.arange(8) < 4, WIDE, np.nan),
    "another order": WIDE.T.reshape(WIDE.shape),
    "100.0% of the elements differ": 2 * WIDE,
    "rounding?": (WIDE * (1 + 1e-4 * RNG.standard_normal(WIDE.shape))).astype(np.float32),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistake_is_named(name: str) -> None:
    assert name in guess(WIDE, PLANTED[name])


def test_boxes_are_put_together() -> None:
    boxes = [([(r, 6, 2), (c * 4, 4, 1)], WIDE[r::2, c * 4 : c * 4 + 4]) for r in range(2) for c in range(2)]
    assert np.array_equal(assemble(WIDE.shape, boxes), WIDE)
