"""Policy checkpoints through torch.distributed.checkpoint: weights and AdamW states by transformers' names, for any
sharding.

A save snapshots and then writes in the background. Training draws no random numbers, so no random state is saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.muon import MOMENTUM, muon_of
from rlctl.backends.policy_rank import Save, on_host
from rlctl.checkpoints.background_writes import Snapshot, write_items
from rlctl.checkpoints.megatron import pickles
from rlctl.checkpoints.megatron.megatron_model import STEP
from rlctl.checkpoints.megatron.torch_dist_files import BACKEND
from rlctl.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq")


class Writer(FileSystemWriter):
    """Writes a snapshot, a file per rank. Leaves out where the checkpoint was written: that is a pickled path, which
    `pickles` does not admit."""

    def __init__(self, directory: Path, snapshot: Snapshot) -> None:
        super().__init__(directory)
        self._directory, self._snapshot, self.digests = directory, snapshot, dict[str, str]()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done, results = Future[list[WriteResult]](), list[WriteResult]()
        items = [(i, planner.resolve_data(i) if i.type == WriteItemType.BYTE_IO else i.index.fqn) for i in plan.items]
        if items:
            name = f"{plan.storage_data.prefix}0.distcp"
            results, self.digests[name] = write_items(self._directory / name, items, self._snapshot)
        done.set_result(results)
        return done


class DTensorSave(Save):
    """A snapshot of weights and states."""

    def __init__(
        self,
        directory: Path,
        weights: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
        group: Any,
        *,
        copies: bool = True,
    ) -> None:
        """`optimizer` None: of a teacher. `group`: of all ranks, for saves alone. What they exchange in the background
        must not meet what training does."""
        self._group = group
        self._state = dict(_state(weights, optimizer))
        tensors = {name: local_part(value) for name, value in self._state.items()}
        super().__init__(directory, Snapshot(tensors, copies=copies))

    def write(self) -> dict[str, str]:
        writer = Writer(self.directory, self.snapshot)
        state_dict_saver.save(self._state, storage_writer=writer, process_group=self._group)
        return writer.digests

    def write_index(self) -> None:
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            (self.directory / "metadata.json").write_text(json.dumps(BACKEND))


def load(directory: Path, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Load a save into live weights and states. Raises InputError for a missing tensor or an unsafe pickle."""
    pickles.scan(directory)
    state = dict(_state(weights, optimizer))
    missing = state.keys() - pickles.load_metadata(directory).state_dict_metadata.keys()
    if missing:
        raise InputError(f"{directory} holds no {min(missing)}.", "Is it a checkpoint of the same model?")
    state_dict_loader.load(state, checkpoint_id=str(directory))
    _set_count(optimizer, int(state[STEP]))


def copied(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return host copies of this rank's weights and states."""
    return {name: on_host(local_part(value)) for name, value in _state(weights, optimizer)}


@torch.no_grad()
def restore(states: Mapping[str, Tensor], weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Write what `copied` returned into live weights and states."""
    for name, value in _state(weights, optimizer):
        local_part(value).copy_(states[name])
    _set_count(optimizer, int(states[STEP]))


def _set_count(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for moments in optimizer.state.values():
        if "step" in moments:
            moments["step"].fill_(float(steps))
    if (muon := muon_of(optimizer)) is not None:
        muon.steps = steps


def _state(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, value.detach()) for name, value in weights.items())
    if optimizer is None:
        return
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    muon, step = muon_of(optimizer), torch.zeros(())
    if muon is not None:
        step = torch.tensor(float(muon.steps))
    for name, parameter in weights.items():
        if parameter not in trained:
            continue
        state, by_muon = optimizer.state[parameter], muon is not None and muon.updates(parameter)
        moments = (MOMENTUM,) if by_muon else MOMENTS
        if not state:
            state |= {} if by_muon else {"step": torch.zeros((), device=parameter.device)}
            state |= {moment: torch.zeros_like(parameter) for moment in moments}
        yield from ((f"optimizer.state.{moment}.{name}", state[moment].detach()) for moment in moments)
        step = state.get("step", step)
    yield STEP, step.cpu().clone()
