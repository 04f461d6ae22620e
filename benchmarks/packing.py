"""Measures packing on the lengths of real rollouts: padding, imbalance between ranks, and training tokens per second.

    python benchmarks/packing.py [--lengths FILE] [--dp 4] [--micro-batch-tokens 2048] [--model DIR --threads 2]
    python benchmarks/packing.py --rollouts 8192 --dp 8 --micro-batch-tokens 16384

Compares rlctl's packing (with and without shared prompts) and its dynamic batching with what is commonly done: no
packing (as many rollouts to a micro-batch as fit at the longest length, padded to the longest of them), and
first-fit-decreasing by tokens with the bins dealt out to the ranks in turn.

`padding` is the part of computed tokens that is padding. `imbalance` is the compute of the busiest rank over the mean,
minus 1; compute counts the quadratic attention with the model's own sizes (without --model: SmolLM2-135M's). With
--model it also trains: every rank's share, one after the other in one process on random tokens of these lengths; a step
takes as long as its slowest rank, and tokens per second are those of the rollouts, prompts counted for each. Times are
the best of the repeats, all ways taking turns. Prints one JSON object.

With --rollouts it packs so many rollouts of each of several distributions of lengths, groups of 16 with prompts of 49
tokens, and prints the CPU seconds of the driver, and the rows over those of first-fit-decreasing on single rollouts.

`data/rollout_lengths.csv`: 24 reasoning-gym prompts of 12 tasks, 8 completions each, sampled with temperature 1 from
SmolLM2-135M-Instruct, at most 384 tokens.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from one_process import PolicyGradient, facts_of, policy

from rlctl.backends.batching.batch import BatchShard, WeightedSequence
from rlctl.backends.batching.packing import plan_batch, row_tokens
from rlctl.data.rollouts import RolloutColumns
from rlctl.models.catalog import lookup
from rlctl.models.facts import ModelFacts

LENGTHS = Path(__file__).parent / "data" / "rollout_lengths.csv"
Shards = tuple[BatchShard, ...]


def read_rows(path: Path) -> list[WeightedSequence]:
    """Read one rollout from each line: group, prompt_tokens, completion_tokens."""
    seen: dict[int, int] = {}
    rows = []
    for line in csv.DictReader(path.open()):
        group, prompt, new = (int(line[key]) for key in ("group", "prompt_tokens", "completion_tokens"))
        seen[group] = seen.get(group, -1) + 1
        rows.append(WeightedSequence(group, seen[group], prompt, prompt + new, 1.0 if seen[group] % 2 else -1.0, 0.01))
    return rows


def padded(rows: Sequence[WeightedSequence], columns: dict[int, object], dp: int, limit: int) -> Shards:
    """Plan without packing: rollouts in their order, the same number in each micro-batch."""
    size = max(1, limit // max(row.tokens for row in rows))
    count = -(-len(rows) // (size * dp))
    micros = [tuple(rows[i * size : (i + 1) * size]) for i in range(count * dp)]
    return tuple(BatchShard(columns, (tuple(micros[r::dp]),), rectangular=True) for r in range(dp))


def first_fit_decreasing(rows: Sequence[WeightedSequence], columns: dict[int, object], dp: int, limit: int) -> Shards:
    bins: list[list[WeightedSequence]] = []
    rooms = np.full(len(rows), limit)
    for row in sorted(rows, key=lambda row: -row.tokens):
        place = int(np.argmax(rooms >= row.tokens))
        rooms[place] -= row.tokens
        bins += [[] for _ in range(place + 1 - len(bins))]
        bins[place].append(row)
    bins += [[] for _ in range(-len(bins) % dp)]
    return tuple(BatchShard(columns, (tuple(tuple(b) for b in bins[r::dp]),)) for r in range(dp))


def ours(**how: bool) -> Callable[..., Shards]:
    def plan(rows: Sequence[WeightedSequence], columns: dict[int, object], dp: int, limit: int) -> Shards:
        return plan_batch([rows], columns, dp=dp, micro_batch_tokens=limit, **how).shards

    return plan


WAYS: dict[str, Callable[..., Shards]] = {
    "no packing": padded,
    "first-fit-decreasing": first_fit_decreasing,
    "dynamic": ours(packing=False, dynamic=True, share_prompts=False),
    "packed": ours(share_prompts=False),
    "packed, shared prompts": ours(),
}


def computed(shard: BatchShard) -> tuple[int, int]:
    """Return (tokens of rollouts, tokens with padding) of a rank; an empty micro-batch counts one token."""
    used = total = 0
    for micro in shard.minibatches[0]:
        length = row_tokens(micro, shard.share_prompts)
        used += length
        total += max(1, len(micro) * max((r.tokens for r in micro), default=0) if shard.rectangular else length)
    return used, total


def compute(shard: BatchShard, facts: ModelFacts) -> float:
    """Count the multiplications of a rank's forward pass: matrices by tokens, attention by pairs of tokens."""
    per_token = facts.layers * (
        facts.hidden * facts.head_dim * (2 * facts.heads + 2 * facts.kv_heads) + 3 * facts.hidden * facts.intermediate
    )
    per_pair = facts.layers * 2 * facts.heads * facts.head_dim
    pairs = 0.0
    for micro in shard.minibatches[0]:
        width = max((row.tokens for row in micro), default=0)
        prompts: set[int] = set()
        for row in micro:
            length = width if shard.rectangular else row.tokens
            pairs += length**2 / 2
            if shard.share_prompts and row.position in prompts:
                pairs -= row.prompt_tokens**2 / 2
            prompts.add(row.position)
    return computed(shard)[1] * per_token + pairs * per_pair


