"""Measures a whole GRPO step by phase, against the same step written in plain transformers.

    python benchmarks/grpo_step.py [--model DIR --shape 8x8x32 --shape 8x4x16 --steps 4 --threads 2]
    python benchmarks/grpo_step.py --peer trl [--trl-python ENV/bin/python] [--dtype float32]
    python benchmarks/grpo_step.py --peer products [--dtype float32]
    python benchmarks/grpo_step.py --peer itself [--shape 8x8x32 --steps 6]

A shape is prompts x samples x new tokens. For each one the real command runs with the laptop preset's task, all its
processes and no checkpoint; then, when these are gone, the peer runs in this process: the same model in float32, the
same prompts, `generate` with sampling, log-probs of the completions, one AdamW step. The first step of each is left
out, for it warms up. Rewards cost the peer nothing. Prints one JSON object: seconds by phase, generated tokens per
second, and the ratio of the seconds (above 1: rlctl is faster).

Run it on an idle machine, and record nothing from a busy one: the two run one after the other, not in turns, so that
other work falls on either. The load average at the start is printed next to the numbers for that reason.

`--peer trl` runs TRL's GRPOTrainer in an environment of its own, which is made with pip in a temporary folder unless
`--trl-python` names one: the same prompts, samples, lengths and reward, a function that calls half of the completions
right whatever the model writes. Each side has its fastest number format: rlctl's `model.dtype=auto`, and of TRL the
faster of float32 and bfloat16. `--dtype` gives both the same one. It also prints trained tokens per second (prompts
and completions), whose ratio counts, since completions differ in length. `products_s` are the seconds of the matrix
products of rlctl's step alone, in its number format, `over_products` is what each phase takes of them, and
`ratio_at_most` is the ratio of a step that does nothing else. `--peer products` measures these alone.

`--peer itself` takes one source of speed away after the other, on the laptop preset's own reward: shared prompts,
skipping rollouts without an advantage, and the number format that `model.dtype=auto` chooses (where it is not
float32). The last two are added: `checks.exact`, and asynchronous rollouts, where generation and training have one
core each. `times` is the seconds of a step over those of the usual step. `--only NAME` measures one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl.config.load import Resolved


LIMIT_S = 3600
TRL = "trl==1.16.0"
MUST = {"fastest": 5.0, "float32": 3.5}
"""The ratio to TRL that is asked for, by `--dtype`."""


SOURCES: dict[str, dict[str, Any]] = {
    "usual": {},
    "no shared prompts": {"training.share_prompts": False},
    "rollouts without advantage trained": {"filter.skip": False},
    "float32": {"model.dtype": "float32"},
    "equal bits in engine and policy": {"checks.exact": True},
    "asynchronous, a core each": {"rollouts.mode": "async", "training.threads": 1, "generation.threads": 1},
}


def half_right(completions: list[str], **_: Any) -> list[float]:
    """The reward of both sides with `--peer trl`, in TRL's form."""
    return [float(zlib.crc32(text.encode()) & 1) for text in completions]


@dataclass(frozen=True)
class Shape:
    """Prompts of a step, samples of a prompt, and the most new tokens of a sample."""

    prompts: int
    samples: int
    new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*(int(part) for part in text.split("x")))

    def settings(self, steps: int) -> dict[str, Any]:
        return {
            "batch.prompts": self.prompts,
            "batch.generations": self.samples,
            "generation.max_new_tokens": self.new_tokens,
            "run.steps": steps,
            "run.checkpoint_every": 0,
            "run.save_final": False,
            "run.loggers": [],
            "run.log_rollouts": self.prompts * self.samples,
        }


def resolved(model: Path, shape: Shape, steps: int, dtype: str = "auto") -> Resolved:
    from rlctl.methods.configuration import resolve  # absent where TRL runs

    return resolve("laptop", flags={"model.name": str(model), "model.dtype": dtype, **shape.settings(steps)})


def prompt_tokens_of(prompts: Any, step: int, shape: Shape) -> list[list[int]]:
    """Return the token ids of the prompts of a step (from 0)."""
    positions = range(step * shape.prompts, (step + 1) * shape.prompts)
    return [list(prompts.tokens(prompts.prompt_at(position))) for position in positions]


@dataclass(frozen=True)
class Work:
    """What a step computed."""

    lengths: list[int]
    """Tokens of each sample."""
    trained_tokens: int
    """Each prompt once, without the groups that teach nothing."""
    trained_positions: int
    """Positions with logits of `trained_tokens`."""

    @classmethod
    def of(cls, line: dict[str, Any], rollouts: Sequence[dict[str, Any]]) -> Work:
        rewards: dict[int, set[float]] = {}
        for rollout in rollouts:
            rewards.setdefault(rollout["position"], set()).add(rollout["reward"])
        trained = sum(rollout["tokens"] for rollout in rollouts if len(rewards[rollout["position"]]) > 1)
        return cls([rollout["tokens"] for rollout in rollouts], line["trained_tokens"], trained)


