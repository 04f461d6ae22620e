"""The server in front of an engine: it answers the clients of the episodes that its process plays.

Each episode has a key, sent as a bearer token, as `x-api-key`, or as the first part of the path. A request waits for
its answer without holding up others; a stream has its headers at once and comments while it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from rlctl.environments.gateway.chat import ChatCompletions
from rlctl.environments.gateway.completions import Completions, Generate
from rlctl.environments.gateway.exchange import Answer, Exchange, ModelEpisode, RefusedError, WireFormat
from rlctl.environments.gateway.messages import AnthropicMessages
from rlctl.environments.gateway.responses import Responses
from rlctl.environments.interface import MODEL, ModelAddress
from rlctl.errors import MachineError

FORMATS: tuple[WireFormat, ...] = (ChatCompletions(), Completions(), Generate(), Responses(), AnthropicMessages())
LOOPBACK = "127.0.0.1"
ANY_ADDRESS = ("0.0.0.0", "::")
ELSEWHERE = ("198.51.100.1", 9)
"""An address for examples (RFC 5737)."""
LARGEST_REQUEST = 1 << 30
"""Bytes."""
IN_FLIGHT = 256
"""Most requests of an episode that wait for an answer; further ones get 429."""
PORTS = 256
"""Ports that are tried from `environment.listen`'s on: the engines of a machine take one each."""
PING_S = 10.0
"""Seconds between comments in a stream that waits."""
RETRY_S = 1
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""Errors of reading a request whose form is not the protocol's."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """A server with a key for each open episode."""

    def __init__(self, host: str = LOOPBACK, port: int = 0, address: str | None = None) -> None:
        """Listen at the first free port from `port` on, or at any with 0. `address` is what episodes get in place of
        the server's own, with its port for `{port}`."""
        self._host, self._port, self._address = host, port, address
        self._episodes: dict[str, ModelEpisode] = {}
        self._waiting: dict[str, int] = {}
        self._requests = 0
        self._sites: list[web.TCPSite] = []
        self._server: asyncio.Future[str] | None = None

    async def open(self, episode: ModelEpisode) -> ModelAddress:
        """Give an episode a key. The first call starts the server."""
        if self._server is None:
            self._server = asyncio.ensure_future(self._start())
        address = await asyncio.shield(self._server)
        key = secrets.token_hex(16)
        self._episodes[key] = episode
        return ModelAddress(f"{address}/{key}", key)

    def end(self, model: ModelAddress) -> None:
        """Refuse an episode's key from now on."""
        self._episodes.pop(model.key, None)
        self._waiting.pop(model.key, None)

    def close(self) -> None:
        """Stop listening."""
        for server in (site._server for site in self._sites):
            if server is not None:
                server.close()

    async def _start(self) -> str:
        app = web.Application(client_max_size=LARGEST_REQUEST)
        for prefix in ("", "/{key:[0-9a-f]{32}}"):
            for form in FORMATS:
                app.router.add_post(prefix + form.path, self._answering(form))
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)
            app.router.add_get(f"{prefix}/", self._alive)  # also HEAD, which Claude Code sends first
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await self._listen(runner)
        port = runner.addresses[0][1]
        if self._address is not None:
            return self._address.replace("{port}", str(port)).rstrip("/")
        host = await asyncio.to_thread(own_address) if self._host in ANY_ADDRESS else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def _listen(self, runner: web.AppRunner) -> None:
        tried = range(self._port, min(self._port + PORTS, 1 << 16)) if self._port else (0,)
        for port in tried:
            site = web.TCPSite(runner, self._host, port)
            try:
                await site.start()
            except OSError as error:
                await site.stop()
                if error.errno != errno.EADDRINUSE or port == tried[-1]:
                    raise MachineError(
                        f"environment.listen: this machine cannot listen at {self._host}, port {port or 'any'}: "
                        f"{error.strerror}.",
                        "Name an address of each machine with engines (0.0.0.0 is all of them), and a free port.",
                    ) from error
            else:
                self._sites.append(site)
                return

    def _key(self, request: web.Request) -> str:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = (
            request.match_info.get("key"),
            token.strip() if scheme.lower() == "bearer" else None,
            request.headers.get("x-api-key"),
        )
        key = next((key for key in given if key in self._episodes), None)
        if key is None:
            raise RefusedError("This key belongs to no running episode.", "invalid_api_key", 401)
        return key

    def _answering(self, form: WireFormat) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                key = self._key(request)
                body = await _body(request)
                answers = self._asked(key, form, body)
            except RefusedError as refusal:
                return _refusal(form, refusal)
            self._requests += 1
            number, created = self._requests, int(time.time())
            self._waiting[key] = self._waiting.get(key, 0) + 1
            try:
                if body.get("stream"):
                    return await _stream(request, form, answers, lambda got: Exchange(number, body, got, created))
                got = await asyncio.shield(answers)
                return web.json_response(form.whole(Exchange(number, body, got, created)))
            except RefusedError as refusal:
                return _refusal(form, refusal)
            finally:
                if key in self._waiting:
                    self._waiting[key] -= 1

        return handle

    def _asked(self, key: str, form: WireFormat, body: dict[str, Any]) -> asyncio.Future[Sequence[Answer]]:
        if self._waiting.get(key, 0) >= IN_FLIGHT:
            raise RefusedError(f"{IN_FLIGHT} requests are in flight.", "rate_limit_exceeded", 429, RETRY_S)
        try:
            return self._episodes[key].asked(form.question(body))
        except UNREADABLE as error:
            reason = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise RefusedError(f"The request cannot be read: {reason:.200}.") from error

    async def _count(self, request: web.Request) -> web.Response:
        form = AnthropicMessages()
        try:
            episode = self._episodes[self._key(request)]
            return web.json_response({"input_tokens": episode.tokens_of(form.question(await _body(request)))})
        except RefusedError as refusal:
            return _refusal(form, refusal)
        except UNREADABLE as error:
            return _refusal(form, RefusedError(f"The request cannot be read: {error!r:.200}."))

    async def _models(self, request: web.Request) -> web.Response:
        return self._described(request, {"object": "list", "data": [_described(MODEL)], "has_more": False})

    async def _model(self, request: web.Request) -> web.Response:
        return self._described(request, _described(request.match_info["model"]))

    def _described(self, request: web.Request, described: dict[str, Any]) -> web.Response:
        try:
            self._key(request)
        except RefusedError as refusal:
            return _refusal(FORMATS[0], refusal)
        return web.json_response(described)

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response()


