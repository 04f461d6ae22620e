"""The page on troubleshooting is found by the words of messages: those it quotes are in the code that says them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OWN = " ".join(path.read_text() for path in (ROOT / "src" / "rlctl").rglob("*.py"))
ELSEWHERE = ("Bus error", "Too many open files", "torch.OutOfMemoryError", "NCCL error", "Watchdog caught")
"""Messages of the system, of torch and of NCCL."""


def joined(source: str) -> str:
    """Return Python's text with the literals of neighboring lines joined, and what they are filled in with cut out."""
    return re.sub(r"\{[^{}]*\}", "...", re.sub(r'"\s*\n?\s*f?"', "", source))


def quoted(section: str) -> list[str]:
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return [text for row in rows for text in re.findall(r"`([^`]*)`", row) if " " in text]


@pytest.mark.parametrize("heading", ["Out of memory", "Containers, limits and NCCL"])
def test_the_messages_that_are_quoted_are_said_somewhere(heading: str) -> None:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    spec = find_spec("vllm")
    assert spec is not None
    places = [Path(place) / "v1" for place in spec.submodule_search_locations or ()]
    names = ("worker/utils.py", "worker/gpu_worker.py", "core/kv_cache_utils.py")
    files = [place / name for place in places for name in names]
    said = joined(OWN + "".join(path.read_text() for path in files))
    messages = [text for text in quoted(section) if not text.startswith(ELSEWHERE)]
    assert len(messages) >= 2
    parts = [part.strip() for text in messages for part in text.split("...") if len(part.strip()) > 3]
    assert [part for part in parts if part not in said] == []
