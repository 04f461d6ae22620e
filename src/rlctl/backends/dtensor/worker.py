"""One process of a policy of transformers' modules under FSDP2: implements `backends.base.PolicyWorker`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlctl.backends.batching.batch import BatchShard, Fetch
from rlctl.backends.batching.packed_rows import PackedRow
from rlctl.backends.dtensor.backend import layouts
from rlctl.backends.dtensor.lora import adapter_parameters, adapters, require_called, set_part
from rlctl.backends.dtensor.packed_linear import load_packed, packed_layers, without_adapters
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.host_memory import HostMemory, Offloaded
from rlctl.backends.lora_adapter import Adapter, is_adapter
from rlctl.backends.policy_rank import LossOf, PolicyRank, Save
from rlctl.backends.results import LossScale, StepOutcome
from rlctl.checkpoints.rank_loading import load_adapters, load_rank, load_value_head, published_value_head
from rlctl.data.rollouts import MediaPart
from rlctl.errors import InputError
from rlctl.models.matrices import BUFFER_ROLES, Role
from rlctl.models.vision import VISION_FAMILIES
from rlctl.vector_math import warm_up
from rlctl.weights.dtensor import DTensorWorld, param_names
from rlctl.weights.rounding import narrowed

if TYPE_CHECKING:
    from rlctl.backends.dtensor.model import Groups

HEAD = "value_head.weight"
"""The name in a checkpoint of the head of values, which no published file holds."""


class DTensorWorker(PolicyRank):
    """One rank."""

    saves_modules = True

    _states_away: Offloaded | None = None
    """With `training.optimizer_offload`: the optimizer's states, but for its steps and the saves."""

    # --- life cycle

    def prepare(self) -> None:
        from rlctl.backends.dtensor.model import register_attention

        warm_up()
        register_attention()

    def join_groups(self) -> Groups:
        from rlctl.backends.dtensor.model import Groups

        return Groups.of(self.spec.parallel, self.spec.device)

    def build_model(self) -> None:
        from rlctl.backends.dtensor.mixed_precision import round_gathered
        from rlctl.backends.dtensor.model import PolicyModel, ValueModel, build_model
        from rlctl.backends.dtensor.muon import use_muon
        from rlctl.backends.dtensor.optimizer import build_optimizer

        spec, world = self.spec, self.layouts()
        torch.manual_seed(spec.seed)
        routers = {name for name, role in world.roles.items() if role in (Role.ROUTER, Role.ROUTER_BIAS)}
        frozen = frozenset(routers if spec.freeze_router else ())
        if vision := spec.facts.vision:
            family = VISION_FAMILIES[vision.kind]
            frozen |= {name for name in world.roles if family.part_of(name) in (*spec.freeze, "sound")}
        kind = ValueModel if self.spec.valued else PolicyModel
        self.model = build_model(spec, world, self.groups, self.device, frozen, kind)
        self.optimizer = build_optimizer(spec, self.model) if spec.teaches is None else None
        if self.optimizer is not None and spec.optimizer.optimizer == "muon":
            use_muon(self.optimizer, spec, world, self.rank, self.model.inner)
        self.grid = self.new_grid(world.layout(self.rank))
        if self.grid is not None:
            round_gathered(self.model, self.grid)
            self.sends_copies = True
        self._buffers = [name for name, role in world.roles.items() if role in BUFFER_ROLES]
        self.stored_alone = frozenset(name for name, role in world.roles.items() if role is Role.STORED)
        self._state_memory = HostMemory()
        self._loss_scale = LossScale() if spec.dtype == "float16" else None
        self.movement = self.new_movement()

    @cached_property
    def _save_groups(self) -> dict[bool, Any]:
        """The process groups of saves, each made by the first one of its kind."""
        return {}

    @property
    def models(self) -> list[nn.Module]:
        return [self.model]

    # --- weights

    def layouts(self) -> DTensorWorld:
        world = layouts(self.spec)
        return replace(world, head=False) if self.spec.valued else world

    def parameters(self) -> dict[str, Tensor]:
        """Views of the live weights: what this rank holds of each."""
        return {name: local_part(value.detach()) for name, value in self._named().items()}

    def sent_parameters(self) -> dict[str, Tensor]:
        """The weights that engines receive: copies of rounded ones."""
        sent, grid = dict(super().sent_parameters()), self.grid
        if grid is not None:
            for name in grid.parts:
                sent[name] = self._narrowed(sent[name])
                grid.round(name, sent[name])
        return sent

    def round_weights(self) -> None:
        """The weights are rounded whenever they are gathered, and here their scales are taken."""
        if self.grid is not None:
            self.grid.measure(self.parameters(), self._narrowed)

    def _narrowed(self, values: Tensor) -> Tensor:
        return narrowed(values, self.dtype, self.rounding)

    def adapters(self) -> Iterator[tuple[str, Adapter]]:
        self._reshard()
        return adapters(self.model.inner, self._narrowed)

    def _named(self) -> dict[str, Tensor]:
        """Return the model's parameters (without adapters) and stored buffers by layout name; sharded ones are
        DTensors."""
        self._reshard()
        inner = self.model.inner
        parameters = {name: value for name, value in inner.named_parameters() if not is_adapter(name)}
        return parameters | {name: inner.get_buffer(name) for name in self._buffers}

    def saved(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors by name: all weights, or adapters and a value head."""
        head = {HEAD: self.model.get_parameter("head.weight")} if self.spec.valued else {}
        return (adapter_parameters(self.model.inner) if self.spec.lora.rank else self._named()) | head

    def _reshard(self) -> None:
        from rlctl.backends.dtensor.model import fsdp_modules

        for module in fsdp_modules(self.model):
            module.reshard()

    @torch.no_grad()
    def load_weights(self, directory: Path, *, saved: bool = False) -> None:
        world = self.layouts()
        valued = saved and self.spec.valued
        load_rank(directory, world, self.rank, self.parameters(), world.facts, valued=valued, masters=saved)
        if valued:
            self._load_head(load_value_head(directory))
        elif self.spec.valued and (published := published_value_head(directory)) is not None:
            self._load_head(published)
        if world.packed:
            load_packed(self.model.inner, directory)
        self.round_weights()  # a forward pass follows
        if world.facts.unpacked:
            from rlctl.backends.dtensor.model import require_causal

            require_causal(self.model, self.spec)
            require_called(self.model.inner)
            self._reshard()
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self._states_away = None
        self._state_memory.rewind()

    def _load_head(self, whole_1H: Tensor) -> None:
        head = local_part(self.model.get_parameter("head.weight").detach())
        head.copy_(whole_1H[: len(head)])  # of its one row, the first shard has all

    @contextlib.contextmanager
    def with_weights(self, others: dict[str, Tensor]) -> Iterator[None]:
        """FSDP2 gathers from the memory that it has. Other weights are not rounded to the grid."""
        with self.exchanged(others), self.grid.lifted() if self.grid is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _without_adapters(self) -> Iterator[None]:
        with without_adapters(self.model.inner), super()._without_adapters():
            yield

    def offload(self, keep_weights: bool) -> Offloaded:
        packed = [buffer for layer in packed_layers(self.model.inner).values() for buffer in layer.buffers()]
        weights = [
            *packed,
            *self.parameters().values(),
            *(local_part(value.detach()) for value in self.model.parameters()),
        ]
        self.clear_gradients()
        moving = [*self._states(), *(self._reference or {}).values(), *(() if keep_weights else weights)]
        return Offloaded(moving, (), self.host_memory())

    def _states(self) -> list[Tensor]:
        states = self.optimizer.state if self.optimizer is not None else {}
        tensors = (value for state in states.values() for value in state.values())
        return [local_part(value) for value in tensors if isinstance(value, Tensor)]

    @contextlib.contextmanager
    def _states_here(self) -> Iterator[None]:
        if self._states_away is not None:
            self._states_away.restore()
            self._state_memory.rewind()
        yield
        offloads = self.spec.optimizer_offload
        self._states_away = Offloaded(self._states(), (), self._state_memory) if offloads else None

    # --- batches

    def clear_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def take_step(self, lr: float, weight_decay: float | None) -> StepOutcome:
        from rlctl.backends.dtensor.optimizer import take_step

        with self._states_here():
            movement = self.movement
            if movement is None:
                return take_step(self.spec, self._trainer(), lr, weight_decay, self._loss_scale)
            for name, value in self.trained():
                movement.before(name, value)
            outcome = take_step(self.spec, self._trainer(), lr, weight_decay, self._loss_scale)
            for name, value in self.trained():
                movement.after(name, value)
            return outcome

    def _trainer(self) -> torch.optim.AdamW:
        assert self.optimizer is not None  # nobody asks a teacher
        return self.optimizer

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        for worker in filter(None, (self, self.critic)):
            if worker.model.images is not None:
                worker.model.images.forget()
        super().load_batch(shard, fetch)

    def positions(self, tokens_T: np.ndarray, media: Sequence[MediaPart]) -> np.ndarray:
        images = self.model.images
        return super().positions(tokens_T, media) if images is None else images.positions(tokens_T, media)

    def run_rows(self, rows: list[PackedRow], loss_of: LossOf, *, forward_only: bool) -> list[dict[str, Any]]:
        """Every rank has the output. Gradients stay sharded between micro-batches, as planned; with
        `training.replicate` they are summed after the last one."""
        from rlctl.backends.dtensor.model import fsdp_modules

        collected = []
        for number, row in enumerate(self.counted(rows)):
            last = number == len(rows) - 1
            for module in () if forward_only else fsdp_modules(self.model):
                module.set_requires_all_reduce(last, recurse=False)
                module.set_is_last_backward(last)
            loss, tensors = loss_of(row, self.model(row))
            if not forward_only:
                (loss * self._loss_scale.value if self._loss_scale else loss).backward()
            collected.append(tensors)
        return collected

    @property
    def data_group(self) -> Any:
        return self.groups.group("dp")

    # --- checkpoints

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        for name, value in self.model.named_parameters():
            if value.requires_grad:
                yield name.removeprefix("inner."), local_part(value.detach())

    def begin_save(self, directory: Path, *, in_memory: bool = False) -> Save:
        from rlctl.backends.dtensor.checkpoint import DTensorSave

        with self._states_here():
            self._reshard()
            # One for all saves of a kind, which follow each other: a new one connects every rank with every other.
            if (group := self._save_groups.get(in_memory)) is None:
                group = self._save_groups[in_memory] = torch.distributed.new_group(backend="gloo")
            save = DTensorSave(directory, self.saved(), self._trainer(), group, copies=self.spec.save_copies)
            if self.spec.optimizer_offload:  # the states leave at the end of the block
                save.snapshot.keep()
            return save

    def load_checkpoint(self, directory: Path) -> None:
        from rlctl.backends.dtensor.checkpoint import load

        with self._states_here():
            self._reshard()
            load(directory, self.saved(), self._trainer())

    @torch.no_grad()
    def load_adapters(self, directory: Path) -> None:
        world = self.layouts()
        stored = load_adapters(directory, world.facts)
        tensors = {param: tensor for tensor, param in param_names(world.facts).items()}
        if self.spec.valued:
            self._load_head(load_value_head(directory))
        for name, value in adapter_parameters(self.model.inner).items():
            module, _, which = name.rpartition(".")
            if f"{module}.weight" not in tensors:
                raise InputError(f"{directory} holds no adapter of {module}.", "Is it a checkpoint of this run?")
            a, b = stored[tensors[f"{module}.weight"]]
            set_part(world, self.rank, name, value, a if which == "lora_a" else b)


if TYPE_CHECKING:
    from rlctl.backends.base import CriticWorker, PolicyWorker

    WORKER: type[PolicyWorker] = DTensorWorker
    CRITIC: type[CriticWorker] = DTensorWorker
