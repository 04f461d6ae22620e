"""How weights get into a vLLM worker: rlctl's engine for vLLM's weight-transfer interface, and its worker extension.

vLLM imports this module in each worker (`worker_extension_cls`), which registers the engine under the name `rlctl`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from rlctl.backends.vllm import buffers, compat, live, routing
from rlctl.backends.vllm.args import PLAIN_PARAMETERS, TRANSFER_BACKEND
from rlctl.backends.vllm.channel import Connection, Lengths, Need, cut_rounds, payload_bytes, whole_tensors
from rlctl.backends.vllm.cuda_buffers import device_name
from rlctl.backends.vllm.direct import DirectWriter
from rlctl.backends.vllm.inlets import open_inlet
from rlctl.backends.vllm.messages import Reading, Received
from rlctl.backends.vllm.poison import poison
from rlctl.backends.vllm.receiver import DirectReceiver, Inlet, LoaderReceiver, Timed
from rlctl.backends.vllm.reload import ReloadFixes
from rlctl.backends.vllm.segment import this_node
from rlctl.backends.vllm.sparse import SparseReceiver, require_base, why_not
from rlctl.errors import ConfigError, WorkerError

Receive = Literal["loader", "direct", "auto"]
TensorRow = tuple[str, str, tuple[int, ...]]
"""(published name, dtype, shape)."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What never changes between refits."""

    table: tuple[TensorRow, ...] = ()
    receive: Receive = "auto"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One refit: the version that it brings, and which attempt of the session it is."""

    version: int = 0
    epoch: int = 1
    base: int | None = None
    """Changed elements alone come, since this version; None: everything comes."""
    lengths: tuple[Lengths, ...] = ()
    """With `base`: by channel, what each sender sends in each round."""


class RlctlTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives rounds of weights through one of rlctl's movers."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    inlet: Inlet | None = None
    applied: int | None = None
    """Version that the parameters hold whole; None: none that came through here."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Decide how tensors will be received, and so what to ask for."""
        self.shutdown()
        buffers.record(self.model)
        self.info = init_info
        self.writer: DirectWriter | None = None
        self.reason = "asked for" if init_info.receive == "loader" else None
        if init_info.receive != "loader":
            compat.abandon_layerwise_reload(self.model)  # parameters of an interrupted reload are not in place
            writer = DirectWriter(self.model, {row[0] for row in init_info.table})
            self.writer, self.reason = (writer, None) if writer.reason is None else (None, writer.reason)
        if init_info.receive == "direct" and self.writer is None:
            raise ConfigError(f"--receive direct: {self.reason}.", "Use --receive auto or loader.")
        self.layout = self.writer.layout() if self.writer is not None else whole_tensors(self._as_held(init_info.table))
        self.receiver = (
            DirectReceiver(self.writer.targets)
            if self.writer is not None
            else LoaderReceiver(self.model.load_weights, self.device)
        )

    def _as_held(self, table: tuple[TensorRow, ...]) -> list[TensorRow]:
        """`table` with the dtypes in which the model holds the tensors: the loader would widen what came rounded."""
        held = live.dtypes(self.model)
        return [(name, held.get(name, dtype), shape) for name, dtype, shape in table]

    def connect(self, connection: Connection, name: str) -> None:
        """Open the receiving end, once for all refits."""
        self.shutdown()
        self.connection = connection
        self.rounds = cut_rounds(self.layout, connection.capacity)
        self.inlet = open_inlet(connection, self.rounds, name, self.device)

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
        if self.inlet is None:
            raise WorkerError("A refit before the engine's worker was connected.")
        begun = time.perf_counter()
        held, self.applied = self.applied, None
        changes = None if update_info.base is None else update_info.lengths[self.connection.channel]
        with torch.no_grad(), self.inlet.begin(update_info.version, update_info.epoch, changes):
            timed = Timed(self.inlet)
            if changes is None:
                self.receiver.receive(self.rounds, timed)
            else:
                require_base(held, update_info.base)
                self._receive_changes(timed, len(changes))
        self.applied = update_info.version
        self.received.waited_s = timed.waited_s
        self.received.seconds += time.perf_counter() - begun
        self.received.tensors = len(self.layout.by_tensor)
        self.received.bytes = payload_bytes(self.rounds)

    def _receive_changes(self, inlet: Timed, rounds: int) -> None:
        assert self.writer is not None
        link = self.connection
        receiver = SparseReceiver(self.writer.targets(), list(self.layout.params), len(link.senders), link.capacity)
        receiver.receive(rounds, inlet)

    def whole_only(self) -> str:
        """Why changed elements alone are no use; empty: they are."""
        if self.writer is None:
            return f"the loader takes whole tensors ({self.reason})"
        return why_not(self.writer.targets())

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        begun = time.perf_counter()
        if self.writer is not None:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        self.fixes.after()
        self.received.seconds += time.perf_counter() - begun

    def path(self) -> tuple[str, str]:
        """(receive path, why)."""
        if self.writer is None:
            return "loader", self.reason or ""
        plain = sum(site.form is live.Form.PLAIN for site in self.writer.sites)
        packed = len(self.writer.sites) - plain
        return "direct", f"{plain} parameters are stored plainly and overwritten, {packed} are packed again in place"

    def _new_record(self) -> Received:
        path, why = self.path()
        return Received(path=path, reasons={path: why})

    def shutdown(self) -> None:
        if self.inlet is not None:
            self.inlet.close()
            self.inlet = None


