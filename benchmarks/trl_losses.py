"""Compares supervised fine-tuning and DPO with TRL: the same rows and the same numbers, and the losses of each step.

    python benchmarks/trl_losses.py --trl-python ENV/bin/python [--model DIR --steps 20 --batch-size 8 --plot FILE.svg]

`ENV` is an environment with TRL, which rlctl does not need: `uv venv ENV` and `uv pip install --python ENV/bin/python
trl`. The rows are sums of two numbers of one digit, with the right answer, and for DPO a wrong one. rlctl trains on
them by its own commands, in rows packed with many texts. TRL's SFTTrainer and DPOTrainer get the same prompts as texts
that the chat template has rendered, and pad each batch; as messages they would also train on the line break that the
template writes behind an answer. Both begin at the same weights in float32, take the rows in their order, and use AdamW
of the same settings. Prints one JSON object with the losses of each step and their largest differences; `--plot` draws
them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OPTIMIZER = {"lr": 2e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "clip_grad": 1.0}
BETA = 0.1
LIMIT_S = 3600


def rows_of(count: int) -> list[dict[str, str]]:
    """Return `count` sums with a right and a wrong answer."""
    draws = random.Random(0)
    found = []
    for _ in range(count):
        one, other, wrong = draws.randint(0, 9), draws.randint(0, 9), draws.randint(1, 9)
        prompt = f"State the final answer to the following arithmetic problem: {one} + {other} ="
        found.append({"prompt": prompt, "chosen": str(one + other), "rejected": str(one + other + wrong)})
    return found


def by_rlctl(kind: str, data: Path, args: argparse.Namespace, place: Path) -> list[float]:
    """Return the losses of `rlctl train KIND`."""
    run, values = place / f"run-{kind}", {f"optimizer.{name}": value for name, value in OPTIMIZER.items()}
    values |= {"data.shuffle": "false", "model.dtype": "float32", "preference.beta": BETA, "run.save_final": "false"}
    command = [
        sys.executable, "-m", "rlctl", "train", kind, "--model", str(args.model), "--data", str(data), "--gpu", "cpu",
        "--steps", str(args.steps), "--batch-size", str(args.batch_size), "--run-dir", str(run),
        "--answer-field", "chosen", *(f"--set={key}={value}" for key, value in values.items()),
    ]  # fmt: skip
    if kind == "dpo":
        command = [part for part in command if part not in ("--answer-field", "chosen")]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=sys.stderr)
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def by_trl(kind: str, data: Path, args: argparse.Namespace, place: Path) -> list[float]:
    """Return the losses of TRL, which this file computes when it is called in TRL's environment."""
    asked = {
        "kind": kind, "data": str(data), "model": str(args.model), "steps": args.steps, "batch": args.batch_size,
        "place": str(place / f"trl-{kind}"), "threads": args.threads,
    }  # fmt: skip
    command = [args.trl_python, __file__, "--in-trl", json.dumps(asked)]
    done = subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def train_in_trl(asked: dict[str, Any]) -> None:
    """Train by TRL and print the losses as JSON."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import (  # pyright: ignore[reportMissingImports]
        DPOConfig,
        DPOTrainer,
        SFTConfig,
        SFTTrainer,
    )

    torch.set_num_threads(asked["threads"])
    tokenizer: Any = AutoTokenizer.from_pretrained(asked["model"])
    rows = [json.loads(line) for line in Path(asked["data"]).read_text().splitlines()]
    for row in rows:
        message = [{"role": "user", "content": row["prompt"]}]
        row["prompt"] = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    common = {
        "output_dir": asked["place"], "max_steps": asked["steps"], "per_device_train_batch_size": asked["batch"],
        "learning_rate": OPTIMIZER["lr"], "lr_scheduler_type": "constant", "weight_decay": OPTIMIZER["weight_decay"],
        "adam_beta1": OPTIMIZER["beta1"], "adam_beta2": OPTIMIZER["beta2"], "adam_epsilon": OPTIMIZER["eps"],
        "max_grad_norm": OPTIMIZER["clip_grad"], "optim": "adamw_torch", "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    if asked["kind"] == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
        base, settings = SFTTrainer, SFTConfig(**common, completion_only_loss=True)
    else:
        base, settings = DPOTrainer, DPOConfig(**common, beta=BETA)

    class InOrder(base):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    data = Dataset.from_list(rows)
    trainer = InOrder(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    print(json.dumps([line["loss"] for line in trainer.state.log_history if "loss" in line]))


def draw(losses: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the losses of both in two charts, one next to the other."""

    from pictures import picture

    from rlctl.report.charts import Series

    found = [
        (f"{kind} loss", [Series(name, [*enumerate(both[name], 1)], color) for color, name in enumerate(both)])
        for kind, both in losses.items()
    ]
    path.write_text(picture(found, len(losses["sft"]["rlctl"]), "losses of rlctl and of TRL on the same rows"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="python of an environment with TRL")
    parser.add_argument("--model", type=Path, help="Hugging Face directory; the laptop preset's model by default")
    parser.add_argument("--plot", type=Path, help="SVG file for the losses")
    parser.add_argument("--in-trl", type=json.loads, help=argparse.SUPPRESS)
    for name, value in {"steps": 20, "batch-size": 8, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.in_trl:
        train_in_trl(args.in_trl)
        return
    if not args.trl_python:
        parser.error("--trl-python names the python of an environment with TRL")
    if args.model is None:
        from rlctl.preparation.laptop_model import fetch

        args.model = fetch(lambda text: print(text, file=sys.stderr))
    losses: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        data = place / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(args.steps * args.batch_size)))
        for kind in ("sft", "dpo"):
            losses[kind] = {"rlctl": by_rlctl(kind, data, args, place), "TRL": by_trl(kind, data, args, place)}
    report: dict[str, Any] = {
        "largest_relative_difference": {
            kind: max(abs(one / other - 1) for one, other in zip(both["rlctl"], both["TRL"], strict=True))
            for kind, both in losses.items()
        },
        "losses": losses,
    }
    if args.plot:
        draw(losses, args.plot)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
