"""Measures what the gateway of agents' programs adds to a step.

    python benchmarks/gateway.py [--episodes 256 --requests 10 --generation-s 2 --tokens 64]

All episodes ask at once, each request after the answer to the one before, with the whole conversation and one more
message, as programs do. An answer takes a fixed time, in place of an engine. First the episodes ask the engine directly
with their tokens, then a program in another process asks over HTTP (`/v1/chat/completions`). Prints the seconds of both
ways and their ratio, the processor time that this process spent for each request beyond the direct way, and for
comparison the time of an aiohttp server that answers requests of the same sizes with a fixed text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from rlctl.backends.messages import GroupRequest, SampleRequest, SampleResult, Sampling
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.environments.gateway.server import Gateway
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes
from rlctl.rollouts.episodes import Episode
from rlctl.rollouts.gateway_episodes import ModelTurns
from rlctl.tiny_models.text import write_tiny_family

ROW = PromptRow(0, "row 0", "2 + 3?", "5")
FOLLOWING = "And what follows from it? Use the result above, and say which step you take next."
PROGRAM = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "2 + 3?"}]}
ask = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
                             {"content-type": "application/json"})
urllib.request.urlopen(ask).read()
print(json.dumps({"reward": 1.0}))
"""


class FixedTime:
    """Stands for the engine: an answer of fixed tokens after a fixed time."""

    def __init__(self, seconds: float, tokens: list[int], text: str) -> None:
        self.seconds, self.tokens, self.text = seconds, np.array(tokens, np.int32), text

    async def sampled(self, request: SampleRequest) -> SampleResult:
        await asyncio.sleep(self.seconds)
        logprobs = np.full(len(self.tokens), -1.0, np.float32)
        versions = np.zeros(len(self.tokens), np.int32)
        return SampleResult(request.key, self.tokens, logprobs, versions, self.text, "stop")


def opened(model: Path, program: Path) -> EnvironmentEpisodes:
    """The play of a run whose environment is a program."""
    environment = {"name": "program", "params": {"command": [sys.executable, str(program)]}, "turns": 1000}
    config = RlConfig.model_validate({"environment": environment})
    encoder = PromptEncoder.build(load_tokenizer(model, config.model), config.model, config.data, model)
    play = EnvironmentEpisodes.open(config, encoder, ROW)
    assert play is not None
    return replace(play, max_length=1 << 20)


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Seconds on the clock, and of this process's processor time."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu


@contextlib.asynccontextmanager
async def client(requests: int) -> AsyncIterator[Callable[[list[str]], Awaitable[None]]]:
    """A process that plays a program for each address that it is given, once."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", str(requests), stdin=pipe, stdout=pipe
    )
    assert process.stdout is not None
    await process.stdout.readline()  # it has imported what it needs

    async def play(addresses: list[str]) -> None:
        await process.communicate(json.dumps(addresses).encode())
        assert process.returncode == 0

    yield play


async def programs(addresses: list[str], requests: int) -> None:
    async def program(session: aiohttp.ClientSession, address: str) -> None:
        messages = [{"role": "user", "content": "2 + 3?"}]
        for _ in range(requests):
            body = {"model": "policy", "messages": messages}
            async with session.post(f"{address}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                answer = (await response.json())["choices"][0]["message"]
            messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": FOLLOWING}]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(program(session, address) for address in addresses))


async def fixed_server(text: str) -> tuple[web.AppRunner, str]:
    """A server that reads JSON and answers with a text."""

    async def answer(request: web.Request) -> web.Response:
        await request.json()
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def measured(episodes: EnvironmentEpisodes, args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = episodes.turns.encoder.tokenizer
    end = episodes.turns.encoder.stop_token_ids[0]
    words = tokenizer.encode("so the next step is " * args.tokens, add_special_tokens=False)[: args.tokens - 1]
    engine: Any = FixedTime(args.generation_s, [*words, end], tokenizer.decode(words))
    sampling = Sampling(args.tokens)

    def episode(number: int) -> Episode:
        return Episode(engine, str(number), GroupRequest(number, (), (number,), ROW, (), number), number, sampling)

    async def direct(number: int) -> None:
        one = episode(number)
        one.read([1, 2, 3])
        for _ in range(args.requests):
            await one.answer()
            one.read(words[:20])

    async def over_the_gateway() -> None:
        gateway, turns = Gateway(), [ModelTurns(episodes, episode(number)) for number in range(args.episodes)]
        await play([(await gateway.open(one)).url for one in turns])
        assert all(len(one._turns) == args.requests for one in turns)
        for one in turns:
            await one.close()
            assert one._episode.counts["gateway/branches"] == 0
        gateway.close()

    count = args.episodes * args.requests
    direct_s, direct_cpu = await timed(lambda: asyncio.gather(*map(direct, range(args.episodes))))
    async with client(args.requests) as play:
        gateway_s, gateway_cpu = await timed(over_the_gateway)
    runner, address = await fixed_server(engine.text)
    async with client(args.requests) as ask:
        _, server_cpu = await timed(lambda: ask([address] * args.episodes))
    await runner.cleanup()
    return {
        "direct_s": round(direct_s, 2),
        "gateway_s": round(gateway_s, 2),
        "ratio": round(gateway_s / direct_s, 3),
        "cpu_ms_a_request": round(1e3 * (gateway_cpu - direct_cpu) / count, 2),
        "aiohttp_alone_ms_a_request": round(1e3 * server_cpu / count, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--requests", type=int, default=10, help="of an episode")
    parser.add_argument("--generation-s", type=float, default=2.0, help="time of an answer")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print("ready", flush=True)
        asyncio.run(programs(json.load(sys.stdin), args.client))
        return
    with tempfile.TemporaryDirectory() as place:
        program = Path(place, "program.py")
        program.write_text(PROGRAM)
        episodes = opened(write_tiny_family(Path(place, "model")), program)
        gc.collect()
        gc.freeze()  # as in an engine's process once it has loaded
        result = asyncio.run(measured(episodes, args))
    print(json.dumps({"load_average": [round(value, 1) for value in os.getloadavg()], **result}, indent=1))


if __name__ == "__main__":
    main()
