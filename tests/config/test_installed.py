"""What is known of installed packages and of checkouts without importing anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rlctl.config.installed import commit_of


def test_a_commit_is_that_of_the_checkout_and_says_whether_something_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(
            ["git", "-C", str(tmp_path / "checkout"), *identity, *arguments], check=True, capture_output=True
        )

    def commit(path: Path) -> str | None:
        commit_of.cache_clear()
        return commit_of(path)

    place = tmp_path / "checkout"
    place.mkdir()
    tracked, ignored = place / "tracked.py", place / "site-packages.py"
    for path in (tracked, ignored):
        path.write_text("a = 1\n")
    git("init", "-q")
    git("add", "tracked.py")
    git("commit", "-qm", "first")
    found = commit(place)
    assert found is not None
    assert len(found) == 12
    assert commit(tracked) == found
    assert commit(ignored) is None  # an installed package may lie in a checkout of something else
    tracked.write_text("a = 2\n")
    assert commit(place) == f"{found} with changes"
    assert commit(tmp_path) is None
