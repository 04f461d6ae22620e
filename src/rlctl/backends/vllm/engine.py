"""A generation engine: vLLM in this process, with in-place weight updates.

`VllmEngine` is a plain class, hosted by a worker group with environment `args.engine_env`. Every token has the version
of its weights; no token uses partial weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.backends.base import EngineSpec
from rlctl.backends.hidden_states import Paths, States
from rlctl.backends.messages import SampleRequest, SampleResult
from rlctl.backends.vllm import compat, hidden_states
from rlctl.backends.vllm.inflight import AwakeClock, EngineLock, Sample
from rlctl.backends.vllm.recorded_experts import Span, assembled, merged
from rlctl.backends.vllm.replicas import LaterHosts, started
from rlctl.cluster.workers import WorkerPlaces
from rlctl.data.image_sources import IMAGE
from rlctl.data.rollouts import TIMEOUT
from rlctl.errors import InputError, PeerFailedError, RlctlError, WaitTimeoutError, WorkerError
from rlctl.garbage import many_objects
from rlctl.settings.training import Rounding
from rlctl.weights.adapters import AdapterRow

ABORTED = "abort"
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of what sleeps
WEIGHT_END, ADAPTER_END = "rlctl_weights", "rlctl_adapters"
"""The parts of a worker that receive weights and adapters (`weights/transfer.py`)."""
POISONED = -1
DISCARDED = -2
"""Stands for the version of weights that were spoiled on purpose."""


class VllmEngine:
    """One engine, from any thread: one decodes (`finished_samples`), and other calls come between its steps."""

    def __init__(self, spec: EngineSpec, index: int = 0, places: WorkerPlaces | None = None) -> None:
        """`places`: for replicas after the first; None: no others."""
        self.spec, self.index = spec, index
        self._lock = EngineLock()
        self._samples: dict[str, Sample] = {}
        """Samples that were not given back yet, by their keys."""
        self._later: list[SampleRequest] = []
        """Samples that wait for a refit; the refit waits for samples in flight."""
        self._rejected = False
        """The weights in use turned out not to be the policy's."""
        self._unclean = False
        """Whether a log-prob that was not finite was returned since the last refit: the cache may hold NaN."""
        self._routed: dict[str, Sample] = {}
        """The samples with recorded experts, and samples that share their prefix."""
        self._spans: dict[str, list[Span]] = {}
        """Records of these samples' experts."""
        self._draining = False
        self._version = 0
        self._updating: int | None = None
        """Version of a refit in progress or failed; the engine refuses to generate."""
        self._adapted = False
        """Adapters follow each base (`AdapterReceiver`)."""
        self._clock = AwakeClock()
        self._failed: Exception | None = None
        """The error of a step. vLLM's scheduler, or the device's context, may be broken although the process lives."""
        self._places = places
        self._engine: Any = None
        self._hosts: LaterHosts | None = None
        self._memory = DeviceMemory(None, shared=False)

    # Start and end

    def start(self) -> None:
        with many_objects():
            compat.check_version()
            self._engine, self._hosts = started(self.spec, self._places)
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
            self._rpc(f"{WEIGHT_END}.close")
            self._rpc(f"{ADAPTER_END}.close")
            if self._hosts is not None:
                self._hosts.close()
            self._engine.shut_down()
            self._engine = None

    def require_alive(self) -> None:
        with self._lock.ask():
            self._rpc("rlctl_alive")
            if self._failed is not None:
                raise WorkerError(f"{self.label} failed in a step: {self._failed}.")

    # Generation

    @property
    def label(self) -> str:
        return f"Engine {self.index}"

    @property
    def version(self) -> int:
        return self._version

    @property
    def asleep(self) -> bool:
        return not self._memory.whole

    def require_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock.ask():
            while self._draining and self._lock.wait(deadline):
                pass  # a refit is due, and comes first
            self._require_whole_weights()
            if self.asleep:
                raise WorkerError(f"{self.label} is asleep: its device is the policy's until it is woken.")

    def add_samples(self, requests: Sequence[SampleRequest]) -> None:
        with self._lock.ask():
            limit = self._engine.max_length
            for request in requests:
                if not 0 < len(request.tokens) < limit:
                    raise InputError(
                        f"A prompt has {len(request.tokens)} tokens; the engine takes 1 to {limit - 1}.",
                        "Raise --max-length, or shorten the prompt.",
                    )
            if self._draining or (self._updating is not None and self.spec.in_flight in ("wait", "turns")):
                self._later += requests
            else:
                self._begin(requests)
            self._lock.tell()

    def _begin(self, requests: Sequence[SampleRequest]) -> None:
        if self.spec.routing and not self._samples:
            self._routed, self._spans = {}, {}
            if self._records:
                # What is found in the cache is not computed, and so not recorded.
                self._engine.reset_prefix_cache()
                self._rpc("rlctl_take_routing")
        for request in requests:
            self._samples[request.key] = Sample(request)
            params = compat.sampling_params(request.sampling, request.seed)
            self._engine.add_request(request.key, prompt_of(request), params)
        if self.spec.routing:
            self._routed |= {request.key: self._samples[request.key] for request in requests}

    def finished_samples(self, timeout_s: float) -> list[SampleResult]:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock.step():
                if self._rejected:
                    self._rejected = False
                    raise WorkerError(f"{self.label} generated with weights that did not pass verification.")
                if finished := [key for key, sample in self._samples.items() if sample.finished]:
                    routed = self._routing(finished)
                    decode = self._engine.decode
                    results = [self._samples.pop(key).result(routed.get(key), decode) for key in finished]
                    self._unclean |= not all(np.isfinite(result.logprobs_R).all() for result in results)
                    self._lock.tell()
                    return results
                if self._held or not self._samples:
                    if not self._lock.wait(deadline):
                        return []
                else:
                    self._take(self._step())
            if time.monotonic() > deadline:
                return []

    def _step(self) -> Sequence[Any]:
        try:
            with self._on_hosts():
                return self._engine.step()
        except Exception as error:
            self._failed = error
            raise

    def drop_samples(self, keys: Sequence[str]) -> None:
        with self._lock.ask():
            self._later = [request for request in self._later if request.key not in keys]
            dropped = [key for key in keys if key in self._samples and not self._samples[key].finished]
            for key in keys:
                self._samples.pop(key, None)
            self._lock.tell()
            with contextlib.suppress(Exception):  # a broken vLLM cannot abort; report its error
                self._engine.abort_request(dropped)

    def _end(self, reason: str, samples: Iterable[Sample]) -> None:
        if ended := [sample for sample in samples if not sample.finished]:
            self._engine.abort_request([sample.request.key for sample in ended])
        for sample in ended:
            sample.end(reason, self._version, self._engine.decode)

    @property
    def _held(self) -> bool:
        """Whether no token may be chosen now: weights change, or the device is the policy's."""
        return self._updating is not None or not self._memory.whole

    def _take(self, outputs: Sequence[Any]) -> None:
        now = self._clock.now()
        for output in outputs:
            if sample := self._samples.get(output.request_id):
                sample.output, sample.begun = output.outputs[0], sample.begun or now
                sample.cached = getattr(output, "num_cached_tokens", None) or sample.cached
                if sample.request.media:
                    sample.require_tokens(output.prompt_token_ids)
                if output.finished:
                    sample.mark(self._version)
                    sample.finished = True
        self._end(TIMEOUT, [sample for sample in self._samples.values() if sample.late(now)])

    def _routing(self, keys: Sequence[str]) -> dict[str, np.ndarray]:
        """int16 [tokens, layers, experts a token] of finished samples; empty unless they are recorded."""
        if not self.spec.routing:
            return {}
        if self._records:
            self._take_routing()
        else:
            routed = {key: getattr(self._samples[key].output, "routed_experts", None) for key in keys}
            self._spans |= {key: [(0, rows)] for key, rows in routed.items() if rows is not None}
        tokens = {key: sample.all_tokens for key, sample in self._routed.items()}
        return assembled(tokens, self._spans, self._engine.recorded_shape)

    def _take_routing(self) -> None:
        for key, spans in merged(self._rpc("rlctl_take_routing")).items():
            self._spans.setdefault(key, []).extend(spans)

    def _forget_routing(self) -> None:
        """Drop records of samples in flight, which new weights recompute, and of finished samples, whose cache is
        gone."""
        if self._records:
            self._take_routing()
        self._routed = dict(self._samples)
        kept = {key for key, sample in self._samples.items() if sample.finished}
        self._spans = {key: spans for key, spans in self._spans.items() if key in kept}

    # Weights

    def weight_version(self) -> int:
        self._require_whole_weights()
        return self._version

    def _require_whole_weights(self) -> None:
        if self._updating == POISONED:
            raise WorkerError(f"{self.label} holds poisoned weights.", "It generates again after a full refit.")
        if self._updating == DISCARDED:
            raise WorkerError(f"{self.label} has discarded its weights.", "It generates again after a full refit.")
        if self._updating is not None:
            raise WorkerError(
                f"{self.label} holds half-updated weights: the refit to version {self._updating} did not succeed.",
                "It generates again after a full refit.",
            )

    # Memory of the device

    def forget_prompts(self) -> None:
        with self._lock.ask():
            self._engine.reset_prefix_cache()

    def sleep(self, refit_next: bool = False) -> None:
        """Samples in flight stay, and are computed again from their tokens once the engine is awake."""
        discards = refit_next and self.spec.discards
        with self._lock.ask():
            if self._samples and self._memory.shared and self._memory.whole:
                self._take(self._engine.pause())
            if self._memory.sleep(discards=discards):
                self._updating = DISCARDED
            self._clock.run(self._memory.whole)
            self._lock.tell()

    def wake(self) -> None:
        with self._lock.ask():
            self._memory.wake()
            if not self._held:
                self._engine.resume()
            self._clock.run(self._memory.whole)
            self._lock.tell()

    # Refits

    def adapters(self) -> AdapterReceiver:
        return AdapterReceiver(self)

    def refit_open(self, table: tuple[Any, ...], receive: str, end: str = WEIGHT_END) -> None:
        """`end`, here and below: the part of each worker that receives."""
        with self._lock.ask():
            self._memory.wake(WEIGHTS)
            if end == WEIGHT_END:
                self._adapted = False
            self._rpc(f"{end}.open", table, receive)

    def refit_adapt(self, rows: tuple[AdapterRow, ...], rounding: Rounding, adds: bool) -> None:
        with self._lock.ask():
            self._rpc(f"{ADAPTER_END}.adapt", rows, rounding, adds)
            self._adapted = True

    def refit_needs(self, end: str = WEIGHT_END) -> list[Any]:
        with self._lock.ask():
            return self._rpc(f"{end}.need", f"engine {self.index}")

    def refit_connect(self, connections: tuple[Any, ...], end: str = WEIGHT_END) -> None:
        with self._lock.ask():
            self._rpc(f"{end}.connect_own", f"engine {self.index}", connections)

    def refit_begin(self, version: int, end: str = WEIGHT_END) -> None:
        """Begin a refit: wait for samples in flight, keep them, or end them (`EngineSpec.in_flight`)."""
        with self._lock.ask():
            self._halt_samples()
            self._memory.wake(WEIGHTS)
            self._updating = version
            self._rpc(f"{end}.begin")

    def _halt_samples(self) -> None:
        if self.spec.in_flight in ("wait", "turns"):
            self._drain()
        elif self.spec.in_flight == "abort":
            self._end(ABORTED, self._samples.values())
            self._lock.tell()
        elif self._samples and self._updating is None:
            self._take(self._engine.pause())
            for sample in self._samples.values():
                if not sample.finished:
                    sample.mark(self._version)

    def _drain(self) -> None:
        deadline = time.monotonic() + self.spec.drain_timeout_s
        self._draining = True
        try:
            while self._samples:
                if not self._lock.wait(deadline):
                    self._begin_later()
                    raise WaitTimeoutError(
                        f"{self.label} still generates {self.spec.drain_timeout_s:.0f} s after a refit was due.",
                        "Raise refit.timeout_s, or set refit.in_flight to keep or abort.",
                    )
        finally:
            self._draining = False
            self._lock.tell()

    def _begin_later(self) -> None:
        later, self._later = self._later, []
        self._begin(later)

    def refit_receive(self, update_info: dict[str, Any], end: str = WEIGHT_END) -> None:
        with self._lock.ask():
            self._rpc(f"{end}.receive_update", update_info)

    def refit_finish(self, version: int, end: str = WEIGHT_END) -> float:
        with self._lock.ask():
            self._rpc(f"{end}.finish")
            if self._adapted and end == WEIGHT_END:
                return 0.0  # a base without its adapters: these complete the refit
            loaded = time.perf_counter()
            if self._unclean:
                # Attention multiplies what follows a request's last token in its last block by 0, and NaN times 0 is
                # NaN: what broken weights left there would reach requests under whole ones (vLLM 0.32 on CPUs).
                self._rpc("rlctl_clear_cache")
                self._unclean = False
            # Samples kept in flight recompute their tokens under the new weights.
            if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._samples)):
                raise WorkerError(f"{self.label} could not drop its prefix cache: requests are still running.")
            if self.spec.routing:
                self._forget_routing()
            self._version, self._updating = version, None
            self._begin_later()
            if not self._held:
                self._engine.resume()
            self._lock.tell()
            return time.perf_counter() - loaded

    def refit_reject(self, version: int) -> None:
        with self._lock.ask():
            self._updating = version
            self._rejected = True
            self._lock.tell()

    def poison(self) -> int:
        """The engine refuses to generate until a full refit succeeds. Returns how many tensors were spoiled."""
        with self._lock.ask():
            self._halt_samples()
            self._memory.wake(WEIGHTS)
            self._updating = POISONED
            return sum(self._rpc("rlctl_weights.poison"))

    def refit_close(self, end: str = WEIGHT_END) -> None:
        with self._lock.ask():
            if self._engine is not None:
                self._rpc(f"{end}.close")

    def received(self, end: str = WEIGHT_END) -> list[Any]:
        with self._lock.ask():
            return self._rpc(f"{end}.received")

    def readings(self, tensors: list[str] | None = None, end: str = WEIGHT_END) -> list[Any]:
        with self._lock.ask():
            self._memory.wake(WEIGHTS)
            return [reading for worker in self._rpc(f"{end}.readings", tensors) for reading in worker]

    def values(self, tensor: str) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        with self._lock.ask():
            self._memory.wake(WEIGHTS)
            return [value for worker in self._rpc("rlctl_weights.values", tensor) for value in worker]

    def record_states(self, paths: Paths) -> None:
        with self._lock.ask():
            self._engine.reset_prefix_cache()
            self._rpc(hidden_states.begin, paths)

    def recorded_states(self, sequence: int, tokens: int, logits: int) -> list[States]:
        with self._lock.ask():
            workers = self._rpc(hidden_states.end, sequence, tokens, logits)
            return [states for of_worker in workers for states in of_worker]

    @contextlib.contextmanager
    def _on_hosts(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self._hosts is not None:
                self._hosts.require(self.label)
            raise

    def _rpc(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Call a method of every vLLM worker, or a function of it. Raises a worker's error, preferring its cause."""
        try:
            with self._on_hosts():
                answers = self._engine.collective_rpc("rlctl_call", args=(method, args))
        except (RuntimeError, ValueError, KeyError, TypeError, AssertionError, AttributeError) as error:
            raise WorkerError(f"{self.label} failed in {method}: {type(error).__name__}: {error}.") from error
        raised = sorted((e for _, e in answers if e is not None), key=lambda e: isinstance(e, PeerFailedError))
        if not raised:
            return [value for value, _ in answers]
        if isinstance(raised[0], RlctlError):
            raise raised[0]
        raise WorkerError(f"{self.label} failed in {method}: {raised[0]}.")


def prompt_of(request: SampleRequest) -> dict[str, Any]:
    """Return a request's prompt as vLLM takes it, which puts the tokens of media in their places itself."""
    ids: list[int] = []
    data: dict[str, list[Any]] = {}
    after = 0
    for part in request.media:
        ids += [*request.tokens[after : part.start], *part.written]
        data.setdefault(part.kind, []).append(_as_image(part.data) if part.kind == IMAGE else part.data)
        after = part.start + part.tokens
    prompt = {"prompt_token_ids": [*ids, *request.tokens[after:]]}
    return {**prompt, "multi_modal_data": data} if data else prompt


def _as_image(pixels: np.ndarray) -> Any:
    """Return an image of PIL: of an array vLLM guesses which axis has the colors."""
    from PIL import Image

    return Image.fromarray(pixels)


class AdapterReceiver:
    """The receiving side for adapters of an engine that keeps their base; methods as in
    `backends.base.AdapterReceiver`."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def refit_adapt(self, rows: tuple[AdapterRow, ...], rounding: Rounding, adds: bool) -> None:
        self._engine.refit_adapt(rows, rounding, adds)

    def refit_open(self, table: tuple[Any, ...], receive: str) -> None:
        self._engine.refit_open(table, receive, ADAPTER_END)

    def refit_needs(self) -> list[Any]:
        return self._engine.refit_needs(ADAPTER_END)

    def refit_connect(self, connections: tuple[Any, ...]) -> None:
        self._engine.refit_connect(connections, ADAPTER_END)

    def refit_begin(self, version: int) -> None:
        self._engine.refit_begin(version, ADAPTER_END)

    def refit_receive(self, update_info: dict[str, Any]) -> None:
        self._engine.refit_receive(update_info, ADAPTER_END)

    def refit_finish(self, version: int) -> float:
        return self._engine.refit_finish(version, ADAPTER_END)

    def refit_reject(self, version: int) -> None:
        self._engine.refit_reject(version)

    def refit_close(self) -> None:
        self._engine.refit_close(ADAPTER_END)

    def weight_version(self) -> int:
        return self._engine.weight_version()

    def received(self) -> list[Any]:
        return self._engine.received(ADAPTER_END)

    def readings(self, tensors: list[str] | None = None) -> list[Any]:
        return self._engine.readings(tensors, ADAPTER_END)

    def poison(self) -> int:
        return self._engine.poison()


class DeviceMemory:
    """Moves an engine's memory off a shared device and back. vLLM's sleep mode moves weights to host memory and drops
    the cache, and restores both at the same addresses. Its CPU platform moves nothing."""

    def __init__(self, engine: Any, *, shared: bool) -> None:
        """If not `shared`, the engine has its device alone, and memory never moves."""
        self._engine, self.shared = engine, shared

    @property
    def _away(self) -> frozenset[str]:
        return self._engine.asleep() if self.shared else frozenset()

    @property
    def whole(self) -> bool:
        return not self._away

    def sleep(self, *, discards: bool = False) -> bool:
        """Move weights to host memory, or discard them, and drop the cache; keep requests. Up to vLLM 0.30, partly
        awake engines stay so. Return whether weights were discarded: vLLM keeps a copy of buffers alone then."""
        if not self.shared or WEIGHTS in self._away:
            return False
        self._engine.sleep(level=2 if discards else 1, mode="keep")
        return discards

    def wake(self, *parts: str) -> None:
        """Bring back `parts` (none named: everything); the cache comes back empty."""
        if back := sorted(self._away & set(parts or (WEIGHTS, CACHE))):
            self._engine.wake_up(tags=back)


if TYPE_CHECKING:
    from rlctl.backends.base import EngineWorker

    WORKER: type[EngineWorker] = VllmEngine
