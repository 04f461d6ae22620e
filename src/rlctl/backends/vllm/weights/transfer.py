"""How weights get into a vLLM worker: rlctl's engine for vLLM's weight-transfer interface, and its worker extension.

vLLM imports this module in each worker (`worker_extension_cls`), which registers the engine under the name `rlctl`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.platforms import current_platform

from rlctl.backends.vllm import compat, routing
from rlctl.backends.vllm.args import PLAIN_PARAMETERS, TRANSFER_BACKEND
from rlctl.backends.vllm.weights import locate, read_back
from rlctl.backends.vllm.weights.assign import Assignment, all_loaded, assign
from rlctl.backends.vllm.weights.reload import Reload, abandon
from rlctl.backends.vllm.weights.write import (
    DirectWriter,
    LiveParameters,
    ModelLoader,
    SparseWriter,
    require_base,
    why_whole,
)
from rlctl.errors import ConfigError, RlctlError, WorkerError
from rlctl.transport.cuda_ipc import device_name
from rlctl.transport.movers import Received, Receiver, TimedReceiver, open_receiver
from rlctl.transport.rounds import Connection, Lengths, Need, cut_rounds, joined, whole_tensors
from rlctl.transport.shared_memory import this_node
from rlctl.vector_math import warm_up
from rlctl.weights.readings import Reading

Receive = Literal["loader", "direct", "auto"]
TensorRow = tuple[str, str, tuple[int, ...]]
"""(published name, dtype, shape)."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The values that stay the same for all refits."""

    table: tuple[TensorRow, ...] = ()
    receive: Receive = "auto"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One refit: the version that it brings, and which attempt of the session it is."""

    version: int = 0
    attempt: int = 1
    base: int | None = None
    """The version since which only changed elements come; None: everything comes."""
    lengths: tuple[Lengths, ...] = ()
    """With `base`: by channel, what each sender sends in each round."""


class RlctlTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives rounds of weights through one of rlctl's movers."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    receiver: Receiver | None = None
    assignment: Assignment
    """The way of each tensor; not there before `init_info` came."""
    applied: int | None = None
    """Version that the parameters hold whole; None: none that came through here."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Decide how tensors will be received, and so what to ask for."""
        self.shutdown()
        self.info = init_info
        abandon(self.model)  # parameters of an interrupted reload are not in place
        self.assignment = self._assign({row[0] for row in init_info.table}, init_info.receive)
        loaded = [row for row in init_info.table if row[0] in self.assignment.loaded]
        self.parameters = LiveParameters(self.assignment.direct)
        # What is written directly comes first, and the rest is left for one call of the model's loader.
        self.layout = joined(self.parameters.layout(), whole_tensors(self._as_held(loaded)))
        direct, load = DirectWriter(self.parameters.targets), cast(Any, self.model).load_weights
        self.writer = ModelLoader(load, self.device, direct) if loaded else direct

    def _assign(self, tensors: set[str], receive: Receive) -> Assignment:
        """The way of each tensor. Raises ConfigError where `receive` is `direct` and one cannot be written so."""
        if receive == "loader":
            return all_loaded(tensors, "asked for")
        if compat.reloads_as_a_whole(self.model):
            found = all_loaded(tensors, "torchao's loader renews a model as a whole")
        else:
            alone, elsewhere = torch.distributed.get_world_size() == 1, locate.elsewhere(self.model)
            found = assign(locate.sites(self.model), tensors, alone=alone, elsewhere=elsewhere)
        if receive == "direct" and found.loaded:
            tensor, why = next(iter(found.loaded.items()))
            raise ConfigError(
                f"--receive direct: {len(found.loaded)} tensors cannot be written directly ({tensor}: {why}).",
                "Use --receive auto or loader.",
            )
        return found

    def matched(self, every: locate.Sites) -> locate.Sites:
        """The sites as far as their names are those of the tensors that come; all of them before `init_info` came, and
        in a known family, whose names have to be right."""
        if not hasattr(self, "assignment") or compat.is_of_known_family(self.model):
            return every
        sent = {row[0] for row in self.info.table}
        return locate.matched(every, sent, self.assignment.loaded, self.stored_buffers())

    def stored_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that refits fill; none before `init_info` came."""
        table = self.info.table if hasattr(self, "assignment") else ()
        return locate.stored_buffers(self.model, {name: tuple(shape) for name, _, shape in table})

    def _as_held(self, table: Sequence[TensorRow]) -> list[TensorRow]:
        """`table` with the dtypes in which the model holds the tensors: the loader would widen what came rounded."""
        held = locate.dtypes(self.model, self.stored_buffers()) if table else {}
        return [(name, held.get(name, dtype), shape) for name, dtype, shape in table]

    def connect(self, connection: Connection, name: str) -> None:
        self.shutdown()
        self.connection = connection
        self.rounds = cut_rounds(self.layout, connection.capacity)
        self.receiver = open_receiver(connection, self.rounds, name, self.device)

    def start_weight_update(self) -> None:
        abandon(self.model)
        self.received = Received(path=self.assignment.path)
        if self.assignment.loaded:
            self.reload = Reload(self.model, self.assignment.reloaded, self.assignment.opaque)
            self.reload.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator, which a CPU worker does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.receiver is None:
            raise WorkerError("A refit began before the engine's worker was connected.")
        held, self.applied = self.applied, None
        changes = None if update_info.base is None else update_info.lengths[self.connection.channel]
        with torch.no_grad(), self.receiver.begin(update_info.version, update_info.attempt, changes):
            timed = TimedReceiver(self.receiver)
            if changes is None or update_info.base is None:
                self.writer.write_rounds(self.rounds, timed)
            else:
                require_base(held, update_info.base)
                self._receive_changes(timed, len(changes))
        self.applied = update_info.version
        self.received.waited_s = timed.waited_s

    def _receive_changes(self, receiver: TimedReceiver, rounds: int) -> None:
        link = self.connection
        writer = SparseWriter(self.parameters.targets(), list(self.layout.params), len(link.senders), link.capacity)
        writer.write_rounds(rounds, receiver)

    def whole_only(self) -> str:
        """Why changed elements alone are no use; empty: they are."""
        if self.assignment.loaded:
            tensor, why = next(iter(self.assignment.loaded.items()))
            return f"the loader takes whole tensors ({tensor}: {why})"
        return why_whole(self.parameters.targets())

    def finish_weight_update(self) -> None:
        if self.assignment.loaded:
            self.reload.finish(self.model_config)

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise RlctlError. vLLM before 0.29 asks every engine for a sender; the sender to this one is in
        `refit/policy_side.py`."""
        raise RlctlError("vLLM's trainer cannot send to rlctl's engine.", "Refit it with a RefitSession.")


