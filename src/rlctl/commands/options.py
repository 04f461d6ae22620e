"""Flags that several commands share or that set a configuration key.

Typer takes options from the parameters of one function. Fifty flags in ten commands would be 250 declarations, so this
table declares each flag once, with its key. A command takes flags by name (`@taking("model preset")`) and passes all
its parameters to `resolve_config`: `options.resolve_config(**context.params)`. A flag that is not given leaves its key
to weaker sources.
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
"""A flag with an optional value, and its default."""


class Flag(NamedTuple):
    """A flag that several commands share or that sets a key."""

    kind: Any
    key: str | None
    """The configuration key that it sets, if any."""
    help: str
    metavar: str | None = None
    names: str | None = None
    """Its names, if they differ from the parameter's."""


FLAGS = {
    "overrides": Flag(list[str], None, "Keys to set: rlctl's own, or those of another trainer's recipe.", "KEY=VALUE"),
    "preset": Flag(str, None, "Preset to start from; `rlctl presets ls` lists them.", "NAME|FILE", "--preset -p"),
    "model": Flag(str, "model.name", "Hub name or local Hugging Face directory.", "NAME|DIR", "--model -m"),
    "tokenizer": Flag(str, "model.tokenizer", "Tokenizer; replaces the model's.", "NAME|DIR"),
    "chat_template": Flag(str, "model.chat_template", "Jinja chat template; replaces the model's.", "FILE|TEXT"),
    "data": Flag(
        list[str],
        "data.name",
        "File (JSON, CSV, Parquet), folder, hub dataset, or reasoning-gym:<task>. Repeatable.",
        "SOURCE",
    ),
    "prompt_field": Flag(str, "data.prompt_field", "Data column with the prompt.", "NAME"),
    "answer_field": Flag(str, "data.answer_field", "Data column with the reference answer.", "NAME"),
    "val_data": Flag(
        str, "validation.data.name", "Validation data, used before the first step and after the last.", "SOURCE"
    ),
    "reward": Flag(
        list[str],
        "reward.terms",
        "task, exact-match, math-verify, dapo-math, ifeval, file.py:function; repeatable.",
        "NAME[=WEIGHT]",
    ),
    "env": Flag(
        str, "environment.name", "Environment of several turns: a built-in one, or your class.", "NAME|FILE:CLASS"
    ),
    "tool": Flag(list[str], "environment.tools", "Function that the model may call. Repeatable.", "FILE:FUNCTION"),
    "algorithm": Flag(
        str,
        "run.algorithm",
        "grpo, dapo, ppo, gspo, rloo, distillation and six more, or yours.",
        "NAME|FILE:CLASS",
    ),
    "teacher": Flag(
        str, "teacher.model", "Teacher model, for --algorithm distillation or `train distill`.", "NAME|DIR"
    ),
    "steps": Flag(int, "run.steps", "Number of training steps."),
    "prompts": Flag(int, "batch.prompts", "Prompts per step."),
    "batch_size": Flag(int, "batch.prompts", "Texts or pairs per step."),
    "epochs": Flag(float, "run.epochs", "Passes over the data; replaces --steps."),
    "beta": Flag(float, "preference.beta", "Strength of the pull toward the reference model."),
    "generations": Flag(int, "batch.generations", "Rollouts per prompt."),
    "temperature": Flag(float, "generation.temperature", "Sampling temperature; 0 is greedy."),
    "top_p": Flag(float, "generation.top_p", "Nucleus sampling: keep the most likely tokens up to this probability."),
    "max_new_tokens": Flag(int, "generation.max_new_tokens", "Maximum length of a completion.", "TOKENS"),
    "max_length": Flag(int, "model.max_length", "Maximum length of prompt plus completion.", "TOKENS"),
    "mean_length": Flag(int, "generation.mean_length", "Mean completion length, for the planner.", "TOKENS"),
    "async_": Flag(
        bool | None, "rollouts.mode", "Generate while the policy trains, or before each step.", names="--async/--sync"
    ),
    "max_staleness": Flag(int, "rollouts.max_staleness", "With --async: maximum age of a rollout, in weight versions."),
    "colocated": Flag(
        bool | None,
        "generation.colocated",
        "Generate on the training devices, or on separate ones.",
        names="--colocated/--split",
    ),
    "lr": Flag(float, "optimizer.lr", "Learning rate."),
    "lora": Flag(
        int,
        "training.lora.rank",
        f"Train LoRA adapters, not all weights; RANK defaults to {LORA_RANK}.",
        "[RANK]",
    ),
    "seed": Flag(int, "run.seed", "Seed for data order and sampling."),
    "run_dir": Flag(str, "run.dir", "Directory of the run.", "DIR"),
    "show_samples": Flag(int, "run.show_samples", "Show the best and worst completion every N steps; 0: never.", "N"),
    "wandb": Flag(bool, None, "Log to Weights & Biases. Combines with --tensorboard."),
    "tensorboard": Flag(bool, None, "Log to TensorBoard. Combines with --wandb."),
    "backend": Flag(str, "training.backend", "megatron, dtensor (FSDP2), or auto: megatron if it can."),
    "tp": Flag(int, "training.tp", "Tensor parallel size of training."),
    "dp": Flag(int, "training.dp", "Data parallel size of training."),
    "generation_tp": Flag(int, "generation.tp", "Tensor parallel size of the engine."),
    "mover": Flag(
        Literal["auto", "shared-memory", "cuda-ipc", "collective", "disk"],
        "refit.mover",
        "Transport of the weights; auto chooses by where the engines run.",
    ),
    "sparse": Flag(
        bool | None, "refit.sparse", "Send only changed elements; the test then changes few of them between refits."
    ),
    "nodes": Flag(int, "cluster.nodes", "Number of nodes."),
    "gpus_per_node": Flag(int, "cluster.gpus_per_node", "GPUs per node."),
    "gpu": Flag(str, "cluster.gpu", "GPU type; auto detects it, cpu uses none.", "TYPE|auto|cpu"),
    "ray_address": Flag(str, "cluster.ray_address", "Ray cluster to join.", "HOST:PORT"),
    "goal": Flag(
        str,
        "run.goal",
        "Plan for fast steps, free memory, or low cost in GPU seconds.",
        "fast|safe|cheap",
    ),
    "config": Flag(
        list[str],
        None,
        "YAML file or another trainer's recipe, over the preset. Repeatable; the last wins.",
        "FILE",
        "--config -c",
    ),
    "set_": Flag(list[str], None, "Set any key. Repeatable; the last wins.", "SECTION.KEY=VALUE", "--set -s"),
    "dry_run": Flag(bool, None, "Check everything; show plan, first prompt and rewards; start nothing."),
    "explain": Flag(bool, None, "With --dry-run: show every value, its rule, and the engines' arguments."),
    "resume": Flag(bool, None, "Continue the run in --run-dir, or the newest run."),
    "allow_changes": Flag(bool, None, "With --resume: continue although data, model or settings changed."),
    "allow_differences": Flag(bool, None, "Run a recipe although rlctl lacks some of its settings."),
    "completion": Flag(str, None, "With --dry-run: score this completion.", "TEXT"),
}
TRAINING = (
    "overrides preset model data prompt_field answer_field val_data reward env tool algorithm teacher steps "
    "prompts generations temperature max_new_tokens max_length mean_length async_ max_staleness colocated lr lora seed "
    "run_dir show_samples wandb tensorboard tokenizer chat_template backend goal nodes gpus_per_node gpu ray_address "
    "config set_"
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
KEYS = {name: one.key for name, one in FLAGS.items() if one.key} | {"loggers": "run.loggers"}
"""The configuration key of each parameter that sets one."""


def _parameter(name: str) -> inspect.Parameter:
    one = FLAGS[name]
    texts: dict[str, Any] = {"metavar": one.metavar, "help": one.help, "autocompletion": COMPLETIONS.get(name)}
    option = typer.Argument(**texts) if name == "overrides" else typer.Option(*names_of(name), **texts)
    kind, unsaid = (bool, False) if one.kind is bool else (one.kind | None, None)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=unsaid, annotation=Annotated[kind, option])


