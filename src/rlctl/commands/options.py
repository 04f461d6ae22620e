"""Flags that several commands share or that set a key of the configuration.

Typer takes options from the parameters of one function. Fifty flags in ten commands would be 250 declarations, so this
table declares each flag once, with its key. A command takes them by name (`@taking("model preset")`), and hands all
its parameters to `resolve_config`: `options.resolve_config(**context.params)`. A flag that was not given leaves its
key to the other sources.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from rlctl.commands import completion
from rlctl.commands.output import want_json
from rlctl.data.prompt_rows import GYM_PREFIX
from rlctl.errors import InputError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", callback=want_json, is_eager=True, help="Print one JSON object on stdout.")
]


LORA, LORA_RANK = "--lora", 16
"""A flag that may have a value, and the value that it has alone."""


class Flag(NamedTuple):
    """A flag that several commands share or that sets a key."""

    kind: Any
    key: str | None
    """The key of the configuration that it sets, if any."""
    help: str
    metavar: str | None = None
    names: str | None = None
    """Its names, where they do not follow from that of the parameter."""


FLAGS = {
    "overrides": Flag(list[str], None, "Keys to set: rlctl's own, or those of another trainer's recipe.", "KEY=VALUE"),
    "preset": Flag(str, None, "Preset to start from; `rlctl presets ls` lists them.", "NAME|FILE", "--preset -p"),
    "model": Flag(str, "model.name", "Hub name or local Hugging Face directory.", "NAME|DIR", "--model -m"),
    "tokenizer": Flag(str, "model.tokenizer", "Tokenizer in place of the model's own.", "NAME|DIR"),
    "chat_template": Flag(str, "model.chat_template", "Jinja chat template in place of the model's own.", "FILE|TEXT"),
    "data": Flag(
        list[str],
        "data.name",
        "A .jsonl or .parquet file, a hub dataset, or reasoning-gym:<task>. Repeat it to mix.",
        "SOURCE",
    ),
    "prompt_field": Flag(str, "data.prompt_field", "Column of the data that holds the prompt.", "NAME"),
    "answer_field": Flag(str, "data.answer_field", "Column of the data that holds the answer.", "NAME"),
    "val_data": Flag(
        str, "validation.data.name", "Data to validate on, before the first step and after the last.", "SOURCE"
    ),
    "reward": Flag(
        list[str],
        "reward.terms",
        "task, exact-match, math-verify, dapo-math, ifeval, file.py:function; repeat to add.",
        "NAME[=WEIGHT]",
    ),
    "env": Flag(
        str, "environment.name", "Environment that answers the model: a built-in one, or your own.", "NAME|FILE:CLASS"
    ),
    "tool": Flag(list[str], "environment.tools", "Function that the model may call. Can be repeated.", "FILE:FUNCTION"),
    "algorithm": Flag(
        str, "run.algorithm", "grpo, dapo, ppo, gspo, rloo, distillation and six more, or your own.", "NAME|FILE:CLASS"
    ),
    "teacher": Flag(
        str, "teacher.model", "Model to learn from, with --algorithm distillation or `train distill`.", "NAME|DIR"
    ),
    "steps": Flag(int, "run.steps", "Number of training steps."),
    "prompts": Flag(int, "batch.prompts", "Number of prompts in each step."),
    "batch_size": Flag(int, "batch.prompts", "Number of texts, or of pairs, in each step."),
    "epochs": Flag(float, "run.epochs", "Number of times that each row is trained on, in place of --steps."),
    "beta": Flag(float, "preference.beta", "Weight of the distance to the model that the run began with."),
    "generations": Flag(int, "batch.generations", "Number of rollouts of each prompt."),
    "temperature": Flag(float, "generation.temperature", "Temperature of sampling; 0 takes the most likely token."),
    "top_p": Flag(float, "generation.top_p", "Sample among the most likely tokens whose probabilities add up to this."),
    "max_new_tokens": Flag(int, "generation.max_new_tokens", "Most tokens of a completion.", "TOKENS"),
    "max_length": Flag(int, "model.max_length", "Most tokens of prompt and completion together.", "TOKENS"),
    "mean_length": Flag(int, "generation.mean_length", "Mean completion length that the planner assumes.", "TOKENS"),
    "async_": Flag(
        bool | None, "rollouts.mode", "Sample while the policy trains, or before each step.", names="--async/--sync"
    ),
    "max_staleness": Flag(int, "rollouts.max_staleness", "With --async, most versions that rollouts may be old."),
    "colocated": Flag(
        bool | None,
        "generation.colocated",
        "Generate on the training devices, or on others.",
        names="--colocated/--split",
    ),
    "lr": Flag(float, "optimizer.lr", "Learning rate."),
    "lora": Flag(
        int, "training.lora.rank", f"Train adapters in place of all weights; RANK is {LORA_RANK} if unsaid.", "[RANK]"
    ),
    "seed": Flag(int, "run.seed", "Seed of the data order and of sampling."),
    "run_dir": Flag(str, "run.dir", "Directory of the run.", "DIR"),
    "show_samples": Flag(int, "run.show_samples", "Show the best and worst completion every N steps (0: never).", "N"),
    "wandb": Flag(bool, None, "Log to Weights & Biases (with --tensorboard to both)."),
    "tensorboard": Flag(bool, None, "Log to TensorBoard (with --wandb to both)."),
    "backend": Flag(str, "training.backend", "megatron, dtensor (FSDP2), or auto: megatron where it can."),
    "tp": Flag(int, "training.tp", "Tensor parallel size of training."),
    "dp": Flag(int, "training.dp", "Data parallel size of training."),
    "generation_tp": Flag(int, "generation.tp", "Tensor parallel size of the engine."),
    "mover": Flag(
        Literal["auto", "shared-memory", "cuda-ipc", "collective", "disk"],
        "refit.mover",
        "Mover that carries the bytes; auto chooses by where the engines are.",
    ),
    "sparse": Flag(
        bool | None, "refit.sparse", "Send only changed elements. The test then perturbs few of them between refits."
    ),
    "nodes": Flag(int, "cluster.nodes", "Number of nodes."),
    "gpus_per_node": Flag(int, "cluster.gpus_per_node", "Number of GPUs of each node."),
    "gpu": Flag(str, "cluster.gpu", "Type of GPU; auto looks which is installed, cpu uses none.", "TYPE|auto|cpu"),
    "ray_address": Flag(str, "cluster.ray_address", "Join this Ray cluster.", "HOST:PORT"),
    "goal": Flag(
        str,
        "run.goal",
        "Plan for short steps, free memory or few GPU seconds.",
        "fast|safe|cheap",
    ),
    "config": Flag(
        list[str],
        None,
        "YAML file, or another trainer's recipe, over the preset. Repeat it: the last wins.",
        "FILE",
        "--config -c",
    ),
    "set_": Flag(list[str], None, "Set any key. Repeat it: the last wins.", "SECTION.KEY=VALUE", "--set -s"),
    "dry_run": Flag(bool, None, "Check and show plan, prompt and rewards; start nothing."),
    "explain": Flag(bool, None, "With --dry-run: every value, its rule, and the engines' arguments."),
    "resume": Flag(bool, None, "Continue the run in --run-dir (or the newest one)."),
    "allow_changes": Flag(bool, None, "With --resume: go on though data, model or settings changed."),
    "allow_differences": Flag(bool, None, "Go on without what a recipe asks for and rlctl lacks."),
    "completion": Flag(str, None, "With --dry-run: a completion to show the rewards of.", "TEXT"),
}
TRAINING = (
    "overrides preset model data prompt_field answer_field val_data reward env tool algorithm teacher steps "
    "prompts generations temperature max_new_tokens max_length mean_length async_ max_staleness colocated lr lora seed "
    "run_dir show_samples wandb tensorboard tokenizer chat_template backend goal nodes gpus_per_node gpu ray_address "
    "config set_"
)
"""Flags that say what is trained, on what and how."""
COMPLETIONS = {
    "preset": completion.presets,
    "model": completion.models,
    "data": completion.data,
    "val_data": completion.data,
    "reward": completion.rewards,
    "teacher": completion.models,
    "gpu": completion.gpus,
}
KEYS = {name: one.key for name, one in FLAGS.items() if one.key} | {"loggers": "run.loggers"}
"""The configuration key of each parameter that sets one."""


def _parameter(name: str) -> inspect.Parameter:
    """Return the parameter of a command by which Typer knows a flag."""
    one = FLAGS[name]
    texts: dict[str, Any] = {"metavar": one.metavar, "help": one.help, "autocompletion": COMPLETIONS.get(name)}
    option = typer.Argument(**texts) if name == "overrides" else typer.Option(*names_of(name), **texts)
    kind, unsaid = (bool, False) if one.kind is bool else (one.kind | None, None)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=unsaid, annotation=Annotated[kind, option])


def taking(flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags, named with spaces between. It gets the values of those that its function names; all are in
    `context.params`."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        names = flags.split()
        own = inspect.signature(command, eval_str=True).parameters
        rest = [one.replace(kind=one.KEYWORD_ONLY) for one in own.values() if one.name not in names]

        @functools.wraps(command)
        def taken(**values: Any) -> None:
            command(**{name: value for name, value in values.items() if name in own})

        parameters = [*map(_parameter, names), *rest]
        taken.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        taken.__annotations__ = {one.name: one.annotation for one in parameters}
        return taken

    return give


def names_of(name: str) -> list[str]:
    """Return the flag of a parameter as the user types it, and its short form."""
    return (FLAGS[name].names or f"--{name.replace('_', '-')}").split()


def given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Return those of the parameters that are on the command line."""
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
    """Return the configuration of this command line; of `params`, those in `KEYS` are flags that set a key. `command`
    is the algorithm where a command of `train` is one. Raises ConfigError for a key or value that is wrong, naming it,
    where it came from and the nearest known one."""
    from rlctl.config.load import resolve
    from rlctl.config.sources import Flag as Given
    from rlctl.settings.config import RolloutConfig

    if params.get("steps") is not None and params.get("epochs") is not None:
        raise InputError("--steps and --epochs both say how long the run is.", "Give one of them.")
    stored = None
    if params.get("resume"):
        from rlctl.jobs.train import values_of_run as stored
    if params.get("reward"):
        params["reward"] = [parse_reward(text) for text in params["reward"]]
    if params.get("async_") is not None:
        params["async_"] = "async" if params["async_"] else "sync"
    if asked := [name for name in ("wandb", "tensorboard") if params.get(name)]:
        params["loggers"] = asked
    given = {name: value for name, value in params.items() if name in KEYS and value not in (None, (), [])}
    flags = {KEYS[name]: Given(flag(name), value) for name, value in given.items()}
    if command is not None:
        flags["run.algorithm"] = Given(f"train {command}", command)
    if several := flags.pop("data.name", None):
        names = [several.value] if isinstance(several.value, str) else several.value
        listed = {"data.sources": [{"name": name} for name in names]} if len(names) > 1 else {"data.name": names[0]}
        flags |= {key: Given(several.name, value) for key, value in listed.items()}
    if "val_data" in given:
        flags |= {f"validation.{when}": Given("--val-data", True) for when in ("at_start", "at_end")}
    resolved = resolve(
        preset=preset, files=config or [], flags=flags, sets=set_ or [], overrides=overrides or [], stored=stored
    )
    if (length := given.get("max_length")) and isinstance(resolved.config, RolloutConfig):
        # Where nobody says it, completions take what a prompt of 256 tokens, or of an eighth, leaves.
        new = max(1, length - min(256, length // 8))
        resolved = resolved.with_values({"generation.max_new_tokens": new}, "with --max-length")
    if resolved.config.data.name and resolved.config.data.name.startswith(GYM_PREFIX):
        for name in ("prompt_field", "answer_field"):
            if name in given:
                raise InputError(
                    f"{flag(name)} has no effect: {resolved.config.data.name} has no columns.", "Leave it out."
                )
    # A run that goes on has the mode of its manifest, and a comparison may have both modes.
    elsewhere = params.get("resume") or params.get("compare")
    if "max_staleness" in given and not resolved.config.samples_while_training and not elsewhere:
        raise InputError("--max-staleness is for --async: rollouts are made before each step here.", "Add --async.")
    return resolved


def require_dry_run(explain: bool, dry_run: bool) -> None:
    """Raises InputError where --explain was given and --dry-run was not."""
    if explain and not dry_run:
        raise InputError("--explain is for --dry-run: it shows what is behind a plan.", "Add --dry-run.")


def parse_reward(text: str) -> dict[str, Any]:
    """`task`, `task=0.5` or `path/to/file.py:function=2` as a reward term."""
    name, equals, weight = text.rpartition("=")
    if not equals:
        return {"name": text}
    try:
        return {"name": name, "weight": float(weight)}
    except ValueError:
        raise InputError(f"--reward {text}: {weight!r} is not a number.", "Write NAME or NAME=WEIGHT.") from None
