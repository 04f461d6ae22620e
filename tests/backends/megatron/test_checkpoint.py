"""What TransformerEngine's modules hold beside weights, in its form: scales in checkpoints, float8 copies asleep."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from rlctl.backends.megatron.checkpoint import make_pickles, make_plain
from rlctl.backends.megatron.optimizer import forget_float8_copies
from rlctl.checkpoints.megatron import pickles
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
    pickles.scan_archive(data, "shard")
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
