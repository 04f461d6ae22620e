"""Flags that several commands share, and the configuration key each of them sets.

A command takes the ones that apply to it as parameters of these types, and hands them to `resolve_config`:

    def plan(model: options.Model = None, preset: options.Preset = None, set_: options.Set = None) -> None:
        resolved = options.resolve_config(preset=preset, set_=set_, model=model)

A flag that was not given is None and leaves its key to the sources below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from rlctl.commands.output import want_json
from rlctl.errors import InputError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved

CONFIGURATION = "Configuration"
MACHINE = "Machine"

Model: TypeAlias = Annotated[
    str | None, typer.Option("--model", "-m", metavar="NAME|DIR", help="Hub name or local Hugging Face directory.")
]
Tokenizer: TypeAlias = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME|DIR", help="Another tokenizer than the model's own.")
]
ChatTemplate: TypeAlias = Annotated[
    str | None, typer.Option("--chat-template", metavar="FILE|TEXT", help="Jinja chat template.")
]
Data: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="SOURCE",
        help="reasoning-gym:<task> (parameters: --set data.params.<key>=<value>), a .jsonl or .parquet file, or a "
        "Hugging Face dataset.",
    ),
]
Reward: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        metavar="NAME[=WEIGHT]",
        help="task, exact-match, math-verify, or path/to/file.py:function. Repeat it to add several up.",
    ),
]
Backend: TypeAlias = Annotated[
    Literal["auto", "megatron", "dtensor"] | None,
    typer.Option("--backend", help="Training engine; dtensor (FSDP2) is planned, and not run yet."),
]
MaxLength: TypeAlias = Annotated[
    int | None, typer.Option("--max-length", metavar="TOKENS", help="Most tokens of prompt and completion together.")
]
MaxNewTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-new-tokens", metavar="TOKENS", help="Most tokens of a completion.")
]
MeanLength: TypeAlias = Annotated[
    int | None,
    typer.Option("--mean-length", metavar="TOKENS", help="Mean generated tokens that the planner reckons with."),
]
Nodes: TypeAlias = Annotated[int | None, typer.Option("--nodes", help="Number of nodes.", rich_help_panel=MACHINE)]
GpusPerNode: TypeAlias = Annotated[
    int | None, typer.Option("--gpus-per-node", help="GPUs of each node.", rich_help_panel=MACHINE)
]
Gpu: TypeAlias = Annotated[
    str | None,
    typer.Option("--gpu", metavar="TYPE|auto|cpu", help="GPU type, what is there, or none.", rich_help_panel=MACHINE),
]
RayAddress: TypeAlias = Annotated[
    str | None,
    typer.Option("--ray-address", metavar="HOST:PORT", help="Join this Ray cluster.", rich_help_panel=MACHINE),
]
Preset: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--preset",
        "-p",
        metavar="NAME|FILE",
        help="Where to start; see `rlctl presets ls`.",
        rich_help_panel=CONFIGURATION,
    ),
]
Config: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML over the preset. Repeat it; the last wins.",
        rich_help_panel=CONFIGURATION,
    ),
]
Set: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="SECTION.KEY=VALUE",
        help="Any key. Repeat it; the last wins.",
        rich_help_panel=CONFIGURATION,
    ),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", callback=want_json, is_eager=True, help="Print one JSON object on stdout.")
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show configuration and plan, check them, and start nothing.")
]
Steps: TypeAlias = Annotated[int | None, typer.Option("--steps", help="Training steps.")]
Prompts: TypeAlias = Annotated[int | None, typer.Option("--prompts", help="Prompts a step.")]
Generations: TypeAlias = Annotated[int | None, typer.Option("--generations", help="Rollouts a prompt.")]
LearningRate: TypeAlias = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
Seed: TypeAlias = Annotated[int | None, typer.Option("--seed", help="Seed of data order and sampling.")]
RunDir: TypeAlias = Annotated[str | None, typer.Option("--run-dir", metavar="DIR", help="Where the run is written.")]

# parameter name -> (flag as the user typed it, configuration key)
FLAGS: dict[str, tuple[str, str]] = {
    "model": ("--model", "model.name"),
    "tokenizer": ("--tokenizer", "model.tokenizer"),
    "chat_template": ("--chat-template", "model.chat_template"),
    "max_length": ("--max-length", "model.max_length"),
    "data": ("--data", "data.name"),
    "reward": ("--reward", "reward.terms"),
    "backend": ("--backend", "training.backend"),
    "max_new_tokens": ("--max-new-tokens", "generation.max_new_tokens"),
    "mean_length": ("--mean-length", "generation.mean_length"),
    "nodes": ("--nodes", "cluster.nodes"),
    "gpus_per_node": ("--gpus-per-node", "cluster.gpus_per_node"),
    "gpu": ("--gpu", "cluster.gpu"),
    "ray_address": ("--ray-address", "cluster.ray_address"),
    "steps": ("--steps", "grpo.steps"),
    "prompts": ("--prompts", "grpo.prompts"),
    "generations": ("--generations", "grpo.generations"),
    "lr": ("--lr", "optimizer.lr"),
    "seed": ("--seed", "run.seed"),
    "run_dir": ("--run-dir", "run.dir"),
    "temperature": ("--temperature", "generation.temperature"),
    "goal": ("--goal", "run.goal"),
    "colocated": ("--colocated/--split", "generation.colocated"),
    "tp": ("--tp", "training.tp"),
    "dp": ("--dp", "training.dp"),
    "generation_tp": ("--generation-tp", "generation.tp"),
    "mover": ("--mover", "refit.mover"),
    "sparse": ("--sparse", "refit.sparse"),
}


def resolve_config(
    *, preset: str | None = None, config: list[str] | None = None, set_: list[str] | None = None, **flags: Any
) -> Resolved:
    """The configuration of this command line; `flags` are the shared options above by parameter name.

    Raises ConfigError for a key or value that is wrong, naming it, where it came from and the nearest known one.
    """
    from rlctl.config.load import Flag, resolve

    given = {FLAGS[name][1]: Flag(FLAGS[name][0], value) for name, value in flags.items() if value is not None}
    if "reward.terms" in given:
        given["reward.terms"] = Flag("--reward", [parse_reward(text) for text in flags["reward"]])
    return resolve(preset=preset, files=config or [], flags=given, sets=set_ or [])


def parse_reward(text: str) -> dict[str, Any]:
    """`task`, `task=0.5` or `path/to/file.py:function=2` as a reward term."""
    name, equals, weight = text.rpartition("=")
    if not equals:
        return {"name": text}
    try:
        return {"name": name, "weight": float(weight)}
    except ValueError:
        raise InputError(f"--reward {text}: {weight!r} is not a number.", "Write NAME or NAME=WEIGHT.") from None
