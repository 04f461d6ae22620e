"""The optimizer's states in host memory between its steps (`training.optimizer_offload`).

For a step they visit the device a part at a time: the states of some parameters are fetched, the ordinary kernel
updates these parameters, and the states go back. The device holds one part of them at a time, and the result is bit for
bit what it would be with all of them there. The states are the two moments and, in bfloat16, the float32 weights; in
float32 the optimizer updates the weights themselves, which stay.

Storages are emptied and refilled (`host_memory`), so every reference to a state stays what it is. On a CPU host memory
is the same memory; there it only costs time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlctl.backends.host_memory import HostMemory, pairs
from rlctl.backends.megatron.masters import RoundingOptimizer
from rlctl.errors import ConfigError
from rlctl.planner.inputs.constants import OPTIMIZER_PART_BYTES

PART_BYTES = OPTIMIZER_PART_BYTES
PAIRS = (("model_float16_groups", "shard_fp32_from_float16_groups"), ("model_fp32_groups", "shard_fp32_groups"))
"""Lists of DistributedOptimizer, by group: its parameters, and the shards that the inner optimizer steps for them."""


def keep_on_host(inner: Any, memory: HostMemory) -> None:
    """Turn one of Megatron's optimizers into a `HostedOptimizer`; its float32 weights leave the device at once. Raises
    ConfigError where its states are not those of Adam as Megatron shards them."""
    if type(inner) not in (DistributedOptimizer, RoundingOptimizer):
        raise ConfigError(
            f"training.optimizer_offload does not go with optimizer.optimizer = {inner.config.optimizer}.",
            "Remove one of the two.",
        )
    hosted: Any = inner
    hosted.__class__ = HostedOptimizer
    hosted.host_states = HostStates(inner, memory)


@dataclass(frozen=True)
class StatePart:
    """Parameters whose states visit the device together."""

    params: list[list[Tensor]]
    """By group of the inner optimizer."""
    lists: dict[str, list[list[Any]]]
    """Likewise those of the lists that Megatron's optimizer copies between weights and float32 weights by."""

    @classmethod
    def of(cls, groups: int) -> StatePart:
        """An empty one."""
        names = [name for pair in PAIRS for name in pair]
        return cls([[] for _ in range(groups)], {name: [[] for _ in range(groups)] for name in names})

    @property
    def all(self) -> list[Tensor]:
        return [param for group in self.params for param in group]


