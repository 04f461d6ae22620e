"""Flags that several commands share or that set a configuration key.

Typer takes options from the parameters of one function. Fifty flags in ten commands would be 250 declarations, so each
flag is declared once: in the field of its key (`config.facts.Flag`), or here without a key. A command takes flags by
name (`@taking("model preset")`) and passes all its parameters to `resolve_config`:
`options.resolve_config(**context.params)`. A flag that is not given leaves its key to weaker sources.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from rlctl.commands import completion
from rlctl.commands.output import want_json
from rlctl.config.facts import Flag
from rlctl.config.schema import Schema
from rlctl.config.section import Section
from rlctl.data.prompt_rows import GYM_PREFIX
from rlctl.errors import InputError
from rlctl.settings.config import RolloutConfig, TextConfig

if TYPE_CHECKING:
    from rlctl.config.load import Resolved

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", callback=want_json, is_eager=True, help="Print one JSON object on stdout.")
]


LORA = "--lora"
"""A flag with an optional value, `LORA_RANK`."""


class Parameter(NamedTuple):
    """A parameter that several commands share or that sets a key."""

    kind: Any
    key: str | None
    """The configuration key that it sets, if any."""
    help: str
    metavar: str | None = None
    names: str | None = None
    """Its names, if they differ from the parameter's."""


FLAGS = {
    "overrides": Parameter(list[str], None, "Keys to set: rlctl's own, or another trainer's.", "KEY=VALUE"),
    "preset": Parameter(str, None, "Preset to start from; `rlctl presets ls` lists them.", "NAME|FILE", "--preset -p"),
    "wandb": Parameter(bool, None, "Log to Weights & Biases. Combines with --tensorboard."),
    "tensorboard": Parameter(bool, None, "Log to TensorBoard. Combines with --wandb."),
    "config": Parameter(
        list[str],
        None,
        "YAML file or another trainer's recipe, over the preset. Repeatable; the last wins.",
        "FILE",
        "--config -c",
    ),
    "set_": Parameter(list[str], None, "Set any key. Repeatable; the last wins.", "SECTION.KEY=VALUE", "--set -s"),
    "vary": Parameter(list[str], None, "Values of a key, one run each. Repeatable: all combinations.", "KEY=VALUE,..."),
    "dry_run": Parameter(bool, None, "Check everything; show plan, first prompt and rewards; start nothing."),
    "explain": Parameter(bool, None, "With --dry-run: show every value, its rule, and the engines' arguments."),
    "resume": Parameter(bool, None, "Continue the run in --run-dir, or the newest run."),
    "allow_changes": Parameter(bool, None, "With --resume: continue although data, model or settings changed."),
    "allow_differences": Parameter(bool, None, "Run a recipe although rlctl lacks some of its settings."),
    "completion": Parameter(str, None, "With --dry-run: score this completion.", "TEXT"),
}
"""Every flag: flags without a key here, the others from the fields of their keys."""


SHARED = (RolloutConfig, TextConfig)
"""Configuration classes whose flags several commands have."""


def declare(config: type[Section]) -> list[str]:
    """Add the flags that a configuration class declares; return the flags of keys that `SHARED` lacks."""
    schema = Schema((config,))
    flags = schema.with_mark(Flag)
    for key, flag in flags.items():
        if flag.parameter not in FLAGS:
            kind = flag.kind or next(iter(schema.plain_kinds(key) - {type(None)}))
            FLAGS[flag.parameter] = Parameter(kind | None, key, flag.help, flag.metavar, flag.names)
    shared = Schema(SHARED).marks
    return [flag.parameter for key, flag in flags.items() if key not in shared]


def of_methods() -> str:
    """Return the flags of keys that only some methods have."""
    from rlctl.methods.available import commands

    return " ".join(dict.fromkeys(flag for method in commands().values() for flag in declare(method.Config)))


for _config in SHARED:
    declare(_config)
TRAINING = (
    "overrides preset model data prompt_field answer_field val_data reward env tool algorithm teacher steps "
    "prompts generations temperature max_new_tokens max_length mean_length async_ max_staleness colocated lr lora "
    "adapter seed run_dir show_samples wandb tensorboard tokenizer chat_template backend goal nodes gpus_per_node gpu "
    "ray_address config set_"
)
"""Flags of RL training."""
COMPLETIONS = {
    "preset": completion.presets,
    "model": completion.models,
    "data": completion.data,
    "val_data": completion.data,
    "reward": completion.rewards,
    "teacher": completion.models,
    "gpu": completion.gpus,
}


def key_of(parameter: str) -> str | None:
    """Return the configuration key that a parameter sets, if any."""
    return "run.loggers" if parameter == "loggers" else FLAGS[parameter].key if parameter in FLAGS else None


def _parameter(name: str) -> inspect.Parameter:
    flag = FLAGS[name]
    texts: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help, "autocompletion": COMPLETIONS.get(name)}
    option = typer.Argument(**texts) if name == "overrides" else typer.Option(*names_of(name), **texts)
    kind, unsaid = (bool, False) if flag.kind is bool else (_chosen(flag) | None, None)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=unsaid, annotation=Annotated[kind, option])


def _chosen(parameter: Parameter) -> Any:
    """Return the type of a flag's value: one of the names that its key takes, or the type of the key's field."""
    choices = _shared_keys(tuple(sys.path)).choices(parameter.key) if parameter.key else ()
    return Literal[choices] if choices else parameter.kind


