"""Environments of other libraries, each a module that imports its library when an episode needs it. Packages add others
by entry points of the group `rlctl.environments`, which name a class in the same way."""

from __future__ import annotations

ADAPTERS = {
    "nemo-gym": "rlctl.environments.adapters.nemo_gym:NemoGym",
    "nemo-rl": "rlctl.environments.adapters.nemo_rl:NemoRL",
    "openenv": "rlctl.environments.adapters.openenv:OpenEnv",
    "skyrl-gym": "rlctl.environments.adapters.skyrl_gym:SkyRLGym",
    "textarena": "rlctl.environments.adapters.textarena:TextArena",
    "verifiers": "rlctl.environments.adapters.verifiers:Verifiers",
}
"""`module:Class` of each, by its name."""
