"""The live report of a run over HTTP, and the metrics of its last step in Prometheus' text format."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlctl.errors import InputError
from rlctl.report.page import page
from rlctl.report.run_report import reported, state_of
from rlctl.runs.directory import RESUMES, RunDirectory
from rlctl.telemetry.metrics import flatten, read_metrics

PORT = 8642
METRICS, EXPOSITION = "/metrics", "text/plain; version=0.0.4"
LIVE, READY = "/livez", "/readyz"
COUNTERS = ("lost_engines", "lost_ranks", "policy_restarts", "skipped_steps")
"""Metrics of a step whose sums over the run are counters."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
"""The page may only send requests to this server."""
SCRIPT = Path(__file__).with_name("watch.js")


class PageServer(ThreadingHTTPServer):
    """Serves the page of one run. Raises InputError without a run, or if it cannot listen on the address."""

    daemon_threads = True

    def __init__(self, directory: Path, host: str, port: int | None) -> None:
        self.run = RunDirectory(directory)
        self.run.manifest()
        self._made = threading.Lock()
        self._page: tuple[str, bytes] = ("", b"")
        ports = [PORT, 0] if port is None else [port]
        for place, number in enumerate(ports):
            try:
                super().__init__((host, number), _Handler)
                break
            except (OSError, OverflowError) as error:
                if place + 1 < len(ports):
                    continue
                reason = getattr(error, "strerror", None) or error
                hint = "Name another --port (0: any that is free), or another --host."
                raise InputError(f"--host {host} --port {number} cannot be listened on: {reason}.", hint) from error

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"

    def page(self) -> tuple[str, bytes]:
        """Return the page as it is now, after a tag that changes with it."""
        with self._made:
            parts: list[object] = [self.run.is_locked()]
            for path in (self.run.metrics, self.run.log, self.run.path / "manifest.json", self.run.memory):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    parts.append((path.name, status.st_size, status.st_mtime_ns))
            tag = f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'
            if tag != self._page[0]:
                html = page([reported(self.run, state_of(self.run), begun=False)], SCRIPT.read_text(encoding="utf-8"))
                self._page = (tag, html.encode(errors="replace"))
            return self._page

    def exposition(self) -> str:
        """Return the metrics of the last finished step, the step, and whether the run is running, as Prometheus reads
        them: https://prometheus.io/docs/instrumenting/exposition_formats/."""
        lines = read_metrics(self.run.metrics) if self.run.metrics.exists() else []
        values = {"step": 0.0, "running": float(self.run.is_locked())}
        values |= {name: value for name, value in (flatten(lines[-1]) if lines else ()) if math.isfinite(value)}
        label = self.run.path.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        totals = {f"{name}_total": float(sum(line.get(name) or 0 for line in lines)) for name in COUNTERS}
        totals["run_resumes_total"] = float(self.run.manifest().get(RESUMES, 0))
        return "".join(
            f'# TYPE {full} {kind}\n{full}{{run="{label}"}} {value!r}\n'
            for kind, series in (("gauge", values), ("counter", totals))
            for name, value in series.items()
            for full in [f"rlctl_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"]
        )

    def health(self, path: str) -> tuple[HTTPStatus, str]:
        """Answer a probe: live while the run's process lives or has taken all steps, ready from the first step on."""
        state = state_of(self.run)
        lines = read_metrics(self.run.metrics)
        step = lines[-1]["step"] if lines else 0
        holds = state != "stopped" and (path == LIVE or step > 0)
        return HTTPStatus.OK if holds else HTTPStatus.SERVICE_UNAVAILABLE, f"{state}, step {step}\n"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/", METRICS, LIVE, READY):
            places = f"The report is at /, the metrics are at {METRICS}, and probes at {LIVE} and {READY}."
            self._answer(HTTPStatus.NOT_FOUND, places.encode())
            return
        try:
            if path in (LIVE, READY):
                status, text = self.server.health(path)
                self._answer(status, text.encode())
                return
            if path == METRICS:
                self._answer(HTTPStatus.OK, self.server.exposition().encode(), kind=EXPOSITION)
                return
            tag, body = self.server.page()
        except InputError as error:  # the run was removed, or a file of it is damaged
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error.message} {error.hint or ''}".encode())
            return
        headers = [("ETag", tag), ("Cache-Control", "no-cache"), ("Content-Security-Policy", POLICY)]
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", headers)
        else:
            self._answer(HTTPStatus.OK, body, headers, "text/html")

    def _answer(
        self, status: HTTPStatus, body: bytes, headers: Sequence[tuple[str, str]] = (), kind: str = "text/plain"
    ) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # a browser that was closed
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests: the terminal shows the address."""
