"""`rlctl config`: the schema, and the resolved configuration with the origin of each value."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from rlctl.commands import options, output
from rlctl.commands.output import examples, message, print_json
from rlctl.commands.parsing import App
from rlctl.config.files import user_path
from rlctl.errors import listed
from rlctl.recipes.available import names as trainers
from rlctl.telemetry.terminal import Severity, colored

if TYPE_CHECKING:
    from rlctl.config.recipes import Import, Status
    from rlctl.config.section import Section
    from rlctl.settings.config import RlctlConfig

app = App()


@app.callback(
    epilog=examples(
        "rlctl config schema", "rlctl config validate --preset 1node --config mine.yaml", "rlctl config show"
    )
)
def config_group() -> None:
    """Show and check the configuration."""


@app.command(
    "schema",
    epilog=examples("rlctl config schema", "rlctl config schema sft", "rlctl config schema sft data --json"),
)
def schema(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD] [SECTION]", help="Only this method or algorithm, only this section."),
    ] = None,
    json_: options.Json = False,
) -> None:
    """List every key of a method with its type, default and meaning; --json prints a JSON Schema."""
    from rlctl.config.schema import Schema
    from rlctl.errors import ConfigError
    from rlctl.methods import available
    from rlctl.methods.configuration import DEFAULT_METHOD
    from rlctl.methods.configuration import schema as whole_schema

    words = list(names or ())
    method = next((name for name in words if name in available.names()), None)
    if method is not None:
        words.remove(method)  # a section may have the method's name
    section = next(iter(words), None)
    everything = whole_schema()
    sections = Schema((available.config_class(method),)).sections if method else everything.sections
    if section is not None and section not in sections:
        meant = everything.nearest(section)
        hint = f"Did you mean `{meant}`?" if meant else f"There are: {', '.join(sections)}."
        which = f"`{available.command_of(method)}` has" if method else "there is"
        raise ConfigError(f"{which} no section `{section}`.", hint)
    chosen = [name for name in sections if section in (None, name)]
    if json_:
        whole = json_schema(method)
        print_json(whole if section is None else whole["$defs"][whole["properties"][section]["$ref"].split("/")[-1]])
        return
    for name in chosen:
        classes, defaults = sections[name], available.defaults_of(method or DEFAULT_METHOD)
        lines = key_lines(classes, defaults=defaults, section=name)
        head = f"{name}:  # {classes[0].__doc__}"
        output.show("\n".join((head, *lines, *passed_lines(name, whole=section is not None))))


def json_schema(method: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema of one method, or of all methods together, with pass-through fields and known names."""
    from rlctl.config.facts import Named
    from rlctl.config.passthrough import TARGETS, json_properties
    from rlctl.methods.available import config_class
    from rlctl.methods.configuration import schema as whole_schema

    configs = (config_class(method),) if method else whole_schema().classes
    schema, *others = (config.model_json_schema() for config in configs)
    defs = schema["$defs"]
    for other in others:
        schema["properties"] = other["properties"] | schema["properties"]
        for name, definition in other["$defs"].items():
            defs.setdefault(name, definition)
        for name, reference in other["properties"].items():
            definition, shared = (
                defs[definition["$ref"].split("/")[-1]] for definition in (reference, schema["properties"][name])
            )
            shared["properties"] = definition.get("properties", {}) | shared.get("properties", {})
    for name in TARGETS:
        if name in schema["properties"]:
            section = defs[schema["properties"][name]["$ref"].split("/")[-1]]
            section["properties"] = json_properties(name) | section.get("properties", {})
    for key in whole_schema().with_mark(Named):
        section, _, field = key.partition(".")
        if section in schema["properties"]:
            named = defs[schema["properties"][section]["$ref"].split("/")[-1]]
            named["properties"][field]["enum"] = list(whole_schema().choices(key))
    return schema


def passed_lines(section: str, *, whole: bool) -> Iterator[str]:
    """Yield a section's pass-through fields, or their number."""
    from rlctl.config.passthrough import TARGETS, passed_fields, type_words
    from rlctl.config.passthrough import annotation as kind_of

    if section not in TARGETS:
        return
    target, fields = TARGETS[section], passed_fields(section)
    if fields is None:
        yield f"  (fields of {target.label}'s {target.name}; it is not installed here)"
        return
    yield f"  (passed through: {len(fields)} fields of {target.words()}" + (
        ")" if whole else f"; `rlctl config schema {section}` lists them)"
    )
    for name, field in fields.items() if whole else ():
        yield f"  {name}: {type_words(kind_of(field))} = {field.default}"
        if field.description:
            yield f"      {field.description}"


