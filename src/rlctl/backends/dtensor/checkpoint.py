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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlctl.backends.policy_rank import Save
from rlctl.checkpoints.identity import file_digest
from rlctl.checkpoints.megatron import pickles
from rlctl.checkpoints.megatron.megatron_model import STEP
from rlctl.checkpoints.megatron.torch_dist_files import BACKEND, without_checksums
from rlctl.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq")


class Writer(FileSystemWriter):
    """Leaves out where the checkpoint was written: that is a pickled path, which `pickles` does not admit."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with without_checksums():
            return super().write_data(plan, planner)


class DTensorSave(Save):
    """A snapshot of weights and states."""

    def __init__(self, directory: Path, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        # Its own group: what it exchanges in the background must not meet what training does.
        self._group: Any = torch.distributed.new_group(backend="gloo")
        state = dict(_state(weights, optimizer))
        self._saving: Any = state_dict_saver.async_save(
            state, storage_writer=Writer(directory), process_group=self._group
        )
        super().__init__(directory)

    def write(self) -> dict[str, str]:
        getattr(self._saving, "upload_completion", self._saving).result()
        own = self.directory.glob(f"__{torch.distributed.get_rank()}_*.distcp")
        return {path.name: file_digest(path) for path in own}

    def write_index(self) -> None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group(self._group)
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
    for own in optimizer.state.values():
        own["step"].fill_(float(state[STEP]))


def _state(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, value.detach()) for name, value in weights.items())
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    step = torch.zeros(())
    for name, parameter in weights.items():
        if parameter not in trained:
            continue
        own = optimizer.state[parameter]
        if not own:
            own |= {"step": torch.zeros((), device=parameter.device)}
            own |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        yield from ((f"optimizer.state.{moment}.{name}", own[moment].detach()) for moment in MOMENTS)
        step = own["step"]
    yield STEP, step.cpu().clone()
