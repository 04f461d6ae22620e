"""A generation engine: vLLM in this process, token ids in, rollout columns out, weights replaced in place.

`VllmEngine` is a plain class; a worker group hosts it in a process whose environment is `args.engine_env`. Every token
is stamped with the version of the weights that chose it, and no token is ever chosen by half-updated ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.backends.base import EngineSpec
from rlctl.backends.messages import VALUES_A_GROUP, GroupRequest, GroupResult, Sampling, apart
from rlctl.backends.vllm import compat
from rlctl.backends.vllm.inflight import AwakeClock, EngineLock, Flight, Sample, columns_of
from rlctl.backends.vllm.replicas import started
from rlctl.backends.vllm.routing import assembled, merged
from rlctl.cluster.progress import report
from rlctl.cluster.workers import WorkerPlaces
from rlctl.errors import InputError, PeerFailedError, RlctlError, WaitTimeoutError, WorkerError

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of what sleeps
POISONED = -1
"""Stands for the version of weights that were spoiled on purpose."""


class VllmEngine:
    """One engine, from any thread: one call of `generate` and one of `collect` at a time, and other calls between their
    decode steps."""

    def __init__(self, spec: EngineSpec, index: int = 0, places: WorkerPlaces | None = None) -> None:
        """`places` are for the replicas after the first; None: there are none."""
        self.spec, self.index = spec, index
        self._lock, self._one_call = EngineLock(), threading.Lock()
        self._flights: list[Flight] = []
        """The samples in flight: those of `generate`, and those of `submit`."""
        self._submitted: Flight | None = None
        """The samples that were submitted and not collected."""
        self._draining = False
        self._version = 0
        self._updating: int | None = None
        """Version of the refit that has begun and not succeeded; nothing is generated until one does."""
        self._calls = 0
        self._clock = AwakeClock()
        self._places = places
        self._engine: Any = None
        self._memory = DeviceMemory(None, shared=False)

    # Start and end

    def start(self) -> None:
        self.spec.require_environment()
        compat.check_version(self.spec.device)
        self._engine = started(self.spec, self._places)
        self._lock.prepare = self._engine.enter
        self._memory = DeviceMemory(self._engine, shared=self.spec.sleeps)
        self._rpc("rlctl_prepare")
        if self._records:
            self._rpc("rlctl_record_routing")

    @property
    def _records(self) -> bool:
        """Whether rlctl records experts itself: vLLM does, but not on its CPU platform."""
        return self.spec.routing and self.spec.device == "cpu"

    def close(self) -> None:
        with self._lock.ask():
            if self._engine is None:
                return
            self._rpc("rlctl_release")
            self._engine.shut_down()
            self._engine = None

    def require_alive(self) -> None:
        if self._engine is None:
            raise WorkerError(f"Engine {self.index} is not started.")
        with self._lock.ask():
            self._rpc("rlctl_alive")

    # Generation

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float) -> list[GroupResult]:
        with self._one_call:
            deadline = time.monotonic() + timeout_s
            with self._lock.ask():
                while self._draining and self._lock.wait(deadline):
                    pass  # a refit is due, and comes first
                self._require_ready(requests)
                flight = Flight(self._engine, sampling.timeout_s)
                self._flights.append(flight)
            try:
                with self._lock.ask():  # a refit that comes now finds all samples in flight, or none
                    self._begin(flight, requests, sampling)
                self._fly(flight, lambda: flight.done, deadline, timeout_s)
            finally:
                with self._lock.ask():
                    self._flights.remove(flight)  # also where vLLM is broken, and cannot abort
                    self._lock.tell()
                    if not flight.done:
                        flight.abort(self._version)
            routed = self._routing(requests, flight)
            return [self._result(request, flight.of_request(row), routed) for row, request in enumerate(requests)]

    def generate_apart(
        self, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float
    ) -> tuple[list[GroupResult], list[Any]]:
        return apart(self.generate(requests, sampling, timeout_s))

    def submit(self, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        with self._lock.ask():
            self._require_ready(requests)
            if self._submitted is None:
                self._submitted = Flight(self._engine, sampling.timeout_s)
                self._flights.append(self._submitted)
            self._begin(self._submitted, requests, sampling)
            self._lock.tell()

    def collect_apart(self, timeout_s: float) -> tuple[list[GroupResult], list[Any]]:
        deadline = time.monotonic() + timeout_s
        with self._lock.ask():
            if not self._memory.whole:
                self._lock.wait(deadline)  # for a moment, so that whoever asks again does not ask without a pause
            while self._submitted is None and self._lock.wait(deadline):
                pass  # they come from another thread of the driver
            flight = self._submitted
            if flight is None:
                raise WaitTimeoutError(f"Engine {self.index} was given nothing to sample in {timeout_s:.0f} s.")
        self._fly(flight, lambda: flight.finished_request() is not None or not self._memory.whole, deadline, timeout_s)
        with self._lock.ask():
            row = flight.finished_request()
            if row is None:  # it fell asleep
                return [], [None] * VALUES_A_GROUP
            result = self._result(flight.requests[row], flight.of_request(row), {})
            flight.forget(row)
            if not flight.samples:
                self._flights.remove(flight)
                self._submitted = None
                self._lock.tell()
        return apart([result])

    def _require_ready(self, requests: Sequence[GroupRequest]) -> None:
        self._require_whole_weights()
        self._require_awake()
        self._require_prompts_fit(requests)

    def _begin(self, flight: Flight, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        self._calls += 1
        if self._records:
            # What is found in the cache is not computed, and so not recorded: begin without what earlier calls left.
            self._engine.reset_prefix_cache()
            self._rpc("rlctl_take_routing")
        for request in requests:
            row = flight.add(request)
            prompt = {"prompt_token_ids": list(request.prompt_tokens)}
            for index, seed in enumerate(request.seeds):
                name = f"{self._calls}.{row}.{index}"
                flight.samples[name] = Sample(row, index)
                flight.engine.add_request(name, prompt, compat.sampling_params(sampling, seed))

    def _fly(self, flight: Flight, enough: Callable[[], bool], deadline: float, timeout_s: float) -> None:
        """Decode until `flight` has enough, giving way to refits between two steps."""
        while True:
            with self._lock.step():  # `submit` adds samples from another thread
                if enough():
                    return
                while self._held and not (enough() or flight.rejected):
                    if not self._lock.wait(deadline):
                        self._require_whole_weights()
                        break
                if flight.rejected:
                    raise WorkerError(f"Engine {self.index} generated with weights that did not pass verification.")
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(
                        f"Engine {self.index} completed {flight.finished} of {len(flight.samples)} samples in "
                        f"{timeout_s:.0f} s.",
                        "Raise cluster.step_timeout_s, or ask for fewer or shorter completions.",
                    )
                if not enough():
                    self._take(flight.engine.step())
                progress = flight.finished, len(flight.samples)
            report(*progress)

    @property
    def _held(self) -> bool:
        """Whether no token may be chosen now: weights change, or the device is the policy's."""
        return self._updating is not None or not self._memory.whole

    def _take(self, outputs: Sequence[Any]) -> None:
        """Give each flight the outputs of its samples."""
        now = self._clock.now()
        for flight in self._flights:
            flight.take([output for output in outputs if output.request_id in flight.samples], self._version, now)

    def _routing(self, requests: Sequence[GroupRequest], flight: Flight) -> dict[tuple[int, int], np.ndarray]:
        """int16 [tokens, layers, experts a token] of each sample (row, index); empty unless they are recorded."""
        if not self.spec.routing:
            return {}
        prompts = [np.asarray(request.prompt_tokens, np.int32) for request in requests]
        tokens = {
            name: np.concatenate([prompts[sample.request], np.asarray(sample.output.token_ids, np.int32)])
            for name, sample in flight.samples.items()
        }
        if self._records:
            spans = merged(self._rpc("rlctl_take_routing"))
        else:
            given = {name: getattr(sample.output, "routed_experts", None) for name, sample in flight.samples.items()}
            spans = {name: [(0, rows)] for name, rows in given.items() if rows is not None}
        routed = assembled(tokens, spans)
        return {(sample.request, sample.index): routed[name] for name, sample in flight.samples.items()}

    def _result(
        self, request: GroupRequest, samples: list[Sample], routed: dict[tuple[int, int], np.ndarray]
    ) -> GroupResult:
        columns = columns_of(request.prompt_tokens, samples, [routed.get((s.request, s.index)) for s in samples])
        texts = [sample.output.text for sample in samples]
        reasons = [str(sample.output.finish_reason) for sample in samples]
        return GroupResult.of(request, columns, texts, reasons, self._version)

    def _require_prompts_fit(self, requests: Sequence[GroupRequest]) -> None:
        limit = self._engine.max_length
        for request in requests:
            if not 0 < len(request.prompt_tokens) < limit:
                raise InputError(
                    f"The prompt of group {request.group} has {len(request.prompt_tokens)} tokens; the engine "
                    f"takes 1 to {limit - 1}.",
                    "Raise --max-length, or shorten the prompt.",
                )

    # Weights

    def weight_version(self) -> int:
        self._require_whole_weights()
        return self._version

    def _require_whole_weights(self) -> None:
        if self._engine is None:
            raise WorkerError(f"Engine {self.index} is not started.")
        if self._updating == POISONED:
            raise WorkerError(f"Engine {self.index} holds poisoned weights.", "It generates again after a full refit.")
        if self._updating is not None:
            raise WorkerError(
                f"Engine {self.index} holds half-updated weights: "
                f"the refit to version {self._updating} did not succeed.",
                "It generates again after a full refit.",
            )

    # Memory of the device

    def forget_prompts(self) -> None:
        with self._lock.ask():
            self._engine.reset_prefix_cache()

    def sleep(self) -> None:
        """Samples in flight stay, and are computed again from their tokens once the engine is awake."""
        with self._lock.ask():
            if self._flights and self._memory.shared and self._memory.whole:
                self._take(self._engine.pause())
            self._memory.sleep()
            self._clock.run(self._memory.whole)
            self._lock.tell()

    def wake(self) -> None:
        with self._lock.ask():
            self._memory.wake()
            if not self._held:
                self._engine.resume()
            self._clock.run(self._memory.whole)
            self._lock.tell()

    def _require_awake(self) -> None:
        if not self._memory.whole:
            raise WorkerError(f"Engine {self.index} is asleep: its device is the policy's until it is woken.")

    # Refits

    def refit_open(self, init_info: dict[str, Any]) -> None:
        with self._lock.ask():
            self._memory.wake(WEIGHTS)
            self._rpc("init_weight_transfer_engine", init_info)

    def refit_needs(self) -> list[Any]:
        with self._lock.ask():
            return self._rpc("rlctl_need", f"engine {self.index}")

    def refit_connect(self, connections: tuple[Any, ...]) -> None:
        with self._lock.ask():
            self._rpc("rlctl_connect", f"engine {self.index}", connections)

    def refit_begin(self, version: int) -> None:
        """Samples in flight are waited for, kept where they are, or ended, as `EngineSpec.in_flight` says."""
        with self._lock.ask():
            if self._engine is None:
                raise WorkerError(f"Engine {self.index} is not started.")
            self._settle()
            self._memory.wake(WEIGHTS)
            self._updating = version
            self._rpc("rlctl_restart_update")
            self._rpc("start_weight_update")

    def _settle(self) -> None:
        """Bring samples in flight to where the weights may change under them."""
        if not self._flights:
            return
        if self.spec.in_flight == "wait":
            self._drain()
        elif self.spec.in_flight == "abort":
            for flight in self._flights:
                flight.abort(self._version)
            self._lock.tell()
        elif self._updating is None:
            self._take(self._engine.pause())
            for flight in self._flights:
                flight.stamp(self._version)

    def _drain(self) -> None:
        """Let the call in flight finish, and none begin before the refit."""
        deadline = time.monotonic() + self.spec.drain_timeout_s
        self._draining = True
        try:
            while self._flights:
                if not self._lock.wait(deadline):
                    raise WaitTimeoutError(
                        f"Engine {self.index} still generates {self.spec.drain_timeout_s:.0f} s after a refit was due.",
                        "Raise refit.timeout_s, or set refit.in_flight to keep or abort.",
                    )
        finally:
            self._draining = False
            self._lock.tell()

    def refit_receive(self, update_info: dict[str, Any]) -> None:
        with self._lock.ask():
            if self._updating is None:
                raise WorkerError(f"Engine {self.index} was asked for refit_receive before refit_begin.")
            self._rpc("update_weights", update_info)

    def refit_finish(self, version: int) -> float:
        with self._lock.ask():
            if self._updating != version:
                raise WorkerError(
                    f"Engine {self.index} was asked to finish refit {version}; the refit under way is {self._updating}."
                )
            self._rpc("finish_weight_update")
            loaded = time.perf_counter()
            # Samples kept in flight compute what they have again, under the new weights.
            if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._flights)):
                raise WorkerError(f"Engine {self.index} could not drop its prefix cache: requests are still running.")
            self._engine.set_weight_version(str(version))
            self._version, self._updating = version, None
            if not self._held:
                self._engine.resume()
            self._lock.tell()
            return time.perf_counter() - loaded

    def refit_reject(self, version: int) -> None:
        with self._lock.ask():
            self._updating = version
            for flight in self._flights:
                flight.rejected = True
            self._lock.tell()

    def poison(self) -> int:
        """The engine refuses to generate until a full refit succeeds. Returns how many tensors were spoiled."""
        with self._lock.ask():
            self._settle()
            self._memory.wake(WEIGHTS)
            self._updating = POISONED
            self._rpc("rlctl_restart_update")
            return sum(self._rpc("rlctl_poison"))

    def refit_close(self) -> None:
        with self._lock.ask():
            if self._engine is not None:
                self._rpc("rlctl_release")

    def received(self) -> list[Any]:
        with self._lock.ask():
            return self._rpc("rlctl_received")

    def readings(self, tensors: list[str] | None = None) -> list[Any]:
        with self._lock.ask():
            self._memory.wake(WEIGHTS)
            return [reading for worker in self._rpc("rlctl_readings", tensors) for reading in worker]

    def values(self, tensor: str) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        with self._lock.ask():
            self._memory.wake(WEIGHTS)
            return [held for worker in self._rpc("rlctl_values", tensor) for held in worker]

    def _rpc(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Call a method of every vLLM worker, or a function of it. Raises what one raised, its own fault first."""
        try:
            answers = self._engine.collective_rpc("rlctl_call", args=(method, args))
        except (RuntimeError, ValueError, KeyError, TypeError, AssertionError, AttributeError) as error:
            raise WorkerError(f"Engine {self.index} failed in {method}: {type(error).__name__}: {error}.") from error
        raised = sorted((e for _, e in answers if e is not None), key=lambda e: isinstance(e, PeerFailedError))
        if not raised:
            return [value for value, _ in answers]
        if isinstance(raised[0], RlctlError):
            raise raised[0]
        raise WorkerError(f"Engine {self.index} failed in {method}: {raised[0]}.")


class DeviceMemory:
    """Moves an engine's memory off a device that it shares with the policy, and back.

    vLLM's sleep mode moves the weights to host memory and drops the cache; both come back at the addresses that they
    had. Its CPU platform keeps the books and moves nothing; on a GPU this has not been run.
    """

    def __init__(self, engine: Any, *, shared: bool) -> None:
        """If not `shared`, the engine has its device to itself, and nothing ever moves."""
        self._engine, self.shared = engine, shared

    @property
    def _away(self) -> frozenset[str]:
        return self._engine.asleep() if self.shared else frozenset()

    @property
    def whole(self) -> bool:
        return not self._away

    def sleep(self) -> None:
        """Move the weights to host memory and drop the cache; requests are kept. Up to vLLM 0.30 an engine with only
        weights awake stays so."""
        if self.shared and WEIGHTS not in self._away:
            self._engine.sleep(level=1, mode="keep")

    def wake(self, *parts: str) -> None:
        """Bring back `parts` (none named: everything); the cache comes back empty."""
        if back := sorted(self._away & set(parts or (WEIGHTS, CACHE))):
            self._engine.wake_up(tags=back)


if TYPE_CHECKING:
    from rlctl.backends.base import EngineWorker

    WORKER: type[EngineWorker] = VllmEngine
