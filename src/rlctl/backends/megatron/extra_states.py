"""What TransformerEngine keeps beside the weights (scales and histories of float8), in a run's checkpoints.

It hands out a pickle within a tensor, and loads one whatever it names. What a checkpoint should keep of it are tensors
and numbers; these are saved as they are, where `checkpoints.pickles` sees all that would be unpickled, and become a
pickle again in the process that loads them. Format: `get_extra_state` of TransformerEngine 2.8, pytorch/module/base.py.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from rlctl.errors import InputError

MARK = "_extra_state"


def make_plain(sharded: dict[str, Any]) -> None:
    """In a model's sharded state that is to be saved: tensors and numbers in place of pickles."""
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedObject) and MARK in leaf.key:
            leaf.data = plain(leaf.data)


def plain(state: Any) -> Any:
    """What a layer handed out, without its recipe; an empty tensor (it has not computed in float8) as it is.

    The pickle is of this process's own making.
    """
    if not isinstance(state, Tensor) or not state.numel():
        return state
    held = pickle.loads(state.cpu().numpy().tobytes())
    # A grouped layer's are views into what all of its experts share.
    kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}
    kept.pop("recipe", None)
    return kept


def make_pickles(found: dict[str, Any], recipe: Any) -> None:
    """In a model's loaded state: what its layers take. `recipe`: of the float8 products that go on; None: there are
    none, and what was kept for them is dropped.

    Raises:
        InputError: there is a pickle, which `make_plain` left in no checkpoint.
    """
    for key in [key for key in found if MARK in key]:
        found[key] = pickled(found[key], recipe, key)


def pickled(state: Any, recipe: Any, key: str) -> Any:
    """A layer's kept state as the layer takes it; empty where it is of no use to `recipe`."""
    if isinstance(state, Tensor) and state.numel():
        raise InputError(
            f"The checkpoint holds a pickle of TransformerEngine ({key}), which rlctl does not load.",
            "Resume from a checkpoint that rlctl wrote.",
        )
    empty = torch.empty(0, dtype=torch.uint8)
    if not isinstance(state, dict) or recipe is None or (recipe.delayed() and "scale_fwd" not in state):
        return empty if isinstance(state, Tensor | dict) else state
    return torch.frombuffer(bytearray(pickle.dumps(state | {"recipe": recipe})), dtype=torch.uint8)
