"""A sliding puzzle, solved by moves such as `<action>up</action>`. With `environment.append: raw`, texts equal an
imported recipe's."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.environments.interface import Message, Step

FROM = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""The place of the tile that a move slides, as rows and columns from the gap."""


class SlidingPuzzle:
    """Each episode draws a board of 2 to `size` tiles a side and shuffles it by 1 to `shuffle_moves` moves, made odd by
    one more where they are even. The reward is 1 for the solved board. After `max_moves` moves,
    impossible ones among them, the next message ends the episode; looking at the board is not a move."""

    stop = ("</action>",)

    def __init__(self, size: int = 3, shuffle_moves: int = 10, max_moves: int = 30) -> None:
        self.largest, self.shuffle_moves, self.max_moves = size, shuffle_moves, max_moves

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        draw = random.Random(seed)
        shuffles = draw.randint(1, self.shuffle_moves) | 1
        self.size, self.moves = draw.randint(2, self.largest), 0
        self.solved = [*range(1, self.size**2), 0]
        self.tiles = list(self.solved)
        for _ in range(shuffles):
            self.slide(draw.choice([place for place in map(self.beside_gap, FROM) if place is not None]))
        rules = f"""===== SLIDING PUZZLE =====
Put the tiles of this {self.size}x{self.size} board in order, by sliding one tile at a time into the gap.

{self.board()}

The board is solved when the numbers go from 1 to {self.size**2 - 1}, row by row, and the gap is at the bottom right.
Actions: up, down, left and right slide the tile that can move so; slide ROW COLUMN, as in 'slide 1 2', names the tile.
Think first, step by step. Then write one action on a line of its own, in tags:
<action>up</action>
To see the board again, write <action>view</action>
"""
        return [{"role": "user", "content": rules}]

    def step(self, message: Message) -> Step:
        if self.moves >= self.max_moves:
            return Step(f"<error>The limit of {self.max_moves} moves is reached.</error>", done=True)
        before, *opened = re.split("<action>", message["content"], flags=re.IGNORECASE)
        action, *closed = re.split("</action>", opened[-1] if opened else before, flags=re.IGNORECASE)
        if not opened or not closed:
            note = "No move was made: there is no action in tags, as in <action>up</action>"
            return self.told(f"{self.board()}\n\n{note}", no_action=1.0)
        action = action.strip()
        if action == "view":
            return self.told(f"{self.board()}\n\nThis is the board. No move was made.")
        self.moves += 1
        place = self.place_of(action)
        if isinstance(place, str):
            return self.told(place, impossible=1.0)
        tile = self.tiles[place]
        self.slide(place)
        if self.tiles == self.solved:
            return Step("<environment>\nThe puzzle is solved.\n</environment>\n", 1.0, True, metrics={"moves": 1.0})
        return self.told(f"Tile {tile} slid {action if action in FROM else 'into the gap'}.", moves=1.0)

    def told(self, text: str, **metrics: float) -> Step:
        return Step(f"<environment>\n{text}\n</environment>\n", metrics=metrics)

    def place_of(self, action: str) -> int | str:
        if action in FROM:
            place = self.beside_gap(action)
            return f"No tile can slide {action}." if place is None else place
        if not action.startswith("slide "):
            return "There is no such action."
        if not re.fullmatch(r"slide\s+[-+]?\d{1,9}\s+[-+]?\d{1,9}", action):
            return "Write it as: slide ROW COLUMN"
        row, column = (int(number) - 1 for number in action.split()[1:])
        if not (0 <= row < self.size and 0 <= column < self.size):
            return f"Rows and columns go from 1 to {self.size}."
        place = row * self.size + column
        return place if place in map(self.beside_gap, FROM) else "The tile is not next to the gap."

    def beside_gap(self, move: str) -> int | None:
        """Return the place of the tile that a move slides; None: the board ends there."""
        gap, (rows, columns) = self.tiles.index(0), FROM[move]
        row, column = gap // self.size + rows, gap % self.size + columns
        return row * self.size + column if 0 <= row < self.size and 0 <= column < self.size else None

    def slide(self, place: int) -> None:
        gap = self.tiles.index(0)
        self.tiles[gap], self.tiles[place] = self.tiles[place], 0

    def board(self) -> str:
        """Return the board as text, with the numbers of its rows and columns."""
        width = len(str(self.size**2 - 1)) + 2
        rows = [self.tiles[i : i + self.size] for i in range(0, self.size**2, self.size)]
        lines = ["".join(" " * width if not tile else f" {tile:>{width - 2}} " for tile in row) for row in rows]
        edge = f"  +{'-' * width * self.size}+"
        columns = "    " + "".join(f"{i + 1:^{width}}" for i in range(self.size))
        return "\n".join([edge, *(f"{i + 1} |{line}|" for i, line in enumerate(lines)), edge, columns])
