"""Environments that come with rlctl; each file is an example to write one by."""

from __future__ import annotations

BUILT_IN = {
    "calculator": "rlctl.envs.builtin.calculator:Calculator",
    "guess-number": "rlctl.envs.builtin.guess_number:GuessNumber",
}
"""`module:Class` of each, by its name."""
