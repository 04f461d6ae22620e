"""How command lines are read: flags of every command, other trainers' names for ours, and errors that list what exists.

Users of other trainers type the names that they know. A name with the same meaning works and is not in the
help; one with a similar meaning is refused with the flag or the key to use.
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

# Typer's own base of what is wrong with a command line: an unknown option, a missing argument, a value of a wrong type.
CommandLineError: Any = typer.BadParameter.__mro__[2]

ALIASES: dict[str, str] = NAMES["flags"]
"""Names of other trainers with the meaning of ours, for every command that has ours."""
SIMILAR: dict[str, str] = {name: f"Use --set {key}=VALUE." for name, key in NAMES["flags_of_keys"].items()}
SIMILAR |= {name: group["use"] for group in NAMES["similar_flags"] for name in group["flags"]}
"""Names of other trainers that mean something else or are a key here, with what to use."""

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
    "Configuration": ("preset", "config", "set_", "allow_differences"),
    "Looking without starting": ("dry_run", "explain", "completion", "top", "compare", "run"),
}  # fmt: skip
"""Headings of a long help, and the parameters below each; all others come last."""
LONG = 14
"""Options from which on a help has headings."""
HELP_WIDTH = 118

Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=be_quiet, expose_value=False, help="Print errors and the result alone."),
]
Verbose = Annotated[
    bool, typer.Option("-v", callback=be_verbose, expose_value=False, help="Say also what is read, chosen and started.")
]
NoColor = Annotated[
    bool, typer.Option("--no-color", callback=without_color, expose_value=False, help="Print without colors.")
]


@cache
def everywhere() -> tuple[Any, ...]:
    """Return the options that every command has, as Typer makes them of a function's parameters."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def flags(quiet: Quiet = False, verbose: Verbose = False, no_color: NoColor = False) -> None: ...

    return tuple(typer.main.get_command(app).params)


class Command(TyperCommand):
    """A command with the flags of every command, which knows other trainers' names for its own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params = [*self.params, *everywhere()]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line; Typer would show a required argument as {SRC}."""
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options below what a person does with them."""
        found = [(param, record) for param in self.get_params(ctx) if (record := help_record(param, ctx))]
        headings = {name: heading for heading, names in PANELS.items() for name in names}
        if len(found) < LONG:
            headings = {}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{heading: [] for heading in PANELS}}
        for param, record in found:
            rest = "Other options" if headings else "Options"
            heading = "Arguments" if param.param_type_name == "argument" else headings.get(param.name, rest)
            sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note the order of the parameters, and give --lora its rank where no number follows it: Typer's options have a
        value always or never."""
        from rlctl.commands.options import LORA, LORA_RANK

        alone = {LORA, *(name for name, ours in ALIASES.items() if ours == LORA)}
        pairs = zip_longest(args, args[1:], fillvalue="")
        filled = [
            f"{word}={LORA_RANK}" if word in alone and not after.lstrip("-").isdecimal() else word
            for word, after in pairs
        ]
        _, _, given = self.make_parser(ctx).parse_args(args=list(filled))
        ctx.meta[GIVEN] = [param.name for param in given]
        return super().parse_args(ctx, filled)

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        options = parser._long_opt  # the help lists parameters, so that an alias is in no help
        options.update({name: options[ours] for name, ours in ALIASES.items() if ours in options})
        return parser


def help_record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """Return an option as the help shows it, with the default of the key that it sets. A command of `train` that is an
    algorithm shows the value that the algorithm sets."""
    from rlctl.commands.options import KEYS, LORA
    from rlctl.config.keys import field
    from rlctl.config.kinds import DEFAULT_METHOD, config_class, defaults_of

    record = param.get_help_record(ctx)
    sets = param.name in KEYS and param.param_type_name == "option" and LORA not in param.opts
    method = getattr(ctx.command, "method", DEFAULT_METHOD)
    found = field(KEYS[param.name], config_class(method)) if sets else None
    default = None if found is None else defaults_of(method).get(KEYS[param.name], found.default)
    if record is None or not isinstance(default, str | int | float) or isinstance(default, bool) or default == "":
        return record
    return record[0], f"{record[1]}  [default: {default}]"


