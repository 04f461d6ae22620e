"""Flags that several commands share, and the configuration key each of them sets.

A command takes those that apply to it as parameters of these types, and hands all its parameters to `resolve_config`:
`options.resolve_config(**context.params)`. A flag that was not given leaves its key to the sources below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from rlctl.commands import completion
from rlctl.commands.output import want_json
from rlctl.commands.parsing import LORA, LORA_RANK
from rlctl.data.prompt_rows import GYM_PREFIX
from rlctl.errors import InputError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved

Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|DIR",
        help="Hub name or local Hugging Face directory.",
        autocompletion=completion.models,
    ),
]
Tokenizer: TypeAlias = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME|DIR", help="Tokenizer in place of the model's own.")
]
ChatTemplate: TypeAlias = Annotated[
    str | None,
    typer.Option("--chat-template", metavar="FILE|TEXT", help="Jinja chat template in place of the model's own."),
]
Data: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="SOURCE",
        help="A .jsonl or .parquet file, a hub dataset, or reasoning-gym:<task>. Repeat it to mix.",
        autocompletion=completion.data,
    ),
]
Reward: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        metavar="NAME[=WEIGHT]",
        help="task, exact-match, math-verify, ifeval, or file.py:function. Repeat it to add up.",
        autocompletion=completion.rewards,
    ),
]
ValData: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--val-data",
        metavar="SOURCE",
        help="Data to validate on, before the first step and after the last.",
        autocompletion=completion.data,
    ),
]
PromptField: TypeAlias = Annotated[
    str | None, typer.Option("--prompt-field", metavar="NAME", help="Column of the data that holds the prompt.")
]
AnswerField: TypeAlias = Annotated[
    str | None, typer.Option("--answer-field", metavar="NAME", help="Column of the data that holds the answer.")
]
Lora: TypeAlias = Annotated[
    int | None,
    typer.Option(
        LORA, metavar="[RANK]", help=f"Train adapters in place of all weights; RANK is {LORA_RANK} if unsaid."
    ),
]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option("--temperature", help="Temperature of sampling; 0 takes the most likely token.")
]
Wandb: TypeAlias = Annotated[
    bool, typer.Option("--wandb", help="Log to Weights & Biases (with --tensorboard to both).")
]
Tensorboard: TypeAlias = Annotated[
    bool, typer.Option("--tensorboard", help="Log to TensorBoard (with --wandb to both).")
]
Backend: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="megatron, dtensor (FSDP2), or auto: megatron where it can.",
    ),
]
MaxLength: TypeAlias = Annotated[
    int | None,
    typer.Option("--max-length", metavar="TOKENS", help="Most tokens of prompt and completion together."),
]
MaxNewTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-new-tokens", metavar="TOKENS", help="Most tokens of a completion.")
]
MeanLength: TypeAlias = Annotated[
    int | None,
    typer.Option("--mean-length", metavar="TOKENS", help="Mean completion length that the planner assumes."),
]
Nodes: TypeAlias = Annotated[int | None, typer.Option("--nodes", help="Number of nodes.")]
GpusPerNode: TypeAlias = Annotated[int | None, typer.Option("--gpus-per-node", help="Number of GPUs of each node.")]
Gpu: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="TYPE|auto|cpu",
        help="Type of GPU; auto looks which is installed, cpu uses none.",
        autocompletion=completion.gpus,
    ),
]
RayAddress: TypeAlias = Annotated[
    str | None, typer.Option("--ray-address", metavar="HOST:PORT", help="Join this Ray cluster.")
]
Preset: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--preset",
        "-p",
        metavar="NAME|FILE",
        help="Preset to start from; `rlctl presets ls` lists them.",
        autocompletion=completion.presets,
    ),
]
Config: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML file or NeMo-RL recipe, over the preset. Repeat it: the last wins.",
    ),
]
Set: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="Set any key. Repeat it: the last wins."),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to set: rlctl's own, or NeMo-RL's (policy.model_name=NAME)."),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", callback=want_json, is_eager=True, help="Print one JSON object on stdout.")
]
Explain: TypeAlias = Annotated[
    bool,
    typer.Option("--explain", help="With --dry-run: every value, its rule, and the engines' arguments."),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Check and show plan, prompt and rewards; start nothing.")
]
Algorithm: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        metavar="NAME|FILE:CLASS",
        help="grpo, dapo, ppo, gspo, rloo, distillation and six more, or your own.",
    ),
]
Teacher: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--teacher",
        metavar="NAME|DIR",
        help="Model to learn from, with --algorithm distillation.",
        autocompletion=completion.models,
    ),
]
Steps: TypeAlias = Annotated[int | None, typer.Option("--steps", help="Number of training steps.")]
Prompts: TypeAlias = Annotated[int | None, typer.Option("--prompts", help="Number of prompts in each step.")]
Generations: TypeAlias = Annotated[int | None, typer.Option("--generations", help="Number of rollouts of each prompt.")]
Async: TypeAlias = Annotated[
    bool | None,
    typer.Option("--async/--sync", help="Sample while the policy trains, or before each step."),
]
MaxStaleness: TypeAlias = Annotated[
    int | None, typer.Option("--max-staleness", help="With --async, most versions that rollouts may be old.")
]
Colocated: TypeAlias = Annotated[
    bool | None, typer.Option("--colocated/--split", help="Generate on the training devices, or on others.")
]
LearningRate: TypeAlias = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
Seed: TypeAlias = Annotated[int | None, typer.Option("--seed", help="Seed of the data order and of sampling.")]
ShowSamples: TypeAlias = Annotated[
    int | None,
    typer.Option("--show-samples", metavar="N", help="Show the best and worst completion every N steps (0: never)."),
]
RunDir: TypeAlias = Annotated[str | None, typer.Option("--run-dir", metavar="DIR", help="Directory of the run.")]

# parameter name -> configuration key
KEYS = {
    "model": "model.name", "tokenizer": "model.tokenizer", "chat_template": "model.chat_template",
    "max_length": "model.max_length", "data": "data.name", "reward": "reward.terms", "backend": "training.backend",
    "max_new_tokens": "generation.max_new_tokens", "mean_length": "generation.mean_length", "nodes": "cluster.nodes",
    "gpus_per_node": "cluster.gpus_per_node", "gpu": "cluster.gpu", "ray_address": "cluster.ray_address",
    "steps": "run.steps", "prompts": "batch.prompts", "generations": "batch.generations", "lr": "optimizer.lr",
    "seed": "run.seed", "run_dir": "run.dir", "temperature": "generation.temperature", "goal": "run.goal",
    "colocated": "generation.colocated", "tp": "training.tp", "dp": "training.dp", "generation_tp": "generation.tp",
    "mover": "refit.mover", "sparse": "refit.sparse", "algorithm": "run.algorithm", "top_p": "generation.top_p",
    "teacher": "teacher.model",
    "val_data": "validation.data.name", "prompt_field": "data.prompt_field", "answer_field": "data.answer_field",
    "lora": "training.lora.rank", "loggers": "run.loggers", "show_samples": "run.show_samples",
    "async_": "rollouts.mode", "max_staleness": "rollouts.max_staleness",
}  # fmt: skip


def flag(name: str) -> str:
    """Return the flag of a parameter, as the user typed it."""
    typed = {"colocated": "--colocated/--split", "async_": "--async/--sync", "loggers": "--wandb/--tensorboard"}
    return typed.get(name, f"--{name.replace('_', '-')}")


def resolve_config(
    *,
    preset: str | None = None,
    config: Sequence[str] | None = None,
    set_: Sequence[str] | None = None,
    overrides: Sequence[str] | None = None,
    **params: Any,
) -> Resolved:
    """Return the configuration of this command line; of `params`, those in `KEYS` are flags that set a key. Raises
    ConfigError for a key or value that is wrong, naming it, where it came from and the nearest known one."""
    from rlctl.config.load import resolve
    from rlctl.config.sources import Flag

    stored = None
    if params.get("resume"):
        from rlctl.apps.train import values_of_run as stored
    if params.get("reward"):
        params["reward"] = [parse_reward(text) for text in params["reward"]]
    if params.get("async_") is not None:
        params["async_"] = "async" if params["async_"] else "sync"
    if asked := [name for name in ("wandb", "tensorboard") if params.get(name)]:
        params["loggers"] = asked
    given = {name: value for name, value in params.items() if name in KEYS and value not in (None, (), [])}
    flags = {KEYS[name]: Flag(flag(name), value) for name, value in given.items()}
    if several := flags.pop("data.name", None):
        names = [several.value] if isinstance(several.value, str) else several.value
        listed = {"data.sources": [{"name": name} for name in names]} if len(names) > 1 else {"data.name": names[0]}
        flags |= {key: Flag(several.name, value) for key, value in listed.items()}
    if "val_data" in given:
        flags |= {f"validation.{when}": Flag("--val-data", True) for when in ("at_start", "at_end")}
    resolved = resolve(
        preset=preset, files=config or [], flags=flags, sets=set_ or [], overrides=overrides or [], stored=stored
    )
    if resolved.config.data.name and resolved.config.data.name.startswith(GYM_PREFIX):
        for name in ("prompt_field", "answer_field"):
            if name in given:
                raise InputError(
                    f"{flag(name)} has no effect: {resolved.config.data.name} has no columns.", "Leave it out."
                )
    # A run that goes on has the mode of its manifest, and a comparison may have both modes.
    elsewhere = params.get("resume") or params.get("compare")
    if "max_staleness" in given and resolved.config.rollouts.mode == "sync" and not elsewhere:
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
