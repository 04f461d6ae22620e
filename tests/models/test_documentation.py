"""`docs/adding_a_model.md` shows the code as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rlctl.models import qwen3
from rlctl.models.families import FAMILIES

ROOT = Path(__file__).parents[2]


def statements(source: str) -> list[str]:
    """Assignments and functions of a module, docstrings left out."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
        if isinstance(node, ast.FunctionDef | ast.Assign):
            found.append(ast.unparse(node))
    return found


def test_the_example_is_the_file() -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    shown = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert statements(shown[1]) == statements(Path(qwen3.__file__).read_text())


def test_named_files_exist() -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    for name in re.findall(r"`((?:models|weights|backends|tests)/[\w/]+\.py)`", page):
        assert (ROOT / name).exists() or (ROOT / "src" / "rlctl" / name).exists(), name
    assert "qwen3" in FAMILIES