@app.command(
    "validate",
    epilog=examples("rlctl config validate --preset 1node --config mine.yaml", "rlctl config validate -p mine.yaml"),
)
@options.taking("preset config set_")
def validate(
    context: typer.Context,
    json_: options.Json = False,
) -> None:
    """Check the keys and values of a configuration. The exit code is 2 if one is wrong."""
    from rlctl.config.load import DEFAULT
    from rlctl.config.passthrough import not_checked

    resolved = options.resolve_config(**context.params)
    for line in not_checked(list(resolved.origin)):
        message(f"{colored('note:', 'warn', sys.stderr)} {line}")
    for line in resolved.notes:
        message(line)
    decided = sum(origin != DEFAULT for origin in resolved.origin.values())
    message(
        f"The configuration is {colored('valid', 'ok', sys.stderr)}: {decided} keys set, the others at their defaults."
    )
    if json_:
        print_json({"valid": True, "keys_set": decided})


@app.command(
    "show",
    epilog=examples(
        "rlctl config show --preset laptop", "rlctl config show --preset 1node --set optimizer.lr=2e-6 --origin"
    ),
)
@options.taking("preset config set_")
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Show the origin of each value.")] = False,
    json_: options.Json = False,
) -> None:
    """Show the whole resolved configuration as YAML for --config."""
    resolved = options.resolve_config(**context.params)
    if json_:
        print_json(resolved.to_json() if origin else resolved.config.model_dump(mode="json"))
        return
    output.show(origin_yaml(dict(resolved.leaves()), resolved.origin if origin else {}))


