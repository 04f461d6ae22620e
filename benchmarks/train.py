"""Seconds and tokens per second of one training step (forward, backward, optimizer) against transformers on the same
batch.

    python benchmarks/train.py --model DIR [--prompts 8 --generations 4 --prompt-tokens 45 --new-tokens 16 --threads 2]

The batch is that of a GRPO step: groups of completions behind one prompt, of uneven lengths. transformers gets it as
TRL does, padded to a rectangle, with logits for the completion only, and torch's fused AdamW. Both train in float32
on the CPU. Each number is the best of the repeats, the two taking turns, so that a busy machine harms both alike.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlctl.backends.base import LossOutput, PolicySpec, RolloutRow, TokenBatch
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.backends.packing import BatchPlan, plan_batch
from rlctl.data.rollouts import RolloutColumns
from rlctl.models.registry import facts_from_hf_config

LR = 0.0  # the work of a step without its effect: all three see the same weights, and their norms can be compared


class PolicyGradient:
    """Plain policy gradient, the same for both."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        return LossOutput(-(batch.logprobs_T * batch.advantages_T * batch.token_weights_T).sum())


def make_groups(args: argparse.Namespace, vocab: int) -> dict[int, RolloutColumns]:
    """Random tokens; prompts of about `prompt_tokens`, completions of at most `new_tokens`."""
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
        RolloutRow(group, row, int(np.argmax(c.loss_mask_T)), int(np.diff(c.offsets_G)[row]), advantage(row), 0.01)
        for group, c in groups.items()
        for row in range(c.rollouts)
    ]
    return plan_batch([rows], groups, dp=1, micro_batch_tokens=limit, share_prompts=share)


def megatron_step(worker: MegatronWorker, batch: BatchPlan) -> Callable[[], float]:
    def step() -> float:
        worker.load_batch(batch.shards[0], list)
        result = worker.train_minibatch(0, PolicyGradient(), LR)
        assert result is not None
        return result.grad_norm

    return step


def transformers_step(model: Any, groups: dict[int, RolloutColumns]) -> Callable[[], float]:
    """Right-padded prompts cannot share a rectangle with completions, so prompts are padded left, as TRL pads them."""
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


def best(steps: dict[str, Callable[[], float]], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds, gradient norm of the first step) of each."""
    norms = {name: step() for name, step in steps.items()}
    seconds = dict.fromkeys(steps, float("inf"))
    for _ in range(repeats):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            seconds[name] = min(seconds[name], time.perf_counter() - begun)
    return seconds, norms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    for name, value in (
        ("prompts", 8),
        ("generations", 4),
        ("prompt-tokens", 45),
        ("new-tokens", 16),
        ("threads", 2),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    args = parser.parse_args()
    facts = facts_from_hf_config(json.loads((args.model / "config.json").read_text()))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    worker = MegatronWorker(0, 1, "127.0.0.1", port, PolicySpec(facts, threads=args.threads))
    worker.setup()
    worker.load_hf(args.model)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    groups = make_groups(args, facts.vocab)
    shared, plain = (plan(groups, share, args.micro_batch_tokens) for share in (True, False))
    steps = {
        "shared": megatron_step(worker, shared),
        "packed": megatron_step(worker, plain),
        "transformers": transformers_step(model, groups),
    }
    seconds, norms = best(steps, args.repeats)
    worker.close()
    tokens = plain.stats.tokens
    report = {
        "tokens": tokens,
        "tokens_computed_with_shared_prompts": shared.stats.tokens,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "tokens_per_s": {name: round(tokens / value, 1) for name, value in seconds.items()},
        "ratio_to_transformers": {name: round(seconds["transformers"] / value, 2) for name, value in seconds.items()},
        "first_grad_norm": {name: round(value, 6) for name, value in norms.items()},
    }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
