"""Samples in flight: their tokens, weight versions, and access to the engine. Decoding and refits run in different
threads. A refit takes the engine between two decode steps, so no token is chosen while weights change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlctl.backends.messages import SampleRequest, SampleResult
from rlctl.errors import WorkerError

POLL_S = 0.001


class EngineLock:
    """Decides who may use the engine: between steps the generating thread gives way to whoever asks."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._asked, self._counting = 0, threading.Lock()
        self.prepare: Callable[[], None] = lambda: None
        """Called in each thread that has got the engine, before it uses it."""

    @contextmanager
    def ask(self) -> Iterator[None]:
        """Have the engine to oneself, after the decode step that is running."""
        with self._counting:
            self._asked += 1
        try:
            self._changed.acquire()
        finally:
            with self._counting:
                self._asked -= 1
        try:
            self.prepare()
            yield
        finally:
            self._changed.release()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the engine for one decode step, with fairness that Python's locks lack."""
        while self._asked > 0:
            time.sleep(POLL_S)
        with self._changed:
            self.prepare()
            yield

    def wait(self, deadline: float) -> bool:
        """Release the engine until a change; False after `deadline`."""
        left = deadline - time.monotonic()
        return left > 0 and (self._changed.wait(min(left, 1.0)) or time.monotonic() < deadline)

    def tell(self) -> None:
        """Wake threads that wait for a change."""
        self._changed.notify_all()


class AwakeClock:
    """Counts seconds without the engine's sleep, which is not part of a rollout."""

    def __init__(self) -> None:
        self._asleep_s, self._since = 0.0, None

    def run(self, awake: bool) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._asleep_s += now - self._since
        self._since = None if awake else now

    def now(self) -> float:
        """Return the time; only differences mean anything."""
        return (time.monotonic() if self._since is None else self._since) - self._asleep_s


@dataclass
class Sample:
    """One sample, as vLLM works on it."""

    request: SampleRequest
    output: Any = None
    """vLLM's completion so far."""
    finished: bool = False
    cached: int = 0
    """Context tokens from vLLM's cache; unknown for other replicas."""
    begun: float | None = None
    """Time of its first token on the engine's `AwakeClock`."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that chose each token, up to the last refit or to the end."""

    @property
    def tokens(self) -> int:
        return 0 if self.output is None else len(self.output.token_ids)

    @property
    def all_tokens(self) -> np.ndarray:
        return np.array([*self.request.tokens, *(self.output.token_ids if self.output else ())], np.int32)

    def require_tokens(self, prompt: Sequence[int]) -> None:
        """Raise WorkerError where vLLM reads the prompt's media as other tokens than the request has."""
        if tuple(prompt) != self.request.tokens:
            raise WorkerError(
                f"vLLM reads a prompt with {', '.join(part.kind for part in self.request.media)} as {len(prompt)} "
                f"tokens; it was asked with {len(self.request.tokens)}, or with others.",
                "The model's processor must have the same settings in the trainer and in the engine.",
            )

    def mark(self, version: int) -> None:
        """Record that `version` chose the tokens since the last call."""
        self.versions += [version] * (self.tokens - len(self.versions))

    def end(self, reason: str, version: int, decode: Callable[[Sequence[int]], str]) -> None:
        """End it with the tokens that it has. vLLM holds back the end of a text that may become a stop text."""
        self.output = self.output or SimpleNamespace(token_ids=[], logprobs=[])
        self.output.text = decode(self.output.token_ids)
        self.output.finish_reason, self.output.stop_reason = reason, None
        self.mark(version)
        self.finished = True

    def late(self, now: float) -> bool:
        limit_s = self.request.sampling.timeout_s
        return limit_s is not None and not self.finished and now - (self.begun or now) > limit_s

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        """Return the model's text. vLLM excludes the final stop, which belongs to the text unless it ends a turn."""
        sampling, ended_by = self.request.sampling, self.output.stop_reason
        if ended_by in sampling.turn_ends or ended_by not in (*sampling.stop, *sampling.stop_token_ids):
            return self.output.text
        return self.output.text + (ended_by if isinstance(ended_by, str) else decode([ended_by]))

    def result(self, routed_T: np.ndarray | None, decode: Callable[[Sequence[int]], str]) -> SampleResult:
        tokens, record = list(self.output.token_ids), self.output.logprobs or []
        return SampleResult(
            key=self.request.key,
            tokens_R=np.array(tokens, np.int32),
            logprobs_R=np.array([record[at][token].logprob for at, token in enumerate(tokens)], np.float32),
            versions_R=np.array(self.versions, np.int32),
            text=self.text(decode),
            stop_reason=str(self.output.finish_reason),
            routed_T=routed_T,
            cached_tokens=self.cached,
        )
