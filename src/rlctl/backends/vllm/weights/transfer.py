"""How weights reach a vLLM worker: rlctl's worker extension and the receiving end of the channel. vLLM imports this
module in each worker (`worker_extension_cls`)."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Literal, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from rlctl.backends.vllm import compat, cpu, exact, recorded_experts
from rlctl.backends.vllm.args import EXACT, PLAIN_PARAMETERS
from rlctl.backends.vllm.weights import locate, read_back
from rlctl.backends.vllm.weights.adapters import WorkerAdapters
from rlctl.backends.vllm.weights.assign import Assignment, all_loaded, assign
from rlctl.backends.vllm.weights.reload import Reload, abandon
from rlctl.backends.vllm.weights.write import (
    Destination,
    DirectWriter,
    LiveParameters,
    ModelLoader,
    ReceivingEnd,
    why_whole,
)
from rlctl.errors import ConfigError, RlctlError
from rlctl.transport.device_memory import device_name
from rlctl.transport.movers import Received
from rlctl.transport.rounds import Connection, Need, whole_tensors
from rlctl.transport.staging import this_node
from rlctl.vector_math import warm_up
from rlctl.weights.layout import Layout
from rlctl.weights.readings import Reading

Receive = Literal["loader", "direct", "auto"]
TensorRow = tuple[str, str, tuple[int, ...]]
"""(published name, dtype, shape)."""


class WorkerWeights(ReceivingEnd):
    """One worker's weights: receive rounds, and read back the model's values."""

    assignment: Assignment
    """The path of each tensor; not there before `open`."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker.device)
        self.model, self.config = worker.model_runner.get_model(), worker.vllm_config
        # Numbered among the workers of all replicas of the engine.
        parallel = worker.parallel_config
        self.number = parallel.data_parallel_rank * parallel.world_size + worker.rank
        self.table: tuple[TensorRow, ...] = ()
        self.kept: dict[str, torch.Tensor] = {}
        """The base of adapted parameters, which they were received with, by their names in the layout."""

    def open(self, table: tuple[TensorRow, ...], receive: Receive = "auto") -> None:
        """Decide how tensors will be received, and so what to ask for."""
        self.close()
        self.table, self.kept = table, {}
        abandon(self.model)  # parameters of an interrupted reload are not in place
        self.assignment = self._assign({row[0] for row in table}, receive)
        loaded = [row for row in table if row[0] in self.assignment.loaded]
        self.parameters = LiveParameters(self.assignment.direct)
        # The loader would widen rounded values: its tensors come in the model's dtypes.
        dtypes_by_name = locate.dtypes(self.model, self.stored_buffers()) if loaded else {}
        handed = whole_tensors([(name, dtypes_by_name.get(name, dtype), shape) for name, dtype, shape in loaded])
        # What is written directly comes first, and the rest is left for one call of the model's loader.
        written = self.parameters.layout()
        self.layout = Layout(0, written.params | handed.params, written.pieces + handed.pieces)
        direct, load = DirectWriter(self.targets), cast(Any, self.model).load_weights
        self.writer = ModelLoader(load, self.device, direct) if loaded else direct

    def targets(self) -> Mapping[str, Destination]:
        """Where each parameter goes. A kept base comes first into its memory, and from there into the model."""
        live = self.parameters.targets()
        kept = {name: Destination(memory, len(memory), (live[name].write,)) for name, memory in self.kept.items()}
        return live | kept

    def keep(self, kept: dict[str, torch.Tensor]) -> None:
        """Keep the next weights of these parameters in `kept` too, which adapters are added to."""
        self.kept = kept

    def _assign(self, tensors: set[str], receive: Receive) -> Assignment:
        if receive == "loader":
            return all_loaded(tensors, "asked for")
        if compat.reloads_as_a_whole(self.model):
            assignment = all_loaded(tensors, "torchao's loader renews a model as a whole")
        else:
            alone, elsewhere = torch.distributed.get_world_size() == 1, locate.elsewhere(self.model)
            assignment = assign(locate.stored_matrices(self.model), tensors, alone=alone, elsewhere=elsewhere)
        if receive == "direct" and assignment.loaded:
            tensor, reason = next(iter(assignment.loaded.items()))
            raise ConfigError(
                f"--receive direct: {len(assignment.loaded)} tensors cannot be written directly ({tensor}: {reason}).",
                "Use --receive auto or loader.",
            )
        return assignment

    def need(self, engine: str) -> Need:
        name, place = f"{engine} worker {self.number}", device_name(self.device)
        if self.assignment.loaded:
            tensor, reason = next(iter(self.assignment.loaded.items()))
            whole_only = f"the loader takes whole tensors ({tensor}: {reason})"
        else:
            whole_only = why_whole(self.targets())
        return Need(name, this_node(), place, self.assignment.routes(), self.layout, whole_only)

    def connect_own(self, engine: str, connections: tuple[Connection, ...]) -> None:
        with self.joining(connections[self.number]) as connection:
            self.connect(connection, f"{engine} worker {self.number}")

    @contextmanager
    def joining(self, connection: Connection) -> Iterator[Connection]:
        """Join a group of processes, if `connection` has one, with NCCL's settings of the policy."""
        shared = connection.group is not None and self.device.type == "cuda"
        with compat.without_own_nccl_settings() if shared else nullcontext():
            yield connection

    def begin(self) -> None:
        abandon(self.model)
        self._received = Received(path=self.assignment.path)
        if self.assignment.loaded:
            self.reload = Reload(self.model, self.assignment.reloaded, self.assignment.unknown_storage)
            with set_current_vllm_config(self.config):
                self.reload.begin()

    def receive_update(self, update: dict[str, Any]) -> None:
        with set_current_vllm_config(self.config):
            self._received.waited_s = self.receive(**update)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish(self) -> None:
        if self.assignment.loaded:
            with set_current_vllm_config(self.config):
                self.reload.finish(self.config.model_config)

    def received(self) -> Received:
        return self._received

    def stored_buffers(self) -> dict[str, torch.Tensor]:
        return locate.stored_buffers(self.model, {name: tuple(shape) for name, _, shape in self.table})

    def readings(self, tensors: list[str] | None = None) -> list[Reading]:
        """Like `EngineWorker.readings`. Unreadable parameters have a reading with the reason."""
        every = locate.stored_matrices(self.model)
        # In a known family names must be right, for any tensors.
        if self.table and not compat.is_of_known_family(self.model):
            sent = {row[0] for row in self.table}
            every = locate.matched(every, sent, self.assignment.loaded, self.stored_buffers())
        readable, unread, stored = every.found, read_back.unread(every), self.stored_buffers()
        if tensors is not None:
            tensor_names = set(tensors)
            selected = {name: buffer for name, buffer in stored.items() if name in tensor_names}
            chosen = [s for s in readable if any(p.tensor in tensor_names for p in s.parts)]
            return [*read_back.read(chosen), *read_back.read_stored(selected), *unread]
        kept = read_back.read_buffers(self.model, stored)
        return [*read_back.read(readable), *read_back.read_stored(stored), *kept, *unread]

    def values(self, tensor: str) -> list[tuple[str, tuple[int, ...], Any]]:
        stored = self.stored_buffers()
        if tensor in stored:
            return [(tensor, (0,) * stored[tensor].dim(), stored[tensor].float().cpu().numpy())]
        return list(read_back.values(locate.stored_matrices(self.model).found, tensor))

    def poison(self) -> int:
        self.applied = None
        for memory in self.kept.values():
            memory.fill_(float("nan"))
        return read_back.poison(self.model, self.stored_buffers())


