"""`docs/architecture.md` names files, classes and functions that are there, and what it says of methods holds."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CODE = "\n".join(path.read_text() for path in (ROOT / "src" / "rlctl").rglob("*.py"))


def test_named_files_exist() -> None:
    names = re.findall(r"`((?:\w+/)*\w+\.(?:py|toml)|(?:\w+/)+)`", PAGE)
    assert len(names) > 60
    absent = [name for name in names if not any((base / name).exists() for base in (ROOT, ROOT / "src" / "rlctl"))]
    assert not absent


def test_named_classes_and_functions_exist() -> None:
    names = {name for found in re.findall(r"`((?:[A-Z]\w+\.)?[A-Za-z_]\w+)(?:\([^`]*\))?`", PAGE) for name in [found]}
    classes = {name.partition(".")[0] for name in names if name[0].isupper() and not name.isupper()}
    assert len(classes) > 10
    methods = {name.partition(".")[2] for name in names if "." in name}
    called = set(re.findall(r"`(\w+)\(", PAGE))
    assert not [name for name in classes if not re.search(rf"^class {name}\b|^{name} = ", CODE, re.MULTILINE)]
    assert not [name for name in methods | called if not re.search(rf"^\s*def {name}\b", CODE, re.MULTILINE)]


def test_code_outside_of_methods_does_not_ask_which_method_runs() -> None:
    asked = re.compile(r"isinstance\([^()]*, \(?[^()]*(Config|Method|Algorithm)\b|\balgorithm [!=]= \"")
    room = ROOT / "src" / "rlctl"
    paths = [path for path in room.rglob("*.py") if path.relative_to(room).parts[0] not in ("methods", "recipes")]
    assert not [f"{path}: {line}" for path in paths for line in path.read_text().splitlines() if asked.search(line)]


def test_the_loop_reads_on_two_screens() -> None:
    assert len((ROOT / "src" / "rlctl" / "training" / "loop.py").read_text().splitlines()) <= 220


def test_methods_on_texts_know_nothing_of_rl() -> None:
    room = ROOT / "src" / "rlctl" / "methods"
    names = ("text_method", "sft", "preference", "kto", "reward_model")
    assert not [name for name in names if "rlctl.methods.rl" in (room / f"{name}.py").read_text()]


def test_the_files_of_the_loop_and_of_methods_stay_small() -> None:
    """At most 25 modules of rlctl from at most 10 rooms."""
    for path in (*(ROOT / "src/rlctl/training").rglob("*.py"), *(ROOT / "src/rlctl/methods").rglob("*.py")):
        modules = set(re.findall(r"^\s*from (rlctl\.[\w.]+) import", path.read_text(), re.MULTILINE))
        assert len(modules) <= 25, path
        assert len({module.split(".")[1] for module in modules}) <= 10, path
