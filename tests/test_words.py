"""No sentence of a docstring, a message or a page begins with Of, That, What, Who or Which, unless it asks a question.

`python tests/test_words.py [ROOM...]` prints the sentences that do, and how many there are in each room.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
WORDS = ("Of", "That", "What", "Who", "Which")
MESSAGE_KEYWORDS = ("help", "hint", "message", "description", "title", "detail", "fix", "why", "reason")
MESSAGE_CALLS = ("say", "tell", "warn", "warning", "info", "error", "fail", "echo", "print", "Fail", "Warn")
ABBREVIATIONS = ("e.g.", "i.e.", "vs.", "cf.", "no.", "etc.")


class Sentence(NamedTuple):
    """A sentence, and the line on which the text that holds it begins."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"

    @property
    def room(self) -> str:
        """The part of the tree that the sentence belongs to."""
        folders = self.file.split("/")[:-1]
        if folders[:2] != ["src", "rlctl"]:
            return folders[0] if folders else self.file
        return "/".join(folders[2:4]) if folders[2:3] == ["backends"] else (folders[2] if folders[2:] else "rlctl")


def sentences(text: str) -> Iterator[str]:
    """Split prose into sentences: at full stops, and where a paragraph, a list item or a section begins."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+", text):
        words = " ".join(paragraph.split())
        begin = 0
        for stop in re.finditer(r"[.!?][\"'`)\]*]*\s+", words):
            goes_on = "..." in stop.string[stop.start() - 2 : stop.end()] and words[stop.end() :][:1].islower()
            if not goes_on and not words[: stop.end()].rstrip().endswith(ABBREVIATIONS):
                yield words[begin : stop.end()].strip()
                begin = stop.end()
        yield words[begin:].strip()


def badly_begun(text: str, *, any_case: bool = False) -> Iterator[str]:
    """Yield the sentences of `text` that begin with one of the words; questions may.

    Code and quotations are part of sentences, so a sentence may begin with a backquote or a bracket before its word.
    """
    pattern = re.compile(rf"[\"'`*_(\[]*(?:{'|'.join(WORDS)})\b(?![-_.(=\[])", re.IGNORECASE if any_case else 0)
    for sentence in sentences(text):
        if pattern.match(sentence) and not sentence.rstrip("\"'`*_)]").endswith("?"):
            yield sentence


def written(node: ast.AST) -> str | None:
    """The text that a string expression gives, with {} where values come in; None where it is not a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = written(node.left), written(node.right)
        return None if left is None and right is None else (left or "{}") + (right or "{}")
    return None


