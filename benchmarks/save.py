"""Measures saves of a policy against `dd conv=fsync` of the same bytes in the same run.

    python benchmarks/save.py [--megabytes 400] [--backend megatron] [--repeats 5] [--step 8x4x45x16 --threads 2]

A random Llama in float32 with its optimizer's states, one process. `stands_still` is the snapshot, during which
training waits; `written` is the time until files are flushed and have digests. Saves and `dd` take turns; prints the
medians, and of each the seconds of processors, which other programs disturb less.

With `--step` it also says how much a save delays the training step beside it: steps on that shape (see train.py) alone
and with a save begun before them take turns. `snapshot` is the part of the delay in which the step has not begun.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from one_process import policy
from train import Shape, make_groups, plan, policy_step

if TYPE_CHECKING:
    from rlctl.backends.policy_rank import PolicyRank

HIDDEN, FFN, VOCAB = 1024, 4096, 4096
BYTES_A_PARAMETER = 12
"""Float32 weights and two moments."""


class Cost(NamedTuple):
    """Seconds on the clock, the part of them in which training waits, and seconds of processors."""

    written: float
    stands_still: float
    cpu: float


def write_model(directory: Path, megabytes: float) -> None:
    """Write a random Llama whose checkpoint has about that size."""
    import torch
    from safetensors.torch import save_file

    from rlctl.models.families import facts_from_hf_config
    from rlctl.weights.hf import layout

    of_layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * FFN
    layers = max(1, round((megabytes * 1e6 / BYTES_A_PARAMETER - VOCAB * HIDDEN) / of_layer))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": VOCAB,
        "dtype": "float32", "tie_word_embeddings": True, "max_position_embeddings": 2048,
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    specs = layout(facts_from_hf_config(config), "float32").params
    save_file({name: 0.02 * torch.randn(spec.shape) for name, spec in specs.items()}, directory / "model.safetensors")


def processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured_save(worker: PolicyRank, directory: Path) -> Cost:
    directory.mkdir()
    begun, used = time.perf_counter(), processor_seconds()
    worker.save_begin(directory)
    still = time.perf_counter() - begun
    worker.save_finish()
    return Cost(time.perf_counter() - begun, still, processor_seconds() - used)


def measured_dd(source: Path, target: Path) -> Cost:
    """Copy from memory, not zeros: some disks know zeros."""
    begun, used = time.perf_counter(), processor_seconds()
    subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"], check=True)
    return Cost(time.perf_counter() - begun, 0.0, processor_seconds() - used)


def measured_delay(worker: PolicyRank, shape: Shape, work: Path, repeats: int) -> dict[str, float]:
    """Return seconds of a step alone and beside a save, and by what part the save delays it: medians over the
    repeats."""
    batch = plan(make_groups(shape, worker.spec.facts.vocab), True, 4096)
    step = policy_step(worker, batch)
    step()
    alone, beside, snapshot = list[float](), list[float](), list[float]()
    for number in range(repeats):
        begun = time.perf_counter()
        step()
        alone.append(time.perf_counter() - begun)
        directory = work / f"beside{number}"
        directory.mkdir()
        begun = time.perf_counter()
        worker.save_begin(directory)
        snapshot.append(time.perf_counter() - begun)
        step()
        beside.append(time.perf_counter() - begun)
        worker.save_finish()
        shutil.rmtree(directory)
    delays = [(b - a) / a for a, b in zip(alone, beside, strict=True)]
    return {
        "step_alone_s": round(statistics.median(alone), 2),
        "step_beside_a_save_s": round(statistics.median(beside), 2),
        "snapshot_s": round(statistics.median(snapshot), 2),
        "delay": round(statistics.median(delays), 3),
        "delay_at_most": 0.05,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--backend", default="megatron")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory, in place of a random model")
    parser.add_argument("--step", type=Shape.parse, help="a shape of the steps that saves are to delay")
    parser.add_argument("--dir", type=Path, help="the working directory; a temporary one if it is not given")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="rlctl-save-", dir=args.dir))
    saves, copies = list[Cost](), list[Cost]()
    try:
        model = args.model or work / "model"
        if args.model is None:
            write_model(model, args.megabytes)
        delay = None
        with policy(model, args.threads, args.backend) as worker:
            measured_save(worker, work / "first")  # makes the optimizer's states
            content = sorted((work / "first").glob("*.distcp"))
            with (work / "bytes").open("wb") as file:
                for path in content:
                    file.write(path.read_bytes())
            shutil.rmtree(work / "first")
            for number in range(args.repeats):
                saves.append(measured_save(worker, work / f"save{number}"))
                copies.append(measured_dd(work / "bytes", work / "copy"))
                shutil.rmtree(work / f"save{number}")
                (work / "copy").unlink()
            if args.step is not None:
                delay = measured_delay(worker, args.step, work, args.repeats)
        size = (work / "bytes").stat().st_size
    finally:
        shutil.rmtree(work, ignore_errors=True)
    save, copy = (
        Cost(*(statistics.median(values) for values in zip(*costs, strict=True))) for costs in (saves, copies)
    )
    report = {
        "bytes": size,
        "load_average": round(os.getloadavg()[0], 1),
        "save_s": {name: round(value, 2) for name, value in save._asdict().items()},
        "dd_s": {"written": round(copy.written, 2), "cpu": round(copy.cpu, 2)},
        "times_dd": round(statistics.median(a.written / b.written for a, b in zip(saves, copies, strict=True)), 2),
        "times_dd_at_most": 1.5,
        **({"beside": delay} if delay else {}),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
