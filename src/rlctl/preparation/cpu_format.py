"""The number format of `model.dtype: auto` on CPUs, chosen by a timing of matrix products.

bfloat16 products are several times faster than float32 on processors with bfloat16 instructions (AVX512-BF16, AMX), and
several times slower on others. The probe runs once per processor and torch version.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rlctl.config.files import cache_directory
from rlctl.config.installed import version
from rlctl.errors import RlctlError
from rlctl.planner.from_config import cluster_from_config
from rlctl.processes.child import call_in_child

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.models.facts import ModelFacts

INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""CPU flags in /proc/cpuinfo for bfloat16 products, on x86 and on Arm."""
LEAST_GAIN = 1.5
LEAST_HIDDEN = 256
"""Minimum hidden size for a probe. Matrix products do not dominate the time of smaller models: they stay in float32."""
ROWS, ROUNDS, ROUND_S = 256, 5, 0.02
LIMIT_S = 60.0

PROBE = "probe: "
"""Prefix of a value's origin if the probe chose the value."""
Rates = dict[str, float]
"""FLOP/s by format: `float32` and `bfloat16`."""


def with_cpu_format(resolved: Resolved, facts: ModelFacts, assume: str | None) -> Resolved:
    """Replace `model.dtype: auto` with bfloat16 if the run uses this machine's CPU and bfloat16 is LEAST_GAIN times as
    fast. Master weights, optimizer states, log-probs and losses stay in float32. `assume`: GPU to plan for if the
    configuration requests GPUs and this machine has none."""
    if resolved.config.model.dtype != "auto" or facts.hidden < LEAST_HIDDEN or find_spec("torch") is None:
        return resolved
    if not has_instructions() or not cluster_from_config(resolved.config, assume).is_cpu:
        return resolved
    rates = measured_rates(facts.hidden, facts.intermediate)
    if rates is None or rates["bfloat16"] < LEAST_GAIN * rates["float32"]:
        return resolved
    narrow, wide = (rates[name] / 1e9 for name in ("bfloat16", "float32"))
    measurement = f"{narrow:.0f} GFLOP/s in bfloat16, {wide:.0f} in float32"
    return resolved.with_values({"model.dtype": "bfloat16"}, f"{PROBE}{measurement}")


def format_notes(resolved: Resolved) -> list[str]:
    """Return a note with the measured rates if the probe chose the number format."""
    origin = resolved.origin.get("model.dtype", "")
    reached = origin.removeprefix(PROBE)
    return [f"model.dtype = bfloat16: this processor reaches {reached}"] if origin.startswith(PROBE) else []


def has_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor has instructions for bfloat16 products."""
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return not set(INSTRUCTIONS).isdisjoint(flags.split())
    return False


def measured_rates(hidden: int, intermediate: int) -> Rates | None:
    """Return the rates of products [ROWS, hidden] x [hidden, intermediate], from the cache after the first call; None
    if the probe fails."""
    cores = len(os.sched_getaffinity(0))
    key = f"{platform.node()}, {cores} cores, torch {version('torch')}, {hidden} x {intermediate}"
    path = cache_directory() / "cpu-formats.json"
    rates_by_node: dict[str, Rates] = {}
    with suppress(OSError, ValueError):
        rates_by_node = json.loads(path.read_text())
    if key not in rates_by_node:
        try:
            probe = partial(probe_rates, hidden, intermediate)
            rates_by_node[key] = call_in_child("the probe of number formats", probe, limit_s=LIMIT_S, quiet=True)
        except RlctlError:
            return None
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rates_by_node))
    return rates_by_node[key]


def probe_rates(hidden: int, intermediate: int) -> Rates:
    """Measure the products in this process. The formats alternate for ROUNDS rounds, and the median round counts."""
    import torch

    inputs = {}
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        inputs[name] = (torch.randn(ROWS, hidden).to(dtype), torch.randn(intermediate, hidden).to(dtype))
        torch.nn.functional.linear(*inputs[name])
    rates: dict[str, list[float]] = {name: [] for name in inputs}
    for _ in range(ROUNDS):
        for name, operands in inputs.items():
            start, done = time.perf_counter(), 0
            while time.perf_counter() - start < ROUND_S:
                torch.nn.functional.linear(*operands)
                done += 1
            rates[name].append(done * 2 * ROWS * hidden * intermediate / (time.perf_counter() - start))
    return {name: median(values) for name, values in rates.items()}
