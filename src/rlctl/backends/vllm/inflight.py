"""Samples in flight: what each has so far, and which weights chose which of its tokens.

Generation runs in one thread and a refit may come in another. Between two decode steps the generating thread lets go
of the engine; a refit takes it there, so that no token is ever chosen while weights change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

ABORTED = "abort"
POLL_S = 0.001


class Turns:
    """Who may use the engine: the generating thread between steps gives way to whoever asks."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._asked, self._counting = 0, threading.Lock()

    @contextmanager
    def ask(self) -> Iterator[None]:
        """The engine to oneself, after the decode step that is running."""
        with self._counted():
            self._changed.acquire()
        try:
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
        """The engine for one decode step, once nobody else asks for it: locks of Python are not fair by themselves."""
        while self._asked > 0:
            time.sleep(POLL_S)
        with self._changed:
            yield

    def wait(self, deadline: float) -> bool:
        """Let others have the engine until one of them has changed something; False once `deadline` is over."""
        left = deadline - time.monotonic()
        return left > 0 and (self._changed.wait(min(left, 1.0)) or time.monotonic() < deadline)

    def tell(self) -> None:
        """Something has changed."""
        self._changed.notify_all()


@dataclass
class Sample:
    """One request of vLLM."""

    row: int
    """Which request of the call."""
    index: int
    """Which sample of it."""
    output: Any = None
    """vLLM's completion so far."""
    finished: bool = False
    versions: list[int] = field(default_factory=list)
    """Version of the weights that chose each token, up to the last refit or to the end."""

    @property
    def tokens(self) -> int:
        return 0 if self.output is None else len(self.output.token_ids)

    def stamp(self, version: int) -> None:
        """The tokens since the last stamp were chosen by `version`."""
        self.versions += [version] * (self.tokens - len(self.versions))


class Flight:
    """The samples of one call."""

    def __init__(self, engine: Any) -> None:
        """`engine` is vLLM's LLMEngine, which knows each sample by its key in `samples`."""
        self.engine = engine
        self.samples: dict[str, Sample] = {}
        self.rejected = False
        """The weights in use turned out not to be the policy's."""

    @property
    def finished(self) -> int:
        return sum(sample.finished for sample in self.samples.values())

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples.values())

    @property
    def done(self) -> bool:
        return all(sample.finished for sample in self.samples.values())

    def take(self, outputs: Sequence[Any], version: int) -> None:
        """What a decode step under `version` answered."""
        for output in outputs:
            sample = self.samples[output.request_id]
            sample.output = output.outputs[0]
            if output.finished:
                sample.stamp(version)
                sample.finished = True

    def stamp(self, version: int) -> None:
        """Weights are about to change: everything chosen so far was chosen by `version`."""
        for sample in self.samples.values():
            if not sample.finished:
                sample.stamp(version)

    def abort(self, version: int) -> None:
        """End what is unfinished; it keeps the tokens that it has."""
        left = {name: sample for name, sample in self.samples.items() if not sample.finished}
        self.engine.abort_request(list(left))
        for sample in left.values():
            sample.output = sample.output or SimpleNamespace(token_ids=[], text="", logprobs=[])
            sample.output.finish_reason = ABORTED
            sample.stamp(version)
            sample.finished = True

    def of_row(self, row: int) -> list[Sample]:
        """The samples of one request, in order."""
        return sorted((s for s in self.samples.values() if s.row == row), key=lambda sample: sample.index)
