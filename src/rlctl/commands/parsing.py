"""Command-line parsing: flags of every command, aliases from other trainers, and errors that list the alternatives.

Users of other trainers type the names that they know. A name with the same meaning works without being listed in the
help; a name with a similar meaning is refused with the flag or key to use.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rlctl.config.other_trainers import NAMES
from rlctl.errors import InputError
from rlctl.telemetry.terminal import be_quiet, be_verbose, without_color

# Typer's base of command-line errors: an unknown option, a missing argument, a value of a wrong type.
CommandLineError: Any = typer.BadParameter.__mro__[2]

ALIASES: dict[str, str] = NAMES["flags"]
"""Aliases from other trainers, for every command that has the rlctl flag."""
SIMILAR: dict[str, str] = {name: f"Use --set {key}=VALUE." for name, key in NAMES["flags_of_keys"].items()}
SIMILAR |= {name: group["use"] for group in NAMES["similar_flags"] for name in group["flags"]}
"""Names from other trainers with another meaning or without a flag here, with the replacement."""

GIVEN = "rlctl.given"
"""Key of `context.meta`: the names of the parameters in the order of the command line, one for each time given."""

PANELS = {
    "Model, data and reward": (
        "model", "teacher", "tokenizer", "chat_template", "data", "task", "prompt_field", "answer_field", "val_data",
        "reward", "env", "tool", "prompt", "prompts_file",
    ),
    "Training": (
        "algorithm", "steps", "epochs", "batch_size", "prompts", "generations", "beta", "lr", "lora", "backend",
        "async_", "max_staleness", "colocated", "seed",
    ),
    "Sampling": ("n", "k", "limit", "temperature", "top_p", "max_new_tokens", "max_length", "mean_length"),
    "The run": (
        "run_dir", "keep", "step", "output", "resume", "allow_changes", "show_samples", "wandb", "tensorboard",
    ),
    "Machine": ("nodes", "gpus_per_node", "gpu", "ray_address", "goal"),
    "Configuration": ("preset", "config", "set_", "vary", "allow_differences"),
    "Looking without starting": ("dry_run", "explain", "completion", "top", "compare", "run"),
}  # fmt: skip
"""Headings of a long help and their parameters; other parameters come last."""
LONG = 14
"""Minimum options for headings in a help text."""
HELP_WIDTH = 118

Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=be_quiet, expose_value=False, help="Print only errors and the result."),
]
Verbose = Annotated[
    bool,
    typer.Option("-v", callback=be_verbose, expose_value=False, help="Also print files read and processes started."),
]
NoColor = Annotated[
    bool, typer.Option("--no-color", callback=without_color, expose_value=False, help="Print without colors.")
]


@cache
def everywhere() -> tuple[Any, ...]:
    """Return the options that every command has."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def flags(quiet: Quiet = False, verbose: Verbose = False, no_color: NoColor = False) -> None: ...

    return tuple(typer.main.get_command(app).params)


class Command(TyperCommand):
    """A command with the common flags and with aliases from other trainers."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params = [*self.params, *everywhere()]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line; Typer would show a required argument as {SRC}."""
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options grouped by task."""
        rows = [(param, record) for param in self.get_params(ctx) if (record := help_record(param, ctx))]
        headings = {name: heading for heading, names in PANELS.items() for name in names}
        if len(rows) < LONG:
            headings = {}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{heading: [] for heading in PANELS}}
        for param, record in rows:
            rest = "Other options" if headings else "Options"
            heading = "Arguments" if param.param_type_name == "argument" else headings.get(param.name, rest)
            sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Record the order of the parameters, and add the default rank to a bare --lora: Typer has no options with an
        optional value."""
        from rlctl.commands.options import LORA
        from rlctl.settings.training import LORA_RANK

        args = several(args)
        alone = {LORA, *(name for name, ours in ALIASES.items() if ours == LORA)}
        pairs = zip_longest(args, args[1:], fillvalue="")
        filled = [
            f"{word}={LORA_RANK}" if word in alone and not after.lstrip("-").isdecimal() else word
            for word, after in pairs
        ]
        _, _, order = self.make_parser(ctx).parse_args(args=list(filled))
        ctx.meta[GIVEN] = [param.name for param in order]
        for param in order:
            spellings = [
                [spelling for spelling in names if spelling in filled] for names in (param.opts, param.secondary_opts)
            ]
            if all(spellings) and order.count(param) > 1:
                (first, *_), (other, *_) = spellings
                raise InputError(f"{first} and {other} contradict each other.", "Give one of them.")
        return super().parse_args(ctx, filled)

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        options = parser._long_opt  # the help lists parameters, so it does not show aliases
        options.update({name: options[ours] for name, ours in ALIASES.items() if ours in options})
        return parser


SEVERAL = ("--compare",)
"""Options that take all words up to the next option."""