@functools.cache
def _shared_keys(places: tuple[str, ...]) -> Schema:
    from rlctl.methods.configuration import names_of_values

    return Schema(SHARED, names_of_values())


def taking(flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to a command; `flags` lists their names, separated by spaces. The function receives the flags that it
    names as parameters; `context.params` holds all."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        names = flags.split()
        own_parameters = inspect.signature(command, eval_str=True).parameters
        rest = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in own_parameters.values()
            if parameter.name not in names
        ]

        @functools.wraps(command)
        def taken(**values: Any) -> None:
            command(**{name: value for name, value in values.items() if name in own_parameters})

        parameters = [*map(_parameter, names), *rest]
        taken.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        taken.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return taken

    return give


def names_of(name: str) -> list[str]:
    """Return the long and short form of a parameter's flag."""
    return (FLAGS[name].names or f"--{name.replace('_', '-')}").split()


def given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Return the parameters that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def flag(name: str) -> str:
    """Return the flag that sets the key of a parameter."""
    return "--wandb/--tensorboard" if name == "loggers" else names_of(name)[0]


def resolve_config(
    *,
    preset: str | None = None,
    config: Sequence[str] | None = None,
    set_: Sequence[str] | None = None,
    overrides: Sequence[str] | None = None,
    command: str | None = None,
    **params: Any,
) -> Resolved:
    """Return the configuration of this command line.

    `params` with a key (`key_of`) are flags that set it; `command` is the method, for the commands of `train` that
    name one. Raises ConfigError for a wrong key or value, with its origin and the nearest known key.
    """
    from rlctl.config.sources import GivenFlag
    from rlctl.methods.configuration import DEFAULT_METHOD, resolve

    _refuse_contradictions(params)
    stored = None
    if params.get("resume"):
        from rlctl.jobs.resume import values_of_run as stored
    if params.get("reward"):
        params["reward"] = [parse_reward(text) for text in params["reward"]]
    if params.get("async_") is not None:
        params["async_"] = "async" if params["async_"] else "sync"
    if loggers := [name for name in ("wandb", "tensorboard") if params.get(name)]:
        params["loggers"] = loggers
    provided = {name: value for name, value in params.items() if key_of(name) and value not in (None, (), [])}
    flags = {key: GivenFlag(flag(name), value) for name, value in provided.items() if (key := key_of(name))}
    if command not in (None, DEFAULT_METHOD):
        flags["run.algorithm"] = GivenFlag(f"train {command}", command)
    if several := flags.pop("data.name", None):
        names = [several.value] if isinstance(several.value, str) else several.value
        listed = {"data.sources": [{"name": name} for name in names]} if len(names) > 1 else {"data.name": names[0]}
        flags |= {key: GivenFlag(several.name, value) for key, value in listed.items()}
    if "val_data" in provided:
        flags |= {f"validation.{when}": GivenFlag("--val-data", True) for when in ("at_start", "at_end")}
    resolved = resolve(
        preset=preset, files=config or [], flags=flags, sets=set_ or [], overrides=overrides or [], stored=stored,
        command=None if params.get("resume") else command,
    )  # fmt: skip
    if (length := provided.get("max_length")) and resolved.config.rollout_settings:
        # By default completions get the tokens that a prompt of 256, or of an eighth of the length, leaves.
        new = max(1, length - min(256, length // 8))
        resolved = resolved.with_values({"generation.max_new_tokens": new}, "with --max-length")
    if resolved.config.data.name and resolved.config.data.name.startswith(GYM_PREFIX):
        for name in ("prompt_field", "answer_field"):
            if name in provided:
                raise InputError(
                    f"{flag(name)} has no effect: {resolved.config.data.name} has no columns.", "Leave it out."
                )
    # A resumed run has the mode of its manifest, and a comparison may have both modes.
    elsewhere = params.get("resume") or params.get("compare")
    if "max_staleness" in provided and not resolved.config.samples_while_training and not elsewhere:
        raise InputError("--max-staleness applies to --async; this run generates before each step.", "Add --async.")
    return resolved


def _refuse_contradictions(params: Mapping[str, Any]) -> None:
    """Raise InputError for flags that contradict each other or their own value."""
    if params.get("steps") is not None and params.get("epochs") is not None:
        raise InputError("--steps and --epochs both set the length of the run.", "Give one of them.")
    if params.get("lora") == 0:
        raise InputError(
            f"{LORA} 0: adapters have a rank of at least 1.",
            f"Leave {LORA} out to train all weights; --set training.lora.rank=0 replaces a rank of a file or preset.",
        )


def require_dry_run(explain: bool, dry_run: bool) -> None:
    """Raise InputError for --explain without --dry-run."""
    if explain and not dry_run:
        raise InputError("--explain applies to --dry-run.", "Add --dry-run.")


def parse_reward(text: str) -> dict[str, Any]:
    """Parse `task`, `task=0.5` or `path/to/file.py:function=2` into a reward term."""
    name, equals, weight = text.rpartition("=")
    if not equals:
        return {"name": text}
    try:
        return {"name": name, "weight": float(weight)}
    except ValueError:
        raise InputError(f"--reward {text}: {weight!r} is not a number.", "Write NAME or NAME=WEIGHT.") from None
