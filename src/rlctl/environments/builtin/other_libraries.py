"""Environments of other libraries. A library whose requirements differ from rlctl's stays in a Python of its own:
OpenEnv's environments are servers, and those of `verifiers` are programs (`verifiers_program.py`)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rlctl.environments.builtin.program import Program
from rlctl.environments.interface import Message, Step
from rlctl.errors import InputError, first_line


def imported(module: str, environment: str) -> Any:
    """Return a module that an environment needs. Raises InputError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(
            f"The environment {environment} needs the package {module}: {first_line(error)}.",
            f"Install it next to rlctl: pip install {module.replace('_', '-')}",
        ) from error


class TextArena:
    """A game of one player of TextArena, by its name. Its reward comes at the end."""

    def __init__(self, game: str) -> None:
        self.game = game

    @classmethod
    def prepare(cls, game: str) -> None:
        imported("textarena", "textarena").make(game)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.env, self.seen = imported("textarena", "textarena").make(self.game), ""
        self.env.reset(num_players=1, seed=seed)
        return self._new()

    def step(self, text: str) -> Step:
        done, _ = self.env.step(text)
        if not done:
            return Step(self._new())
        rewards, _ = self.env.close()
        return Step(reward=float(next(iter(rewards.values()))), done=True)

    def _new(self) -> str:
        """Return what was added to the game's text, which each observation holds from its beginning."""
        _, text = self.env.get_observation()
        new, self.seen = text.removeprefix(self.seen), text
        return str(new).strip()


class SkyRLGym:
    """A registered environment of SkyRL-gym, or `module:Class` of one. The columns of the row are its `extras`."""

    def __init__(self, name: str, **config: Any) -> None:
        self.name, self.config = name, config

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        gym, given = imported("skyrl_gym", "skyrl-gym"), dict(row)
        if self.config:
            from omegaconf import OmegaConf

            given["env_config"] = OmegaConf.create(self.config)
        module, _, name = self.name.rpartition(":")
        if module:
            self.env = getattr(imported(module, "skyrl-gym"), name)(given.get("env_config"), extras=given)
        else:
            made = {"env_config": given["env_config"]} if "env_config" in given else {}
            self.env = gym.make(self.name, extras=given, **made)
        prompt = row["prompt"]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        said, _ = self.env.init(asked)
        return [dict(one) for one in said[len(asked) :]]

    def step(self, text: str) -> Step:
        found = self.env.step(text)
        numbers = {name: value for name, value in found["metadata"].items() if isinstance(value, int | float)}
        return Step(list(found["observations"]), float(found["reward"]), bool(found["done"]), metrics=numbers)

    def close(self) -> None:
        self.env.close()


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
        found = await self.socket.receive_json()
        said = found["data"]
        if found["type"] == "error" and kind == "step":  # the model may read what it has done wrong
            return Step(f"Error: {said.get('message')}", metrics={"refused_actions": 1.0})
        if found["type"] == "error":
            hint = " (raise max_concurrent_envs of the server)" if said.get("code") == "CAPACITY_REACHED" else ""
            raise RuntimeError(f"the OpenEnv server says: {said.get('message')}{hint}")
        seen = said["observation"]
        if self.observation not in seen:
            raise InputError(
                f"An observation of {self.url} has no field {self.observation!r}; its fields are {', '.join(seen)}.",
                "Name the one with the text: --set environment.params.observation=FIELD",
            )
        text = seen[self.observation]
        shown = text if isinstance(text, str) else json.dumps(text)
        return Step(shown, float(said.get("reward") or 0.0), bool(said.get("done")))


class NemoRL:
    """A class of NeMo-RL's `EnvironmentInterface`, `module:Class`, made with `config`. The column `metadata` of a row
    is the environment's first metadata."""

    def __init__(self, environment: str, config: Mapping[str, Any] | None = None, metadata: str = "metadata") -> None:
        self.environment, self.config, self.column = environment, dict(config or {}), metadata

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        module, _, name = self.environment.partition(":")
        kind = getattr(imported(module, "nemo-rl"), name)
        actor = getattr(kind, "__ray_metadata__", None)  # the class below @ray.remote
        self.made = (actor.modified_class if actor else kind)(self.config)
        prompt = row["prompt"]
        self.log = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        self.metadata = row.get(self.column)

    async def step(self, text: str) -> Step:
        self.log.append({"role": "assistant", "content": text})
        found = self.made.step([self.log], [self.metadata])
        if inspect.isawaitable(found):
            found = await found
        said = dict(found.observations[0])
        self.log.append(said)
        self.metadata = found.metadata[0]
        stops = found.next_stop_strings[0] if found.next_stop_strings else None
        done = bool(found.terminateds[0])
        messages = [] if done else [{"role": "user", "content": str(said["content"])}]
        return Step(messages, float(found.rewards[0]), done, tuple(stops or ()))


class Verifiers(Program):
    """An installed environment of Prime's `verifiers`, by its name, in the Python that has it (`python`). Its own data
    are the tasks, of which the seed chooses one; `arguments` are those of its `load_environment`."""

    def __init__(self, environment: str, python: str = "python", arguments: Mapping[str, Any] | None = None) -> None:
        script = Path(__file__).with_name("verifiers_program.py")
        super().__init__([python, str(script), environment, json.dumps(dict(arguments or {}))])
