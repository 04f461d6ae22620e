"""What a comparison says of tensors that cannot be read, of buffers, and of copies that disagree."""

from __future__ import annotations

from rlctl.backends.vllm.messages import Reading
from rlctl.refit.verify import compare

NORM, UP, DOWN = "model.layers.0.norm.weight", "model.layers.0.mlp.experts.0.up.weight", "model.layers.0.o.weight"
SOURCE = {NORM: 5, UP: 7, DOWN: 9}


def whole(tensor: str, value: int, site: str = "") -> Reading:
    return Reading(tensor, (4,), (0,), (4,), value, site or tensor)


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
