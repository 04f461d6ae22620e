"""Environments of OpenEnv, which are servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlctl.environments.interface import Step
from rlctl.errors import InputError, first_line


class OpenEnv:
    """A server of OpenEnv at `url`, with a session for each episode. The model's message is the field `action` of an
    action; the text of an observation is its field `observation`."""

    def __init__(self, url: str, action: str = "text", observation: str = "text") -> None:
        self.url = url.rstrip("/")
        self.action, self.observation = action, observation

    async def reset(self, row: Mapping[str, Any], seed: int) -> Step:
        from aiohttp import ClientError, ClientSession

        self.session = ClientSession()
        try:
            self.socket = await self.session.ws_connect(f"{self.url}/ws", max_msg_size=0)
        except (ClientError, OSError) as error:
            raise InputError(
                f"There is no OpenEnv server at {self.url}: {first_line(error)}.",
                "Start it, and give its address: --set environment.params.url=http://HOST:PORT",
            ) from error
        return await self._asked("reset", {"seed": seed})

    async def step(self, text: str) -> Step:
        return await self._asked("step", {self.action: text})

    async def close(self) -> None:
        await self.session.close()

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> Step:
        await self.socket.send_json({"type": kind, "data": data})
        reply = await self.socket.receive_json()
        reply_data = reply["data"]
        if reply["type"] == "error" and kind == "step":  # the model may read its mistake
            return Step(f"Error: {reply_data.get('message')}", metrics={"refused_actions": 1.0})
        if reply["type"] == "error":
            hint = " (raise max_concurrent_envs of the server)" if reply_data.get("code") == "CAPACITY_REACHED" else ""
            raise RuntimeError(f"the OpenEnv server says: {reply_data.get('message')}{hint}")
        seen = reply_data["observation"]
        if self.observation not in seen:
            raise InputError(
                f"An observation of {self.url} has no field {self.observation!r}; its fields are {', '.join(seen)}.",
                "Name the one with the text: --set environment.params.observation=FIELD",
            )
        text = seen[self.observation]
        content = text if isinstance(text, str) else json.dumps(text)
        return Step(content, float(reply_data.get("reward") or 0.0), bool(reply_data.get("done")))
