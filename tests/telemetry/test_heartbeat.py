"""`run.heartbeat_url`: a request after each step, and a service that fails."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from rlctl.errors import ConfigError
from rlctl.methods.configuration import resolve
from rlctl.telemetry.heartbeat import Heartbeat


class Service(http.server.ThreadingHTTPServer):
    """A service that answers with `status` and keeps what it was sent."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[tuple[str, dict[str, object]]] = []
        self.arrived = threading.Semaphore(0)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Service  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.server.status)
        self.end_headers()
        self.server.received.append((self.path, body))
        self.server.arrived.release()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        made.shutdown()


def test_each_step_is_sent_and_a_failing_service_is_named_once(service: Service) -> None:
    told: list[str] = []
    heartbeat = Heartbeat(f"http://127.0.0.1:{service.server_port}/beat/secret", "mine", told.append)
    for step, status in enumerate((200, 500, 404, 200, 500), start=1):
        service.status = status
        heartbeat.log(step, {"reward_mean": 1.0})
        assert service.arrived.acquire(timeout=20)
        while heartbeat._step is not None:
            pass
    heartbeat.close()
    assert service.received == [("/beat/secret", {"run": "mine", "step": step}) for step in range(1, 6)]
    assert [text.partition(" (")[0] for text in told] == [f"run.heartbeat_url failed after step {n}" for n in (2, 5)]
    assert not any("secret" in text for text in told)


def test_a_service_that_is_gone_ends_no_run() -> None:
    told: list[str] = []
    heartbeat = Heartbeat("http://127.0.0.1:1/", "mine", told.append)
    heartbeat.log(1, {})
    heartbeat.close()
    assert len(told) == 1
    assert "Connection refused" in told[0]


@pytest.mark.parametrize("url", ["ftp://host/x", "host:80/x", "https://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="heartbeat_url"):
        resolve(sets=[f"run.heartbeat_url={url}"], environment={})
