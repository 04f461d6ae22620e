"""`docs/reliability.md` names tests that are there, and says which of them are slow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


def slow_by_test() -> dict[str, bool]:
    """Return every test of the project, and whether `make test` leaves all of its cases out."""
    found: dict[str, bool] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        all_slow = re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", text, re.MULTILINE) is not None
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marked = any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list)
                found[node.name] = all_slow or marked
    return found


def test_each_row_is_held_by_a_test() -> None:
    tests = slow_by_test()
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| fault")]
    assert len(rows) > 35
    for row in rows:
        named = re.findall(r"(\*?)`(test_\w+)`\*?", row.split(" | ")[-1])
        assert named, f"no test holds: {row}"
        for slanted, name in named:
            assert name in tests, f"there is no test {name}"
            assert tests[name] == bool(slanted), f"{name} is {'slow' if tests[name] else 'not slow'}"