def rlctl_steps(
    model: Path, shape: Shape, steps: int, threads: int, more: Sequence[str] = (), **other: Any
) -> tuple[list[dict[str, float]], list[int], list[Work]]:
    """Run the real command; returns the seconds by phase, the generated tokens and the work of each step."""
    from rlctl.telemetry.metrics import read_metrics

    with tempfile.TemporaryDirectory() as directory:
        settings = shape.settings(steps) | {"training.threads": threads, "generation.threads": threads} | other
        command = [
            sys.executable, "-m", "rlctl", "train", "grpo", "--preset", "laptop",
            "--model", str(model), "--run-dir", f"{directory}/run", *more,
            *(word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=LIMIT_S, stdout=sys.stderr)
        lines = read_metrics(Path(directory) / "run" / "metrics.jsonl")
        logs = [Path(directory) / "run" / "rollouts" / f"step_{line['step']}.jsonl" for line in lines]
        work = [
            Work.of(line, [*map(json.loads, log.read_text().splitlines())])
            for line, log in zip(lines, logs, strict=True)
        ]
    return [line["seconds"] for line in lines], [sum(one.lengths) for one in work], work


class Peer:
    """The same step as a short script for transformers would have it."""

    def __init__(self, config: Resolved, model: Path, shape: Shape, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from rlctl.preparation.job import prepare_job
        from rlctl.vector_math import warm_up

        torch.set_num_threads(threads)
        warm_up()
        self.torch, self.shape, self.settings = torch, shape, config.config
        self.prompts = prepare_job(config).prompts
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.config.optimizer.lr, weight_decay=0.0)
        eos = self.model.generation_config.eos_token_id
        ends = eos if isinstance(eos, list) else [eos]
        self.ends = torch.tensor(sorted({*ends, *self.prompts.stop_token_ids} - {None}))

    def step(self, step: int) -> tuple[dict[str, float], int]:
        """Run one step; returns the seconds by phase and the generated tokens."""
        marks = [time.perf_counter()]
        ids, mask, response = self._generate(prompt_tokens_of(self.prompts, step, self.shape))
        marks.append(time.perf_counter())
        if "old_logprobs" in self.settings.logprobs_needed:
            with self.torch.no_grad():
                self._logprobs(ids, mask, response.shape[1])
        marks.append(time.perf_counter())
        self._train(ids, mask, response)
        marks.append(time.perf_counter())
        names = ("generation", "logprobs", "training")
        seconds = {name: end - begin for name, begin, end in zip(names, marks, marks[1:], strict=False)}
        return seconds | {"total": marks[-1] - marks[0]}, int(response.sum())

    def _generate(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any, Any]:
        """Return token ids and attention mask [B, S], prompts padded on the left, and the response mask [B, new]."""
        torch, wide = self.torch, max(map(len, prompts))
        rows = [list(tokens) for tokens in prompts for _ in range(self.shape.samples)]
        ids = torch.tensor([[0] * (wide - len(row)) + row for row in rows])
        held = torch.tensor([[0] * (wide - len(row)) + [1] * len(row) for row in rows])
        self.model.eval()
        out = self.model.generate(
            input_ids=ids, attention_mask=held, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=self.shape.new_tokens, eos_token_id=self.ends.tolist(), pad_token_id=0,
        )  # fmt: skip
        self.model.train()
        ended = torch.isin(out[:, wide:], self.ends).long().cumsum(1)
        # The token that ends a response belongs to it.
        response = torch.cat([torch.ones_like(ended[:, :1]), (ended[:, :-1] == 0).long()], 1)
        return out, torch.cat([held, response], 1), response

    def _logprobs(self, ids: Any, mask: Any, new: int) -> Any:
        """Return the log-probs [B, new] of the last `new` tokens."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=new + 1, use_cache=False)
        logits, targets = out.logits[:, :-1], ids[:, -new:]
        cross_entropy = self.torch.nn.functional.cross_entropy
        return -cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

    def _train(self, ids: Any, mask: Any, response: Any) -> None:
        torch = self.torch
        advantages = torch.where(torch.arange(len(ids)) % 2 == 0, 1.0, -1.0)[:, None]
        logprobs = self._logprobs(ids, mask, response.shape[1])
        ratio = (logprobs - logprobs.detach()).exp()
        self.optimizer.zero_grad()
        (-(ratio * advantages * response).sum() / response.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def summary(seconds: Sequence[dict[str, float]], tokens: Sequence[int]) -> dict[str, Any]:
    """Return the medians over the steps after the first."""
    phases = {name: round(statistics.median(step[name] for step in seconds[1:]), 3) for name in seconds[0]}
    rates = [count / step["total"] for count, step in zip(tokens[1:], seconds[1:], strict=True)]
    return {"seconds": phases, "generated_tokens_per_s": round(statistics.median(rates), 1)}


def trl_steps(asked: dict[str, Any], python: str) -> dict[str, Any]:
    """Return what `run_trl` prints in TRL's environment."""
    command = [python, __file__, "--in-trl", json.dumps(asked)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": str(asked["threads"]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def run_trl(asked: dict[str, Any]) -> None:
    """Train by TRL, and print the seconds and the tokens of each step as JSON."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(asked["threads"])
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    rollouts, bfloat16 = asked["prompts"] * asked["samples"], asked["dtype"] == "bfloat16"
    settings = GRPOConfig(
        output_dir=asked["place"], max_steps=asked["steps"], per_device_train_batch_size=rollouts,
        num_generations=asked["samples"], max_completion_length=asked["new_tokens"], temperature=1.0, beta=0.0,
        learning_rate=asked["lr"], lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=bfloat16, disable_tqdm=True, shuffle_dataset=False, gradient_checkpointing=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=getattr(torch, asked["dtype"]))
    trainer = GRPOTrainer(
        model=model, reward_funcs=half_right, args=settings, callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": text} for text in asked["texts"]]),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
    )  # fmt: skip
    trainer.train()
    logs = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    steps = [{"total": end - begin} for begin, end in pairwise(marks)]
    generated = [round(line["completions/mean_length"] * rollouts) for line in logs]
    print(json.dumps({"seconds": steps, "tokens": generated[1:]}))


def made_environment(place: Path) -> str:
    """Make an environment with TRL and the torch of this one; return its Python."""
    from importlib.metadata import version

    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    torch = f"torch=={version('torch').partition('+')[0]}"
    subprocess.run([str(place / "bin" / "pip"), "install", "--quiet", torch, TRL], check=True, stdout=sys.stderr)
    return str(place / "bin" / "python")


def measure_products(model: Path, shape: Shape, args: argparse.Namespace, python: str = "") -> dict[str, Any]:
    """Compare a step with its own matrix products, and with TRL's step if `python` has TRL."""
    from rlctl.preparation.job import prepare_job

    dtype = "auto" if args.dtype == "fastest" else args.dtype
    config = resolved(model, shape, args.steps, dtype)
    job = prepare_job(config)
    ids = [tokens for step in range(args.steps) for tokens in prompt_tokens_of(job.prompts, step, shape)]
    more = ["--reward", f"{__file__}:half_right", "--set", f"model.dtype={dtype}"]
    seconds, tokens, work = rlctl_steps(model, shape, args.steps, args.threads, more)
    ours = rates(seconds[1:], tokens[1:], shape.samples * sum(map(len, ids)) / args.steps)
    prompt_tokens = round(sum(map(len, ids)) / args.steps)
    alone = products_seconds(model, prompt_tokens, work[1:], args.threads, job.dtype)
    phases = summary(seconds, tokens)["seconds"]
    alone["total"] = sum(alone.values())
    found = {
        "dtype": job.dtype, "rlctl": ours, "seconds": phases,
        "products_s": {name: round(seconds, 2) for name, seconds in alone.items()},
        "over_products": {name: round(phases[name] / seconds, 2) for name, seconds in alone.items()},
    }  # fmt: skip
    if not python:
        return found
    theirs = measure_trl(model, shape, args, python, config.config.optimizer.lr, ids)
    best = max(one["trained_tokens_per_s"] for one in theirs.values())
    ratio = ours["trained_tokens_per_s"] / best
    return found | {
        "trl": theirs, "ratio": round(ratio, 2), "must": MUST.get(args.dtype),
        "ratio_at_most": round(ratio * ours["total_s"] / alone["total"], 2),
    }  # fmt: skip


def measure_trl(
    model: Path, shape: Shape, args: argparse.Namespace, python: str, lr: float, ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return TRL's rates by number format, for the prompts `ids` of all steps."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = {
        "model": str(model), "texts": [tokenizer.decode(one) for one in ids], "steps": args.steps,
        "prompts": shape.prompts, "samples": shape.samples, "new_tokens": shape.new_tokens, "threads": args.threads,
        "lr": lr,
    }  # fmt: skip
    prompt_tokens = shape.samples * sum(map(len, ids)) / args.steps
    theirs: dict[str, Any] = {}
    for dtype in ["float32", "bfloat16"] if args.dtype == "fastest" else [args.dtype]:
        with tempfile.TemporaryDirectory() as place:
            found = trl_steps(asked | {"dtype": dtype, "place": place}, python)
        theirs[dtype] = rates(found["seconds"], found["tokens"], prompt_tokens)
    return theirs


def products_seconds(
    model: Path, prompt_tokens: int, work: Sequence[Work], threads: int, dtype: str
) -> dict[str, float]:
    """Return the seconds of the matrix products of a step, medians over the steps: each prompt once, in each decode
    step the samples that have not ended, and three times those of a forward pass to train. Best of three, by torch's
    `linear`."""
    from generation import Products
    from one_process import facts_of

    products = Products(facts_of(model), dtype, threads)

    def best(forwards: Sequence[tuple[int, int]]) -> float:
        return min(products.of(forwards) for _ in range(3))

    def decoded(lengths: Sequence[int]) -> list[tuple[int, int]]:
        alive = [sum(length > place for length in lengths) for place in range(1, max(lengths))]  # a prompt gives one
        return [(prompt_tokens, len(lengths)), *((rows, rows) for rows in alive)]

    return {
        "generation": statistics.median(best(decoded(one.lengths)) for one in work),
        "training": statistics.median(3 * best([(one.trained_tokens, one.trained_positions)]) for one in work),
    }


def sources(model: Path, shape: Shape, steps: int, threads: int, only: str | None) -> dict[str, Any]:
    """Take each source of a step's speed away, or add it, alone."""
    from rlctl.preparation.cpu_format import has_instructions

    found: dict[str, Any] = {}
    for name, settings in SOURCES.items():
        if (name == "float32" and not has_instructions()) or (only and name not in ("usual", only)):
            continue
        seconds, tokens, _ = rlctl_steps(model, shape, steps, threads, **settings)
        found[name] = summary(seconds, tokens)
        usual = found["usual"]["seconds"]["total"]
        found[name]["times"] = round(found[name]["seconds"]["total"] / usual, 2)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    return found


def rates(seconds: Sequence[dict[str, float]], tokens: Sequence[int], prompt_tokens: float) -> dict[str, Any]:
    """Return the medians of seconds and of tokens per second of a step."""
    found = {"total_s": round(statistics.median(step["total"] for step in seconds), 2)}
    totals = [step["total"] for step in seconds]
    return found | {
        "generated_tokens_per_s": round(statistics.median(n / t for n, t in zip(tokens, totals, strict=True)), 1),
        "trained_tokens_per_s": round(
            statistics.median((n + prompt_tokens) / t for n, t in zip(tokens, totals, strict=True)), 1
        ),
    }


def measure(model: Path, shape: Shape, steps: int, threads: int) -> dict[str, Any]:
    ours = summary(*rlctl_steps(model, shape, steps, threads)[:2])
    peer = Peer(resolved(model, shape, steps), model, shape, threads)
    theirs = summary(*zip(*(peer.step(step) for step in range(steps)), strict=True))
    ratio = theirs["seconds"]["total"] / ours["seconds"]["total"]
    return {"rlctl": ours, "transformers": theirs, "ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face directory; the laptop preset's model by default")
    parser.add_argument("--peer", choices=["transformers", "trl", "products", "itself"], default="transformers")
    parser.add_argument("--trl-python", help="python of an environment with TRL; made by pip if it is not given")
    parser.add_argument(
        "--dtype", choices=["fastest", "float32", "bfloat16"], default="fastest", help="with --peer trl or products"
    )
    parser.add_argument("--in-trl", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--shape", action="append", help="prompts x samples x new tokens, for example 8x8x32")
    parser.add_argument("--only", choices=list(SOURCES)[1:], help="with --peer itself")
    parser.add_argument("--steps", type=int, default=4, help="steps of each, the first of which is left out")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.in_trl:
        run_trl(args.in_trl)
        return
    if args.model is None:
        from rlctl.preparation.laptop_model import fetch

        args.model = fetch(lambda text: print(text, file=sys.stderr))
    if args.steps < 2:
        parser.error("--steps: the first step is left out, so give at least 2")
    load = [round(value, 1) for value in os.getloadavg()]
    shapes = args.shape or ["8x8x32", "8x4x16"]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        python = args.trl_python or (made_environment(Path(place, "trl")) if args.peer == "trl" else "")
        for text in shapes:
            shape = Shape.parse(text)
            if args.peer in ("trl", "products"):
                results[text] = measure_products(args.model, shape, args, python)
            else:
                given = (args.model, shape, args.steps, args.threads)
                results[text] = sources(*given, args.only) if args.peer == "itself" else measure(*given)
    print(json.dumps({"load_average_at_start": load, "threads": args.threads, **results}, indent=1))


if __name__ == "__main__":
    main()
