"""Measures refits of adapters: merged weights, adapters merged by the engine (delta), and adapters added to products.

    python benchmarks/lora_refit.py [--model DIR] [--rank 16] [--steps 6] [--ways merged,delta,adapters]
    python benchmarks/lora_refit.py --dtype auto --ways merged,auto

Each way of `training.lora.refit` trains the laptop preset with the real command. All runs are there at once and take
steps in turn, the others being stopped (SIGSTOP), so that other work on the machine falls on all of them. Prints one
JSON object: bytes that policy ranks sent in a refit and their ratio to the adapters, median seconds of a refit, and of
a step from the line of one step in metrics.jsonl to the next, without the time in which the run was stopped; CPU
seconds of all processes in a step; and the ratios of each way's refit and step to `merged`. The first two steps of each
run are left out: the first refit sends the base, and the next works out views. The limits are a fifth of the merged
refit (the aim is a tenth), twice the adapters' bytes, and for `auto` the step of `merged`. `copy_s` and
`pack_s` are limits of `delta`: the adapted matrices copied once in memory, and packed by the engine's own call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 900
LOOK_S = 0.01
WARM = 2
"""Steps before the measured ones."""


class Run:
    """A run in the background that takes a step when it is asked to."""

    def __init__(self, way: str, directory: Path, options: argparse.Namespace) -> None:
        rlctl = str(Path(sys.executable).with_name("rlctl"))
        command = [rlctl, "train", "grpo", "--preset", "laptop", "--lora", str(options.rank), "--run-dir"]
        sets = (f"training.lora.refit={way}", f"model.dtype={options.dtype}", "validation.at_start=false",
                "validation.at_end=false", "run.checkpoint_every=0")  # fmt: skip
        command += [str(directory), *(word for value in sets for word in ("--set", value)), "--steps", "1000"]
        command += ["--model", options.model] if options.model else []
        self._metrics, self._log = directory / "metrics.jsonl", directory.parent / f"{way}.log"
        with self._log.open("w") as log:
            self._process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        self._directory, self._seen, self._carried_s, self._cpu_s = directory, 0, 0.0, 0.0
        self.steps = list[tuple[float, float]]()
        """Seconds and CPU seconds of each measured step."""

    def take_step(self) -> None:
        """Continue until the next line of the metrics, and stop."""
        self._signal("resume")
        begun = time.monotonic()
        while not self._metrics.exists() or self._metrics.read_bytes().count(b"\n") == self._seen:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < begun + LIMIT_S, self._log.read_text()
            time.sleep(LOOK_S)
        done, cpu_s = time.monotonic(), self._cpu_seconds()
        self._signal("suspend")
        self._seen += 1
        if self._seen > WARM:
            self.steps.append((self._carried_s + done - begun, cpu_s - self._cpu_s))
        self._carried_s, self._cpu_s = time.monotonic() - done, cpu_s

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._metrics.read_text().splitlines()][WARM:]

    def value(self, key: str) -> Any:
        """Return a value of the run's configuration."""
        return json.loads((self._directory / "manifest.json").read_text())["config"][key]["value"]

    def end(self) -> None:
        self._signal("kill")
        self._process.wait(60)

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return [self._process, *self._process.children(recursive=True)]
        return []

    def _signal(self, name: str) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                getattr(process, name)()

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total


HIDDEN, KV, FFN, LAYERS = 576, 192, 1536, 30
"""Sizes of SmolLM2-135M."""


def adapter_bytes(rank: int, dtype: str) -> int:
    """Return the bytes of the adapters of SmolLM2-135M: r (I + O) elements of each matrix."""
    elements = (3 * HIDDEN + HIDDEN + 2 * KV) + 2 * HIDDEN + 2 * (HIDDEN + FFN) + (FFN + HIDDEN)
    return (4 if dtype == "float32" else 2) * rank * LAYERS * elements


def least_seconds(dtype: str, threads: int) -> dict[str, float]:
    """Return the seconds of copying the adapted matrices of SmolLM2-135M once in memory, and of packing them for the
    processor by vLLM's own call, whose result nothing else can write: what `delta` cannot do without."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    torch.set_num_threads(threads)
    sizes = [(HIDDEN + 2 * KV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)] * LAYERS
    bases = [torch.ones(size, dtype=getattr(torch, dtype)) for size in sizes]
    results, modules = [torch.ones_like(base) for base in bases], [torch.nn.Module() for _ in bases]

    def pack(module: Any, base: torch.Tensor) -> None:
        module.weight = torch.nn.Parameter(base, requires_grad=False)
        module.cpu_linear = None
        dispatch_cpu_unquantized_gemm(module, remove_weight=True)

    def median_of(step: Callable[[Any, torch.Tensor], Any], places: Sequence[Any]) -> float:
        taken = list[float]()
        for _ in range(9):
            begun = time.perf_counter()
            for place, base in zip(places, bases, strict=True):
                step(place, base)
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken)

    return {"copy_s": median_of(torch.Tensor.copy_, results), "pack_s": median_of(pack, modules)}


def measured(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    lines, dtype = run.lines(), run.value("model.dtype")
    report: dict[str, Any] = {
        "way": run.value("training.lora.refit"),
        "dtype": dtype,
        "bytes": lines[-1]["refit_bytes"],
        "refit_s": statistics.median(sum(line["refit_seconds"].values()) for line in lines),
        "step_s": statistics.median(seconds for seconds, _ in run.steps),
        "cpu_s": statistics.median(cpu_s for _, cpu_s in run.steps),
        "steps_s": [round(seconds, 2) for seconds, _ in run.steps],
        "logprob_diff_max": max(line["logprob_diff"]["max"] for line in lines),
        "logprob_diff_mean": [round(line["logprob_diff"]["mean"], 4) for line in lines],
    }
    if not options.model:
        report["of_adapter_bytes"] = report["bytes"] / adapter_bytes(options.rank, dtype)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory; default: the laptop preset's SmolLM2-135M")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="float32", help="auto: this processor's faster format")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", default="merged,delta,adapters", help="the first is what others are compared with")
    options = parser.parse_args()
    loads, runs = [os.getloadavg()[0]], dict[str, Run]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for way in options.ways.split(","):
                runs[way] = Run(way, Path(folder) / way, options)
                for _ in range(WARM):
                    runs[way].take_step()
            for _ in range(options.steps):
                for run in runs.values():
                    run.take_step()
                loads.append(os.getloadavg()[0])
            report: dict[str, Any] = {"load": loads, "rank": options.rank}
            report |= {way: measured(run, options) for way, run in runs.items()}
            threads = next(iter(runs.values())).value("generation.threads") or os.cpu_count() or 1
        finally:
            for run in runs.values():
                run.end()
    first = report[next(iter(runs))]
    if not options.model:
        for name, seconds in least_seconds(first["dtype"], threads).items():
            report |= {name: seconds, f"{name}_of_merged": seconds / first["refit_s"]}
    for way in runs:
        for key, name in (("refit_s", "of_merged"), ("step_s", "step_of_merged"), ("cpu_s", "cpu_of_merged")):
            report[way][name] = report[way][key] / first[key]
    report["limits"] = {"of_merged": 0.2, "of_adapter_bytes": 2.0, "step_of_merged (auto)": 1.0}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
