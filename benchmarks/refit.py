"""Measures the cost of a refit: per tensor at DeepSeek-V3's count, per byte against memcpy, and as both grow.

    python benchmarks/refit.py ablation [--model deepseek-v3] [--hidden 64] [--repeats 3]
    python benchmarks/refit.py memcpy [--gb 0.5 1.0] [--staging-mb 8 16 64]
    python benchmarks/refit.py growth
    python benchmarks/refit.py engine [--gb 0.5] [--kept plain repacked] [--receive loader auto] [--changed 0.01 0.03]

`ablation` moves the same tensors (all of the model, small shapes) from one trainer to two engine ranks in the steps by
which published systems became fast. Every way is run in the same processes and is checked at the end. `memcpy` moves
whole-width Llama layers straight into parameters, between two processes, and compares with copying as many bytes
within one. `growth` varies tensors and ranks. `engine` refits into a running vLLM engine (`refit_engine.py`). Each
number is the best of the repeats. vLLM's own transfer engines (NCCL, CUDA IPC) are left out, since they need a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import refit_engine
import torch
from refit_executor import executor_main, ring_of, tensor_at

from rlctl.config.parallel import ParallelSpec
from rlctl.jobs.refit_synthetic import MODELS
from rlctl.models.facts import ModelFacts
from rlctl.refit.synthetic import SyntheticSender, reduced
from rlctl.transport.round_buffers import Packer, source_view
from rlctl.transport.rounds import chunk_layout, cut_rounds, whole_tensors
from rlctl.transport.staging import Ring, Segment, ring_bytes
from rlctl.weights import hf
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.plan_execution import dtype_of, strided, transformed
from rlctl.weights.transfer_plan import RememberingWorld, many_objects, receive_plan

EXECUTORS = 2
ALIGNMENT = 256
STAGES = (
    "per-tensor handles", "packed", "per-executor metadata", "ahead-of-time metadata", "double-buffered", "direct",
)  # fmt: skip


class Trainer:
    """The sending process and the executors that it talks to."""

    def __init__(self, facts: ModelFacts, executors: int = EXECUTORS) -> None:
        torch.set_num_threads(1)
        self.facts, self.executors = facts, executors
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(executors):
            ours, theirs = context.Pipe()
            process = context.Process(target=executor_main, args=(rank, facts, executors, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.source = SyntheticSender(0, MegatronWorld(facts, ParallelSpec(), "local", "bfloat16"), 1)
        self.source.setup()
        self.world = RememberingWorld(self.source.layouts())
        self.params = self.source.parameters()
        self.rows = [(name, spec.dtype, spec.shape) for name, spec in hf.layout(facts, "bfloat16").params.items()]
        self.whole = whole_tensors(self.rows)
        with many_objects():
            plan = receive_plan(self.world, self.whole)
        self.copies: dict[str, list[Any]] = {}
        for copy in plan.copies:
            self.copies.setdefault(copy.tensor, []).append((copy, source_view(copy, self.params, "the trainer")))
        self.layouts = [pipe.recv() for pipe in self.pipes]
        self.bytes = sum(spec.bytes for spec in self.whole.params.values())
        self.attempt = 0
        self.kept: dict[Any, Any] = {}

    def order(self, *message: Any) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def finish(self) -> list[Any]:
        return [pipe.recv() for pipe in self.pipes]

    def write(self, name: str, target: torch.Tensor) -> None:
        for copy, values in self.copies[name]:
            strided(target, copy.destination_view).copy_(transformed(values, copy))

    def send_handles(self) -> None:
        self.order("handles", len(self.rows))
        for name, dtype, shape in self.rows:
            segment = Segment.create(self.whole.params[name].bytes)
            self.write(name, tensor_at(segment, 0, shape, dtype_of(dtype)))
            self.order(name, dtype, shape, segment.address)
            self.finish()
            segment.close()
        self.finish()

    def _packed(self) -> tuple[Segment, list[tuple]]:
        if "packed" not in self.kept:
            table, offset = [], 0
            for name, dtype, shape in self.rows:
                table.append((name, dtype, shape, offset))
                offset += -(-self.whole.params[name].bytes // ALIGNMENT) * ALIGNMENT
            self.kept["packed"] = Segment.create(offset), table
        return self.kept["packed"]

    def send_packed(self, metadata: str) -> None:
        segment, table = self._packed()
        for name, dtype, shape, offset in table:
            self.write(name, tensor_at(segment, offset, shape, dtype_of(dtype)))
        tables: Any = dict.fromkeys(range(self.executors), table) if metadata == "all" else table
        if metadata == "all":  # each executor's list is a message of its own to everybody
            tables = {rank: list(own) for rank, own in tables.items()}
        self.order("packed", segment.address, None if metadata == "none" else tables)
        self.finish()

    def send_rounds(self, capacity: int) -> None:
        key = ("rounds", capacity)
        if key not in self.kept:
            rounds = cut_rounds(self.whole, capacity)
            segment = Segment.create(ring_bytes(1 + self.executors, min(2, len(rounds)), capacity))
            with many_objects():
                plan = receive_plan(self.world, chunk_layout(self.whole, rounds))
            packer = Packer(rounds, plan.copies, message=False)
            ring = ring_of(segment.address, capacity, rounds, 0, self.executors, segment)
            self.kept[key] = rounds, packer, ring
            self.order("layout", ring.segment.address, capacity, self.whole, self.executors)  # once, as a session does
            self.finish()
        rounds, packer, ring = self.kept[key]
        self.attempt += 1
        self.order("rounds", ring.segment.address, self.attempt)
        packer.look(self.params)
        with ring.refit(self.attempt, self.attempt):
            for index in range(len(rounds)):
                packer.pack(index, ring.wait_free(index))
                ring.filled(index)
        self.finish()

    def send_direct(self, capacity: int) -> None:
        key = ("direct", capacity)
        if key not in self.kept:
            self.kept[key] = [self._channel(layout, capacity) for layout in self.layouts]
        self.attempt += 1
        channels = self.kept[key]
        for pipe, (_, _, ring) in zip(self.pipes, channels, strict=True):
            pipe.send(("direct", ring.segment.address, capacity, self.attempt))
        for _, packer, _ in channels:
            packer.look(self.params)
        rings = [ring.refit(self.attempt, self.attempt) for _, _, ring in channels]
        for ring in rings:
            ring.__enter__()
        for index in range(max(len(rounds) for rounds, _, _ in channels)):
            for rounds, packer, ring in channels:
                if index < len(rounds):
                    packer.pack(index, ring.wait_free(index))
                    ring.filled(index)
        for ring in rings:
            ring.__exit__(None, None, None)
        self.finish()

    def _channel(self, layout: Any, capacity: int) -> tuple[Any, Packer, Ring]:
        rounds = cut_rounds(layout, capacity)
        segment = Segment.create(ring_bytes(2, min(2, len(rounds)), capacity))
        with many_objects():
            plan = receive_plan(self.world, chunk_layout(layout, rounds))
        packer = Packer(rounds, plan.copies, message=False)
        return rounds, packer, ring_of(segment.address, capacity, rounds, 0, 1, segment)

    def check(self) -> tuple[float, ...]:
        self.order("check")
        return tuple(self.finish())

    def stop(self) -> None:
        self.order("stop")
        for process in self.processes:
            process.join(30)


def best(action: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Return (seconds of the first run, least seconds of the others)."""
    seconds = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun)
    return seconds[0], min(seconds[1:] or seconds)


