"""Heartbeat for a monitoring service: a POST to `run.heartbeat_url` after each step."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from http.client import HTTPException

from rlctl.telemetry.metrics import Metrics

ANSWER_S = 10.0


class Heartbeat:
    """Sends the newest finished step in a thread. The first failure in a row is reported, and the next step tries
    again."""

    def __init__(self, url: str, run: str, tell: Callable[[str], None]) -> None:
        self._url, self._run, self._tell = url, run, tell
        self._changed = threading.Condition()
        self._step: int | None = None
        self._ended = self._told = False
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        with self._changed:
            self._step = step  # replaces an older step that was not sent yet
            self._changed.notify()

    def close(self) -> None:
        """Wait for the last step's request, at most ANSWER_S seconds."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(ANSWER_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._step is not None or self._ended)
                step, self._step = self._step, None
            if step is None:
                return
            self._send(step)

    def _send(self, step: int) -> None:
        body = json.dumps({"run": self._run, "step": step}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            urllib.request.urlopen(request, timeout=ANSWER_S).close()
            self._told = False
        except (OSError, HTTPException, ValueError) as error:
            if not self._told:  # name the key, not the URL, which may contain a secret
                self._tell(f"run.heartbeat_url failed after step {step} ({error}); the run continues.")
            self._told = True
