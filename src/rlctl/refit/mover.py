"""The sending ends of the movers: one small interface, one file a mover; `backends.vllm.inlets` has the other ends."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from rlctl.errors import WorkerError

if TYPE_CHECKING:
    import torch

    from rlctl.backends.vllm.group import Group
    from rlctl.backends.vllm.segment import Segment
    from rlctl.refit.packing import Packer
    from rlctl.refit.records import Channel


class Outlet(Protocol):
    """The sending end of one channel on one policy rank: rounds in order, each written into a buffer it lends."""

    packer: Packer

    def begin(self, version: int, epoch: int) -> AbstractContextManager[None]:
        """A context in which `version` is sent; what is raised inside is told to the other ends."""
        ...

    def wait(self, index: int) -> torch.Tensor:
        """Memory for this rank's part of round `index`."""
        ...

    def done(self, index: int) -> None:
        """This rank's part of round `index` is in that memory."""
        ...

    def wait_changes(self, index: int) -> torch.Tensor:
        """Memory for the changed elements that this rank sends in round `index`."""
        ...

    def done_changes(self, index: int, length: int) -> None:
        """They are in that memory, `length` bytes."""
        ...

    def close(self) -> None: ...


def sends_messages(mover: str) -> bool:
    """Whether ranks send their boxes one behind the other, rather than write into the image that is read."""
    return mover in ("collective", "disk")


def open_outlet(
    channel: Channel,
    rank: int,
    packer: Packer,
    *,
    made: Segment | None,
    buffers: list[torch.Tensor],
    group: Group | None,
) -> Outlet:
    """The outlet of policy rank `rank`.

    `made` and `buffers` are memory that this rank made for it (shared, on the device), `group` the collective group.
    """
    mover = channel.connection.mover
    if mover == "shared-memory":
        from rlctl.refit.shared_memory import SharedMemoryOutlet

        return SharedMemoryOutlet(channel, rank, packer, made)
    if mover == "cuda-ipc":
        from rlctl.refit.cuda_ipc import CudaIpcOutlet

        return CudaIpcOutlet(channel, rank, packer, made, buffers)
    if mover == "disk":
        from rlctl.refit.disk import DiskOutlet

        return DiskOutlet(channel, rank, packer)
    if mover == "collective" and group is not None:
        from rlctl.refit.collective import CollectiveOutlet

        return CollectiveOutlet(channel, packer, group)
    raise WorkerError(f"refit.mover = {mover} was not prepared on policy rank {rank}.")