def taking(flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to a command; `flags` lists their names, separated by spaces. The function receives the flags that it
    names as parameters; `context.params` holds all."""

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
    """Return the configuration of this command line. `params` in `KEYS` are flags that set a key; `command` is the
    algorithm, for the commands of `train` that name one. Raises ConfigError for a wrong key or value, with its origin
    and the nearest known key."""
    from rlctl.config.sources import GivenFlag
    from rlctl.methods.configuration import resolve

    if params.get("steps") is not None and params.get("epochs") is not None:
        raise InputError("--steps and --epochs both set the length of the run.", "Give one of them.")
    if params.get("lora") == 0:
        raise InputError(
            f"{LORA} 0: adapters have a rank of at least 1.",
            f"Leave {LORA} out to train all weights; --set training.lora.rank=0 replaces a rank of a file or preset.",
        )
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
    flags = {KEYS[name]: GivenFlag(flag(name), value) for name, value in given.items()}
    if command is not None:
        flags["run.algorithm"] = GivenFlag(f"train {command}", command)
    if several := flags.pop("data.name", None):
        names = [several.value] if isinstance(several.value, str) else several.value
        listed = {"data.sources": [{"name": name} for name in names]} if len(names) > 1 else {"data.name": names[0]}
        flags |= {key: GivenFlag(several.name, value) for key, value in listed.items()}
    if "val_data" in given:
        flags |= {f"validation.{when}": GivenFlag("--val-data", True) for when in ("at_start", "at_end")}
    resolved = resolve(
        preset=preset, files=config or [], flags=flags, sets=set_ or [], overrides=overrides or [], stored=stored
    )
    if (length := given.get("max_length")) and resolved.config.rollout_settings:
        # By default completions get what a prompt of 256 tokens, or of an eighth, leaves.
        new = max(1, length - min(256, length // 8))
        resolved = resolved.with_values({"generation.max_new_tokens": new}, "with --max-length")
    if resolved.config.data.name and resolved.config.data.name.startswith(GYM_PREFIX):
        for name in ("prompt_field", "answer_field"):
            if name in given:
                raise InputError(
                    f"{flag(name)} has no effect: {resolved.config.data.name} has no columns.", "Leave it out."
                )
    # A resumed run has the mode of its manifest, and a comparison may have both modes.
    elsewhere = params.get("resume") or params.get("compare")
    if "max_staleness" in given and not resolved.config.samples_while_training and not elsewhere:
        raise InputError("--max-staleness applies to --async; this run generates before each step.", "Add --async.")
    return resolved


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
