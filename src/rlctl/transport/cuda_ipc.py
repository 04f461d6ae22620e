"""The CUDA IPC transport: two buffers on a GPU that policy and engine share. Policy ranks on other GPUs send boxes over
the policy's process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.transport.facts import Places, Refusal
from rlctl.transport.movers import Receiver, Sender, Transport
from rlctl.transport.rounds import Channel, Connection, Rounds
from rlctl.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

if TYPE_CHECKING:
    import torch

    from rlctl.transport.round_buffers import Packer
    from rlctl.transport.staging import Staging


class CudaIpc(Transport):
    """Memory of a GPU on which a policy rank and an engine worker take turns."""

    name = "cuda-ipc"
    way = "Policy and engines share a node's memory."
    shares = "device"

    def suits(self, places: Places) -> bool:
        return not (places.on_cpu or places.elsewhere or places.barred)

    def refusal(self, places: Places) -> Refusal | None:
        if places.on_cpu:
            return Refusal("the engines compute on a CPU", "Use auto or shared-memory.")
        if places.elsewhere:
            return Refusal(places.elsewhere, "Use auto or collective.")
        return Refusal(places.barred, "Use auto or shared-memory.") if places.barred else None

    def make_staging(self, channel: Channel, device: torch.device) -> Staging:
        from rlctl.transport.device_memory import device_staging

        return device_staging(channel, device)

    def sender(
        self, channel: Channel, rank: int, packer: Packer, *, staging: Staging | None, device: torch.device
    ) -> Sender:
        assert staging is not None  # the one rank on the device made it
        return CudaIpcSender(channel, rank, packer, staging=staging)

    def receiver(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Receiver:
        return CudaIpcReceiver(connection, rounds, name, device)


class CudaIpcSender(SharedMemorySender):
    """Writes the rounds of the rank on the worker's device."""

    def __init__(self, channel: Channel, rank: int, packer: Packer, *, staging: Staging) -> None:
        import torch

        super().__init__(channel, rank, packer, staging=staging)
        self.device = staging.buffers[0].device if staging.buffers else torch.device("cuda")

    def done(self, index: int, length: int) -> None:
        from rlctl.transport.device_memory import finish_copies

        finish_copies(self.device)
        super().done(index, length)


class CudaIpcReceiver(SharedMemoryReceiver):
    """Reads the rounds that the policy rank on the same device fills."""

    def __init__(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> None:
        from rlctl.transport.device_memory import open_buffer

        super().__init__(connection, rounds, name, [open_buffer(handle, device) for handle in connection.handles])
        self.device = device

    def done(self, index: int) -> None:
        from rlctl.transport.device_memory import finish_copies

        finish_copies(self.device)  # out of the buffer
        super().done(index)
