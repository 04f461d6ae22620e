"""Code in the README and the pages is that of the file in the repository that the paragraph in front of it names."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
NAMED = re.compile(r"`((?:examples|src|presets|docs|docker)/[\w./-]+)`")
COMMAND = re.compile(r"(rlctl|make|python|uv|docker|sbatch|kubectl|#) ")
KINDS = {".py", ".jsonl", ".yaml", ".sbatch"}


class Snippet(NamedTuple):
    """Lines of code without a blank line between them, and the files that may hold them."""

    page: str
    files: tuple[Path, ...]
    code: str


def snippets() -> Iterator[Snippet]:
    for path in PAGES:
        before = ""
        for token in MarkdownIt().parse(path.read_text()):
            if token.type == "inline":
                before = token.content
            if token.type not in ("fence", "code_block"):
                continue
            named = [ROOT / name for name in NAMED.findall(before)]
            files = [one for name in named for one in (sorted(name.iterdir()) if name.is_dir() else [name])]
            files = [one for one in files if one.suffix in KINDS and one.is_file()]
            for code in re.split(r"\n\s*\n", textwrap.dedent(token.content).strip("\n")) if files else ():
                if not COMMAND.match(code):
                    yield Snippet(path.name, tuple(files), code)


@pytest.mark.parametrize("snippet", list(snippets()), ids=lambda one: f"{one.page}: {one.code.splitlines()[0][:50]}")
def test_a_snippet_is_in_the_file_that_is_named(snippet: Snippet) -> None:
    assert any(snippet.code in file.read_text() for file in snippet.files), snippet.code


def test_the_snippets_are_found() -> None:
    found = {(one.page, file.name) for one in snippets() for file in one.files}
    assert {("README.md", "rewards.py"), ("README.md", "questions.jsonl"), ("howto.md", "questions.jsonl")} <= found
    assert {("howto.md", "rewards.py"), ("python_api.md", "python_api.py"), ("adding_a_model.md", "qwen3.py")} <= found
