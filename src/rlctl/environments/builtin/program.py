"""A program that uses the model through OpenAI's or vLLM's protocol; one run is one episode.

It gets the row as JSON on stdin, with images as data URLs, and the server in `OPENAI_BASE_URL`, `OPENAI_API_KEY` and
`OPENAI_MODEL`. Its last line is a JSON object with `reward`; other numbers are metrics.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from rlctl.data.image_sources import saved
from rlctl.environments.interface import Ask, Message, Step, is_cut

Answered = asyncio.Future[Message | None]
"""The future answer to a question; None: the episode is over."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MODEL = "policy"
OVER = "context_length_exceeded"
"""Error code for a question after the end of the episode. Clients do not retry on it."""


class Program:
    """Starts `command` for each episode and answers its requests. `variables` are added to its environment."""

    def __init__(self, command: str | Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self.command = shlex.split(command) if isinstance(command, str) else list(command)
        self.variables = dict(variables or {})
        self.questions: asyncio.Queue[tuple[Ask, Answered]] = asyncio.Queue()
        self.asked: list[Answered] = []
        self.conversing = asyncio.Lock()
        """One question at a time: its answer reveals whether it continues the previous one."""
        self.answering: Answered | None = None
        self.said: list[Message] = []
        """The conversation that the model has read, in the program's form."""
        self.tools: Any = None
        """The tools that it shows."""
        self.over = False
        self.process: asyncio.subprocess.Process | None = None
        self.result: dict[str, Any] = {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Step:
        routes = {"/v1/chat/completions": self._chat, "/inference/v1/generate": self._generate}
        self.server, address = await serve(routes, "127.0.0.1", 0, {"/v1/models": self._models})
        self.ended = asyncio.ensure_future(self.run(row, seed, address))
        return await self._next()

    async def run(self, row: Mapping[str, Any], seed: int, address: str) -> Mapping[str, Any]:
        """Run the program, whose model is at `address`, to its end; return its last line."""
        variables = {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **variables, "EPISODE_SEED": str(seed), **self.variables},
        )
        output, errors = await self.process.communicate(json.dumps(row, default=_as_json).encode())
        if self.process.returncode:
            last = (errors.decode(errors="replace").strip().splitlines() or ["it wrote no error"])[-1]
            raise RuntimeError(f"the program ended with code {self.process.returncode}: {last}")
        lines = output.decode(errors="replace").strip().splitlines() or [""]
        try:
            return {"reward": float(json.loads(lines[-1])["reward"]), **json.loads(lines[-1])}
        except (ValueError, TypeError, KeyError):
            raise RuntimeError(
                f'the last line of the program is {lines[-1]!r:.80}, and has to be JSON such as {{"reward": 1.0}}'
            ) from None

    async def step(self, message: Message) -> Step:
        assert self.answering is not None
        self.answering.set_result(message)
        return await self._next()

    async def get_reward(self) -> float:
        self._end()
        await self._finished()
        return float(self.result["reward"])

    @property
    def reward_parts(self) -> dict[str, float]:
        """The parts of the reward, if the program reports them (`reward_components`)."""
        return {str(name): float(part) for name, part in (self.result.get("reward_components") or {}).items()}

    async def close(self) -> None:
        self._end()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
        self.ended.cancel()
        await self.server.cleanup()

    async def _next(self) -> Step:
        question = asyncio.ensure_future(self.questions.get())
        await asyncio.wait([question, self.ended], return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            ask, self.answering = question.result()
            return Step(ask=ask)
        question.cancel()
        await self._finished()
        numbers = {name: value for name, value in self.result.items() if isinstance(value, int | float)}
        return Step(done=True, metrics={name: value for name, value in numbers.items() if name != "reward"})

    async def _finished(self) -> None:
        try:
            self.result = dict(await self.ended)
        except RuntimeError:
            if not self.over:
                raise
            self.result = {"reward": 0.0}  # the program failed because its request was refused

    def _end(self) -> None:
        self.over = True
        for answer in self.asked:
            if not answer.done():
                answer.set_result(None)

    # The server

    async def _answer(self, ask: Ask) -> Message:
        answer: Answered = asyncio.get_running_loop().create_future()
        if not self.over:
            self.asked.append(answer)
            self.questions.put_nowait((ask, answer))
            if (message := await answer) is not None:
                return message
        raise _refused("The episode is over: a limit of the run ended it.", OVER)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        async with self.conversing:
            return await self._conversed(request, asked)

    async def _conversed(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        messages = [
            dict(message) | ({"role": "system"} if message["role"] == "developer" else {})
            for message in asked["messages"]
        ]
        same = self.said and self.tools == asked.get("tools") and _alike(messages[: len(self.said)], self.said)
        continued = len(self.said) if same and len(messages) > len(self.said) else 0
        ask = Ask(
            messages=messages,
            known=continued,
            tools=asked.get("tools") or (),
            max_tokens=asked.get("max_completion_tokens") or asked.get("max_tokens"),
            stop=_texts(asked.get("stop")),
            stop_token_ids=tuple(asked.get("stop_token_ids") or ()),
        )
        answer = await self._answer(ask)
        answers = [answer]
        while len(answers) < (asked.get("n") or 1):  # each continues the same tokens in a new context
            answers.append(await self._answer(replace(ask, tokens=answer["prompt_tokens"])))
        choices, replies = [], []
        for index, reply in enumerate(answers):
            calls = reply.get("tool_calls") or None
            ends = [at for stop in ask.stop if (at := reply["content"].find(stop)) >= 0]
            text = reply["content"][: min(ends, default=None)]
            replies.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
            choices.append(
                {
                    "index": index,
                    "finish_reason": "tool_calls" if calls and not is_cut(reply) else _finish(reply),
                    "token_ids": list(reply["tokens"]),
                    "logprobs": {"content": _logprobs(reply)} if asked.get("logprobs") else None,
                }
            )
        self.said, self.tools = [*messages, replies[-1]], asked.get("tools")
        read, written = len(answer["prompt_tokens"]), sum(len(reply["tokens"]) for reply in answers)
        whole = {
            "id": f"chatcmpl-{len(self.said)}",
            "created": 0,
            "model": MODEL,
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
            "prompt_token_ids": list(answer["prompt_tokens"]),
        }
        if not asked.get("stream"):
            whole |= {"choices": [choice | {"message": text} for choice, text in zip(choices, replies, strict=True)]}
            return web.json_response(whole | {"object": "chat.completion"})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for choice, text in zip(choices, replies, strict=True):
            calls = [call | {"index": at} for at, call in enumerate(text.get("tool_calls", ()))]
            delta = text | ({"tool_calls": calls} if calls else {})
            chunk = whole | {"object": "chat.completion.chunk", "choices": [choice | {"delta": delta}]}
            await stream.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        sampling = asked.get("sampling_params") or {}
        if asked.get("stream") or sampling.get("n", 1) != 1:
            raise _refused("stream has to be false and n has to be 1.", "invalid_value")
        ask = Ask(
            tokens=[int(token) for token in asked["token_ids"]],
            max_tokens=sampling.get("max_tokens"),
            stop=_texts(sampling.get("stop")),
            stop_token_ids=tuple(sampling.get("stop_token_ids") or ()),
        )
        async with self.conversing:
            self.said = []
            answer = await self._answer(ask)
        choice = {
            "index": 0,
            "finish_reason": _finish(answer),
            "token_ids": list(answer["tokens"]),
            "logprobs": {"content": _logprobs(answer)},
        }
        return web.json_response({"request_id": asked.get("request_id", ""), "choices": [choice]})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rlctl"}]})


async def serve(
    posts: Mapping[str, Handler], host: str, port: int, gets: Mapping[str, Handler] | None = None
) -> tuple[web.AppRunner, str]:
    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    app.add_routes([web.get(path, handler) for path, handler in (gets or {}).items()])
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, host, port).start()
    return server, f"http://{host}:{server.addresses[0][1]}"


def _refused(message: str, code: str) -> web.HTTPBadRequest:
    error = {"error": {"message": message, "type": "invalid_request_error", "code": code}}
    return web.HTTPBadRequest(text=json.dumps(error), content_type="application/json")


def _as_json(value: Any) -> str:
    image = saved(value)
    return str(value) if image is None else f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _finish(answer: Message) -> str:
    return "length" if is_cut(answer) else "stop"


def _logprobs(answer: Message) -> list[dict[str, Any]]:
    """Return log-probs in OpenAI's form with token ids, like a vLLM server, because texts would need a tokenizer."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(answer["tokens"], answer["logprobs"], strict=True)
    ]


def _alike(some: Sequence[Message], others: Sequence[Message]) -> bool:
    def said(message: Message) -> tuple[Any, ...]:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        return (message["role"], message.get("content") or "", calls)

    return len(some) == len(others) and all(said(a) == said(b) for a, b in zip(some, others, strict=True))
