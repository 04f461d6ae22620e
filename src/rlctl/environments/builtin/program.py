"""A program that asks the model with any client of OpenAI's or Anthropic's protocol; one run is one episode.

It gets the row as JSON on stdin, with images as data URLs, and the model's address in the variables that such clients
read (`ModelAddress.variables`). Its last line is a JSON object with `reward`; other numbers are metrics.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlctl.data.image_sources import saved
from rlctl.environments.interface import Agent, ModelAddress
from rlctl.environments.sandboxes import SandboxError

KILLED = (-9, 137)
"""Exit codes after SIGKILL: of a process, and of a shell or sandbox that reports one."""


class Program(Agent):
    """Starts `command` for each episode, in its sandbox. `variables` are added to its environment."""

    sandboxed = True

    def __init__(self, command: str | Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self.command = shlex.split(command) if isinstance(command, str) else list(command)
        self.variables = dict(variables or {})

    async def run(self, row: Mapping[str, Any], seed: int, model: ModelAddress) -> Mapping[str, Any]:
        """Run the program to its end; return its last line."""
        reached = replace(model, url=self.sandbox.address(model.url))
        variables = {**reached.variables(), "EPISODE_SEED": str(seed), **self.variables}
        outcome = await self.sandbox.run(self.command, json.dumps(row, default=_as_json).encode(), variables)
        if outcome.code:
            last = (outcome.errors.strip().splitlines() or ["it wrote no error"])[-1]
            if outcome.code in KILLED:
                raise SandboxError("died", f"something killed the program: {last}")
            raise RuntimeError(f"the program ended with code {outcome.code}: {last}")
        lines = outcome.output.strip().splitlines() or [""]
        try:
            return {**json.loads(lines[-1]), "reward": float(json.loads(lines[-1])["reward"])}
        except (ValueError, TypeError, KeyError):
            raise RuntimeError(
                f'the last line of the program is {lines[-1]!r:.80}, and has to be JSON such as {{"reward": 1.0}}'
            ) from None


def _as_json(value: Any) -> str:
    image = saved(value)
    return str(value) if image is None else f"data:image/png;base64,{base64.b64encode(image).decode()}"