warm_up()  # every worker process imports this before it makes the model
compat.embed_for_each_layer()
if current_platform.is_cpu():
    cpu.install()
if os.environ.get(PLAIN_PARAMETERS) == "1":
    cpu.keep_parameters_plain()
if os.environ.get(EXACT) == "1":
    exact.install()


class RlctlWorkerExtension:
    """Methods that vLLM mixes into its worker: `self` is the worker."""

    rank: int
    device: torch.device
    parallel_config: Any
    model_runner: Any

    def rlctl_call(self, method: str | Callable[..., Any], args: Sequence[Any]) -> tuple[Any, RlctlError | str | None]:
        """Call a worker method (dotted for its parts) or a function; return (result, None) or (None, error). Workers
        never raise, because vLLM would then mix up answers."""
        try:
            return (attrgetter(method)(self)(*args) if isinstance(method, str) else method(self, *args)), None
        except RlctlError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine raises it
            traceback.print_exc()
            return None, f"{type(error).__name__}: {error}"

    def rlctl_prepare(self) -> None:
        """Finish the start and record the model's buffers. Raises VerificationError for a wrong table."""
        if os.environ.get(EXACT) == "1":
            exact.require(self.model_runner.model)
        cpu.make_stage_inputs(self.model_runner)
        compat.renew_input_norms(self.model_runner)
        self.rlctl_weights = WorkerWeights(self)
        self.rlctl_adapters = WorkerAdapters(self.rlctl_weights)
        read_back.record_buffers(self.rlctl_weights.model)

    def rlctl_alive(self) -> None:
        """Compute on the device. After an illegal access, an ECC error or an Xid every call raises, and the process
        lives on; a device that hangs exceeds the limit of the caller."""
        if float(torch.ones(8, device=self.device).sum()) != 8:
            raise RuntimeError(f"{self.device} computes wrong sums")

    def rlctl_clear_cache(self) -> None:
        """Fill the caches of keys and values with zeros."""
        for cache in self.model_runner.kv_caches:
            for part in cache if isinstance(cache, list | tuple) else (cache,):
                part.zero_()

    def rlctl_record_routing(self) -> None:
        self._recorder = recorded_experts.Recorder(self.model_runner)

    def rlctl_take_routing(self) -> dict[str, list[recorded_experts.Span]]:
        """Return choices since the last call by request, from the first worker of a pipeline stage; all workers route
        alike."""
        routing = self._recorder.take()
        return routing if self.rank % self.parallel_config.tensor_parallel_size == 0 else {}