def memcpy_seconds(size: int) -> float:
    """Return the least seconds to copy `size` bytes within this process, on one thread, into pages that exist."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return best(lambda: target.copy_(source), 5)[1]


def ablation(args: argparse.Namespace) -> dict[str, Any]:
    from rlctl.models.catalog import lookup

    facts = reduced(lookup(MODELS[args.model]), args.hidden)  # type: ignore[arg-type]
    trainer = Trainer(facts)
    capacity = args.staging_mb << 19
    ways: dict[str, Callable[[], None]] = {
        STAGES[0]: trainer.send_handles,
        STAGES[1]: lambda: trainer.send_packed("all"),
        STAGES[2]: lambda: trainer.send_packed("own"),
        STAGES[3]: lambda: trainer.send_packed("none"),
        STAGES[4]: lambda: trainer.send_rounds(capacity),
        STAGES[5]: lambda: trainer.send_direct(capacity),
    }
    copying, tensors = memcpy_seconds(trainer.bytes), len(trainer.rows)
    result: dict[str, Any] = {"model": args.model, "hidden": args.hidden, "tensors": tensors,
                              "payload_bytes": trainer.bytes, "executors": EXECUTORS, "memcpy_s": copying,
                              "stages": []}  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in ways}
    expected = None
    for turn in range(args.repeats + 1):  # in turns, so that what else the machine does falls on every way alike
        for name in ways if turn < 2 else STAGES[1:]:
            begun = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - begun)
            found = trainer.check()
            expected = expected or found
            if found != expected:
                raise SystemExit(f"{name}: the engines hold something else ({found}, not {expected})")
    base = min(times[STAGES[0]])
    for name, (first, *more) in times.items():
        warm = min(more or [first])
        result["stages"].append({
            "name": name, "seconds": warm, "seconds_first": first, "microseconds_a_tensor": 1e6 * warm / tensors,
            "fraction_of_memcpy": copying / warm, "times_faster": base / warm,
        })  # fmt: skip
        print(f"{name:<24}{warm:>9.3f} s{1e6 * warm / tensors:>9.1f} us a tensor{base / warm:>8.1f} x", flush=True)
    trainer.stop()
    return result


def memcpy(args: argparse.Namespace) -> dict[str, Any]:
    found = []
    for gigabytes in args.gb:
        trainer = Trainer(refit_engine.llama_of(gigabytes), executors=1)
        for staging in args.staging_mb:
            _, warm = best(lambda size=staging, one=trainer: one.send_direct(size << 19), args.repeats)
            copying = memcpy_seconds(trainer.bytes)
            found.append({"payload_bytes": trainer.bytes, "staging_mb": staging, "seconds": warm, "memcpy_s": copying,
                          "gb_per_s": trainer.bytes / 1e9 / warm, "fraction_of_memcpy": copying / warm})  # fmt: skip
            print(f"{trainer.bytes / 1e9:.2f} GB, staging {staging:>4} MB: {warm:.3f} s, {copying / warm:.2f} of "
                  f"memcpy ({trainer.bytes / 1e9 / copying:.1f} GB/s)", flush=True)  # fmt: skip
        trainer.stop()
    return {"direct": found}


def growth(args: argparse.Namespace) -> dict[str, Any]:
    from rlctl.models.catalog import lookup

    found = []
    for model, executors, hidden in (("qwen3-30b", 1, 64), ("qwen3-30b", 2, 64), ("qwen3-30b", 4, 64),
                                     ("qwen3-30b", 2, 128), ("qwen3-235b", 2, 64), ("deepseek-v3", 2, 64)):  # fmt: skip
        trainer = Trainer(reduced(lookup(MODELS[model]), hidden), executors)  # type: ignore[arg-type]
        first, warm = best(lambda one=trainer: one.send_direct(4 << 20), args.repeats)
        copies = sum(len(own) for _, packer, _ in trainer.kept["direct", 4 << 20] for own in packer.copies)
        found.append({"model": model, "executors": executors, "hidden": hidden, "tensors": len(trainer.rows),
                      "copies": copies, "payload_bytes": trainer.bytes, "seconds": warm, "seconds_first": first,
                      "microseconds_a_copy": 1e6 * warm / copies})  # fmt: skip
        print(f"{model:<12}{executors} executors{hidden:>5} wide{trainer.bytes / 1e6:>6.0f} MB{len(trainer.rows):>7} "
              f"tensors{copies:>8} copies{warm:>8.3f} s{1e6 * warm / copies:>7.2f} us a copy (first, with planning, "
              f"{first:.1f} s)", flush=True)  # fmt: skip
        trainer.stop()
    return {"growth": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("ablation")
    one.add_argument("--model", choices=sorted(MODELS), default="deepseek-v3")
    one.add_argument("--hidden", type=int, default=64)
    one.add_argument("--staging-mb", type=int, default=16)
    two = kinds.add_parser("memcpy")
    two.add_argument("--gb", type=float, nargs="+", default=[0.5, 1.0])
    two.add_argument("--staging-mb", type=int, nargs="+", default=[8, 16, 64])
    three = kinds.add_parser("growth")
    four = kinds.add_parser("engine")
    refit_engine.add_arguments(four)
    for sub in (one, two, three, four):
        sub.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    modes = {"ablation": ablation, "memcpy": memcpy, "growth": growth, "engine": refit_engine.engine}
    print(json.dumps(modes[args.kind](args)))


if __name__ == "__main__":
    main()