@app.command(
    "import",
    help=f"""Write another trainer's recipe ({listed(trainers())}) as rlctl configuration; report differences on stderr.

    The other commands read such a recipe directly with `--config FILE`.""",
    epilog=examples(
        "rlctl config import grpo_math_8B_megatron.yaml > mine.yaml", "rlctl config import recipe.yaml --all"
    ),
)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Recipe of another trainer.")],
    report: Annotated[bool, typer.Option("--report", help="Report the differences instead.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="Report the outcome of every key instead.")] = False,
    json_: options.Json = False,
) -> None:
    from rlctl.config.recipes import PRESET_KEYS, is_own, read_file
    from rlctl.errors import ConfigError
    from rlctl.methods.configuration import registry, resolve

    importers = registry()
    values, importer = read_file(file, "recipe", importers)
    if importer is None and not values:
        raise ConfigError(f"{file} is empty: it holds no keys.", f"Name a recipe of {' or '.join(trainers())}.")
    if importer is None and is_own(values, importers.schema):
        raise ConfigError(f"{file} is not a recipe but rlctl YAML.", "Pass it to --config unchanged.")
    if importer is None:
        sections = {*importers.schema.sections, *PRESET_KEYS}
        others = [str(key) for key in values if str(key).partition(".")[0] not in sections]
        raise ConfigError(
            f"{file} is neither a recipe of {' or '.join(trainers())} nor rlctl's YAML: rlctl has no section "
            f"{listed(others)}.",
            "docs/coming_from.md maps keys of other trainers to rlctl's.",
        )
    recipe = importer.read(file, (), None).without_invalid(importers.config_class)
    resolved = resolve(files=[file], environment={})
    if json_:
        entries = [{name: vars(entry)[name] for name in ("key", "value", "status", "note")} for entry in recipe.entries]
        counts = {status: len(recipe.of(status)) for status in HEADINGS}
        print_json({"values": recipe.values, "counts": counts, "keys": entries, "unsupported": recipe.unsupported})
        return
    if report or all_:
        output.show("\n".join(report_lines(recipe, sys.stdout, everything=all_)))
        return
    idle = _without_effect(resolved.config)
    chosen = {key: value for key, value in resolved.leaves() if resolved.origin[key] != "default" and key not in idle}
    output.show(origin_yaml(chosen, {key: recipe.source[key] for key in chosen if key in recipe.source}))
    for key, reason in idle.items():
        output.show(f"# {key}: {inline_yaml(recipe.values[key])} ({recipe.source[key]}) has no effect: {reason}")
    for line in report_lines(recipe, sys.stderr):
        message(line)


HEADINGS: dict[Status, tuple[str, Severity | None]] = {
    "not yet": ("rlctl cannot run this yet (`train` stops here without --allow-differences):", "fail"),
    "not known": ("Unknown keys, ignored:", "warn"),
    "changed": ("Different in rlctl:", "warn"),
    "logging": ("Logging and validation keys, replaced by rlctl's:", None),
    "mapped": ("Mapped keys:", None),
    "not applicable": ("Keys without a counterpart, with the reason:", None),
}
"""The heading and color of each outcome, in the order of the report."""
REST = ("mapped", "not applicable")
"""Outcomes that only --all shows."""


def report_lines(recipe: Import, stream: TextIO | None, *, everything: bool = False) -> Iterator[str]:
    """Yield the report on a recipe for `stream`: counts, differences by section, and on request the rest."""
    from rlctl.config.recipes import grouped
    from rlctl.errors import MOST_LINES

    counts = ", ".join(f"{len(recipe.of(status))} {status}" for status in HEADINGS if recipe.of(status))
    yield f"{recipe.path.name}: {len(recipe.entries)} keys: {counts}."
    if recipe.foreign is not None:
        yield colored(recipe.foreign, "fail", stream)
    for status, (heading, color) in HEADINGS.items():
        entries = sorted(recipe.of(status), key=lambda entry: entry.key.partition(".")[0])
        # The sentence on an unsupported recipe covers all but unknown keys.
        by_status = recipe.foreign is not None and status != "not known"
        if not entries or ((by_status or status in REST) and not everything):
            continue
        if recipe.foreign is not None and status == "not yet":
            heading = "rlctl cannot run this yet:"
        yield colored(heading, color, stream) if color else heading
        parts = [[entry] for entry in entries] if everything else [entries]
        lines = [line for part in parts for line, _ in grouped(part)]
        visible = lines if everything else lines[:MOST_LINES]
        yield from (f"  {line}" for line in visible)
        if len(visible) < len(lines):
            yield f"  and {len(lines) - len(visible):,} more lines, which --all shows"
    yield from (f"note: {line}" for line in recipe.notes)
    if not everything:
        yield "--all reports every key."


def _without_effect(config: RlctlConfig) -> dict[str, str]:
    """Return the Megatron fields without effect on the configured model, and why. Empty for models that are neither
    local nor in the catalog, because `import` does not ask the hub."""
    from rlctl.models.catalog import lookup_entry
    from rlctl.preparation.open_model import published_facts
    from rlctl.preparation.planned import idle_fields

    name = config.model.name or ""
    is_model = user_path(name).joinpath("config.json").is_file() or lookup_entry(name)
    return idle_fields(config, published_facts(config.model, engines_alone=True)) if is_model else {}


def key_lines(
    sections: Sequence[type[Section]], indent: str = "  ", *, defaults: Mapping[str, Any], section: str
) -> Iterator[str]:
    """Yield `  key: type = default` for each key of a section's classes, with its meaning on the next line; nested
    sections come after their key."""
    from pydantic import TypeAdapter

    from rlctl.config.passthrough import type_words
    from rlctl.config.schema import section_of
    from rlctl.methods.configuration import schema as whole_schema

    meanings = {key: text for part in reversed(sections) for key, text in part.meanings().items()}
    for key, field in {key: field for part in reversed(sections) for key, field in part.model_fields.items()}.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield f"{indent}{key}:  # {inner.__doc__}"
            yield from key_lines([inner], f"{indent}  ", defaults=defaults, section=f"{section}.{key}")
            continue
        value = defaults.get(f"{section}.{key}", field.default)
        default = TypeAdapter(Any).dump_python(value, mode="json")
        words = " | ".join(whole_schema().choices(f"{section}.{key}")) or type_words(field.annotation)
        yield f"{indent}{key}: {words} = {inline_yaml(default)}"
        if key in meanings:
            yield f"{indent}    {' '.join(meanings[key].split())}"


def origin_yaml(values: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    """Return values by dotted key as YAML sections, with the origin as a comment."""
    lines, opened = list[str](), list[str]()
    for key, value in values.items():
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if opened[: depth + 1] != sections[: depth + 1]:
                opened = sections[: depth + 1]
                lines.append(f"{'  ' * depth}{section}:")
        opened = sections
        line = f"{'  ' * len(sections)}{name}: {inline_yaml(value)}"
        lines.append(f"{line:<48}  # {origin[key]}" if key in origin else line)
    return "\n".join(lines)


def inline_yaml(value: Any) -> str:
    """Return a value on one line, as JSON: valid YAML with visible strings."""
    plain_word = isinstance(value, str) and value.replace("-", "").replace("_", "").isalpha()
    reserved = isinstance(value, str) and value.lower() in ("true", "false", "null")
    return value if plain_word and not reserved else json.dumps(value)
