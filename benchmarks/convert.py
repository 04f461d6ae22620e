"""Seconds and peak memory of conversions, against copying the same bytes with `cp` in the same run.

    python benchmarks/convert.py                        # 0.5 GB
    python benchmarks/convert.py --gigabytes 0.5 4      # the memory of both sizes side by side
    python benchmarks/convert.py --no-verify --dir /mnt/fast

`cp` is the limit: reading and writing each byte once and flushing. A verified conversion reads the result once more.
Each conversion is a process of its own; the page cache is whatever the machine makes of it, for all alike.
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

HIDDEN, FFN, VOCAB = 2048, 8192, 32_000


def write_model(directory: Path, gigabytes: float) -> int:
    """A random Llama in bfloat16 of about that size; returns its bytes."""
    import torch

    from rlctl.checkpoints.hf_files import SafetensorsWriter
    from rlctl.models.registry import facts_from_hf_config
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
    return sum(spec.bytes for spec in specs.values())


def timed_copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of `cp -r` and of flushing what it wrote, and its seconds on a processor."""
    begun, used = time.perf_counter(), cpu_seconds(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - begun, cpu_seconds(resource.RUSAGE_CHILDREN) - used


def cpu_seconds(who: int) -> float:
    """Seconds on processors, which other programs on the machine change less than the seconds on the clock."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def timed_conversion(direction: str, source: Path, target: Path, verify: bool) -> dict[str, float]:
    """Seconds, those on processors, and growth of memory (bytes) of one conversion, in a process of its own."""
    command = [sys.executable, __file__, "--child", direction, str(source), str(target), str(int(verify))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600).stdout)


def child(direction: str, source: str, target: str, verify: str) -> None:
    from rlctl.checkpoints.convert import Options, hf_to_megatron, megatron_to_hf

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
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--dir", type=Path, help="where to work; a temporary directory where it is not given")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    verify = not arguments.no_verify
    print(f"random Llama in bfloat16, {'verified' if verify else 'not verified'}; peak memory above start-up")
    for gigabytes in arguments.gigabytes:
        work = Path(tempfile.mkdtemp(prefix="rlctl-convert-", dir=arguments.dir))
        try:
            size = write_model(work / "model", gigabytes)
            copied, used = timed_copy(work / "model", work / "copy")
            shutil.rmtree(work / "copy")
            rate = size / 1e9 / copied
            print(
                f"{size / 1e9:5.2f} GB  cp              {copied:7.2f} s  {rate:5.2f} GB/s"
                f"              {used:5.2f} s of CPU"
            )
            steps = (("hf-to-megatron", "model", "megatron"), ("megatron-to-hf", "megatron", "back"))
            for direction, source, target in steps:
                found = timed_conversion(direction, work / source, work / target, verify)
                rate, ratio = size / 1e9 / found["seconds"], found["seconds"] / copied
                print(
                    f"{size / 1e9:5.2f} GB  {direction}  {found['seconds']:7.2f} s  {rate:5.2f} GB/s"
                    f"  {ratio:5.2f} x cp  {found['cpu']:5.2f} s of CPU  {found['grown'] / 1e6:6.0f} MB"
                )
        finally:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
