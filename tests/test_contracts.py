"""The structure of the code: which way imports point, and what a fast start may import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from rlctl.config.plugins import EntryPointGroup

ROOT = Path(__file__).parents[1]
GROUPS = get_args(EntryPointGroup)
ENGINES = ("torch", "ray", "vllm", "transformers", "megatron")


def imported_after(code: str) -> set[str]:
    """The engines that a fresh interpreter has imported after `code`."""
    report = "\nimport sys; print('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = next(line for line in done.stdout.splitlines() if line.startswith("LOADED")).split()
    return set(ENGINES) & set(loaded)


def test_imports_point_down() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]


def test_help_imports_no_engine() -> None:
    assert imported_after("from rlctl.cli import run\nassert run(['--help']) == 0") == set()


def test_importing_a_command_imports_no_engine() -> None:
    code = (
        "import sys; from rlctl.cli import COMMANDS, load_command\n"
        "for name in COMMANDS:\n"
        "    load_command(name)\n"
        f"    engines = set(sys.modules) & set({ENGINES})\n"
        "    assert not engines, f'rlctl {name} imports {engines}'"
    )
    assert imported_after(code) == set()


def test_resolving_a_configuration_imports_no_engine() -> None:
    assert imported_after("from rlctl.methods.configuration import resolve\nresolve('1node')") == set()


def test_resolving_one_configuration_class_loads_few_modules() -> None:
    code = (
        "import sys; from rlctl.config.load import resolve; from rlctl.settings.config import RlctlConfig\n"
        "print(resolve(RlctlConfig, sets=['run.steps=1'], environment={}).config.run.steps)\n"
        "print(*(name for name in sys.modules if name.startswith('rlctl.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    steps, modules = done.stdout.splitlines()
    assert steps == "1"
    assert len(modules.split()) <= 30
    rooms = {name.split(".")[1] for name in modules.split()} - {"torchvision_on_cpu"}  # its .pth file
    assert rooms <= {"config", "settings", "errors"}


def test_modules_that_are_named_in_texts_are_not_above() -> None:
    """import-linter does not see modules that `import_module` or an entry point's text names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    rank = {name.strip(): depth for depth, layer in enumerate(layers) for name in layer.split("|")}
    edges = list(named_modules())
    assert len(edges) > 20
    assert [edge for edge in edges if rank.get(edge[0], 0) > rank.get(edge[1], len(rank))] == []


def named_modules() -> Iterator[tuple[str, str, str]]:
    """Yield the room of each file, the room of a module that one of its texts names, and the text."""
    source = ROOT / "src"
    for path in sorted((source / "rlctl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or node.value in GROUPS:
                continue
            module = node.value.partition(":")[0]
            place = source.joinpath(*module.split("."))
            if re.fullmatch(r"rlctl(\.\w+)+", module) and (place.is_dir() or place.with_suffix(".py").is_file()):
                own = ".".join(path.relative_to(source).with_suffix("").parts[:2])
                yield own, ".".join(module.split(".")[:2]), node.value


MODULES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "src" / "rlctl").rglob("*.py")
}


def imports_of(path: Path) -> set[str]:
    """Return the rlctl modules that a file imports, inside functions and for annotations too."""
    imported = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= inner & MODULES.keys() if inner & MODULES.keys() else {node.module}
    return imported & MODULES.keys()


def test_a_file_imports_at_most_25_modules_of_10_rooms() -> None:
    imports = {name: imports_of(path) for name, path in MODULES.items()}
    rooms = {name: {module.split(".")[1] for module in modules if "." in module} for name, modules in imports.items()}
    assert {name: len(modules) for name, modules in imports.items() if len(modules) > 25} == {}
    assert {name: sorted(several) for name, several in rooms.items() if len(several) > 10} == {}


def test_modules_import_each_other_in_no_circle() -> None:
    left = {name: imports_of(path) - {name} for name, path in MODULES.items()}
    while free := {name for name, modules in left.items() if not modules & left.keys()}:
        left = {name: modules for name, modules in left.items() if name not in free}
    # what is left are circles, and modules above them
    circles = {name: sorted(modules & left.keys()) for name, modules in left.items()}
    assert circles == {}
