"""Times the rounding of float32 weights to bfloat16 and float16 without bias, against a plain copy.

    python benchmarks/rounding.py [--elements 33554432 --threads 1 --device cpu]

Prints one JSON object: for each dtype the seconds of torch's own copy, which rounds to nearest, those of the rule,
their ratio and its limit. On a processor both are seconds of computing, so that others who use it do not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from rlctl.weights.rounding import narrow_into

LIMIT = 3.0
ROUNDS = 9


def best_of(function: Callable[[], object], device: torch.device) -> float:
    """The least seconds of a few calls, behind one that is not counted."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    clock, best = (time.process_time if device.type == "cpu" else time.perf_counter), float("inf")
    for number in range(ROUNDS + 1):
        wait()
        begun = clock()
        function()
        wait()
        best = min(best, clock() - begun) if number else best
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    weights = 0.02 * torch.randn(given.elements, device=device)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        target = torch.empty(given.elements, dtype=dtype, device=device)
        copy = best_of(lambda target=target: target.copy_(weights), device)
        rule = best_of(lambda target=target: narrow_into(target, weights), device)
        seconds = {"copy_s": round(copy, 5), "rule_s": round(rule, 5), "ratio": round(rule / copy, 2), "limit": LIMIT}
        found[str(dtype).removeprefix("torch.")] = seconds
    shape = {"elements": given.elements, "threads": given.threads, "device": given.device}
    print(json.dumps({**shape, **found}, indent=2))


if __name__ == "__main__":
    main()
