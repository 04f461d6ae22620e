"""What is in a checkpoint next to weights: the optimizer's blocks and counts, and what TransformerEngine's modules
hold."""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from rlctl.backends.megatron.checkpoint import blocks_of_range, make_pickles, make_plain
from rlctl.backends.megatron.optimizer import count_of, forget_float8_copies, set_count
from rlctl.checkpoints.megatron import pickles
from rlctl.checkpoints.megatron.megatron_model import steps_in
from rlctl.errors import InputError

KEY = "decoder.layers.0.mlp.linear_fc1._extra_state"


class Recipe:
    """In the place of one of TransformerEngine's, of which only this is asked."""

    def __init__(self, is_delayed: bool) -> None:
        self.is_delayed = is_delayed

    def delayed(self) -> bool:
        return self.is_delayed


def handed_out(recipe: Recipe) -> torch.Tensor:
    """As `get_extra_state` of a module makes it."""
    state: dict[str, Any] = {"recipe": recipe, "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True}}
    if recipe.delayed():
        state |= {"scale_fwd": torch.arange(3.0), "amax_history_fwd": torch.ones(2, 3)}
        state |= {"scale_bwd": torch.arange(2.0), "amax_history_bwd": torch.ones(2, 2)}
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def saved(state: Any) -> tuple[Any, bytes]:
    """What a checkpoint keeps of it, and the bytes of that in a shard."""
    leaf = ShardedObject(KEY, state, (1,), (0,))
    make_plain({KEY: leaf})
    out = io.BytesIO()
    torch.save(leaf.data, out)
    return torch.load(io.BytesIO(out.getvalue())), out.getvalue()


def test_scales_come_back_and_all_that_is_unpickled_is_seen_beforehand() -> None:
    kept, data = saved(handed_out(Recipe(True)))
    pickles.load_saved(io.BytesIO(data), "shard")
    found = {KEY: kept, "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(2)}
    recipe = Recipe(True)
    make_pickles(found, recipe)
    back = pickle.loads(found[KEY].numpy().tobytes())
    assert back["recipe"].delayed()
    assert torch.equal(back["scale_fwd"], torch.arange(3.0))
    assert back["extra_fp8_variables"] == {"num_gemms": 1, "fp8_checkpoint": True}
    assert torch.equal(found["decoder.layers.0.mlp.linear_fc1.weight"], torch.ones(2))


@pytest.mark.parametrize(
    ("before", "after"),
    [(Recipe(True), None), (Recipe(False), Recipe(True)), (None, Recipe(True)), (None, None)],
)
def test_what_is_of_no_use_to_how_a_run_goes_on_is_dropped(before: Recipe | None, after: Recipe | None) -> None:
    kept, _ = saved(handed_out(before) if before else torch.empty(0, dtype=torch.uint8))
    found = {KEY: kept}
    make_pickles(found, after)
    assert found[KEY].numel() == 0


def test_a_pickle_in_a_checkpoint_is_not_loaded() -> None:
    with pytest.raises(InputError, match="holds a pickle of TransformerEngine"):
        make_pickles({KEY: handed_out(Recipe(True))}, Recipe(True))


def test_a_sleep_leaves_no_float8_copies_of_weights() -> None:
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    chunk[1][0]._fp8_workspaces = {"weight": torch.ones(2, 2)}
    forget_float8_copies([chunk])
    assert chunk[1][0]._fp8_workspaces == {}


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4)])
def test_any_range_of_a_flattened_tensor_is_a_few_blocks_of_it_in_order(shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    for first in range(values.numel()):
        for last in range(first + 1, values.numel() + 1):
            blocks = list(blocks_of_range(shape, first, last))
            held = [
                values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].flatten()
                for offsets, sizes in blocks
            ]
            assert torch.cat(held).tolist() == list(range(first, last))
            assert len(blocks) <= max(1, 2 * len(shape) - 1)


def test_a_loaded_count_of_steps_is_what_each_adam_counts_in() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    adam = torch.optim.AdamW(params, fused=True)
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    adam.step()
    fused = types.SimpleNamespace(param_groups=[{"params": params}, {"params": []}], state={})  # TransformerEngine's
    optimizer = types.SimpleNamespace(
        chained_optimizers=[types.SimpleNamespace(optimizer=one) for one in (adam, fused)]
    )
    before = [state["step"] for state in adam.state.values()]
    steps = steps_in({0: {"optimizer": {"param_groups": [{"step": 7.0}]}}, 1: {"optimizer": {"param_groups": [{}]}}})
    set_count(optimizer, steps)
    assert [type(group["step"]) for group in fused.param_groups] == [int, int]
    after = [state["step"] for state in adam.state.values()]
    assert all(one is other and float(one) == 7 for one, other in zip(before, after, strict=True))  # on their device
    assert count_of(optimizer) == 7
