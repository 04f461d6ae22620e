"""Policy checkpoints through megatron.core.dist_checkpointing: model, optimizer and random state, for any parallelism,
written in the background."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor

from rlctl.backends.lora_adapter import is_adapter
from rlctl.backends.megatron.compat import call_known
from rlctl.backends.megatron.lora import core_of, trains_adapters
from rlctl.backends.megatron.optimizer import count_of, inner_optimizers, make_states, ranges, set_count
from rlctl.backends.policy_rank import Save
from rlctl.checkpoints.background_writes import Snapshot, with_own_storage, write_items
from rlctl.checkpoints.megatron import pickles
from rlctl.checkpoints.megatron.megatron_model import steps_in
from rlctl.errors import InputError


class MegatronSave(Save):
    """A snapshot of model, optimizer and random state."""

    def __init__(
        self, directory: Path, chunks: list[Any], optimizer: Any, strategy: Any = None, *, copies: bool = True
    ) -> None:
        """`strategy`: see `spread_over_data_ranks`; None: the first of ranks that hold the same writes it."""
        make_states(optimizer)
        state = _sharded_state(chunks, optimizer)
        self._live = list[Tensor]()
        """Hold the memory of the snapshot."""
        for key, _ in _chunk_keys(chunks):
            make_plain(state[key])
        apply_factories(state)
        for leaf in nested_values(state):
            if isinstance(leaf, ShardedTensor) and leaf.data is not None and leaf.data.device.type == "cpu":
                self._live.append(leaf.data)
                leaf.data = with_own_storage(leaf.data)  # Megatron would copy others
        state["random"] = _random_state_of_rank()
        state["layout"] = _layout()
        self._request = call_known(
            dist_checkpointing.save,
            sharded_state_dict=state,
            checkpoint_dir=str(directory),
            async_sharded_save=True,
            async_strategy="mcore",  # of newer versions, whose default asks for one more package
            sharded_strategy=strategy,
        )
        self._arguments = list(self._request.async_fn_args)
        super().__init__(directory, Snapshot(self._tensors(), copies=copies))

    def _tensors(self) -> dict[tuple[int, int], Tensor]:
        """Take the tensors of all files out of Megatron's lists; keys are their places there."""
        by_rank = dict[tuple[int, int], Tensor]()
        for number, (_, _, (_, tensors)) in enumerate(self._files):
            by_rank |= {(number, place): tensor for place, (_, tensor) in enumerate(tensors)}
            tensors[:] = [(item, (number, place)) for place, (item, _) in enumerate(tensors)]
        return by_rank

    @property
    def _files(self) -> list[Any]:
        """Path, name, and objects and tensors with their items, of each file that this rank writes."""
        return self._arguments[1] if self._request.async_fn is not None else []

    def write(self) -> dict[str, str]:
        """Write in this thread: Megatron forks processes for it, and forks after communication and autograd threads
        can deadlock."""
        results, digests = dict[int, Any](), dict[str, str]()
        try:
            for number, (path, name, (objects, keys)) in enumerate(self._files):
                results[number], digests[name] = write_items(Path(path), [*objects, *keys], self.snapshot)
            self._tell(results)
        except Exception as error:  # noqa: BLE001 - the first of `finalize_fns` raises it on all ranks
            self._tell(error)
        self._live.clear()
        return digests

    def _tell(self, outcome: Any) -> None:
        if self._request.async_fn is not None:
            self._arguments[2].put(outcome)

    def write_index(self) -> None:
        for step in self._request.finalize_fns:
            step()


