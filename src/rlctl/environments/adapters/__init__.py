"""Environments of other libraries, one module each, imported when an episode needs it. Packages add others by entry
points of `rlctl.environments`."""

from __future__ import annotations

ADAPTERS = {
    "harbor": "rlctl.environments.adapters.harbor:Harbor",
    "nemo-gym": "rlctl.environments.adapters.nemo_gym:NemoGym",
    "nemo-rl": "rlctl.environments.adapters.nemo_rl:NemoRL",
    "openenv": "rlctl.environments.adapters.openenv:OpenEnv",
    "skyrl-gym": "rlctl.environments.adapters.skyrl_gym:SkyRLGym",
    "textarena": "rlctl.environments.adapters.textarena:TextArena",
    "verifiers": "rlctl.environments.adapters.verifiers:Verifiers",
}
"""`module:Class` of each, by its name."""
