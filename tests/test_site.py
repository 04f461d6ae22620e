"""The documentation builds as a site without a warning, and its generated pages have every command and key."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.cli import COMMANDS
from rlctl.methods.configuration import schema

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a dead link, or a page that no menu has, fails."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return place


def test_the_commands_are_generated(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    assert [name for name in COMMANDS if f'id="rlctl-{name}"' not in page] == []
    assert "Rollouts per prompt." in page


def test_every_key_is_generated(site: Path) -> None:
    page = (site / "reference" / "configuration.html").read_text()
    keys = [key for key in schema().keys if not schema().is_section(key)]
    assert [key for key in keys if f"<code>{key}</code>" not in page] == []


def test_commands_are_shown_as_code(site: Path) -> None:
    """Code below the item of a list is prose where it is not indented by eight spaces."""
    pages = {page.name: page.read_text() for page in site.glob("*.html")}
    assert [name for name, text in pages.items() if re.search(r"<p>(?:rlctl|make|uv|ray) [^<]*--", text)] == []
    assert [name for name, text in pages.items() if re.search(r"<code>[^<]*\\\|", text)] == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert 'src="http' not in page
    assert "fonts.googleapis" not in page