class HostStates:
    """Where the states of one optimizer are, and the parts in which they visit the device."""

    def __init__(self, owner: RoundingOptimizer, memory: HostMemory) -> None:
        self._owner, self._memory = owner, memory
        self._masters = {id(param) for group in owner.shard_fp32_from_float16_groups for param in group}
        self._kept: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """By the identity of a state: it (so that it lives), and its bytes."""
        self.parts = self._divide()
        steps: Any = owner.optimizer
        self._step = steps.step
        steps.step = self.step
        for part in self.parts:
            self._put_away(part.all)

    def _divide(self) -> list[StatePart]:
        """The parameters in parts, in the order of their groups."""
        owner, groups = self._owner, self._owner.optimizer.param_groups
        parts, number, size = list[StatePart](), dict[int, int](), 0
        for index, group in enumerate(groups):
            for param in group["params"]:
                needs = 4 * param.numel() * (3 if id(param) in self._masters else 2)
                if not parts or size + needs > PART_BYTES:
                    parts.append(StatePart.of(len(groups)))
                    size = 0
                parts[-1].params[index].append(param)
                number[id(param)], size = len(parts) - 1, size + needs
        for models, shards in PAIRS:
            both = zip(getattr(owner, models), getattr(owner, shards), strict=True)
            for index, of_group in enumerate(zip(*pair, strict=True) for pair in both):
                for model, shard in of_group:
                    lists = parts[number[id(shard)]].lists
                    lists[models][index].append(model)
                    lists[shards][index].append(shard)
        return parts

    def _states(self, params: Iterable[Tensor]) -> Iterator[Tensor]:
        for param in params:
            if id(param) in self._masters:
                yield param
            # torch's Adam keeps a count of steps next to the moments
            found = self._owner.optimizer.state.get(param, {}).values()
            yield from (value for value in found if isinstance(value, Tensor) and value.dim())

    @contextlib.contextmanager
    def on_device(self, params: list[Tensor], *, changed: bool) -> Iterator[None]:
        """The states of `params` are where kernels find them; `changed`: they are written back to the host."""
        for state in self._states(params):
            storage, (_, host) = state.untyped_storage(), self._kept[id(state)]
            storage.resize_(sum(piece.numel() for piece in host))
            for piece, there in pairs(host, storage):
                there.copy_(piece, non_blocking=True)
        yield
        self._put_away(params, changed=changed)

    def _put_away(self, params: list[Tensor], *, changed: bool = True) -> None:
        """Copies run in the order of the stream that also frees and reuses the device's memory; the host reads none of
        these bytes itself, so nothing is waited for."""
        for state in self._states(params):
            storage = state.untyped_storage()
            if id(state) not in self._kept:
                self._kept[id(state)] = state, self._memory.take(storage.nbytes())
            for piece, there in pairs(self._kept[id(state)][1], storage) if changed else ():
                piece.copy_(there, non_blocking=True)
            storage.resize_(0)

    @contextlib.contextmanager
    def visit(self, part: StatePart) -> Iterator[None]:
        """The states of `part` are on the device, to be changed, and the optimizer knows of no other parameters."""
        owner = self._owner
        with self.on_device(part.all, changed=True):
            lists, groups = {name: getattr(owner, name) for name in part.lists}, owner.optimizer.param_groups
            params = [group["params"] for group in groups]
            try:
                self._show(part.lists, groups, part.params)
                owner.optimizer.param_groups = [group for group in groups if group["params"]]
                yield
            finally:
                owner.optimizer.param_groups = groups
                self._show(lists, groups, params)

    def _show(
        self, lists: dict[str, list[list[Any]]], groups: list[dict[str, Any]], params: list[list[Tensor]]
    ) -> None:
        for name, value in lists.items():
            setattr(self._owner, name, value)
        for group, own in zip(groups, params, strict=True):
            group["params"] = own

    def step(self) -> None:
        """In place of the step of torch's or TransformerEngine's optimizer: theirs, and the new weights to the model, a
        part at a time."""
        counts = self._counts()
        for part in self.parts:
            with self.visit(part):
                RoundingOptimizer.look(self._owner)
                self._step_once(counts)
                self._owner.copy_weights()

    def _counts(self) -> dict[int, Any]:
        """TransformerEngine counts the steps of a param group. Here by the identity of the group."""
        return {id(group): group["step"] for group in self._owner.optimizer.param_groups if "step" in group}

    def _step_once(self, counts: dict[int, Any]) -> None:
        """A step of the groups that are shown, each of which has `counts` before it, whatever part it is."""
        for group in self._owner.optimizer.param_groups:
            group.pop("step", None)
            if id(group) in counts:
                group["step"] = counts[id(group)]
        self._step()

    def make(self) -> None:
        """States of every parameter, of no meaning yet: to be loaded."""
        counts = self._counts()
        for part in self.parts:
            with self.visit(part):
                for param in part.all:
                    param.grad = torch.zeros_like(param)
                self._step_once(counts)
                for param in part.all:
                    param.grad = None


class HostedOptimizer(RoundingOptimizer):
    """Megatron's distributed optimizer where it reads or writes states: `keep_on_host` makes one of an existing one."""

    host_states: HostStates

    def look(self) -> None:
        """Every part of the step does so."""

    def _copy_main_params_to_model_params(self) -> None:
        """Every part of the step has done so."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        for part in self.host_states.parts:
            with self.host_states.visit(part):
                super()._copy_model_params_to_main_params(state_dict)

    def _init_optimizer_states_with_dummy_values(self) -> None:
        self.host_states.make()

    def _shard_of(self, model_param: Any) -> list[Tensor]:
        group, order = self.model_param_group_index_map[model_param]
        return [self.optimizer.param_groups[group]["params"][order]]

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, Tensor]:
        """For a checkpoint, which gathers them in host memory: copies there."""
        with self.host_states.on_device(self._shard_of(model_param), changed=False):
            found = super()._get_main_param_and_optimizer_states(model_param)
            return {name: value.detach().to("cpu", copy=True) for name, value in found.items()}

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Tensor]) -> None:
        with self.host_states.on_device(self._shard_of(model_param), changed=True):
            super()._set_main_param_and_optimizer_states(model_param, tensors)
