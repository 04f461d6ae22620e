"""Measures a whole GRPO step by phase, against the same step written in plain transformers.

    python benchmarks/grpo_step.py --model DIR [--shape 8x8x32 --shape 8x4x16 --steps 4 --threads 2]

A shape is prompts x samples x new tokens. For each one the real command runs with the laptop preset's task, all its
processes and no checkpoint; then, when these are gone, the peer runs in this process: the same model in float32, the
same prompts, `generate` with sampling, log-probs of the completions, one AdamW step. The first step of each is left
out, for it warms up. Rewards cost the peer nothing. Prints one JSON object: seconds by phase, generated tokens per
second, and the ratio of the seconds (above 1: rlctl is faster).

Run it on an idle machine, and record nothing from a busy one: the two run one after the other, not in turns, so that
other work falls on either. The load average at the start is printed next to the numbers for that reason.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.load import Resolved, resolve
from rlctl.jobs.prepare import prepare_job
from rlctl.telemetry.metrics import read_metrics
from rlctl.vector_math import warm_up

LIMIT_S = 3600


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
        }


def resolved(model: Path, shape: Shape, steps: int) -> Resolved:
    return resolve("laptop", flags={"model.name": str(model), **shape.settings(steps)})


def rlctl_steps(model: Path, shape: Shape, steps: int, threads: int) -> tuple[list[dict[str, float]], list[int]]:
    """Run the real command; returns the seconds by phase and the generated tokens of each step."""
    with tempfile.TemporaryDirectory() as directory:
        settings = shape.settings(steps) | {"training.threads": threads, "generation.threads": threads}
        command = [
            str(Path(sys.executable).with_name("rlctl")), "train", "grpo", "--preset", "laptop",
            "--model", str(model), "--run-dir", f"{directory}/run",
            *(word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=LIMIT_S, stdout=sys.stderr)
        lines = read_metrics(Path(directory) / "run" / "metrics.jsonl")
    samples = shape.prompts * shape.samples
    return [line["seconds"] for line in lines], [round(line["response_tokens_mean"] * samples) for line in lines]


class Peer:
    """The same step as a short script for transformers would have it."""

    def __init__(self, config: Resolved, model: Path, shape: Shape, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

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
        ids, mask, response = self._generate(self.prompts.tokens(step))
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


def measure(model: Path, shape: Shape, steps: int, threads: int) -> dict[str, Any]:
    ours = summary(*rlctl_steps(model, shape, steps, threads))
    peer = Peer(resolved(model, shape, steps), model, shape, threads)
    theirs = summary(*zip(*(peer.step(step) for step in range(steps)), strict=True))
    ratio = theirs["seconds"]["total"] / ours["seconds"]["total"]
    return {"rlctl": ours, "transformers": theirs, "ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--shape", action="append", help="prompts x samples x new tokens, for example 8x8x32")
    parser.add_argument("--steps", type=int, default=4, help="steps of each, the first of which is left out")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps: the first step is left out, so give at least 2")
    load = [round(value, 1) for value in os.getloadavg()]
    shapes = args.shape or ["8x8x32", "8x4x16"]
    results = {text: measure(args.model, Shape.parse(text), args.steps, args.threads) for text in shapes}
    print(json.dumps({"load_average_at_start": load, "threads": args.threads, **results}, indent=1))


if __name__ == "__main__":
    main()
