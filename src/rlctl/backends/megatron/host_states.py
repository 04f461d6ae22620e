"""Optimizer states in host memory between steps (`training.optimizer_offload`).

In a step, the states of some parameters at a time visit the device for the ordinary kernel; results are bitwise equal
to states on the device. States are the two moments and, in bfloat16, the float32 weights. Storages are emptied and
refilled (`host_memory`), so references stay valid. On a CPU this only costs time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlctl.backends.host_memory import HostMemory, pairs
from rlctl.backends.megatron.masters import RoundingOptimizer
from rlctl.backends.muon import muon_of
from rlctl.errors import ConfigError
from rlctl.planner.inputs.constants import OPTIMIZER_PART_BYTES

PART_BYTES = OPTIMIZER_PART_BYTES
Part = list[list[Tensor]]
"""Parameters whose states visit the device together, by group of the inner optimizer."""


def keep_on_host(inner: Any, memory: HostMemory) -> None:
    """Turn a Megatron optimizer into a `HostedOptimizer` and move its float32 weights. Raises ConfigError unless its
    states are Megatron's sharded Adam."""
    if type(inner) not in (DistributedOptimizer, RoundingOptimizer):
        raise ConfigError(
            f"training.optimizer_offload does not go with optimizer.optimizer = {inner.config.optimizer}.",
            "Remove one of the two.",
        )
    hosted: Any = inner
    hosted.__class__ = HostedOptimizer
    hosted.host_states = HostStates(inner, memory)


class HostStates:
    """The places of an optimizer's states, and the parts in which they visit the device."""

    def __init__(self, owner: RoundingOptimizer, memory: HostMemory) -> None:
        self._owner, self._memory = owner, memory
        self._masters = {id(param) for group in owner.shard_fp32_from_float16_groups for param in group}
        self._kept: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """By the identity of a state: it (so that it lives), and its bytes."""
        self.parts, size, groups = list[Part](), 0, owner.optimizer.param_groups
        self._muon = muon_of(owner.optimizer)
        self._matrices: Part = [[] for _ in groups]
        """The parameters that Muon updates together."""
        for index, group in enumerate(groups):
            for param in group["params"]:
                if self._muon is not None and self._muon.updates(param):
                    self._matrices[index].append(param)
                    continue
                needs = 4 * param.numel() * (3 if id(param) in self._masters else 2)
                if not self.parts or size + needs > PART_BYTES:
                    self.parts.append([[] for _ in groups])
                    size = 0
                self.parts[-1][index].append(param)
                size += needs
        inner: Any = owner.optimizer
        self._step, inner.step = inner.step if self._muon is None else self._muon.step_others, self.step
        for group in groups:
            self._put_away(group["params"], changed=True)

    @property
    def all_parts(self) -> list[Part]:
        return [self._matrices, *self.parts]

    def _states(self, params: Iterable[Tensor]) -> Iterator[Tensor]:
        for param in params:
            if id(param) in self._masters:
                yield param
            # torch's Adam keeps a count of steps next to the moments
            states = self._owner.optimizer.state.get(param, {}).values()
            yield from (value for value in states if isinstance(value, Tensor) and value.dim())

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

    def _put_away(self, params: list[Tensor], *, changed: bool) -> None:
        """Copies run in the stream that frees and reuses device memory, so the host does not wait."""
        for state in self._states(params):
            storage = state.untyped_storage()
            if id(state) not in self._kept:
                self._kept[id(state)] = state, self._memory.take(storage.nbytes())
            for piece, there in pairs(self._kept[id(state)][1], storage) if changed else ():
                piece.copy_(there, non_blocking=True)
            storage.resize_(0)

    @contextlib.contextmanager
    def visit(self, part: Part) -> Iterator[list[Tensor]]:
        """The states of `part` are on the device, to be changed, and the optimizer knows of no other parameters."""
        owner, groups = self._owner, self._owner.optimizer.param_groups
        whole, params = (
            [group["params"] for group in groups],
            [param for group_params in part for param in group_params],
        )
        with self.on_device(params, changed=True):
            try:
                for group, part_group in zip(groups, part, strict=True):
                    group["params"] = part_group
                owner.optimizer.param_groups = [group for group in groups if group["params"]]
                owner.visiting = {id(param) for param in params}
                yield params
            finally:
                owner.visiting, owner.optimizer.param_groups = None, groups
                for group, part_group in zip(groups, whole, strict=True):
                    group["params"] = part_group

    def step(self, *, empty: bool = False) -> None:
        """Replace the optimizer's step: step and update the model a part at a time. `empty`: create states without
        gradients."""
        owner = self._owner
        if self._muon is not None:
            with self.visit(self._matrices):
                if empty:
                    with self._muon.creating_states():
                        self._muon.step_matrices()
                else:
                    RoundingOptimizer.look(owner)
                    self._muon.step_matrices()
                    owner.copy_weights()
        counts = {id(group): group["step"] for group in owner.optimizer.param_groups if "step" in group}
        for part in self.parts:
            with self.visit(part) as params:
                for group in owner.optimizer.param_groups:  # TransformerEngine counts the steps of a group
                    group.pop("step", None)
                    if id(group) in counts:
                        group["step"] = counts[id(group)]
                if not empty:
                    RoundingOptimizer.look(owner)
                    self._step()
                    owner.copy_weights()
                    continue
                for param in params:
                    param.grad = torch.zeros_like(param)
                self._step()
                for param in params:
                    param.grad = None


class HostedOptimizer(RoundingOptimizer):
    """Megatron's distributed optimizer where it reads or writes states: `keep_on_host` makes one of an existing one."""

    host_states: HostStates

    def look(self) -> None:
        """Every part of the step does so."""

    def _copy_main_params_to_model_params(self) -> None:
        """Every part of the step has done so."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        for part in self.host_states.all_parts:
            with self.host_states.visit(part):
                for model, master in self.masters():
                    master.data.copy_(model)

    def _init_optimizer_states_with_dummy_values(self) -> None:
        self.host_states.step(empty=True)

    def _shard_of(self, model_param: Any) -> list[Tensor]:
        group, order = self.model_param_group_index_map[model_param]
        return [self.optimizer.param_groups[group]["params"][order]]

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, Tensor]:
        with self.host_states.on_device(self._shard_of(model_param), changed=False):
            states = super()._get_main_param_and_optimizer_states(model_param)
            return {name: value.detach().to("cpu", copy=True) for name, value in states.items()}

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Tensor]) -> None:
        with self.host_states.on_device(self._shard_of(model_param), changed=True):
            super()._set_main_param_and_optimizer_states(model_param, tensors)