def spread_over_data_ranks() -> FullyParallelSaveStrategyWrapper:
    """Return a way of saving for one model and optimizer in which each of the data-parallel ranks, which hold the same
    weights, writes a part of them. It keeps the division, so that only the first save exchanges it."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert not isinstance(group, int)  # Megatron's type includes -1, for a rank without a group
    return FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group, do_cache_distribution=True)


def load(directory: Path, chunks: list[Any], optimizer: Any) -> None:
    """Load a save; random state only under the same parallelism. Raises InputError without a policy checkpoint or for
    an unsafe pickle."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise InputError(
            f"{directory} holds no policy checkpoint.", "Name a directory checkpoints/step_N/policy of a run."
        )
    pickles.scan(directory)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    make_states(optimizer)
    template = _sharded_state(chunks, optimizer)
    for leaf in nested_values(template):
        if isinstance(leaf, ShardedTensorFactory):  # its parts are views, and are read into the parameter itself
            leaf.merge_fn = lambda _, live=leaf.data: live
    if same_layout := common.get("layout") == _layout():
        template["random"] = _random_state_of_rank()
    loaded = cast(dict[str, Any], dist_checkpointing.load(template, str(directory)))
    for key, chunk in _chunk_keys(chunks):
        core = core_of(chunk)
        make_pickles(loaded[key], get_fp8_recipe(core.config) if core.config.fp8 else None)
        core.load_state_dict(loaded[key], strict=not trains_adapters(core))
    states = loaded["optimizer"].get("states", {})
    for number, inner in enumerate(inner_optimizers(optimizer)):
        _take_states(inner, states.get(number, {}))
    set_count(optimizer, steps_in(common["optimizer"]))
    if same_layout:
        _set_random_state(loaded["random"])