def several(args: list[str]) -> list[str]:
    """Return a command line that repeats an option of `SEVERAL` for each of its words."""
    notes: list[str] = []
    repeated = None
    for word, before in zip(args, ["", *args], strict=False):
        if word.startswith("-"):
            repeated = word if word in SEVERAL else None
        elif repeated is not None and before != repeated:
            notes.append(repeated)
        notes.append(word)
    return notes


def help_record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """Return the help line of an option with the default of its key. Commands of `train` show their method's
    defaults."""
    from rlctl.commands.options import LORA, key_of
    from rlctl.config.schema import Schema
    from rlctl.methods.available import config_class, defaults_of
    from rlctl.methods.configuration import DEFAULT_METHOD

    record = param.get_help_record(ctx)
    key = key_of(param.name) if param.param_type_name == "option" and LORA not in param.opts else None
    method = getattr(ctx.command, "method", DEFAULT_METHOD)
    declared = Schema((config_class(method),)).field(key) if key else None
    default = None if key is None or declared is None else defaults_of(method).get(key, declared.default)
    if record is None or not isinstance(default, str | int | float) or isinstance(default, bool) or default == "":
        return record
    return record[0], f"{record[1]}  [default: {default}]"


class CommandGroup(TyperGroup):
    """A command with subcommands, which lists them if none is given."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            meant = self.meant(ctx, args[0])
            question = f"Did you mean `{ctx.command_path} {meant}`? " if meant else ""
            raise InputError(f"`{ctx.command_path}` has no command `{args[0]}`.", f"{question}{self.there_are(ctx)}")
        return super().resolve_command(ctx, args)

    def meant(self, ctx: Any, name: str) -> str | None:
        """Return the command that `name` probably means; an algorithm name means `train grpo --algorithm`."""
        from rlctl.methods.available import ALGORITHMS

        commands: dict[str, Any] = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        takes = [name for name, command in commands.items() if "--algorithm" in _flags(command)]
        if ctx.parent is not None and name in ALGORITHMS and takes:
            return f"{takes[0]} --algorithm {name}"
        return next(iter(difflib.get_close_matches(name, commands, 1)), None)

    def there_are(self, ctx: Any) -> str:
        """Return the subcommands with their summaries, one per line."""
        subcommands: dict[str, Any] = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        commands = [(name, command.get_short_help_str(160)) for name, command in subcommands.items()]
        width = max(len(name) for name, _ in commands)
        return "\n".join(["There are:", *(f"    {name:<{width}}  {text}" for name, text in commands)])


class App(typer.Typer):
    """A Typer app with plain help instead of panels: faster, and the same in a log."""

    def __init__(self, *, add_completion: bool = False, cls: type[TyperGroup] = CommandGroup) -> None:
        super().__init__(
            cls=cls, rich_markup_mode=None, add_completion=add_completion, pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
        )  # fmt: skip

    def command(self, name: str | None = None, **settings: Any) -> Any:
        chosen: dict[str, Any] = {"cls": Command} | settings
        return super().command(name, **chosen)


def explained(error: Any) -> InputError:
    """Return the InputError for a CommandLineError."""
    context = error.ctx
    if context is None:
        return InputError(error.format_message())
    path, command = context.command_path, context.command
    see = f"`{path} -h` shows its flags."
    if (option := getattr(error, "option_name", None)) is not None and hasattr(error, "possibilities"):
        return InputError(f"`{path}` has no flag {option}.", _meant(option, path, command) or see)
    if type(error).__name__ == "MissingParameter" and error.param is not None:
        # Arguments are filled in order: all after the first missing one are missing too.
        after = command.params[command.params.index(error.param) :]
        needed = [param for param in after if param.required and param.param_type_name == error.param.param_type_name]
        missing = " and ".join((param.metavar or param.human_readable_name.upper()).strip("{}[]") for param in needed)
        return InputError(f"`{path}` needs {missing}.", " ".join(context.get_usage().split()))
    if error.message == "Missing command." and isinstance(command, CommandGroup):
        return InputError(f"`{path}` needs a command.", command.there_are(context))
    return InputError(error.format_message(), see)


def _meant(option: str, path: str, command: Any) -> str | None:
    options = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    if any(option in param.opts for param in everywhere()):
        return f"Give it after the whole command: `{path} ... {option}`."
    for name, sub in getattr(command, "commands", {}).items():
        if option in (names := list(_flags(sub))) or ALIASES.get(option) in names:
            return f"Give it to the command: `{path} {name} {option} ...`."
    if option in SIMILAR:
        return SIMILAR[option]
    names = {name: name for name in options if name.startswith("--")}
    names |= {alias: ours for alias, ours in ALIASES.items() if ours in names}
    if near := difflib.get_close_matches(option, names, 1, 0.75):
        return f"Did you mean {names[near[0]]}?"
    near = difflib.get_close_matches(option, SIMILAR, 1, 0.85)
    return SIMILAR[near[0]] if near else None


def _flags(command: Any) -> Iterator[str]:
    return (name for param in command.params for name in param.opts)
