"""Fields of the classes of an installed package, read from its source: nothing of the package is imported.

Types are texts made of Python's own names (`int | None`, `Literal['a', 'b']`, `list[int]`), as far as the annotations
say; `Any` where they name a class that a configuration file spells as a mapping, `Dtype` for a torch data type and
`Function` for what only Python can say. Read once a process for each version of the package.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

BUILTINS = {"int", "float", "bool", "str", "list", "dict", "set", "tuple"}
NAMES = {"List": "list", "Dict": "dict", "Set": "set", "Tuple": "tuple", "Sequence": "list", "None": "None"}
DEEPEST = 8
"""Names that stand for other names are followed so far."""


@dataclass(frozen=True)
class InstalledField:
    """One field of a class of the installed version."""

    name: str
    type: str
    default: str | None
    """Text of the default in the source; None if there is none."""
    description: str = ""


@dataclass(frozen=True)
class Module:
    """A parsed source file and the package it belongs to."""

    path: Path
    name: str
    is_package: bool

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those that are installed, in the order given."""
    found = {}
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@functools.cache
def commit_of(path: Path) -> str | None:
    """Return the commit of the git checkout that a directory or a tracked file is in, and whether tracked files differ
    from it; None where there is no checkout, as with an installed package."""

    def git(*arguments: str) -> str:
        place = path if path.is_dir() else path.parent
        command = ["git", "-C", str(place), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if path.is_dir() or git("ls-files", path.name):
            return git("rev-parse", "--short=12", "HEAD") + " with changes" * bool(git("status", "-s", "-uno"))
    except (OSError, subprocess.SubprocessError):
        pass
    return None


def version(package: str) -> str | None:
    """Return the version of an importable package, whatever its distribution is called; None if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    for name in (package, f"{package}-core", f"{package}-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    names = metadata.packages_distributions().get(package)  # reads every distribution: the last resort
    return metadata.version(names[0]) if names else "unknown"


def fields_of(module: str, name: str) -> dict[str, InstalledField] | None:
    """Return the fields of dataclass `name` of `module`, those of its base classes first. None if the package is not
    installed or has no such class."""
    installed = version(module.partition(".")[0])
    return None if installed is None else _fields(module, name, installed)


@functools.cache
def _fields(module: str, name: str, installed: str) -> dict[str, InstalledField] | None:
    source = find_module(module)
    found = _class(source, name) if source is not None else None
    return None if found is None else dict(_class_fields(*found))


@functools.cache
def find_module(name: str) -> Module | None:
    """Return the source of a module, found through its top-level package (a deeper `find_spec` imports it)."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest and spec.origin:
        return Module(Path(spec.origin), name, True)
    for root in spec.submodule_search_locations or ():
        place = Path(root).joinpath(*rest)
        if (place / "__init__.py").is_file():
            return Module(place / "__init__.py", name, True)
        if place.with_suffix(".py").is_file():
            return Module(place.with_suffix(".py"), name, False)
    return None


def _class_fields(module: Module, node: ast.ClassDef) -> Iterator[tuple[str, InstalledField]]:
    for base in node.bases:
        found = _class(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None:
            yield from _class_fields(*found)
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, default = statement.target.id, statement.value
        if name.startswith("_") or "ClassVar" in ast.unparse(statement.annotation) or not _is_given(default):
            continue
        default = _default(default, module)
        text = None if default is None else " ".join(ast.unparse(default).split())
        yield name, InstalledField(name, type_text(statement.annotation, module), text, _docstring(following))


def _default(node: ast.expr | None, module: Module) -> ast.expr | None:
    """Return a default, read from another class where it refers to that (`ModelConfig.dtype`)."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            found = _class(module, name)
        case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=name), ast.Constant(value=attribute)]):
            found = _class(module, name)
        case ast.Call(func=ast.Name(id="field" | "Field"), keywords=[ast.keyword(arg="default", value=value), *_]):
            return value
        case _:
            return node
    for statement in found[1].body if found else ():
        match statement:
            case ast.AnnAssign(target=ast.Name(id=known), value=ast.expr() as value) if known == attribute:
                return _default(value, found[0]) if found else node
    return node


def _is_given(default: ast.expr | None) -> bool:
    """Return whether a dataclass takes the field as an argument (not with `field(init=False)`)."""
    keywords = default.keywords if isinstance(default, ast.Call) else []
    return not any(k.arg == "init" and isinstance(k.value, ast.Constant) and not k.value.value for k in keywords)


def _docstring(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""


def type_text(node: ast.expr, module: Module, depth: int = 0) -> str:
    """Return an annotation as text of Python's own names; aliases and enumerations are followed into their modules."""
    match node:
        case ast.Constant(value=None):
            return "None"
        case ast.Constant(value=str() as text):
            return type_text(ast.parse(text, mode="eval").body, module, depth)
        case ast.BinOp(op=ast.BitOr()):
            return _union([node.left, node.right], module, depth)
        case ast.Attribute(value=ast.Name(id="torch"), attr="dtype"):
            return "Dtype"
        case ast.Attribute():
            return type_text(ast.Name(node.attr), module, depth)
        case ast.Subscript():
            return _subscript(node, module, depth)
        case ast.Name(id=name):
            return _named(name, module, depth)
    return "Any"


def _subscript(node: ast.Subscript, module: Module, depth: int) -> str:
    head = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    match head:
        case "Literal":
            return _literal(parts, module, depth)
        case "Optional":
            return _union([*parts, ast.Constant(None)], module, depth)
        case "Union":
            return _union(parts, module, depth)
        case "Annotated" | "SkipValidation" | "Final":
            return type_text(parts[0], module, depth)
        case "Callable" | "type" | "Type":
            return "Function"
    name = NAMES.get(head, head)
    if name not in BUILTINS:
        return "Any"
    inner = [
        "..." if isinstance(part, ast.Constant) and part.value is ... else type_text(part, module, depth)
        for part in parts
    ]
    return f"{name}[{', '.join('Any' if part in ('Function', 'Dtype') else part for part in inner)}]"


def _literal(parts: list[ast.expr], module: Module, depth: int) -> str:
    """Return the text of a `Literal` that holds words, numbers, and other literals by their names."""
    words: list[str] = []
    for part in parts:
        if isinstance(part, ast.Name | ast.Subscript):
            inner = type_text(part, module, depth + 1)
            if not inner.startswith("Literal["):
                return "Any"
            words.append(inner.removeprefix("Literal[").removesuffix("]"))
        else:
            words.append(ast.unparse(part))
    return f"Literal[{', '.join(words)}]"


def _union(nodes: list[ast.expr], module: Module, depth: int) -> str:
    parts = [part for node in nodes for part in alternatives(type_text(node, module, depth))]
    return "Any" if "Any" in parts else " | ".join(dict.fromkeys(parts))


def alternatives(text: str) -> list[str]:
    """Return the members of a union in the text of a type."""
    node, found = ast.parse(text, mode="eval").body, []
    while isinstance(node, ast.BinOp):
        found.append(ast.unparse(node.right))
        node = node.left
    return [ast.unparse(node), *found[::-1]]


def _named(name: str, module: Module, depth: int) -> str:
    name = NAMES.get(name, name)
    if name in BUILTINS or name == "None":
        return name
    if name in ("Callable", "type"):
        return "Function"
    found = _definition(module, name) if depth < DEEPEST else None
    if found is None:
        return "Any"
    place, statement = found
    if isinstance(statement, ast.ClassDef):
        members = _members(statement)
        return f"Literal[{', '.join(map(repr, members))}]" if members else "Any"
    return type_text(statement, place, depth + 1)


def _members(node: ast.ClassDef) -> list[object]:
    """Return the names of an enumeration's members, and their values where those are words or, in an IntEnum, numbers.
    Another class has none."""
    bases = " ".join(ast.unparse(base) for base in node.bases)
    if "Enum" not in bases:
        return []
    found: list[object] = []
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not name.startswith("_"):
                found.append(name)
                match value:
                    case ast.Constant(value=str() as word) if word.isidentifier():
                        found.append(word)
                    case ast.Constant(value=int() as number) if "IntEnum" in bases:
                        found.append(number)
    return list(dict.fromkeys(found))


def _class(module: Module, name: str) -> tuple[Module, ast.ClassDef] | None:
    found = _definition(module, name)
    return found if found is not None and isinstance(found[1], ast.ClassDef) else None  # type: ignore[return-value]


@functools.cache
def _definition(module: Module, name: str, depth: int = 0) -> tuple[Module, ast.ClassDef | ast.expr] | None:
    """Return the class or the expression that a name stands for, in this module or the one it is imported from."""
    for statement in _statements(module.tree.body):
        match statement:
            case ast.ClassDef(name=found) if found == name:
                return module, statement
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return module, value
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if found == name:
                return module, value
            case ast.ImportFrom() if depth < DEEPEST:
                original = next((a.name for a in statement.names if (a.asname or a.name) == name), None)
                place = find_module(_absolute(statement, module)) if original else None
                if place is not None and original is not None:
                    return _definition(place, original, depth + 1)
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under `if TYPE_CHECKING` and `try`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)


def _absolute(statement: ast.ImportFrom, module: Module) -> str:
    """Return the module that an import names; a relative import starts from `module`."""
    if not statement.level:
        return statement.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - statement.level + module.is_package]
    return ".".join([*parts, *([statement.module] if statement.module else [])])
