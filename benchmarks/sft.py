"""Measures supervised fine-tuning against transformers' Trainer on the same batches in one run, and compares losses.

    python benchmarks/sft.py --model DIR [--steps 10 --batch-size 16 --max-length 512 --threads 2 --plot losses.html]

The texts are questions about functions and classes of Python's standard library, answered by their documentation, whose
lengths have a long tail: of texts with more than `--max-length` tokens the first are kept. Each batch is trained on by
transformers' Trainer, which pads it to its longest text, and directly after it by rlctl's policy, in every second step
packed into rows of `--row-tokens`, else a text a row. Both hold their own copy of the model in float32, with AdamW of
the same settings. Seconds are those of a step without the making of its batch. Ratios are of the seconds of the same
batches, by the clock and by the processor, whose time a busy machine disturbs less; the first two steps are left out.
Prints one JSON object, with the losses of both in each step.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_process import policy

from rlctl.backends.batching.packing import plan_batch
from rlctl.backends.policy_rank import PolicyRank
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.texts import TrainedText, trained_texts
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.report import charts
from rlctl.rollouts.dataset import columns_of, group_of
from rlctl.settings.data import DataConfig, ModelConfig
from rlctl.settings.training import OptimizerConfig
from rlctl.training.run_loss import RunLoss

LIMITS = {"unpacked": 1.0, "packed": 1.5}
"""Tokens per second of rlctl are to be at least so many times those of the Trainer."""
MODULES = (
    "argparse", "base64", "bisect", "calendar", "collections", "contextlib", "copy", "csv", "datetime", "decimal",
    "difflib", "email", "fractions", "functools", "glob", "gzip", "hashlib", "heapq", "html", "inspect", "io",
    "ipaddress", "itertools", "json", "logging", "math", "operator", "os", "pathlib", "pickle", "random", "re",
    "shutil", "socket", "sqlite3", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading",
    "time", "traceback", "typing", "unittest", "urllib.parse", "uuid", "weakref", "zipfile",
)  # fmt: skip
OPTIMIZER = {"lr": 2e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "clip_grad": 1.0}


def documented_texts(model: Path, count: int, longest: int) -> list[TrainedText]:
    """Return texts in a shuffled order that does not change."""
    tokenizer = load_tokenizer(model, ModelConfig())
    encoder = PromptEncoder.build(tokenizer, ModelConfig(), DataConfig(system_prompt=""), model)
    said = {}
    for module in map(importlib.import_module, MODULES):
        for name in sorted(vars(module)):
            found = vars(module)[name]
            if not name.startswith("_") and callable(found) and isinstance(found.__doc__, str):
                said[f"{module.__name__}.{name}"] = inspect.cleandoc(found.__doc__)
    rows = [PromptRow(place, name, f"What does {name} do?", (text,)) for place, (name, text) in enumerate(said.items())]
    order = np.random.default_rng(0).permutation(len(rows))
    texts = (trained_texts(encoder, rows[place])[0] for place in (order[index % len(rows)] for index in range(count)))
    return [TrainedText(text.tokens_T[:longest], text.mask_T[:longest]) for text in texts]


def now() -> np.ndarray:
    """Return the time by the clock, and that of the processors that this process has had."""
    return np.array([time.perf_counter(), time.process_time()])


class Steps:
    """rlctl's step on each batch, in turns packed and not."""

    def __init__(self, worker: PolicyRank, row_tokens: int) -> None:
        config = resolve(flags={"run.algorithm": "sft"}, environment={}).config
        self._worker, self._row_tokens, self._algorithm = worker, row_tokens, method_from_config(config)
        self.seconds: list[np.ndarray] = []
        self.losses: list[float] = []

    def take(self, texts: list[TrainedText]) -> None:
        position = len(self.losses)
        packed = position % 2 == 0
        groups = [
            group_of(index, PromptRow(index, "", "", None), [text], columns_of([text]))
            for index, text in enumerate(texts)
        ]
        batch = self._algorithm.train_batch(groups, 1)
        plan = plan_batch(batch.minibatches, batch.columns, dp=1, micro_batch_tokens=self._row_tokens, packing=packed)
        begun = now()
        self._worker.load_batch(plan.shards[0], list)
        result = self._worker.train_minibatch(0, RunLoss(self._algorithm), OPTIMIZER["lr"], 0.0)
        self.seconds.append(now() - begun)
        assert result is not None
        self.losses.append(result.loss)