class Group(TyperGroup):
    """A command with subcommands, which lists them where none of them is named."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            meant = self.meant(ctx, args[0])
            question = f"Did you mean `{ctx.command_path} {meant}`? " if meant else ""
            raise InputError(f"`{ctx.command_path}` has no command `{args[0]}`.", f"{question}{self.there_are(ctx)}")
        return super().resolve_command(ctx, args)

    def meant(self, ctx: Any, name: str) -> str | None:
        """Return the command that `name` was probably meant for: an algorithm of `train` is a flag of `train grpo`."""
        from rlctl.methods.available import ALGORITHMS

        found: dict[str, Any] = {own: self.get_command(ctx, own) for own in self.list_commands(ctx)}
        takes = [own for own, command in found.items() if "--algorithm" in _flags(command)]
        if ctx.parent is not None and name in ALGORITHMS and takes:
            return f"{takes[0]} --algorithm {name}"
        return next(iter(difflib.get_close_matches(name, found, 1)), None)

    def there_are(self, ctx: Any) -> str:
        """Return the subcommands with what each does, a line each."""
        found: dict[str, Any] = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        commands = [(name, command.get_short_help_str(160)) for name, command in found.items()]
        width = max(len(name) for name, _ in commands)
        return "\n".join(["There are:", *(f"    {name:<{width}}  {text}" for name, text in commands)])


class App(typer.Typer):
    """A Typer app whose commands are ours: plain help instead of panels, which renders in a third of the time and
    reads the same in a log."""

    def __init__(self, *, add_completion: bool = False, cls: type[TyperGroup] = Group) -> None:
        super().__init__(
            cls=cls, rich_markup_mode=None, add_completion=add_completion, pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
        )  # fmt: skip

    def command(self, name: str | None = None, **settings: Any) -> Any:
        chosen: dict[str, Any] = {"cls": Command} | settings
        return super().command(name, **chosen)


def explained(error: Any) -> InputError:
    """Return what is wrong with a command line in rlctl's words; `error` is a CommandLineError."""
    context = error.ctx
    if context is None:
        return InputError(error.format_message())
    path, command = context.command_path, context.command
    see = f"`{path} -h` shows its flags."
    if (option := getattr(error, "option_name", None)) is not None and hasattr(error, "possibilities"):
        return InputError(f"`{path}` has no flag {option}.", _meant(option, path, command) or see)
    if type(error).__name__ == "MissingParameter" and error.param is not None:
        # Arguments are filled in order, so that those after the first that is missing are missing too.
        after = command.params[command.params.index(error.param) :]
        needed = [one for one in after if one.required and one.param_type_name == error.param.param_type_name]
        missing = " and ".join((one.metavar or one.human_readable_name.upper()).strip("{}[]") for one in needed)
        return InputError(f"`{path}` needs {missing}.", " ".join(context.get_usage().split()))
    if error.message == "Missing command." and isinstance(command, Group):
        return InputError(f"`{path}` needs a command.", command.there_are(context))
    return InputError(error.format_message(), see)


def _meant(option: str, path: str, command: Any) -> str | None:
    """Return what to use in place of a flag that the command does not have."""
    own = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    if any(option in param.opts for param in everywhere()):
        return f"Give it after the whole command: `{path} ... {option}`."
    for name, sub in getattr(command, "commands", {}).items():
        if option in (names := list(_flags(sub))) or ALIASES.get(option) in names:
            return f"Give it to the command: `{path} {name} {option} ...`."
    if option in SIMILAR:
        return SIMILAR[option]
    names = {name: name for name in own if name.startswith("--")}
    names |= {alias: ours for alias, ours in ALIASES.items() if ours in names}
    if near := difflib.get_close_matches(option, names, 1, 0.75):
        return f"Did you mean {names[near[0]]}?"
    near = difflib.get_close_matches(option, SIMILAR, 1, 0.85)
    return SIMILAR[near[0]] if near else None


def _flags(command: Any) -> Iterator[str]:
    return (name for param in command.params for name in param.opts)
