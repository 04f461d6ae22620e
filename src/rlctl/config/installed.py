"""Fields of installed classes, read from source without importing.

Reads only the needed modules, in under a second; griffe loads whole packages (7 s for Megatron-Core, over a minute for
vLLM). Annotations are evaluated with names from the source: `Open` is a mapping, `Dtype` a torch dtype, `Function` a
Python-only value.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import subprocess
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

DEEPEST = 8
"""Imports of a name are followed so far."""
Dtype = Literal["float32", "bfloat16", "float16", "uint8", "fp32", "bf16", "fp16", "fp8"]
"""Torch data types by their names; 8-bit states of an optimizer are bytes."""


class Open:
    """Stands for a class of the package, or what its source does not say: any value is taken."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return cls

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class Function:
    """Stands for types that only Python code can give, such as functions."""

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> dict[str, Any]:
        return {}


class First:
    """Represents wrapper types that do not restrict values."""

    def __class_getitem__(cls, parts: Any) -> Any:
        return parts[0] if isinstance(parts, tuple) else parts


TYPES = {
    "Any": Open, "object": Open, "Literal": Literal, "Optional": typing.Optional, "Union": typing.Union,
    "Annotated": First, "Final": First, "SkipValidation": First,
    "Callable": Function, "Type": Function, "type": Function,
    "int": int, "float": float, "bool": bool, "str": str,
    "list": list, "List": list, "Sequence": list, "dict": dict, "Dict": dict, "set": set, "Set": set, "tuple": tuple,
    "Tuple": tuple, "typing": typing, "torch": SimpleNamespace(dtype=Dtype),
}  # fmt: skip
"""Names that mean the same in every module."""


@dataclass(frozen=True)
class InstalledField:
    """One field of a class of the installed version."""

    name: str
    type: Any
    default: str | None
    """Source text of the default; None: no default."""
    description: str = ""
    narrower: Any = None
    """The type of the field that the default is taken from, which may say more; None: the default is written out."""


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
    versions = {}
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@functools.cache
def commit_of(path: Path) -> str | None:
    """Return the git commit of a path, and whether tracked files differ; None outside a checkout."""

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
    """Return an importable package's version, under any distribution name; None if not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    for name in (package, f"{package}-core", f"{package}-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    names = metadata.packages_distributions().get(package)  # reads every distribution: the last resort
    return metadata.version(names[0]) if names else "unknown"


@functools.cache
def fields_of(module: str, name: str) -> dict[str, InstalledField] | None:
    """Return the fields of dataclass `name`, base classes first; None if not installed."""
    source = find_module(module)
    definition = _class(source, name) if source is not None else None
    return None if definition is None else dict(_class_fields(*definition))


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
        if isinstance(base, ast.Name) and (base_class := _class(module, base.id)) is not None:
            yield from _class_fields(*base_class)
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, default = statement.target.id, statement.value
        keywords = {k.arg: ast.unparse(k.value) for k in default.keywords} if isinstance(default, ast.Call) else {}
        hidden = name.startswith("_") or keywords.get("init") == "False"  # no argument of the dataclass
        annotation = ast.unparse(statement.annotation)
        if hidden or "ClassVar" in annotation:
            continue
        match following:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                description = " ".join(text.split())
            case _:
                description = ""
        owner, base_class = _owner(default, module), _default(default, module)
        text = None if base_class is None else " ".join(ast.unparse(base_class).split())
        narrower = None if owner is None else type_of(ast.unparse(owner[1].annotation), owner[0])
        yield name, InstalledField(name, type_of(annotation, module), text, description, narrower)


def _default(node: ast.expr | None, module: Module) -> ast.expr | None:
    match node:
        case ast.Call(func=ast.Name(id="field" | "Field"), keywords=[ast.keyword(arg="default", value=value), *_]):
            return value
    if (owner := _owner(node, module)) is not None and owner[1].value is not None:
        return _default(owner[1].value, owner[0])
    return node


def _owner(node: ast.expr | None, module: Module) -> tuple[Module, ast.AnnAssign] | None:
    """Return the field of another class that a default is taken from, such as `ModelConfig.dtype`."""
    match node:
        case (
            ast.Attribute(value=ast.Name(id=name), attr=attribute)
            | ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=name), ast.Constant(value=attribute)])
        ):
            place, owner = _class(module, name) or (module, ast.Module([], []))
            for statement in owner.body:
                match statement:
                    case ast.AnnAssign(target=ast.Name(id=bound)) if bound == attribute:
                        return place, statement
    return None


class Names(dict[str, Any]):
    """The meanings of a module's names in an annotation; aliases and enumerations are followed to their modules."""

    def __init__(self, module: Module) -> None:
        super().__init__(TYPES)
        self.module = module

    def __missing__(self, name: str) -> Any:
        match _definition(self.module, name):
            case _, ast.ClassDef() as found:
                return Literal[members] if (members := tuple(_members(found))) else Open
            case place, ast.expr() as alias:
                return type_of(ast.unparse(alias), place)
        return Open


def type_of(annotation: str, module: Module) -> Any:
    """Return the type of an annotation's text in a module."""
    try:
        value = eval(annotation, {"__builtins__": {}}, Names(module))
    except (TypeError, AttributeError, SyntaxError):
        return Open
    if isinstance(value, str):  # an annotation in quotes
        return type_of(value, module)
    return Open if Open in typing.get_args(value) and typing.get_origin(value) not in (dict, list, tuple) else value


def _members(node: ast.ClassDef) -> list[object]:
    bases = " ".join(ast.unparse(base) for base in node.bases)
    if "Enum" not in bases:
        return []
    members: list[object] = []
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not name.startswith("_"):
                members.append(name)
                match value:
                    case ast.Constant(value=str() as word) if word.isidentifier():
                        members.append(word)
                    case ast.Constant(value=int() as number) if "IntEnum" in bases:
                        members.append(number)
    return list(dict.fromkeys(members))


def _class(module: Module, name: str) -> tuple[Module, ast.ClassDef] | None:
    definition = _definition(module, name)
    return definition if definition is not None and isinstance(definition[1], ast.ClassDef) else None  # type: ignore[return-value]


@functools.cache
def _definition(module: Module, name: str, depth: int = 0) -> tuple[Module, ast.ClassDef | ast.expr] | None:
    """Return the class or expression of a name, in this or the imported module."""
    for statement in _statements(module.tree.body):
        match statement:
            case ast.ClassDef(name=bound) if bound == name:
                return module, statement
            case ast.Assign(targets=[ast.Name(id=bound)], value=value) if bound == name:
                return module, value
            case ast.AnnAssign(target=ast.Name(id=bound), value=ast.expr() as value) if bound == name:
                return module, value
            case ast.ImportFrom() if depth < DEEPEST:
                original = next((a.name for a in statement.names if (a.asname or a.name) == name), None)
                base = module.name if module.is_package else module.name.rpartition(".")[0]
                absolute = importlib.util.resolve_name("." * statement.level + (statement.module or ""), base)
                place = find_module(absolute) if original else None
                if place is not None and original is not None:
                    return _definition(place, original, depth + 1)
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)
