"""Environments that come with rlctl; each file is an example to write one by."""

from __future__ import annotations

BUILT_IN = {
    "calculator": "rlctl.environments.builtin.calculator:Calculator",
    "guess-number": "rlctl.environments.builtin.guess_number:GuessNumber",
    "program": "rlctl.environments.builtin.program:Program",
    "python": "rlctl.environments.builtin.python:Python",
    "search": "rlctl.environments.builtin.search:Search",
    "sliding-puzzle": "rlctl.environments.builtin.sliding_puzzle:SlidingPuzzle",
    "wordle": "rlctl.environments.builtin.wordle:Wordle",
}
"""`module:Class` of each, by its name."""
