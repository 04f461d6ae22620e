"""Environments that come with rlctl; each file is an example to write one by."""

from __future__ import annotations

BUILT_IN = {
    "calculator": "rlctl.envs.builtin.calculator:Calculator",
    "guess-number": "rlctl.envs.builtin.guess_number:GuessNumber",
    "nemo-gym": "rlctl.envs.builtin.nemo_gym:NemoGym",
    "nemo-rl": "rlctl.envs.builtin.other_libraries:NemoRL",
    "openenv": "rlctl.envs.builtin.other_libraries:OpenEnv",
    "program": "rlctl.envs.builtin.program:Program",
    "python": "rlctl.envs.builtin.python:Python",
    "search": "rlctl.envs.builtin.search:Search",
    "skyrl-gym": "rlctl.envs.builtin.other_libraries:SkyRLGym",
    "sliding-puzzle": "rlctl.envs.builtin.sliding_puzzle:SlidingPuzzle",
    "textarena": "rlctl.envs.builtin.other_libraries:TextArena",
    "verifiers": "rlctl.envs.builtin.other_libraries:Verifiers",
    "wordle": "rlctl.envs.builtin.wordle:Wordle",
}
"""`module:Class` of each, by its name."""
