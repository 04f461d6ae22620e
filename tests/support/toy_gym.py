"""Servers with NeMo Gym's protocol at one address: the head server, and an agent."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientSession, web

REWARD = {"reward": 0.5, "reward_components": {"right": 0.2, "form": 0.3}}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def toy_gym(policy_base_url: str) -> Iterator[str]:
    """Yield the address of the head server. The agent asks the model twice, and rewards a word that the row names."""
    port, loop, started = free_port(), asyncio.new_event_loop(), threading.Event()

    async def servers(_: web.Request) -> web.Response:
        agent = {"guesser": {"host": "127.0.0.1", "port": port, "entrypoint": "app.py"}}
        return web.json_response(json.dumps({"guesser": {"responses_api_agents": agent}, "policy_model": {}}))

    async def run(request: web.Request) -> web.Response:
        row = await request.json()
        asked = row["responses_create_params"]
        extra = json.loads(asked["metadata"]["extra_body"])
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        async with ClientSession() as session:
            for _ in range(2):
                body = extra | {"model": "policy", "messages": messages, "logprobs": True, "top_logprobs": 0}
                async with session.post(f"{policy_base_url}/chat/completions", json=body) as answer:
                    found = await answer.json()
                messages += [found["choices"][0]["message"], {"role": "user", "content": "Again."}]
        return web.json_response({**row, "response": {"output": []}, **REWARD, "turns": len(messages)})

    app = web.Application()
    app.add_routes([web.get("/global_config_dict_yaml", servers), web.post("/run", run)])
    runner = web.AppRunner(app)

    async def serve() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        started.set()

    def work() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())  # an address that is still listened at would be waited for

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(30)
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
