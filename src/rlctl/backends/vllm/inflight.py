"""Samples in flight: their tokens so far, and which weights chose which of them; and the columns they end up in.

Generation runs in one thread and a refit may come in another. Between two decode steps the generating thread lets go
of the engine; a refit takes it there, so that no token is ever chosen while weights change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlctl.backends.messages import GroupRequest
from rlctl.data.rollouts import ROUTED_EXPERTS, TIMEOUT, RolloutColumns
from rlctl.errors import WorkerError

ABORTED = "abort"
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
        with self._counted():
            self._changed.acquire()
        try:
            self.prepare()
            yield
        finally:
            self._changed.release()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._counting:
            self._asked += 1
        try:
            yield
        finally:
            with self._counting:
                self._asked -= 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Have the engine for one decode step, once nobody else asks for it. Python's locks alone are not fair."""
        while self._asked > 0:
            time.sleep(POLL_S)
        with self._changed:
            self.prepare()
            yield

    def wait(self, deadline: float) -> bool:
        """Let others have the engine until one of them has changed something; False once `deadline` is over."""
        left = deadline - time.monotonic()
        return left > 0 and (self._changed.wait(min(left, 1.0)) or time.monotonic() < deadline)

    def tell(self) -> None:
        """Wake those who wait for a change."""
        self._changed.notify_all()


class AwakeClock:
    """Counts seconds, but for those in which the engine sleeps: they are not a rollout's."""

    def __init__(self) -> None:
        self._asleep_s, self._since = 0.0, None

    def run(self, awake: bool) -> None:
        """Let the clock run, or stop it."""
        now = time.monotonic()
        if self._since is not None:
            self._asleep_s += now - self._since
        self._since = None if awake else now

    def now(self) -> float:
        """Return the time; only differences mean anything."""
        return (time.monotonic() if self._since is None else self._since) - self._asleep_s


@dataclass
class Sample:
    """One sample of a request, as vLLM works on it."""

    request: int
    """Number of the request in the call."""
    index: int
    """Number of the sample in the request."""
    output: Any = None
    """vLLM's completion so far."""
    finished: bool = False
    begun: float | None = None
    """Time of its first token, of the engine's `AwakeClock`."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that chose each token, up to the last refit or to the end."""

    @property
    def tokens(self) -> int:
        return 0 if self.output is None else len(self.output.token_ids)

    def stamp(self, version: int) -> None:
        """Record that `version` chose the tokens since the last stamp."""
        self.versions += [version] * (self.tokens - len(self.versions))


class Flight:
    """The samples of one `generate`, or all that were submitted and not collected yet."""

    def __init__(self, engine: Any, limit_s: float | None = None) -> None:
        """`engine` is vLLM's LLMEngine, which knows each sample by its key in `samples`. `limit_s`: longest time from
        the first token of a sample to its last."""
        self.engine, self.limit_s = engine, limit_s
        self.requests: dict[int, GroupRequest] = {}
        self.samples: dict[str, Sample] = {}
        self.rejected = False
        """The weights in use turned out not to be the policy's."""

    def add(self, request: GroupRequest) -> int:
        """Take `request` in; return its number."""
        row = max(self.requests, default=-1) + 1
        self.requests[row] = request
        return row

    @property
    def finished(self) -> int:
        return sum(sample.finished for sample in self.samples.values())

    @property
    def done(self) -> bool:
        return all(sample.finished for sample in self.samples.values())

    def finished_request(self) -> int | None:
        """The number of the first request whose samples are all finished; None: there is none."""
        unfinished = {sample.request for sample in self.samples.values() if not sample.finished}
        return min(self.requests.keys() - unfinished, default=None)

    def forget(self, request: int) -> None:
        """Let go of a request and its samples."""
        del self.requests[request]
        self.samples = {name: sample for name, sample in self.samples.items() if sample.request != request}

    def take(self, outputs: Sequence[Any], version: int, now: float) -> None:
        """Take the outputs that a decode step under `version` has at `now`."""
        for output in outputs:
            sample = self.samples[output.request_id]
            sample.output, sample.begun = output.outputs[0], sample.begun or now
            if output.finished:
                sample.stamp(version)
                sample.finished = True
        if self.limit_s is not None:
            self._end([n for n, s in self.samples.items() if now - (s.begun or now) > self.limit_s], version, TIMEOUT)

    def stamp(self, version: int) -> None:
        """Record that `version` chose every token so far: the weights are about to change."""
        for sample in self.samples.values():
            if not sample.finished:
                sample.stamp(version)

    def abort(self, version: int) -> None:
        """End the unfinished samples; they keep the tokens that they have."""
        self._end(self.samples, version, ABORTED)

    def _end(self, names: Iterable[str], version: int, reason: str) -> None:
        left = {name: self.samples[name] for name in names if not self.samples[name].finished}
        if not left:
            return
        self.engine.abort_request(list(left))
        for sample in left.values():
            sample.output = sample.output or SimpleNamespace(token_ids=[], text="", logprobs=[])
            sample.output.finish_reason = reason
            sample.stamp(version)
            sample.finished = True

    def of_request(self, request: int) -> list[Sample]:
        """The samples of one request, in order."""
        return sorted((s for s in self.samples.values() if s.request == request), key=lambda sample: sample.index)


def columns_of(prompt: Sequence[int], samples: Sequence[Sample], routed: Sequence[np.ndarray | None]) -> RolloutColumns:
    """The group's columns: prompt and completion of each sample, one behind the other; `routed`: the experts of their
    tokens, int16 [tokens, layers, experts a token]. Raises WorkerError where vLLM's record lacks a log-prob."""
    lengths = [len(prompt) + sample.tokens for sample in samples]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.zeros(offsets[-1], np.int32)
    mask = np.zeros(offsets[-1], bool)
    logprobs = np.zeros(offsets[-1], np.float32)
    versions = np.full(offsets[-1], -1, np.int32)
    for begin, sample in zip(offsets, samples, strict=False):
        first = begin + len(prompt)
        chosen = slice(first, first + sample.tokens)
        tokens[begin:first] = prompt
        tokens[chosen] = sample.output.token_ids
        mask[chosen] = True
        logprobs[chosen] = _chosen_logprobs(sample.output)
        versions[chosen] = sample.versions
    known = [one for one in routed if one is not None]
    further = {ROUTED_EXPERTS: np.concatenate(known)} if len(known) == len(samples) else {}
    return RolloutColumns(tokens, offsets, mask, logprobs, versions, further)


def _chosen_logprobs(completion: Any) -> list[float]:
    record = completion.logprobs
    if record is None or len(record) != len(completion.token_ids):
        raise WorkerError(f"vLLM returned {len(record or ())} log-probs for {len(completion.token_ids)} tokens.")
    return [record[index][token].logprob for index, token in enumerate(completion.token_ids)]
