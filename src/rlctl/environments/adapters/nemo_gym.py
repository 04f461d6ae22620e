"""NeMo Gym rows, played by its servers: rlctl asks the row's agent to run, and answers the agent's requests to the
model.

episode -> agent's /run -> Gym's model server -> `listen` -> the episode -> the model; the agent returns the reward.
Gym's model server knows one `policy_base_url`; a small server listens there and forwards to the episode whose address
is in `responses_create_params.metadata.extra_body`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from typing import Any
from urllib.request import urlopen

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from rlctl.environments.interface import Agent, ModelAddress
from rlctl.errors import InputError, first_line

EPISODE = "rlctl_episode"
"""Field of a question that has the address of its episode."""
LIMIT_S, RETRY_S = 30.0, 0.2
LARGEST_REQUEST = 1 << 30
"""Bytes."""
NO_LIMIT = ClientTimeout(total=None)


class NemoGym(Agent):
    """`head` is the address of Gym's head server, and `listen` the HOST:PORT that Gym's `policy_base_url` names;
    `agent` names the agent of rows without an `agent_ref`."""

    def __init__(self, head: str, listen: str = "127.0.0.1:8700", agent: str | None = None) -> None:
        self.head, self.listen, self.agent = head, listen, agent

    @classmethod
    def prepare(cls, head: str, listen: str = "127.0.0.1:8700", agent: str | None = None) -> str:
        """Check that Gym runs, and listen for its model server. Raises InputError without Gym."""
        servers = _servers(head)
        names = [name for name in servers if agents_of(servers, name)]
        command = [sys.executable, "-m", __name__, listen]
        cls.listener = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert cls.listener.stdout is not None
        if not cls.listener.stdout.readline():
            raise InputError(
                f"environment.params.listen = {listen} is not an address that rlctl can listen at.",
                "Name a HOST of this machine and a PORT, as policy_base_url of NeMo Gym has them.",
            )
        return f"agents of NeMo Gym at {head}: {', '.join(names)}; its policy_base_url is http://{listen}/v1"

    async def run(self, row: Mapping[str, Any], seed: int, model: ModelAddress) -> Mapping[str, Any]:
        """Have the agent of the row play it; return its answer, which has the reward."""
        name = (row.get("agent_ref") or {}).get("name") or self.agent
        servers = await asyncio.to_thread(_servers, self.head)
        addresses = agents_of(servers, str(name))
        if not addresses:
            agents = [server for server in servers if agents_of(servers, server)]
            raise InputError(
                f"The row names the agent {name!r}, and NeMo Gym at {self.head} has {', '.join(agents) or 'none'}.",
                "Start Gym with its configuration, or name one for all rows: --set environment.params.agent=NAME",
            )
        params = dict(row.get("responses_create_params") or {})
        metadata = dict(params.get("metadata") or {})
        extra = json.loads(metadata.get("extra_body") or "{}") | {EPISODE: model.url}
        params["metadata"] = metadata | {"extra_body": json.dumps(extra)}
        async with ClientSession(timeout=NO_LIMIT) as session:
            body = {**row, "responses_create_params": params}
            async with session.post(f"{addresses[0]}/run", json=body) as answer:
                if answer.status != 200:
                    detail = (await answer.text()).strip().partition("\n")[0]
                    raise RuntimeError(f"the agent {name} says: {detail} ({answer.status})")
                return dict(await answer.json())


def agents_of(servers: Mapping[str, Any], name: str) -> list[str]:
    server = servers.get(name)
    kinds = server.get("responses_api_agents") if isinstance(server, Mapping) else None
    return [f"http://{host['host']}:{host['port']}" for host in (kinds or {}).values()]


def _servers(head: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    try:
        with closing(urlopen(f"{head.rstrip('/')}/global_config_dict_yaml", timeout=LIMIT_S)) as answer:
            servers_: Any = OmegaConf.to_container(OmegaConf.create(json.loads(answer.read())), resolve=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"There is no head server of NeMo Gym at {head}: {first_line(error)}.",
            "Start Gym, and give its address: --set environment.params.head=http://HOST:PORT",
        ) from error
    return dict(servers_)


async def _listens(host: str, port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False


async def _pass_on(request: web.Request) -> web.Response:
    content = await request.json()
    address = content.pop(EPISODE, None)
    if address is None:
        return web.json_response({"error": {"message": "This question belongs to no episode."}}, status=400)
    try:
        url = f"{address}{request.path}"
        async with ClientSession(timeout=NO_LIMIT) as session, session.post(url, json=content) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
    except ClientError as error:
        return web.json_response({"error": {"message": f"The episode is over: {error}"}}, status=400)


async def _serve(host: str, port: int) -> web.AppRunner:
    app = web.Application(client_max_size=LARGEST_REQUEST)
    app.router.add_post("/v1/chat/completions", _pass_on)
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, host, port).start()
    return server


async def main() -> None:
    """Listen until the parent process is gone, after the end of another engine's listener."""
    host, _, port = sys.argv[1].rpartition(":")
    gone, server = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read)), None
    while server is None and not gone.done():
        with suppress(OSError) if await _listens(host, int(port)) else nullcontext():
            server = await _serve(host, int(port))
        print("ready", flush=True)
        await asyncio.wait([gone], timeout=None if server else RETRY_S)


if __name__ == "__main__":
    asyncio.run(main())
