"""`rlctl presets`: list, show and copy the presets."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlctl.commands import completion, options, output
from rlctl.commands.output import examples, message, print_json
from rlctl.commands.parsing import App
from rlctl.errors import InputError

app = App()
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Preset name or .yaml file.", show_default=False, autocompletion=completion.presets
    ),
]


@app.callback(epilog=examples("rlctl presets ls", "rlctl presets show laptop", "rlctl presets cp 1node mine.yaml"))
def presets() -> None:
    """List, show and copy presets."""


@app.command("ls", epilog=examples("rlctl presets ls", "rlctl presets ls --json"))
def list_presets(json_: options.Json = False) -> None:
    """List the presets and their purposes."""
    from rlctl.config.presets import preset_names, read_preset

    presets = {name: read_preset(name).description for name in preset_names()}
    if json_:
        print_json({"presets": [{"name": name, "description": text} for name, text in presets.items()]})
        return
    width = max(map(len, presets))
    for name, text in presets.items():
        output.show(f"{name:{width}}  {text}")


@app.command("show", epilog=examples("rlctl presets show laptop", "rlctl presets show 8nodes --json"))
def show(name: Name, json_: options.Json = False) -> None:
    """Show the values of a preset, including inherited ones, with their origin."""
    from rlctl.commands.config_ import origin_yaml
    from rlctl.config.load import DEFAULT
    from rlctl.config.presets import read_preset
    from rlctl.methods.configuration import resolve

    resolved = resolve(name, environment={})
    decided = {key: value for key, value in resolved.leaves() if resolved.origin[key] != DEFAULT}
    if json_:
        values = {key: {"value": value, "origin": resolved.origin[key]} for key, value in decided.items()}
        print_json({"name": name, "description": read_preset(name).description, "values": values})
        return
    output.show(f"# {read_preset(name).description}")
    output.show(origin_yaml(decided, resolved.origin))


@app.command("cp", epilog=examples("rlctl presets cp 1node mine.yaml", "rlctl train grpo --preset mine.yaml"))
def copy(
    name: Name,
    destination: Annotated[Path, typer.Argument(metavar="FILE", help="File to create.")],
) -> None:
    """Copy a preset to a file; use the copy with --preset FILE."""
    from rlctl.config.presets import read_preset

    if destination.suffix not in (".yaml", ".yml"):
        raise InputError(f"{destination}: a preset's file name ends in .yaml.", f"Write to {destination}.yaml instead.")
    text = read_preset(name).path.read_text()
    try:
        with destination.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError(f"{destination} exists already.", "Name another file, or remove it first.") from error
    except OSError as error:
        raise InputError(f"{destination} cannot be written: {error.strerror}.") from error
    message(f"Wrote {destination}; use it with --preset {shlex.quote(str(destination))}")