def random_columns(rows: Sequence[WeightedSequence], vocab: int) -> dict[int, RolloutColumns]:
    """Draw random tokens of the rollouts' lengths."""
    rng = np.random.default_rng(0)
    found = {}
    for group in sorted({row.position for row in rows}):
        own = [row for row in rows if row.position == group]
        prompt = rng.integers(0, vocab, own[0].prompt_tokens)
        parts = [np.concatenate([prompt, rng.integers(0, vocab, row.tokens - len(prompt))]) for row in own]
        mask = np.concatenate([np.arange(row.tokens) >= row.prompt_tokens for row in own])
        offsets = np.cumsum([0, *(row.tokens for row in own)]).astype(np.int32)
        logprobs, version = -5.0 * mask.astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
        found[group] = RolloutColumns(np.concatenate(parts).astype(np.int32), offsets, mask, logprobs, version)
    return found


def train_seconds(plans: dict[str, Shards], args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a step for each way, which are those of its slowest rank."""
    best = {name: [float("inf")] * len(shards) for name, shards in plans.items()}
    with policy(args.model, args.threads) as worker:

        def step(shard: BatchShard) -> float:
            begun = time.perf_counter()
            worker.load_batch(shard, list)
            worker.train_minibatch(0, PolicyGradient(), 0.0)
            return time.perf_counter() - begun

        step(next(iter(plans.values()))[0])  # to warm up
        for _ in range(args.repeats):
            for name, shards in plans.items():
                for rank, shard in enumerate(shards):
                    best[name][rank] = min(best[name][rank], step(shard))
    return {name: max(seconds) for name, seconds in best.items()}


def distributions(count: int, limit: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    drawn = {
        "uniform": rng.uniform(0, 1, count),
        "log-normal": rng.lognormal(-1.7, 0.8, count),
        "exponential": rng.exponential(0.25, count),
        "near a third": rng.uniform(0.305, 0.372, count),
        "near a half": rng.uniform(0.458, 0.543, count),
        "near a quarter": rng.uniform(0.238, 0.268, count),
        "short": rng.uniform(0, 0.03, count),
        "equal": np.full(count, 1 / 3 + 1e-4),
    }
    return {name: np.clip(part * limit, 50, limit).astype(int) for name, part in drawn.items()}


def at_scale(count: int, dp: int, limit: int) -> dict[str, Any]:
    """Pack many rollouts of each distribution, without and with shared prompts."""
    report: dict[str, Any] = {"rollouts": count, "ranks": dp, "row": limit, "must": {"cpu_s": 0.5, "rows_ratio": 1.02}}
    for name, lengths in distributions(count, limit).items():
        rows = [WeightedSequence(i // 16, i % 16, 49, n, 1.0, 0.01) for i, n in enumerate(lengths.tolist())]
        columns: dict[int, object] = {group: f"handle {group}" for group in range(count // 16 + 1)}
        reference = -(-len(first_fit_decreasing(rows, {}, 1, limit)[0].minibatches[0]) // dp)
        for share in (False, True):
            begun = time.process_time()
            stats = plan_batch([rows], columns, dp=dp, micro_batch_tokens=limit, share_prompts=share).stats
            report[name + ", shared prompts" * share] = {
                "cpu_s": round(time.process_time() - begun, 3),
                "rows_ratio": round(stats.micro_batches / reference, 4),
                "imbalance": round(stats.imbalance, 5),
            }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="CSV: group, prompt_tokens, completion_tokens")
    parser.add_argument("--model", type=Path, help="Hugging Face directory; with it, training is measured too")
    parser.add_argument("--groups", type=int, help="use only this many prompts, from the first on")
    for name, value in (("dp", 4), ("micro-batch-tokens", 2048), ("threads", 2), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rollouts", type=int, help="pack so many of several distributions instead")
    args = parser.parse_args()
    if args.rollouts:
        json.dump(at_scale(args.rollouts, args.dp, args.micro_batch_tokens), sys.stdout, indent=1)
        print()
        return
    facts = lookup("SmolLM2-135M")
    if args.model is not None:
        facts = facts_of(args.model)
    assert facts is not None
    rows = [row for row in read_rows(args.lengths) if args.groups is None or row.position < args.groups]
    columns: dict[int, Any] = random_columns(rows, facts.vocab)
    plans = {name: way(rows, columns, args.dp, args.micro_batch_tokens) for name, way in WAYS.items()}
    tokens = sum(row.tokens for row in rows)
    seconds = train_seconds(plans, args) if args.model is not None else {}
    report: dict[str, Any] = {"rollouts": len(rows), "tokens": tokens, "longest": max(row.tokens for row in rows)}
    for name, shards in plans.items():
        used, total = (sum(values) for values in zip(*map(computed, shards), strict=True))
        costs = [compute(shard, facts) for shard in shards]
        report[name] = {
            "micro_batches": len(shards[0].minibatches[0]),
            "computed_tokens": total,
            "padding": round(1 - used / total, 4),
            "imbalance": round(max(costs) / np.mean(costs) - 1, 4),
        }
        if seconds:
            report[name] |= {
                "step_s": round(seconds[name], 3),
                "tokens_per_s": round(tokens / seconds[name], 1),
                "ratio_to_no_packing": round(seconds["no packing"] / seconds[name], 2),
                "ratio_to_first_fit_decreasing": round(seconds["first-fit-decreasing"] / seconds[name], 2),
            }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
