"""How weights get into a vLLM worker: rlctl's engine for vLLM's weight-transfer interface, and its worker extension.

vLLM imports this module in each worker (`worker_extension_cls`), which registers the engine under the name `rlctl`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from rlctl.backends.vllm import buffers, compat, live
from rlctl.backends.vllm.args import PLAIN_PARAMETERS, TRANSFER_BACKEND
from rlctl.backends.vllm.direct import DirectWriter
from rlctl.backends.vllm.messages import Reading, Received
from rlctl.backends.vllm.poison import poison
from rlctl.backends.vllm.reload import ReloadFixes
from rlctl.backends.vllm.segment import Segment, SegmentAddress
from rlctl.errors import ConfigError, WorkerError

Receive = Literal["loader", "direct", "auto"]
TensorRow = tuple[str, str, tuple[int, ...], int]
"""(published name, dtype, shape, byte offset in the segment)."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What never changes between refits; exchanged once."""

    address: SegmentAddress | None = None
    table: tuple[TensorRow, ...] = ()
    receive: Receive = "auto"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One part of a refit: rows [first, last) of the table are in the segment."""

    first: int = 0
    last: int = 0


class RlctlTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives whole published tensors through shared memory."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Map the segment and decide how each tensor will be received."""
        self.shutdown()
        buffers.record(self.model)
        self.info = init_info
        if init_info.address is not None:
            self.segment = Segment(init_info.address)
        self.rows = {row[0]: row for row in init_info.table}
        self.writer: DirectWriter | None = None
        self.reason = "asked for" if init_info.receive == "loader" else None
        if init_info.receive != "loader":
            compat.abandon_layerwise_reload(self.model)  # parameters of an interrupted reload are not in place
            writer = DirectWriter(self.model, set(self.rows))
            self.writer, self.reason = (writer, None) if writer.reason is None else (None, writer.reason)
        if init_info.receive == "direct" and self.writer is None:
            raise ConfigError(f"--receive direct: {self.reason}.", "Use --receive auto or loader.")

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        compat.abandon_layerwise_reload(self.model)
        self.received = self._new_record()
        if self.writer is not None:
            return
        self.fixes = ReloadFixes(self.model)
        self.fixes.before()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator, which a CPU worker does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        begun = time.perf_counter()
        rows = self.info.table[update_info.first : update_info.last]
        if self.writer is None:
            self.model.load_weights(self._tensors(rows))
        elif len(rows) != len(self.info.table):
            raise WorkerError("The direct path takes all tensors at once.")
        else:
            held = dict(self._tensors(rows))
            self.writer.write(held.__getitem__)
        self.received.seconds += time.perf_counter() - begun

    def _tensors(self, rows: tuple[TensorRow, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape, offset in rows:
            tensor = self.segment.view(offset, shape, getattr(torch, dtype))
            self.received.tensors += 1
            self.received.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        begun = time.perf_counter()
        if self.writer is not None:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        self.fixes.after()
        self.received.seconds += time.perf_counter() - begun

    def _new_record(self) -> Received:
        if self.writer is None:
            return Received(path="loader", reasons={"loader": self.reason or ""})
        packed = sum(site.packed for site in self.writer.sites)
        plain = len(self.writer.sites) - packed
        return Received(
            path="direct",
            reasons={
                "direct": f"{plain} parameters are stored plainly and overwritten, {packed} are packed again in place"
            },
        )

    def shutdown(self) -> None:
        segment: Segment | None = getattr(self, "segment", None)
        if segment is not None:
            segment.close()
            self.segment = None  # type: ignore[assignment]


compat.register_transfer_engine(TRANSFER_BACKEND, RlctlTransferEngine)
if current_platform.is_cpu():
    compat.rotate_every_head()
if os.environ.get(PLAIN_PARAMETERS) == "1":
    compat.keep_parameters_plain()


class RlctlWorkerExtension:
    """Mixed into vLLM's worker: `self` is the worker."""

    def rlctl_received(self) -> Received:
        """What the refit just finished did in this worker."""
        return self.weight_transfer_engine.received

    def rlctl_readings(self, tensors: list[str] | None = None) -> list[Reading]:
        """Fingerprints of `tensors` (None: all, and of the buffers) as this worker holds them.

        A parameter that cannot be read back has a reading that says why.
        """
        model = self.model_runner.get_model()
        found, unreadable = live.sites(model)
        if tensors is not None:
            return list(live.read([s for s in found if any(p.tensor in set(tensors) for p in s.parts)]))
        unread = [Reading(name, (), (), (), 0, name, unreadable=why) for name, why in unreadable.items()]
        return [*live.read(found), *buffers.read(model), *unread]

    def rlctl_values(self, tensor: str) -> list[tuple[str, tuple[int, ...], Any]]:
        """Every copy of one published tensor in this worker: (site, start of its box, values)."""
        return list(live.values(live.sites(self.model_runner.get_model()).found, tensor))

    def rlctl_poison(self) -> int:
        """Make everything that this worker computes with not-a-number; returns how many tensors that were."""
        return poison(self.model_runner.get_model())

    def rlctl_restart_update(self) -> None:
        """Forget an update that was begun and never finished."""
        self._weight_update_active = False

    def rlctl_release(self) -> None:
        """Let go of shared memory, whatever state an update is in."""
        self._weight_update_active = False
        self.weight_transfer_engine.shutdown()
