"""Measures seconds and peak memory of conversions, against copying the same bytes with `cp` in the same run.

    python benchmarks/convert.py                        # 0.5 GB
    python benchmarks/convert.py --gigabytes 0.5 4      # the memory of both sizes side by side
    python benchmarks/convert.py --no-verify --dir /mnt/fast
    python benchmarks/convert.py --cold                 # sources are read from the disk, not from memory

`cp` is the limit: reading and writing each byte once and flushing. A verified conversion reads the result once more.
Each conversion is a process of its own. Copies and conversions take turns, and the best of each counts, because the
first one may spend several times the cost of copying on memory that the kernel has not handed out yet.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HIDDEN, FFN, VOCAB = 2048, 8192, 32_000


class Measured(NamedTuple):
    """Seconds on the clock and on processors, and the bytes by which the process grew."""

    seconds: float
    cpu: float
    grown: float = 0.0


def write_model(directory: Path, gigabytes: float) -> int:
    """Write a random Llama in bfloat16 of about that size; returns its bytes."""
    import torch

    from rlctl.checkpoints.hf.safetensors_files import SafetensorsWriter
    from rlctl.models.families import facts_from_hf_config
    from rlctl.weights.hf import layout

    per_layer = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * FFN)
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCAB * HIDDEN) / per_layer))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": VOCAB,
        "rope_theta": 500000.0, "dtype": "bfloat16", "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    specs = layout(facts_from_hf_config(config), "bfloat16").params
    writer = SafetensorsWriter(directory, specs, 2_000_000_000)
    for name, spec in specs.items():
        writer.write(name, torch.randn(spec.shape, dtype=torch.bfloat16))
    writer.finish()
    writer.wait()
    return sum(spec.bytes for spec in specs.values())


def forget(directory: Path) -> None:
    """Let the kernel drop the files of a directory from its page cache."""
    for path in directory.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only what is on the disk is dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed_copy(source: Path, target: Path) -> Measured:
    """Measure `cp -r`, with flushing the files that it wrote."""
    begun, used = time.perf_counter(), cpu_seconds(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return Measured(time.perf_counter() - begun, cpu_seconds(resource.RUSAGE_CHILDREN) - used)


def cpu_seconds(who: int) -> float:
    """Return the seconds on processors; other programs change them less than the seconds on the clock."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def timed_conversion(direction: str, source: Path, target: Path, verify: bool) -> Measured:
    """Measure one conversion in a process of its own."""
    command = [sys.executable, __file__, "--child", direction, str(source), str(target), str(int(verify))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
    return Measured(**json.loads(done.stdout))


def child(direction: str, source: str, target: str, verify: str) -> None:
    from rlctl.checkpoints.conversion.hf_megatron import Options, hf_to_megatron, megatron_to_hf

    options, before = Options(verify=verify == "1"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, used = time.perf_counter(), cpu_seconds(resource.RUSAGE_SELF)
    if direction == "hf-to-megatron":
        hf_to_megatron(Path(source), Path(target), options)
    else:
        megatron_to_hf(Path(source), Path(target), options=options)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    seconds, used = time.perf_counter() - begun, cpu_seconds(resource.RUSAGE_SELF) - used
    print(json.dumps({"seconds": seconds, "cpu": used, "grown": grown}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--cold", action="store_true", help="drop the sources from memory before each copy")
    parser.add_argument("--dir", type=Path, help="the working directory; a temporary one if it is not given")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    verify = not arguments.no_verify
    how = f"{'verified' if verify else 'not verified'}, {'cold' if arguments.cold else 'cached'} sources"
    print(f"random Llama in bfloat16, {how}; best of {arguments.repeats}")
    for gigabytes in arguments.gigabytes:
        work = Path(tempfile.mkdtemp(prefix="rlctl-convert-", dir=arguments.dir))
        try:
            report(
                write_model(work / "model", gigabytes) / 1e9, measure(work, arguments.repeats, verify, arguments.cold)
            )
        finally:
            shutil.rmtree(work, ignore_errors=True)


def measure(work: Path, repeats: int, verify: bool, cold: bool) -> dict[str, list[Measured]]:
    """Measure the copy of `work/model`, its conversion and the conversion back, in turns."""
    ready = forget if cold else lambda source: None
    found: dict[str, list[Measured]] = {"cp": [], "hf-to-megatron": [], "megatron-to-hf": []}
    for _ in range(repeats):
        ready(work / "model")
        found["cp"].append(timed_copy(work / "model", work / "copy"))
        shutil.rmtree(work / "copy")
        for direction, source, target in (
            ("hf-to-megatron", "model", "megatron"),
            ("megatron-to-hf", "megatron", "back"),
        ):
            ready(work / source)
            found[direction].append(timed_conversion(direction, work / source, work / target, verify))
        shutil.rmtree(work / "megatron")
        shutil.rmtree(work / "back")
    return found


def report(gigabytes: float, found: dict[str, list[Measured]]) -> None:
    copied = min(one.seconds for one in found["cp"])
    for what, all_ in found.items():
        best = min(all_, key=lambda one: one.seconds)
        print(
            f"{gigabytes:5.2f} GB  {what:14}  {best.seconds:7.2f} s  {gigabytes / best.seconds:5.2f} GB/s"
            f"  {best.seconds / copied:5.2f} x cp  {best.cpu:5.2f} s of CPU"
            + (f"  {max(one.grown for one in all_) / 1e6:6.0f} MB above start-up" if best.grown else "")
        )


if __name__ == "__main__":
    main()
