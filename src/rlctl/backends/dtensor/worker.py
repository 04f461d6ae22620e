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
from rlctl.backends.dtensor.lora import (
    adapter_parameters,
    adapters,
    drop_inputs,
    held_adapters,
    require_called,
    set_part,
)
from rlctl.backends.dtensor.packed_linear import load_packed, packed_layers
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.host_memory import HostMemory, Offloaded
from rlctl.backends.lora_adapter import Adapter, is_adapter
from rlctl.backends.policy_rank import HeadTap, LossOf, Paths, PolicyRank, Save, Spans
from rlctl.backends.results import LossScale, StepOutcome
from rlctl.checkpoints.megatron.lora_weights import of_site
from rlctl.checkpoints.rank_loading import Pairs, load_rank, load_value_head, published_value_head
from rlctl.data.rollouts import MediaPart
from rlctl.models.matrices import BUFFER_ROLES, Role
from rlctl.models.vision import VISION_FAMILIES
from rlctl.vector_math import warm_up
from rlctl.weights.adapter_sites import saved_whole
from rlctl.weights.dtensor import DTensorWorld
from rlctl.weights.rounding import narrowed

if TYPE_CHECKING:
    from rlctl.backends.base import Teaching
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
        from rlctl.backends.dtensor.model import prepare_process

        warm_up()
        prepare_process(self.spec)

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
        if self.dropout is not None:
            drop_inputs(self.model.inner, self.dropout)
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
        if not self.spec.lora.rank:
            return self._named() | head
        whole = {name: self.model.inner.get_parameter(name) for name in saved_whole(self.spec.facts, self.spec.lora)}
        return adapter_parameters(self.model.inner) | whole | head

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

    def take_task(self, task: Teaching) -> None:
        self.model.teaches = task

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

    def steps_taken(self) -> int:
        with self._states_here():
            return max((int(state["step"]) for state in self._trainer().state.values() if "step" in state), default=0)

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

    def sublayers(self, paths: Paths) -> tuple[Spans, list[HeadTap]]:
        module = self.model.inner.get_submodule
        spans: Spans = {point: (module(first), module(last)) for point, (first, last) in paths.items()}
        tp = self.spec.parallel.tp
        return spans, [HeadTap(self.model, "_head", self.rank % tp * (self.spec.facts.vocab // tp))]

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
            save = DTensorSave(directory, self.saved(), self.optimizer, group, copies=self.spec.save_copies)
            if self.spec.optimizer_offload:  # the states leave at the end of the block
                save.snapshot.keep()
            return save

    def load_checkpoint(self, directory: Path) -> None:
        from rlctl.backends.dtensor.checkpoint import load

        with self._states_here():
            self._reshard()
            load(directory, self.saved(), self._trainer())

    def adapter_states(self) -> dict[str, Tensor]:
        from rlctl.backends.dtensor.checkpoint import copied

        with self._states_here():
            self._reshard()
            return copied(self.saved(), self._trainer())

    def set_adapter_states(self, states: dict[str, Tensor]) -> None:
        from rlctl.backends.dtensor.checkpoint import restore

        with self._states_here():
            self._reshard()
            restore(states, self.saved(), self._trainer())

    @torch.no_grad()
    def take_whole(self, values: dict[str, Tensor]) -> None:
        world, parameters = self.layouts(), self.parameters()
        for name, whole in values.items():
            part = whole[tuple(slice(span.start, span.start + span.count) for span in world.box(name, self.rank))]
            parameters[name].copy_(part)

    @torch.no_grad()
    def take_adapters(self, pairs: Pairs, head: Tensor | None) -> None:
        world = self.layouts()
        if head is not None:
            self._load_head(head)
        for site, _, *parts in held_adapters(self.model.inner):
            wholes = of_site(site, pairs, world.modules)
            for which, part, whole in zip(("lora_a", "lora_b"), parts, wholes, strict=True):
                set_part(world, self.rank, f"{site.module}.{which}", part, whole)


if TYPE_CHECKING:
    from rlctl.backends.base import CriticWorker, PolicyWorker

    WORKER: type[PolicyWorker] = DTensorWorker
    CRITIC: type[CriticWorker] = DTensorWorker
