"""Every key of the schema is read somewhere, and every option of every command reaches its function's body.

The source is searched for where each section travels: variables, parameters and fields that hold it, by annotation or
by assignment from the configuration, and the attributes that are read of them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import rlctl
from rlctl.cli import COMMANDS
from rlctl.commands import options, train
from rlctl.commands.generate import model_or_checkpoint
from rlctl.config.section import PassThrough, Section
from rlctl.methods.configuration import schema
from rlctl.planner.inputs.request import Request

SOURCE = Path(rlctl.__file__).parent
SECTIONS = {
    one.__name__: name
    for name, kinds in schema().sections.items()
    for kind in kinds
    for one in kind.__mro__
    if issubclass(one, Section) and one not in (Section, PassThrough)
}
"""Section class -> section."""
SECTIONS["CriticSettings"] = "critic"
ROLES = get_args(get_type_hints(Request)["role"])
"""Sections of the models next to the policy, whose pins are read by the name of the section in `role`."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path.relative_to(SOURCE)), ast.parse(path.read_text())


def holders(tree: ast.AST) -> dict[str, set[str]]:
    """Names (of variables, parameters and fields) -> sections that they hold in this module."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        match node:
            case (
                ast.arg(arg=name, annotation=ast.expr() as kind)
                | ast.AnnAssign(target=ast.Name(id=name), annotation=ast.expr() as kind)
            ):
                for part in ast.walk(kind):
                    if isinstance(part, ast.Name) and part.id in SECTIONS:
                        found[name].add(SECTIONS[part.id])
            case ast.Assign(targets=[target], value=value):
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                values = value.elts if isinstance(value, ast.Tuple) else [value] * len(targets)
                for one, held in zip(targets, values, strict=False):
                    if isinstance(one, ast.Name) and isinstance(held, ast.Attribute):
                        found[one.id].add(held.attr.removeprefix("named_"))
                    if isinstance(one, ast.Attribute) and isinstance(held, ast.Name):
                        found[one.attr] |= found[held.id]
    return found


def without_validators(tree: ast.Module) -> ast.Module:
    """The module without the schema's own checks, which make nothing of a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [item for item in node.body if not getattr(item, "name", "").startswith("validate_")]
    return tree


def reads() -> dict[str, list[str]]:
    """`section.key` -> places that read it."""
    places: dict[str, list[str]] = defaultdict(list)
    keys = set(schema().keys)
    parsed = [(name, without_validators(tree)) for name, tree in modules()]
    fields: dict[str, set[str]] = defaultdict(set)  # of dataclasses, read from other modules too
    for _, tree in parsed:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.annotation, ast.Name | ast.Constant):
                        kind = item.annotation.id if isinstance(item.annotation, ast.Name) else ""
                        if kind in SECTIONS and isinstance(item.target, ast.Name):
                            fields[item.target.id].add(SECTIONS[kind])
    for name, tree in parsed:
        held = holders(tree)
        own_class = {id(child): SECTIONS.get(node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
                     for child in ast.walk(node)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in keys and name.startswith("planner/"):
                places[node.value].append(f"{name}:{node.lineno} (a pin)")
            match node:
                case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id="role")), ast.Constant(value=key)]):
                    for section in ROLES:
                        places[f"{section}{key}"].append(f"{name}:{node.lineno} (a pin of one of {len(ROLES)} models)")
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            if isinstance(owner, ast.Attribute):
                sections = {owner.attr} | fields[owner.attr] | held[owner.attr]
            elif isinstance(owner, ast.Name):
                sections = held[owner.id] | ({own_class.get(id(node))} if owner.id == "self" else set())
            else:
                continue
            for section in sections:
                if f"{section}.{node.attr}" in keys:
                    places[f"{section}.{node.attr}"].append(f"{name}:{node.lineno}")
    return places


@pytest.fixture(scope="module")
def places() -> dict[str, list[str]]:
    return reads()


def test_every_key_of_the_schema_is_read(places: dict[str, list[str]]) -> None:
    assert [key for key in schema().keys if not places[key]] == []


def test_the_search_finds_nothing_for_a_key_that_is_not_there(places: dict[str, list[str]]) -> None:
    assert "batch.no_such_key" not in places
    assert all(place.partition(":")[0].endswith(".py") for found in places.values() for place in found)


def commands() -> Iterator[tuple[str, str, object]]:
    for name, (module, _) in COMMANDS.items():
        for registered in importlib.import_module(module).app.registered_commands:
            yield name, registered.name or "", registered.callback


@pytest.mark.parametrize(
    ("command", "sub", "function"), list(commands()), ids=lambda value: getattr(value, "__name__", value)
)
def test_an_option_of_a_command_is_used_in_its_body(command: str, sub: str, function: object) -> None:
    source = inspect.getsource(function)  # type: ignore[arg-type]
    tree = ast.parse(source)
    body = ast.Module(tree.body[0].body, [])  # type: ignore[attr-defined]
    used = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    if command == "train":  # the commands of this group hand all they take to one function
        assert "_train(" in source
        read = ast.walk(ast.parse(inspect.getsource(train._train)))
        used |= {node.value for node in read if isinstance(node, ast.Constant)}
    if "model_or_checkpoint(context" in source:  # two commands take a model or a run by one function
        read = ast.walk(ast.parse(inspect.getsource(model_or_checkpoint)))
        used |= {node.value for node in read if isinstance(node, ast.Constant)}
        source += inspect.getsource(model_or_checkpoint)
    if command == "train" or "resolve_config(**context.params" in source:
        # It takes all parameters, and reads these.
        used |= {"preset", "config", "set_", "overrides", "wandb", "tensorboard", "loggers"}
        used |= set(filter(options.key_of, options.FLAGS))
    unused = set(inspect.signature(function).parameters) - used  # type: ignore[arg-type]
    assert not unused, f"rlctl {command} {sub}: {unused} are parsed and not used"