def _sharded_state(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    state = {key: _trained_part(core_of(chunk), metadata) for key, chunk in _chunk_keys(chunks)}
    states = {number: _states_in_blocks(inner, state) for number, inner in enumerate(inner_optimizers(optimizer))}
    # Hyperparameters come from the configuration, and from the driver at each step.
    return state | {"optimizer": {"param_groups": [{"step": count_of(optimizer)}], "states": states}}


def _trained_part(core: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    state = core.sharded_state_dict(metadata=metadata)
    if not trains_adapters(core):
        return state
    trained = {name for name, value in core.named_parameters() if value.requires_grad}
    return {key: value for key, value in state.items() if is_adapter(key) or key in trained}


def _chunk_keys(chunks: list[Any]) -> list[tuple[str, Any]]:
    return [("model" if len(chunks) == 1 else f"model{number}", chunk) for number, chunk in enumerate(chunks)]


def _layout() -> dict[str, int]:
    return {
        "world": torch.distributed.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


def _random_state_of_rank() -> ShardedObject:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    states = {"cpu": torch.get_rng_state(), "tracker": cast(Any, tensor_parallel.get_cuda_rng_tracker()).get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("random", states, (world,), (rank,))


def _set_random_state(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    cast(Any, tensor_parallel.get_cuda_rng_tracker()).set_states(states["tracker"])


# --- the optimizer's states
# Megatron's distributed optimizer cuts flattened parameters into ranges. Of its own two formats one is bound to the
# parallelism (`dp_reshardable`), and the other (`fully_reshardable`) gathers whole buffers in float32 on the device and
# holds them in the host memory of every rank, at saves and at loads (get_parameter_state_dp_zero of
# megatron/core/optimizer/distrib_optimizer.py, 0.16 to 0.19). But a range of a flattened tensor is a few blocks of the
# tensor, and torch.distributed.checkpoint stores blocks of any size and reads any part of them. So each rank saves what
# it has, under the keys of `fully_reshardable`, and reads what it needs into its live states. Checkpoints that hold
# whole tensors under these keys are read likewise.


def _states_in_blocks(inner: Any, models: dict[str, Any]) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Return the blocks of states by parameter number, in the order of this rank's range. `models`: the sharded model
    state."""
    leaves = [leaf for leaf in nested_values(models) if isinstance(leaf, ShardedTensor | ShardedTensorFactory)]
    by_param = {leaf.data: leaf for leaf in leaves}
    by_kind: dict[int, dict[str, list[ShardedTensor]]] = {}
    for number, (param, first, last) in enumerate(ranges(inner)):
        leaf = by_param[param]
        parts: list[Any] = list(nested_values(leaf.build())) if isinstance(leaf, ShardedTensorFactory) else [leaf]
        states = {name: value.detach() for name, value in inner._get_main_param_and_optimizer_states(param).items()}
        if inner.config.use_precision_aware_optimizer:  # unpacked for this, on the device
            states = {name: value.cpu() for name, value in states.items()}
        by_kind[number] = {
            name: [
                block
                for part in sorted(parts, key=lambda shard: shard.data.storage_offset())
                for block in _blocks_of(part, param, values, first, last, f"optimizer.state.{name}.")
            ]
            for name, values in states.items()
            if name != "step"
        }
    return by_kind


def _blocks_of(
    part: ShardedTensor, param: Tensor, values: Tensor, first: int, last: int, prefix: str
) -> Iterator[ShardedTensor]:
    """The blocks of `part`, which is a range of `param`, that `values` has: a state of elements `first` to `last`."""
    assert part.data is not None
    assert part.data.is_contiguous(), part.key
    axes, start = (1,) * part.prepend_axis_num, int(part.data.storage_offset() - param.storage_offset())
    begin, end = max(first, start), min(last, start + part.data.numel())
    lead, origin = part.global_offset[: part.prepend_axis_num], part.global_offset[part.prepend_axis_num :]
    for offsets, sizes in blocks_of_range(tuple(part.local_shape), begin - start, end - start):
        size = prod(sizes)
        yield replace(
            part,
            key=prefix + part.key,
            data=values[begin - first : begin - first + size].view(axes + sizes),
            dtype=values.dtype,
            local_shape=axes + sizes,
            global_offset=(*lead, *(at + offset for at, offset in zip(origin, offsets, strict=True))),
            axis_fragmentations=None,  # no regular grid, and Megatron knows prepended axes only for grids
            prepend_axis_num=0,
            replica_id=(*cast(tuple[int, ...], part.replica_id)[:2], 0),  # of data-parallel ranks none has the same
        )
        begin += size


def blocks_of_range(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, sizes) of blocks that cover elements `first` to `last` of a flattened tensor: whole rows as one
    block, partial rows around it."""
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    while first < last:
        index, start = divmod(first, row)
        rows = 0 if start else (last - first) // row
        if rows:
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:])
            first += rows * row
            continue
        end = min(last, (index + 1) * row)
        for offsets, sizes in blocks_of_range(shape[1:], start, end - index * row):
            yield (index, *offsets), (1, *sizes)
        first = end


@torch.no_grad()
def _take_states(inner: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    for number, (param, *_) in enumerate(ranges(inner)):
        states = {name: torch.cat([block.flatten() for block in blocks]) for name, blocks in loaded[number].items()}
        inner._set_main_param_and_optimizer_states(param, states)


# --- what TransformerEngine keeps next to the weights (scales and histories of float8)
# It hands out a pickle within a tensor, and loads one whatever it names. rlctl saves the tensors and numbers in it as
# they are, where `checkpoints.megatron.pickles` sees all that would be unpickled, and makes a pickle of them again in
# the process that loads them. Format: `get_extra_state` of TransformerEngine 2.8, pytorch/module/base.py.

MARK = "_extra_state"


def make_plain(sharded: dict[str, Any]) -> None:
    """Replace pickles by tensors and numbers in a model's sharded state before a save."""
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedObject) and MARK in leaf.key:
            leaf.data = plain(leaf.data)


def plain(state: Any) -> Any:
    """A layer's state, pickled by this process, without its recipe; an empty tensor (no float8 yet) stays."""
    if not isinstance(state, Tensor) or not state.numel():
        return state
    content = pickle.loads(state.cpu().numpy().tobytes())
    # A grouped layer's are views into what all of its experts share.
    kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in content.items()}
    kept.pop("recipe", None)
    return kept


def make_pickles(states: dict[str, Any], recipe: Any) -> None:
    """Convert loaded state for float8 layers under `recipe` (None: without float8). Raises InputError for a pickle that
    `make_plain` should have removed."""
    for key in [key for key in states if MARK in key]:
        states[key] = pickled(states[key], recipe, key)


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
