"""Measures a training step (forward, backward, optimizer) against transformers: seconds, tokens per second, memory.

    python benchmarks/train.py --model DIR [--backend dtensor --shape 4x4x45x16 --shape 2x4x64x64 --threads 2]

A shape is prompts x completions of each x tokens of a prompt x most new tokens. The batch is that of a GRPO step:
groups of completions behind one prompt, of uneven lengths. transformers gets it as TRL does, padded to a rectangle,
with logits for the completion only, and torch's fused AdamW. Both train in float32 on the CPU. Seconds are the best of
the repeats; ratios are medians over the repeats, in each of which all ways take a turn, of wall-clock and of processor
seconds, so that a busy machine harms all alike. Memory is by how much the process is
larger at its highest in a step than before it: activations and what else a step holds, by token of the batch. Prints
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from one_process import PolicyGradient, peak_bytes, policy

from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.batching.packing import BatchPlan, plan_batch
from rlctl.backends.policy_rank import PolicyRank
from rlctl.data.rollouts import RolloutColumns

SHAPES = ("4x4x45x16", "2x4x64x64", "1x2x64x448")
LR = 0.0  # the work of a step without its effect: all three see the same weights, and their norms can be compared


@dataclass(frozen=True)
class Shape:
    """Prompts of a step, completions of each, tokens of a prompt, and the most tokens of a completion."""

    prompts: int
    generations: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*(int(part) for part in text.split("x")))


def make_groups(args: Shape, vocab: int) -> dict[int, RolloutColumns]:
    """Draw random tokens: prompts of about `prompt_tokens`, completions of at most `new_tokens`."""
    rng = np.random.default_rng(0)
    groups = {}
    for group in range(args.prompts):
        prompt = rng.integers(0, vocab, args.prompt_tokens + int(rng.integers(-2, 3)))
        completions = [
            rng.integers(0, vocab, int(rng.integers(args.new_tokens * 3 // 4, args.new_tokens + 1)))
            for _ in range(args.generations)
        ]
        rows = [np.concatenate([prompt, completion]) for completion in completions]
        mask = np.concatenate([np.arange(len(row)) >= len(prompt) for row in rows])
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        tokens = np.concatenate(rows).astype(np.int32)
        groups[group] = RolloutColumns(
            tokens, offsets, mask, -5.0 * mask.astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
        )
    return groups


def advantage(row: int) -> float:
    return 1.0 if row % 2 else -1.0


def plan(groups: dict[int, RolloutColumns], share: bool, limit: int) -> BatchPlan:
    rows = [
        WeightedSequence(
            group, row, int(np.argmax(c.loss_mask_T)), int(np.diff(c.offsets_G)[row]), advantage(row), 0.01
        )
        for group, c in groups.items()
        for row in range(c.rollouts)
    ]
    return plan_batch([rows], groups, dp=1, micro_batch_tokens=limit, share_prompts=share)


def policy_step(worker: PolicyRank, batch: BatchPlan) -> Callable[[], float]:
    def step() -> float:
        worker.load_batch(batch.shards[0], list)
        result = worker.train_minibatch(0, PolicyGradient(), LR)
        assert result is not None
        return result.grad_norm

    return step


def transformers_step(model: Any, groups: dict[int, RolloutColumns]) -> Callable[[], float]:
    """Pad prompts on the left, as TRL does, so that prompts and completions form one rectangle."""
    prompts, completions, advantages = [], [], []
    for columns in groups.values():
        for row in range(columns.rollouts):
            tokens, mask = columns.tokens_T[columns.slice(row)], columns.loss_mask_T[columns.slice(row)]
            prompts.append(tokens[~mask])
            completions.append(tokens[mask])
            advantages.append(advantage(row))
    wide, long = max(map(len, prompts)), max(map(len, completions))
    ids = torch.zeros(len(prompts), wide + long, dtype=torch.int64)
    held = torch.zeros_like(ids)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        span = slice(wide - len(prompt), wide + len(completion))
        ids[i, span], held[i, span] = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64)), 1
    positions = (held.cumsum(1) - 1).clamp(min=0)
    weights = held[:, wide:] * torch.tensor(advantages)[:, None] * 0.01
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        logits = model(ids, attention_mask=held, position_ids=positions, logits_to_keep=long + 1).logits[:, :-1]
        targets = ids[:, wide:]
        logprobs = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        ).view_as(targets)
        (-(logprobs * weights).sum()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        return norm

    return step


@dataclass(frozen=True)
class Taken:
    """Wall-clock and processor seconds of each repeat, and the gradient norm of the first step."""

    wall: list[float]
    processor: list[float]
    norm: float

    def ratios(self, plain: Taken) -> dict[str, float]:
        """Return how many of these steps `plain` could have taken meanwhile: medians over the repeats."""
        pairs = {"wall": (plain.wall, self.wall), "processor": (plain.processor, self.processor)}
        return {name: round(median(a / b for a, b in zip(*two, strict=True)), 2) for name, two in pairs.items()}


def in_turns(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, Taken]:
    """Take each way's step `repeats` times, after one that is not counted."""
    found = {name: Taken([], [], step()) for name, step in steps.items()}
    for _ in range(repeats):
        for name, step in steps.items():
            begun = time.perf_counter(), time.process_time()
            step()
            found[name].wall.append(time.perf_counter() - begun[0])
            found[name].processor.append(time.process_time() - begun[1])
    return found


def measure(worker: PolicyRank, model: Any, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    groups = make_groups(shape, worker.spec.facts.vocab)
    shared, plain = (plan(groups, share, args.micro_batch_tokens) for share in (True, False))
    steps = {
        "shared": policy_step(worker, shared),
        "packed": policy_step(worker, plain),
        "transformers": transformers_step(model, groups),
    }
    taken = in_turns(steps, args.repeats)
    seconds = {name: min(one.wall) for name, one in taken.items()}
    memory = {name: peak_bytes(step) for name, step in steps.items()}
    tokens = plain.stats.tokens
    return {
        "tokens": tokens,
        "tokens_computed_with_shared_prompts": shared.stats.tokens,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "tokens_per_s": {name: round(tokens / value, 1) for name, value in seconds.items()},
        "ratio_to_transformers": {name: one.ratios(taken["transformers"]) for name, one in taken.items()},
        "kilobytes_per_token": {name: round(value / tokens / 1e3, 1) for name, value in memory.items()},
        "first_grad_norm": {name: round(one.norm, 6) for name, one in taken.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--backend", choices=("megatron", "dtensor"), default="megatron", help="training engine")
    parser.add_argument("--shape", action="append", help="prompts x generations x prompt tokens x new tokens")
    for name, value in (("threads", 2), ("repeats", 2), ("micro-batch-tokens", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    report: dict[str, Any] = {"load_average_at_start": [round(value, 1) for value in os.getloadavg()]}
    with policy(args.model, args.threads, args.backend) as worker:
        for shape in args.shape or SHAPES:
            report[shape] = measure(worker, model, Shape.parse(shape), args)
            print(shape, json.dumps(report[shape]), file=sys.stderr, flush=True)  # should the rest take too long
    report["load_average_at_end"] = [round(value, 1) for value in os.getloadavg()]
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
