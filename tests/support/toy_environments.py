"""Environments that a run does not have, in each form that is accepted."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from rlctl.environments.interface import Ask, Failure, Message, Step


class Counting:
    """Says the number of the turn, and ends after three. What the model wrote does not matter."""

    def __init__(self, turns: int = 3, tail: str = "") -> None:
        self.turns, self.tail = turns, tail

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self.said, self.number = 0, random.Random(seed).randint(0, 9)
        return [{"role": "user", "content": f"Begin with {self.number}."}]

    async def step(self, message: Message) -> Step:
        self.said += 1
        await asyncio.sleep(0)
        last = self.said == self.turns
        return Step([{"role": "user", "content": f"turn {self.said}{self.tail}"}], 0.5, last, metrics={"said": 1.0})


class Failing(Counting):
    """Fails in its second step, in the way that `how` names, for the rows whose seeds give an even number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def step(self, text: str) -> dict[str, Any]:  # type: ignore[override]
        self.said += 1
        if self.said == 2 and self.number % 2 == 0:
            ways = {
                "raise": lambda: {}["nothing"],
                "die": lambda: os._exit(3),
                "hang": lambda: time.sleep(100),
                "eat": lambda: bytearray(1 << 34),
                "fork": os.fork,
            }
            ways[self.how]()
        print("printed where nobody parses it")
        return {"messages": f"turn {self.said}", "reward": 1, "done": self.said == 3}


class Role(StrEnum):
    USER = "user"


class Odd(Counting):
    """Returns unusual values: half of a surrogate pair, a role of an enumeration, a reward that is not a number."""

    stop = "</a>"

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def step(self, text: str) -> Step:  # type: ignore[override]
        said = [{"role": Role.USER, "content": text + " \ud83d"}]
        return Step(said, float("nan") if self.how == "nan" else 1.0, stop="end")  # type: ignore[arg-type]


class Sums:
    """Tools and a reward, as TRL's trainer takes them."""

    def reset(self, **row: Any) -> str:
        self.sum = 0
        return "Add."

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.sum = a + b
        return self.sum

    def divide(self, a: int, b: int) -> dict[str, float]:
        """Divide one number by another.

        Args:
            a: The number that is divided.
            b: The number that it is divided by.
        """
        return {"result": a / b}

    def get_reward(self) -> float:
        return float(self.sum)


class Down:
    """A tool whose server is down for some words."""

    def reset(self, **row: Any) -> str:
        return "Ask."

    def ask(self, words: str) -> str:
        """Ask a server.

        Args:
            words: What it is asked.
        """
        raise Failure(f"no answer to {words}") if words == "now" else ValueError(f"{words} is no question")


def undescribed(a: int) -> int:
    """Give back a number."""
    return a


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


class Even(Counting):
    """Rewards turns with an even number of characters, which a random model writes. It waits for some seconds before
    each answer, and while there is a file."""

    def __init__(self, hold: str = "", seconds: float = 0.0) -> None:
        super().__init__(turns=2)
        self.hold, self.seconds = hold, seconds

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(self.seconds)
        while self.hold and os.path.exists(self.hold):
            await asyncio.sleep(0.05)
        found = await super().step(message)
        return Step(found.messages, float(len(message["content"]) % 2 == 0), found.done, metrics=found.metrics)


class Calling:
    """Says that the model has called a tool, whatever it wrote: the conversation goes on with results of the tool, with
    words of the user, and to its end."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Step:
        self.said: list[Message] = [{"role": "user", "content": f"Find {seed % 10}."}]
        return self._asks(0)

    def step(self, message: Message) -> Step:
        turn = sum(one["role"] == "assistant" for one in self.said)
        call = {"id": "call_000000", "type": "function", "function": {"name": "find", "arguments": "{}"}}
        answer = {"role": "assistant", "content": message["content"]} | ({"tool_calls": [call]} if turn != 1 else {})
        self.said.append(answer)
        known = len(self.said)
        if turn == 1:
            self.said.append({"role": "user", "content": "Next?"})
        else:
            self.said.append({"role": "tool", "name": "find", "tool_call_id": "call_000000", "content": "is 12"})
        return Step(reward=0.25, done=True) if turn == 3 else self._asks(known)

    def _asks(self, known: int) -> Step:
        about = {"name": "find", "description": "F", "parameters": {"type": "object", "properties": {}}}
        ask = Ask(list(self.said), known, tools=[{"type": "function", "function": about}])
        return Step(reward=0.25 * bool(known), ask=ask)


class Album:
    """Tools that return images: one of PIL, and a list of a text and a part of a message."""

    def reset(self, **row: Any) -> str:
        return "Look."

    def show(self, color: str) -> Any:
        """Show a square.

        Args:
            color: Its color.
        """
        return _shown(color, (64, 64))["image"]

    def compare(self) -> Any:
        """Show a square next to a text."""
        return ["as wide as", _shown("blue", (112, 48))]

    def find(self) -> Any:
        """Find images, which the model is told of."""
        return [{"type": "image", "image": "a.png", "title": "A"}]


class Gymnasium:
    """Has Gymnasium's methods, and an observation of the form that `form` names."""

    def __init__(self, form: str = "text") -> None:
        self.form = form

    def _said(self, text: str) -> Any:
        message = {"role": "user", "content": text}
        return {"text": text, "message": message, "messages": [message], "number": 3}[self.form]

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.turn = 0
        return self._said(f"{(options or {})['prompt']} {seed}"), {"seen": 1}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return self._said(f"{action} again"), 0.5, self.turn == 3, self.turn == 2, {"seen": 1}


RETURNED: dict[str, Any] = {
    "observation": {"observation": "more", "reward": 1.0, "done": True},
    "obs": {
        "obs": [{"role": "user", "content": "more"}],
        "reward": 1,
        "terminated": False,
        "truncated": True,
        "info": {},
    },
    "older tuple": ("more", 1.0, True, {}),
    "text": "more",
    "message": {"role": "user", "content": "more"},
    "messages": [{"role": "user", "content": "more"}],
    "nothing": None,
    "unknown": {"observation": "more", "rewards": 1.0},
    "both": {"observation": "more", "messages": "more"},
    "number": {"observation": 3},
    "pair": ("more", 1.0),
}


class Returning:
    """Returns what `RETURNED` has under a name, from a method."""

    def __init__(self, what: str, method: str = "step") -> None:
        self.what, self.method = what, method

    def reset(self, row: Mapping[str, Any]) -> Any:
        return RETURNED[self.what] if self.method == "reset" else "begin"

    def step(self, text: str) -> Any:
        return RETURNED[self.what]


class Drawing(Counting):
    """Says and shows: an image of PIL in its first message, two of other sizes in the second, of which one is a data
    URL, and none in the third."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        super().reset(row, seed)
        return [{"role": "user", "content": [{"type": "text", "text": "Begin:"}, _shown("red", (64, 64))]}]

    def step(self, text: str) -> Step:  # type: ignore[override]
        self.said += 1
        reward = float(len(text) % 2)
        if self.said > 1:
            return Step("And without one?", reward, self.said == self.turns)
        tall = _shown("green", (40, 100))["image"]
        file = io.BytesIO()
        tall.save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        link = {"type": "image_url", "image_url": {"url": url}}
        parts = [_shown("blue", (112, 48)), {"type": "text", "text": "or"}, link, {"type": "text", "text": "?"}]
        return Step([{"role": "user", "content": parts}], reward)


def _shown(color: str, size: tuple[int, int]) -> dict[str, Any]:
    from rlctl.tiny_models.vision import square

    return {"type": "image", "image": square(color, size)}