warm_up()  # every worker process imports this before it makes the model
compat.register_transfer_engine(TRANSFER_BACKEND, RlctlTransferEngine)
compat.embed_for_each_layer()
if current_platform.is_cpu():
    compat.rotate_every_head()
    compat.find_own_experts()
    compat.draw_for_kept_tokens_alone()
    compat.gather_unequal_parts()
if os.environ.get(PLAIN_PARAMETERS) == "1":
    compat.keep_parameters_plain()


class RlctlWorkerExtension:
    """Methods that vLLM mixes into its worker: `self` is the worker."""

    rank: int
    parallel_config: Any
    model_runner: Any
    weight_transfer_engine: RlctlTransferEngine

    def rlctl_call(
        self, method: str | Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Any, RlctlError | str | None]:
        """Call a method of the worker, or a function of it; return (its result, None) or (None, the error). No worker
        raises: vLLM would stop listening, and take the others' answers for those to the next call."""
        try:
            return (getattr(self, method)(*args) if isinstance(method, str) else method(self, *args)), None
        except RlctlError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine raises it
            traceback.print_exc()
            return None, f"{type(error).__name__}: {error}"

    @property
    def _number(self) -> int:
        """Number of this worker among those of all replicas of its engine."""
        return self.parallel_config.data_parallel_rank * self.parallel_config.world_size + self.rank

    def rlctl_need(self, engine: str) -> Need:
        transfer = self.weight_transfer_engine
        return Need(
            f"{engine} worker {self._number}",
            this_node(),
            device_name(transfer.device),
            transfer.assignment.taken(),
            transfer.layout,
            transfer.whole_only(),
        )

    def rlctl_connect(self, engine: str, connections: tuple[Connection, ...]) -> None:
        self.weight_transfer_engine.connect(connections[self._number], f"{engine} worker {self._number}")

    def rlctl_prepare(self) -> None:
        """Complete the start, and keep what the model's buffers hold now. Raises VerificationError where a table is
        wrong already."""
        compat.make_stage_inputs(self.model_runner)
        read_back.record_buffers(self.model_runner.get_model())

    def rlctl_alive(self) -> bool:
        return True

    def rlctl_record_routing(self) -> None:
        self._recorder = routing.Recorder(self.model_runner)

    def rlctl_take_routing(self) -> dict[str, list[routing.Span]]:
        """Return the choices since the last call, by request. Only the first worker of a pipeline stage has any, as all
        of them route alike."""
        found = self._recorder.take()
        return found if self.rank % self.parallel_config.tensor_parallel_size == 0 else {}

    def rlctl_received(self) -> Received:
        return self.weight_transfer_engine.received

    def rlctl_readings(self, tensors: list[str] | None = None) -> list[Reading]:
        """As `EngineWorker.readings`. Every parameter that cannot be read back has a reading that says why."""
        model = self.model_runner.get_model()
        every = self.weight_transfer_engine.matched(locate.sites(model))
        found, unread = every.found, read_back.unread(every)
        stored = self.weight_transfer_engine.stored_buffers()
        if tensors is not None:
            wanted = set(tensors)
            own = {name: buffer for name, buffer in stored.items() if name in wanted}
            chosen = [s for s in found if any(p.tensor in wanted for p in s.parts)]
            return [*read_back.read(chosen), *read_back.read_stored(own), *unread]
        kept = read_back.read_buffers(model, stored)
        return [*read_back.read(found), *read_back.read_stored(stored), *kept, *unread]

    def rlctl_values(self, tensor: str) -> list[tuple[str, tuple[int, ...], Any]]:
        stored = self.weight_transfer_engine.stored_buffers()
        if tensor in stored:
            return [(tensor, (0,) * stored[tensor].dim(), stored[tensor].float().cpu().numpy())]
        return list(read_back.values(locate.sites(self.model_runner.get_model()).found, tensor))

    def rlctl_poison(self) -> int:
        self.weight_transfer_engine.applied = None
        return read_back.poison(self.model_runner.get_model(), self.weight_transfer_engine.stored_buffers())

    def rlctl_restart_update(self) -> None:
        """Forget an update that was begun and never finished."""
        self._weight_update_active = False

    def rlctl_release(self) -> None:
        """Let go of shared memory, whatever state an update is in."""
        self._weight_update_active = False
        self.weight_transfer_engine.shutdown()
