"""Measures decoding of a running vLLM engine against the model's matrix products alone, in the same run.

    python benchmarks/generation.py [--samples 32] [--new-tokens 32] [--dtype float32] [--threads 1] [--repeats 5]

A random model of SmolLM2-135M's sizes. The products are those of all linear layers and of the output embedding, for the
prompts and for each decode step, by torch's `linear` with as many threads in this process. Both take turns; prints the
median rates and the median of the ratios. A ratio of 1 would mean that attention, norms, activations, sampling and
Python cost nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from refit_engine import LIMIT_S, PROMPT_TOKENS, WorkerGroup, engine_process, write_model

from rlctl.backends.base import EpisodeWorker
from rlctl.backends.messages import GroupRequest, Sampling
from rlctl.cluster.ray_session import ray_session
from rlctl.models.facts import ModelFacts

SMOLLM2 = ModelFacts("llama", 30, 576, 9, 3, 64, 1536, 49152, 2048, norm_eps=1e-5)
MUST = 0.6


class Products:
    """The matrix products of a forward pass."""

    def __init__(self, facts: ModelFacts, dtype: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.torch, self.dtype, self.layers = torch, getattr(torch, dtype), facts.layers
        heads, kv_heads, hidden = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim, facts.hidden
        shapes = ((heads + 2 * kv_heads, hidden), (hidden, heads), (2 * facts.intermediate, hidden),
                  (hidden, facts.intermediate))  # fmt: skip
        self.stack = [[torch.randn(shape, dtype=self.dtype) for shape in shapes] for _ in range(facts.layers)]
        self.head = torch.randn(facts.vocab, hidden, dtype=self.dtype)

    def seconds(self, samples: int, new_tokens: int) -> float:
        """Return the seconds of all prompts and of all decode steps."""
        return self.of([(samples * PROMPT_TOKENS, samples), *[(samples, samples)] * (new_tokens - 1)])

    def of(self, forwards: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of forward passes over so many tokens, with logits of so many."""
        with self.torch.inference_mode():
            begun = time.perf_counter()
            for tokens, sampled in forwards:
                self._forward(tokens, sampled)
            return time.perf_counter() - begun

    def _forward(self, tokens: int, sampled: int) -> None:
        linear = self.torch.nn.functional.linear
        inputs = {w.shape[1]: self.torch.zeros(tokens, w.shape[1], dtype=self.dtype) for w in self.stack[0]}
        for layer in self.stack:
            for weight in layer:
                linear(inputs[weight.shape[1]], weight)
        linear(self.torch.zeros(sampled, self.head.shape[1], dtype=self.dtype), self.head)


def decode(engine: WorkerGroup, samples: int, new_tokens: int, seed: int) -> tuple[float, int]:
    """Return the seconds of a generation and its tokens."""
    requests = [
        GroupRequest(i, tuple(3 + (7 * i + 11 * j + seed) % 1000 for j in range(PROMPT_TOKENS)), (seed + i,))
        for i in range(samples)
    ]
    begun = time.perf_counter()
    results = engine.within(LIMIT_S).call(EpisodeWorker.generate, requests, Sampling(new_tokens), LIMIT_S)[0]
    return time.perf_counter() - begun, sum(sum(result.response_tokens) for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("samples", 32), ("new-tokens", 32), ("threads", 1), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    products, ratios = Products(SMOLLM2, args.dtype, args.threads), list[float]()
    engine_rates, product_rates = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="generation-") as work, ray_session(None):
        write_model(Path(work), SMOLLM2, args.dtype)
        with engine_process(SMOLLM2, Path(work), plain=False, threads=args.threads, dtype=args.dtype) as engine:
            decode(engine, args.samples, args.new_tokens, 0)  # warms up
            products.seconds(args.samples, 2)
            for seed in range(1, args.repeats + 1):
                alone = products.seconds(args.samples, args.new_tokens)
                seconds, tokens = decode(engine, args.samples, args.new_tokens, seed)
                engine_rates.append(tokens / seconds)
                product_rates.append(args.samples * args.new_tokens / alone)
                ratios.append(engine_rates[-1] / product_rates[-1])
    report = {
        "samples": args.samples, "new_tokens": args.new_tokens, "dtype": args.dtype, "threads": args.threads,
        "load_average": round(os.getloadavg()[0], 1),
        "engine_tokens_per_s": round(statistics.median(engine_rates), 1),
        "products_tokens_per_s": round(statistics.median(product_rates), 1),
        "ratio": round(statistics.median(ratios), 2), "must": MUST,
    }  # fmt: skip
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
