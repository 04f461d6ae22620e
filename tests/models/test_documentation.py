"""`docs/adding_a_model.md` names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.models.families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_named_files_exist() -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    for name in re.findall(r"`((?:models|weights|backends|tests)/[\w/]+\.py)`", page):
        assert (ROOT / name).exists() or (ROOT / "src" / "rlctl" / name).exists(), name
    assert "qwen3" in FAMILIES