def choices(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that a value may be: both arms of `a if b else c`, and the parts of `a or b`."""
    if isinstance(node, ast.IfExp):
        yield from choices(node.body)
        yield from choices(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from choices(value)
    else:
        yield node


def called(node: ast.Call) -> str:
    """The last name of what is called: `InputError` of `errors.InputError(...)`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every string that stands alone as a statement: docstrings, also those below fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and (text := written(node.value)) is not None:
            yield node.lineno, text


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings given to errors, to functions that tell the user something, and as help, hint and the like."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        values = [k.value for k in node.keywords if k.arg in MESSAGE_KEYWORDS]
        if name.endswith(("Error", "Exit", "Warning")) or name in MESSAGE_CALLS:
            values += node.args
        for value in values:
            for choice in choices(value):
                if (text := written(choice)) is not None:
                    yield choice.lineno, text


def other_strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield all further strings of five words and more: reasons, captions and tables that are shown somewhere."""
    inside = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr | ast.BinOp) for part in ast.walk(n)}
    for node in ast.walk(tree):
        joined = isinstance(node, ast.JoinedStr | ast.BinOp)
        if (joined or id(node) not in inside) and (text := written(node)) is not None and len(text.split()) >= 5:
            yield node.lineno, text


def in_source(path: Path, name: str) -> set[Sentence]:
    """The badly begun sentences of a Python file."""
    tree = ast.parse(path.read_text())
    found = {(line, s) for line, text in [*docstrings(tree), *messages(tree)] for s in badly_begun(text, any_case=True)}
    found |= {(line, s) for line, text in other_strings(tree) for s in badly_begun(text)}
    return {Sentence(name, line, text) for line, text in found}


def in_page(path: Path, name: str) -> set[Sentence]:
    """The badly begun sentences of a Markdown page: of paragraphs, list items and cells, not of headings and code."""
    found, block, begin, code = set(), [], 1, False
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        code ^= line.lstrip().startswith("```")
        cells = [cell for cell in re.split(r"(?<!\\)\|", line) if cell.strip()] if line.startswith("|") else []
        item = re.match(r"\s*(?:[-*]|\d+\.)\s+", line)
        apart = code or not line.strip() or line.startswith(("#", "    ", "```", "|")) or item
        if apart and block:
            found |= {Sentence(name, begin, s) for s in badly_begun("\n".join(block))}
            block = []
        found |= {Sentence(name, number, s) for cell in cells for s in badly_begun(cell.strip())}
        if item or not apart:
            begin = begin if block else number
            block.append(line[item.end() :] if item else line)
    return found


def in_preset(path: Path, name: str) -> set[Sentence]:
    """The badly begun sentences of a preset's description and comments."""
    text = path.read_text()
    described = (yaml.safe_load(text) or {}).get("description", "")
    comments = "\n".join(re.findall(r"(?:^|\s)#\s*(.*)$", text, re.MULTILINE))
    return {Sentence(name, 1, s) for part in (described, comments) for s in badly_begun(part)}


def all_found(root: Path = ROOT) -> list[Sentence]:
    """The badly begun sentences of the sources, the presets and the pages, in the order of files and lines."""
    kinds = [
        (in_source, root.glob("src/**/*.py")),
        (in_source, root.glob("benchmarks/*.py")),
        (in_preset, root.glob("presets/*.yaml")),
        (in_page, [root / "README.md", *root.glob("docs/*.md"), *root.glob("benchmarks/*.md")]),
    ]
    return sorted({s for find, paths in kinds for path in paths for s in find(path, str(path.relative_to(root)))})


def test_sentences_begin_with_a_subject() -> None:
    found = all_found()
    counts = ", ".join(f"{room} {n}" for room, n in Counter(s.room for s in found).most_common())
    assert not found, f"{len(found)} sentences begin with {', '.join(WORDS)} ({counts}):\n" + "\n".join(map(str, found))


def test_the_script_finds_each_kind_of_sentence(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '"""Of a module."""\n'
        "class Spec:\n"
        "    size: int\n"
        '    """Bytes. What a copy takes."""\n'
        "def f(n):\n"
        '    tell("Which one?")\n'
        "    raise InputError(f\"{n} is odd. that is not allowed\", hint='who asked' if n else None)\n"
        '"""That\'s all, e.g. what was said. `that_name` stays."""\n'
    )
    found = sorted(in_source(tmp_path / "module.py", "module.py"))
    assert [(s.line, s.text) for s in found] == [
        (1, "Of a module."),
        (4, "What a copy takes."),
        (7, "that is not allowed"),
        (7, "who asked"),
        (8, "That's all, e.g. what was said."),
    ]
    page = "# What this is\n\nIt works. That is\nall.\n\n- Of a list\n\n| what | Who? Which cell. |\n\n    What code\n"
    (tmp_path / "page.md").write_text(page)
    found = sorted(in_page(tmp_path / "page.md", "page.md"))
    assert [(s.line, s.text) for s in found] == [(3, "That is all."), (6, "Of a list"), (8, "Which cell.")]


if __name__ == "__main__":
    rooms = sys.argv[1:]
    found = all_found()
    for sentence in found:
        if not rooms or sentence.room in rooms:
            print(sentence)
    for room, number in Counter(s.room for s in found).most_common():
        print(f"{number:5} {room}")
    print(f"{len(found):5} in all")
