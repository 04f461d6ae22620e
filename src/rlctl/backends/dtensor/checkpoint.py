"""Policy checkpoints through torch.distributed.checkpoint: weights and AdamW's states by the names of transformers'
modules, loaded under any sharding. A save takes a snapshot, then writes it in the background while training goes on.

Nothing here draws random numbers after the model is built, so there is no random state to save.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import StorageMeta

from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.checkpoints.identity import file_digest
from rlctl.checkpoints.megatron import pickles
from rlctl.checkpoints.megatron.megatron_model import STEP
from rlctl.checkpoints.megatron.torch_dist_files import BACKEND
from rlctl.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq")


class Writer(FileSystemWriter):
    """Leaves out where the checkpoint was written: that is a pickled path, which `pickles` does not admit."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class Save:
    """A save under way on this rank. Every rank makes one and finishes it; the checkpoint is complete when all have."""

    def __init__(self, directory: Path, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Takes a snapshot for an existing empty directory and starts writing it; training may go on at once."""
        # Its own group: what it exchanges in the background must not meet what training does.
        self._group: Any = torch.distributed.new_group(backend="gloo")
        state = dict(_state(weights, optimizer))
        writing = state_dict_saver.async_save(state, storage_writer=Writer(directory), process_group=self._group)
        self._directory, self._digests = directory, dict[str, str]()
        pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing = pool.submit(self._write, writing)
        pool.shutdown(wait=False)

    def _write(self, writing: Any) -> None:
        getattr(writing, "upload_completion", writing).result()
        own = self._directory.glob(f"__{torch.distributed.get_rank()}_*.distcp")
        self._digests = {path.name: file_digest(path) for path in own}

    @property
    def written(self) -> bool:
        """Whether `finish` will not have to wait for this rank."""
        return self._writing.done()

    def finish(self) -> dict[str, str]:
        """Wait for the writing; collective. Returns the digests of the files."""
        self._writing.result()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            (self._directory / "metadata.json").write_text(json.dumps(BACKEND))
            index = [path for path in self._directory.iterdir() if path.is_file() and path.suffix != ".distcp"]
            self._digests |= {path.name: file_digest(path) for path in index}
        torch.distributed.destroy_process_group(self._group)
        return self._digests


def load(directory: Path, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Read what `Save` wrote into the live weights and states. Raises InputError where a tensor is missing, or a pickle
    could run code."""
    pickles.scan(directory)
    state = dict(_state(weights, optimizer))
    missing = state.keys() - pickles.load_metadata(directory).state_dict_metadata.keys()
    if missing:
        raise InputError(f"{directory} holds no {min(missing)}.", "Is it a checkpoint of the same model?")
    state_dict_loader.load(state, checkpoint_id=str(directory))
    set_steps(optimizer, float(state[STEP]))


def set_steps(optimizer: torch.optim.Optimizer, steps: float) -> None:
    for own in optimizer.state.values():
        own["step"].fill_(steps)


def moments_of(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """By moment, what this rank holds of it for each trained parameter, live."""
    live = dict(_state(weights, optimizer))
    found: dict[str, dict[str, Tensor]] = {moment: {} for moment in MOMENTS}
    for moment, own in found.items():
        prefix = f"optimizer.state.{moment}."
        own |= {key.removeprefix(prefix): local_part(value) for key, value in live.items() if key.startswith(prefix)}
    return found


def _state(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Live weights and states by key; `weights` are the parameters themselves, and buffers."""
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