def _described(model: str) -> dict[str, Any]:
    """Return a model in OpenAI's form and in Anthropic's."""
    return {
        "id": model, "object": "model", "created": 0, "owned_by": "rlctl",
        "type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z",
    }  # fmt: skip


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise RefusedError(f"The request is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RefusedError("The request is not a JSON object.")
    return body


def _refusal(form: WireFormat, refusal: RefusedError) -> web.Response:
    headers = {"retry-after": str(refusal.retry_s)} if refusal.retry_s is not None else {}
    return web.json_response(form.error(refusal), status=refusal.status, headers=headers)


async def _stream(
    request: web.Request,
    form: WireFormat,
    answers: asyncio.Future[Sequence[Answer]],
    exchange: Callable[[Sequence[Answer]], Exchange],
) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    while not (await asyncio.wait([answers], timeout=PING_S))[0]:
        await stream.write(b": waiting\n\n")
    try:
        events = [_event(name, data) for name, data in form.events(exchange(answers.result()))]
    except RefusedError as refusal:
        error = form.error(refusal)
        await stream.write(_event("error" if "type" in error else "", error))
        return stream
    await stream.write(b"".join(events))
    if form.path.endswith("completions"):
        await stream.write(b"data: [DONE]\n\n")
    return stream


def _event(name: str, data: Any) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(data)}\n\n".encode()


def own_address() -> str:
    """Return the address of this machine by which others reach it: the one that it sends from. Its name often stands
    for a loopback address (127.0.1.1 on Debian)."""
    if given := os.environ.get("RLCTL_ADDRESS"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused, contextlib.suppress(OSError):
        unused.connect(ELSEWHERE)  # sends nothing
        return str(unused.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())