def collated(texts: list[TrainedText]) -> dict[str, torch.Tensor]:
    """Return a batch as transformers takes it: padded behind the texts to the longest."""
    shape = len(texts), max(len(text.tokens_T) for text in texts)
    ids, seen, labels = (
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.full(shape, -100),
    )
    for row, text in enumerate(texts):
        tokens = torch.from_numpy(text.tokens_T).long()
        ids[row, : len(tokens)], seen[row, : len(tokens)] = tokens, 1
        labels[row, : len(tokens)] = torch.where(torch.from_numpy(text.mask_T), tokens, -100)
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


def train_in_turns(
    args: argparse.Namespace, texts: list[TrainedText], steps: Steps
) -> tuple[list[np.ndarray], list[float]]:
    """Train with the Trainer, and after each of its steps with `steps`; return its seconds and losses."""
    from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    batches, seconds = [texts[i : i + args.batch_size] for i in range(0, len(texts), args.batch_size)], []

    class Turns(TrainerCallback):
        begun = np.zeros(2)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(now() - self.begun)
            steps.take(batches[len(seconds) - 1])
            print(len(seconds), seconds[-1], steps.seconds[-1], steps.losses[-1], file=sys.stderr, flush=True)

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(texts)

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    settings = TrainingArguments(
        output_dir=str(args.output), max_steps=args.steps, per_device_train_batch_size=args.batch_size,
        learning_rate=OPTIMIZER["lr"], lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_torch_fused", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        remove_unused_columns=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = InOrder(model=model, args=settings, train_dataset=texts, data_collator=collated, callbacks=[Turns()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return seconds, [line["loss"] for line in trainer.state.log_history if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--backend", choices=("megatron", "dtensor"), default="megatron", help="training engine")
    parser.add_argument("--plot", type=Path, help="HTML file for the losses")
    parser.add_argument("--output", type=Path, default=Path("/tmp/sft-trainer"), help="directory of the Trainer")
    numbers = {"steps": 10, "batch-size": 16, "max-length": 512, "row-tokens": 2048, "threads": 2}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = documented_texts(args.model, args.steps * args.batch_size, args.max_length)
    with policy(args.model, args.threads, args.backend, OptimizerConfig.model_validate(OPTIMIZER)) as worker:
        steps = Steps(worker, args.row_tokens)
        seconds, losses = train_in_turns(args, texts, steps)
    lengths = [len(text.tokens_T) for text in texts]
    tokens = [sum(lengths[i : i + args.batch_size]) for i in range(0, len(lengths), args.batch_size)]
    report: dict[str, Any] = {
        "lengths": {name: float(np.quantile(lengths, q)) for name, q in (("median", 0.5), ("90%", 0.9), ("most", 1.0))},
        "trainer_padding": round(1 - sum(lengths) / padded(lengths, args.batch_size), 3),
        "largest_relative_difference_of_losses": max(abs(a / b - 1) for a, b in zip(steps.losses, losses, strict=True)),
    }
    for first, name in enumerate(("packed", "unpacked")):
        own = range(first + 2, args.steps, 2)
        mine, theirs = (sum(one[i] for i in own) for one in (steps.seconds, seconds))
        count = sum(tokens[i] for i in own)
        report[name] = {
            "tokens_per_s": round(count / mine[0], 1),
            "trainer_tokens_per_s": round(count / theirs[0], 1),
            "ratio": round(theirs[0] / mine[0], 2),
            "ratio_of_processor_seconds": round(theirs[1] / mine[1], 2),
            "at_least": LIMITS[name],
        }
    report |= {"losses": {"rlctl": steps.losses, "trainer": losses}, "load_average": os.getloadavg()}
    if args.plot:
        both = (
            charts.Series("rlctl", [*enumerate(steps.losses, 1)]),
            charts.Series("Trainer", [*enumerate(losses, 1)], 1),
        )
        style = Path(charts.__file__).with_name("page.css").read_text()
        chart = charts.line_chart(both, "loss of rlctl and of the Trainer", (1, args.steps), "loss")
        args.plot.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{chart}")
    print(json.dumps(report, indent=1))


def padded(lengths: list[int], size: int) -> int:
    """Return the tokens of all batches with their padding."""
    found = iter(lengths)
    return sum(len(batch) * max(batch) for batch in iter(lambda: list(islice(found, size)), []))


if __name__ == "__main__":
    main()
