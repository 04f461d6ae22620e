"""Environments that come with rlctl; each file is an example to write one by."""

from __future__ import annotations

BUILT_IN = {
    "calculator": "rlctl.envs.builtin.calculator:Calculator",
    "guess-number": "rlctl.envs.builtin.guess_number:GuessNumber",
    "nemo-gym": "rlctl.envs.builtin.nemo_gym:NemoGym",
    "nemo-rl": "rlctl.envs.builtin.adapters:NemoRL",
    "openenv": "rlctl.envs.builtin.adapters:OpenEnv",
    "program": "rlctl.envs.builtin.program:Program",
    "python": "rlctl.envs.builtin.python:Python",
    "search": "rlctl.envs.builtin.search:Search",
    "skyrl-gym": "rlctl.envs.builtin.adapters:SkyRLGym",
    "sliding-puzzle": "rlctl.envs.builtin.sliding_puzzle:SlidingPuzzle",
    "textarena": "rlctl.envs.builtin.adapters:TextArena",
    "verifiers": "rlctl.envs.builtin.adapters:Verifiers",
    "wordle": "rlctl.envs.builtin.wordle:Wordle",
}
"""`module:Class` of each, by its name."""
