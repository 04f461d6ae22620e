"""Environments that come with rlctl; each file is an example to write one by."""

from __future__ import annotations

BUILT_IN = {
    "calculator": "rlctl.environments.builtin.calculator:Calculator",
    "guess-number": "rlctl.environments.builtin.guess_number:GuessNumber",
    "nemo-gym": "rlctl.environments.builtin.nemo_gym:NemoGym",
    "nemo-rl": "rlctl.environments.builtin.other_libraries:NemoRL",
    "openenv": "rlctl.environments.builtin.other_libraries:OpenEnv",
    "program": "rlctl.environments.builtin.program:Program",
    "python": "rlctl.environments.builtin.python:Python",
    "search": "rlctl.environments.builtin.search:Search",
    "skyrl-gym": "rlctl.environments.builtin.other_libraries:SkyRLGym",
    "sliding-puzzle": "rlctl.environments.builtin.sliding_puzzle:SlidingPuzzle",
    "textarena": "rlctl.environments.builtin.other_libraries:TextArena",
    "verifiers": "rlctl.environments.builtin.other_libraries:Verifiers",
    "wordle": "rlctl.environments.builtin.wordle:Wordle",
}
"""`module:Class` of each, by its name."""
