"""One process of a policy of transformers' modules under FSDP2: implements `backends.base.PolicyWorker`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.batch import LogprobColumn
from rlctl.backends.dtensor.backend import layouts
from rlctl.backends.host_memory import HostMemory, Offloaded
from rlctl.backends.policy_rank import LossOf, PolicyRank, Save
from rlctl.backends.results import StepOutcome
from rlctl.backends.rows import PackedRow
from rlctl.checkpoints.megatron.megatron_model import names_modules
from rlctl.checkpoints.rank_loading import load_moments, load_rank, require_policy
from rlctl.errors import InputError
from rlctl.models.matrices import Role
from rlctl.weights.dtensor import DTensorWorld


class DTensorWorker(PolicyRank):
    """One rank."""

    _states_away: Offloaded | None = None
    """With `training.optimizer_offload`: the optimizer's states, but for its steps and the saves."""

    # --- life cycle

    def prepare(self) -> None:
        from rlctl.backends.dtensor.model import register_attention

        register_attention()

    def build(self) -> None:
        from rlctl.backends.dtensor.model import Groups, build_model
        from rlctl.backends.dtensor.optimizer import build_optimizer

        spec, world = self.spec, self.layouts()
        torch.manual_seed(spec.seed)
        routers = {name for name, role in world.roles.items() if role in (Role.ROUTER, Role.ROUTER_BIAS)}
        self.groups = Groups.of(spec.parallel, spec.device)
        self.model = build_model(
            spec, world, self.groups, self.device, frozenset(routers if spec.freeze_router else ())
        )
        self.optimizer = build_optimizer(spec, self.model)
        self._buffers = [name for name in world.roles if name in dict(self.model.inner.named_buffers())]
        self._reference = None
        self._rows = []
        self._state_memory = HostMemory()

    # --- weights

    def layouts(self) -> DTensorWorld:
        return layouts(self.spec)

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the live weights: what this rank holds of each."""
        from rlctl.backends.dtensor.model import local_part

        return {name: local_part(value.detach()) for name, value in self._named().items()}

    def _named(self) -> dict[str, Tensor]:
        """Parameters, and buffers that are stored, by the names of the layout; sharded ones are DTensors."""
        self._reshard()
        inner = self.model.inner
        return dict(inner.named_parameters()) | {name: inner.get_buffer(name) for name in self._buffers}

    def _reshard(self) -> None:
        """After a forward pass without a backward one, the root's parameters are still gathered."""
        from rlctl.backends.dtensor.model import fsdp_modules

        for module in fsdp_modules(self.model):
            module.reshard()

    @torch.no_grad()
    def load_model(self, directory: Path | str) -> None:
        world = self.layouts()
        load_rank(Path(directory), world, self.rank, dict(self.parameters()), world.facts)
        self.optimizer.state.clear()
        self._states_away = None
        self._state_memory.rewind()

    def hold_reference(self) -> None:
        self._reference = {name: value.clone() for name, value in self.parameters().items()}

    @contextlib.contextmanager
    def weights_of(self, column: LogprobColumn) -> Iterator[None]:
        if column == "old_logprobs":
            yield
            return
        if self._reference is None:
            raise InputError("no reference policy is held.", "Call hold_reference before training starts.")
        self._exchange(self._reference)
        try:
            yield
        finally:
            self._exchange(self._reference)

    @torch.no_grad()
    def _exchange(self, others: dict[str, Tensor]) -> None:
        """Exchange the weights with `others`, one after the other: FSDP2 gathers from the memory that it has."""
        for name, live in self.parameters().items():
            kept = live.clone()
            live.copy_(others[name])
            others[name].copy_(kept)

    def sleep(self, keep_weights: bool = False) -> int:
        """The bytes returned include those of an earlier `sleep` that kept the weights."""
        weights = self.parameters()
        self.clear_gradients()
        moving = [*self._states(), *(self._reference or {}).values(), *(() if keep_weights else weights.values())]
        self._offloaded.append(Offloaded(moving, (), self.host_memory()))
        return sum(part.device_bytes for part in self._offloaded)

    def _states(self) -> list[Tensor]:
        """This rank's part of the optimizer's states, live."""
        from rlctl.backends.dtensor.model import local_part

        found = (value for state in self.optimizer.state.values() for value in state.values())
        return [local_part(value) for value in found if isinstance(value, Tensor)]

    @contextlib.contextmanager
    def _states_here(self) -> Iterator[None]:
        """Bring states that wait in host memory to the device for a moment. Activations are not there then."""
        if self._states_away is not None:
            self._states_away.restore()
            self._state_memory.rewind()
        yield
        offloads = self.spec.optimizer_offload
        self._states_away = Offloaded(self._states(), (), self._state_memory) if offloads else None

    # --- batches

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()

    def take_step(self, lr: float, weight_decay: float | None) -> StepOutcome:
        from rlctl.backends.dtensor.optimizer import take_step

        with self._states_here():
            return take_step(self.spec, self.optimizer, lr, weight_decay)

    def run_rows(self, rows: list[PackedRow], loss_of: LossOf, *, forward_only: bool) -> list[dict[str, Any]]:
        """Every rank has the output. Gradients stay sharded between micro-batches, as the plan counts their memory;
        copies of the weights (`training.replicate`) add theirs up after the last one only."""
        from rlctl.backends.dtensor.model import fsdp_modules

        collected = []
        for number, row in enumerate(self.counted(rows)):
            last = number == len(rows) - 1
            for module in () if forward_only else fsdp_modules(self.model):
                module.set_requires_all_reduce(last, recurse=False)
                module.set_is_last_backward(last)
            loss, found = loss_of(row, self.model(row))
            if not forward_only:
                loss.backward()
            collected.append(found)
        return collected

    @property
    def data_group(self) -> Any:
        return self.groups.group("dp")

    # --- checkpoints

    def parameters_not_finite(self) -> list[str]:
        trained = {name for name, value in self.model.inner.named_parameters() if value.requires_grad}
        return [name for name, value in self.parameters().items() if name in trained and not value.isfinite().all()]

    def begin_save(self, directory: Path) -> Save:
        from rlctl.backends.dtensor.checkpoint import Save as DTensorSave

        with self._states_here():
            return DTensorSave(directory, self._named(), self.optimizer)

    def load(self, directory: Path | str) -> None:
        from rlctl.backends.dtensor.checkpoint import load, moments_of, set_steps

        directory = require_policy(Path(directory))
        if names_modules(directory):
            with self._states_here():
                load(directory, self._named(), self.optimizer)
            return
        self.load_model(directory)
        world = self.layouts()
        with self._states_here():
            moments = moments_of(self._named(), self.optimizer)
            set_steps(self.optimizer, load_moments(directory, world, self.rank, moments, world.facts))
