"""`rlctl rollout`: play and show a few episodes of an environment."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlctl.commands import options
from rlctl.commands.generate import Step, model_or_checkpoint
from rlctl.commands.output import examples, message, print_json
from rlctl.commands.parsing import App

app = App()

Episodes = Annotated[int, typer.Option("--n", "-n", min=1, max=10_000, help="Number of episodes.")]
Check = Annotated[bool, typer.Option("--check", help="Compare the engine's log-probs with a policy's.")]


@app.command(
    "rollout",
    epilog=examples(
        "rlctl rollout --preset laptop-tools -n 3",
        "rlctl rollout --env guess-number --model Qwen/Qwen3-0.6B",
        "rlctl rollout --tool tools.py:search --data questions.jsonl --reward exact-match --model Qwen/Qwen3-0.6B",
        "rlctl rollout --env game.py:Game --run-dir runs/my-run --json",
    ),
)
@options.taking(
    "env tool data prompt_field answer_field reward temperature max_new_tokens seed model run_dir tokenizer "
    "chat_template max_length preset config set_ nodes gpus_per_node gpu ray_address"
)
def rollout(
    context: typer.Context,
    n: Episodes = 4,
    step: Step = None,
    check: Check = False,
    json_: options.Json = False,
) -> None:
    """Play a few episodes with a model or a checkpoint (--run-dir) and show them turn by turn, without training.

    --check computes the log-probs of the sampled tokens with a policy and shows the difference. --json prints one JSON
    object per episode (JSON Lines).
    """
    from rlctl.jobs.episodes_job import episodes_job
    from rlctl.jobs.rollout import play

    resolved, checkpoint = model_or_checkpoint(context, "episodes")
    job = episodes_job(resolved, checkpoint, n, check, message)
    for line in job.describe():
        message(line)
    for record in play(job, message):
        print_json(record, lines=True) if json_ else print(text_of(record), flush=True)


def text_of(record: dict[str, Any]) -> str:
    """Return an episode as text."""
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:.3g}"
    head = [f"episode {record['episode']}", reward, f"ended by {record['stop_reason']}"]
    head += [f"{name} {value:g}" for name, value in record.get("counts", {}).items() if value]
    if difference := record.get("logprob_diff"):
        head.append(f"log-probs differ by {difference['mean']:.1e}, at most {difference['max']:.1e}")
    lines = [" · ".join(head), *([f"  {record['error']}"] if "error" in record else [])]
    for turn in record["turns"]:
        of_turn = f" (reward {turn['reward']:g})" if turn["reward"] else ""
        lines += [f"  {turn['role']}{of_turn}", *(f"    {line}" for line in turn["text"].strip().splitlines())]
    return "\n".join([*lines, ""])