compat.register_transfer_engine(TRANSFER_BACKEND, RlctlTransferEngine)
if current_platform.is_cpu():
    compat.rotate_every_head()
if os.environ.get(PLAIN_PARAMETERS) == "1":
    compat.keep_parameters_plain()


class RlctlWorkerExtension:
    """Mixed into vLLM's worker: `self` is the worker."""

    def rlctl_need(self, engine: str) -> Need:
        """What this worker of `engine` asks for in every refit, and where it is."""
        transfer = self.weight_transfer_engine
        path, reason = transfer.path()
        name = f"{engine} worker {self.rank}"
        return Need(
            name,
            this_node(),
            device_name(transfer.device),
            os.getpid(),
            path,
            reason,
            transfer.layout,
            transfer.whole_only(),
        )

    def rlctl_connect(self, engine: str, connections: tuple[Connection, ...]) -> None:
        """Open this worker's own connection of those of its engine."""
        self.weight_transfer_engine.connect(connections[self.rank], f"{engine} worker {self.rank}")

    def rlctl_alive(self) -> bool:
        """Answers as long as the worker does."""
        return True

    def rlctl_record_routing(self) -> None:
        """Keep the experts of every token from here on."""
        self._recorder = routing.Recorder(self.model_runner)

    def rlctl_take_routing(self) -> dict[str, list[routing.Span]]:
        """What was recorded since the last time, by request; of the first worker alone, as all route alike."""
        found = self._recorder.take()
        return found if self.rank == 0 else {}

    def rlctl_received(self) -> Received:
        """What the refit just finished did in this worker."""
        return self.weight_transfer_engine.received

    def rlctl_readings(self, tensors: list[str] | None = None) -> list[Reading]:
        """Fingerprints of `tensors` (None: all, and of the buffers) as this worker holds them.

        Every parameter that cannot be read back has a reading that says why.
        """
        model = self.model_runner.get_model()
        found, unreadable = live.sites(model)
        unread = [Reading(name, (), (), (), 0, name, unreadable=why) for name, why in unreadable.items()]
        if tensors is not None:
            wanted = set(tensors)
            return [*live.read([s for s in found if any(p.tensor in wanted for p in s.parts)]), *unread]
        return [*live.read(found), *buffers.read(model), *unread]

    def rlctl_values(self, tensor: str) -> list[tuple[str, tuple[int, ...], Any]]:
        """Every copy of one published tensor in this worker: (site, start of its box, values)."""
        return list(live.values(live.sites(self.model_runner.get_model()).found, tensor))

    def rlctl_poison(self) -> int:
        """Make everything that this worker computes with not-a-number; returns how many tensors that were."""
        self.weight_transfer_engine.applied = None
        return poison(self.model_runner.get_model())

    def rlctl_restart_update(self) -> None:
        """Forget an update that was begun and never finished."""
        self._weight_update_active = False

    def rlctl_release(self) -> None:
        """Let go of shared memory, whatever state an update is in."""
        self._weight_update_active = False
        self.weight_transfer_engine.shutdown()
