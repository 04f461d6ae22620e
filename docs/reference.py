"""Pages of the site that are generated from the code: commands, configuration keys, and the Python API.

mkdocs calls `on_files` (`hooks` in mkdocs.yml). `python docs/reference.py` prints the pages.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import rlctl
from rlctl.cli import COMMANDS, load_command
from rlctl.commands.parsing import help_record
from rlctl.config.schema import section_of
from rlctl.config.section import Section
from rlctl.methods.configuration import schema


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the pages of the folder."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Return each page by its path."""
    return {
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(),
        "reference/api.md": api_page(),
    }


def commands_page() -> str:
    """Return a section for each command, with its arguments, options and examples."""
    parts = ["# Commands\n\nThis page is generated from the commands themselves; `--help` says the same."]
    for name in COMMANDS:
        parts += described(["rlctl", name], load_command(name))
    return "\n\n".join(parts) + "\n"


def described(path: list[str], command: Any) -> Iterator[str]:
    """Yield the paragraphs on a command and on its subcommands."""
    yield f"{'#' * min(len(path), 3)} {' '.join(path)}\n\n{cell(plain(command.help))}"
    children = getattr(command, "commands", {})
    context = command.make_context(path[-1], [], resilient_parsing=True)
    records = [help_record(parameter, context) for parameter in command.params if not parameter.hidden]
    rows = [f"| `{option(record[0])}` | {cell(plain(record[1]))} |" for record in records if record]
    if rows:
        yield "| option | meaning |\n|---|---|\n" + "\n".join(rows)
    if examples := re.findall(r"^\s*(rlctl .*)$", command.epilog or "", re.MULTILINE):
        yield "\n".join(["```", *examples, "```"])
    for name, child in children.items():
        yield from described([*path, name], child)


def configuration_page() -> str:
    """Return a section for each section of the schema, with type, default and meaning of its keys."""
    parts = ["# Configuration keys\n\nThis page is generated from the schema; `rlctl config schema` prints the same."]
    for name, classes in schema().sections.items():
        parts.append(f"## {name}\n\n{plain(classes[0].__doc__)}")
        rows: dict[str, str] = {}  # by key; where methods differ, the row of `train grpo`
        for section in classes:
            for row in key_rows(section, name):
                rows.setdefault(row.split("|")[1], row)
        lines = "\n".join(rows.values())
        parts.append(f"| key | type | default | meaning |\n|---|---|---|---|\n{lines}")
    return "\n\n".join(parts) + "\n"


def key_rows(section: type[Section], prefix: str) -> Iterator[str]:
    """Yield a line of a table for each key; inner sections follow their section's keys."""
    from pydantic import TypeAdapter

    from rlctl.commands.config_ import inline_yaml
    from rlctl.config.passthrough import type_words

    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from key_rows(inner, f"{prefix}.{key}")
            continue
        default = inline_yaml(TypeAdapter(Any).dump_python(field.default, mode="json"))
        words = cell(" | ".join(schema().choices(f"{prefix}.{key}")) or type_words(field.annotation))
        yield f"| `{prefix}.{key}` | {words} | `{default}` | {cell(plain(section.meanings().get(key)))} |"


SEAMS = {
    "rlctl.methods.rl.policy_gradient": ("PolicyGradient",),
    "rlctl.methods.rl.grpo": ("Grpo",),
    "rlctl.methods.rl.rl_config": ("RlConfig", "AlgorithmConfig"),
    "rlctl.methods.text_method": ("TextMethod",),
    "rlctl.training.capabilities": ("PassBeforeStep", "ScalarHead", "PacksWholeGroups", "PrecomputesReference"),
    "rlctl.data.row_types": ("RowType", "TextRows"),
    "rlctl.environments.interface": ("Environment", "Step", "Ask"),
    "rlctl.backends.lookup": ("PolicyBackend", "EngineBackend"),
    "rlctl.config.recipes": ("Importer", "Import", "Entry"),
    "rlctl.models.families": ("Family",),
    "rlctl.transport.facts": ("TransportFacts", "Places", "Rates", "Refusal"),
    "rlctl.transport.movers": ("Transport", "Sender", "Receiver"),
}
"""What parts of users derive from or fill in, next to the names of `rlctl`."""


def api_page() -> str:
    """Return the names of `rlctl` and of `SEAMS` with signatures, members and docstrings."""
    parts = [
        "# API reference\n\nThis page is generated from the docstrings. [Extend rlctl](../extend.md) has examples."
    ]
    names = [(rlctl.API[name], name, f"rlctl.{name}") for name in rlctl.API]
    names += [(module, name, f"{module}.{name}") for module, found in SEAMS.items() for name in found]
    for module, name, shown in names:
        found = getattr(import_module(module), name)
        parts += [f"## {shown.rpartition('.')[2]}", f"`{shown}{signature(found)}`", *paragraphs(found.__doc__)]
        if inspect.isclass(found):
            rows = [f"| `{member}` | {cell(plain(doc))} |" for member, doc in members(found)]
            parts += ["| member | meaning |\n|---|---|\n" + "\n".join(rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def signature(found: Any) -> str:
    """Return the parameters of a function; classes have their members."""
    return "" if inspect.isclass(found) else re.sub(r"'", "", str(inspect.signature(found)))


def paragraphs(text: str | None) -> list[str]:
    """Return a docstring as Markdown; indented lines stay code."""
    return [inspect.cleandoc(text)] if text else []


def members(found: type) -> Iterator[tuple[str, str]]:
    """Yield the public fields and methods of a class that have a docstring, as written in its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0].body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, doc = (
                f"{node.name}({ast.unparse(node.args).removeprefix('self').removeprefix(', ')})",
                ast.get_docstring(node),
            )
            is_property = any(ast.unparse(one) == "property" for one in node.decorator_list)
            name = node.name if is_property else name
        elif isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            name, doc = ast.unparse(node.target), str(after.value.value)
        else:
            continue
        if doc and not name.startswith("_"):
            yield name, doc


def plain(text: str | None) -> str:
    """Return help or a docstring as one paragraph, without the mark that keeps lines apart."""
    return " ".join((text or "").replace("\b", " ").split())


def option(names: str) -> str:
    """Return an option's names and value for a code cell, without the type of an argument that has a name."""
    return re.sub(r"(?<=\]|\.) <.*>$", "", names)


def cell(text: str) -> str:
    """Return prose for a cell of a table. Outside of code, bars end no cell and angle brackets are no HTML."""
    prose = {"|": "\\|", "<": "&lt;"}
    parts = text.split("`")
    return "`".join(part if number % 2 else part.translate(str.maketrans(prose)) for number, part in enumerate(parts))


if __name__ == "__main__":
    print("\n".join(pages().values()))
