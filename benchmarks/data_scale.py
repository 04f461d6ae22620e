"""Measures a start on a data file of many rows against reading the file once, and the memory that it takes.

    python benchmarks/data_scale.py [--rows 10000000] [--kinds jsonl parquet] [--repeats 5] [--drawn 20000]

Each part has a process of its own. `read` is `cat` of the file into /dev/null and then Arrow's scan of all its columns.
`start` prepares the laptop preset's run on the file, up to where Ray would start, and takes the first prompts of the
run; `few` does the same on a file with its first 1,000 rows. `draw` takes prompts in the order of the run. The ratio is
(start - few) / read, in processor seconds and by the clock. `resume` opens the file again and compares the prompts from
a position in the middle of the epoch with those of the first process. Prints one JSON object, medians over the repeats.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

MUST = 1.5
FEW = 1000
PROMPTS = 64
WORDS = ("river", "stone", "market", "seven", "window", "carry", "number", "cloud", "early", "garden", "paper")


def records(rows: int) -> Iterator[dict[str, Any]]:
    """Yield rows of some 200 bytes in JSON, each with another question."""
    draw = random.Random(0)
    phrases = [" ".join(draw.choices(WORDS, k=9)) for _ in range(4096)]
    for row in range(rows):
        question = f"Question {row}: {phrases[draw.getrandbits(12)]}, {phrases[draw.getrandbits(12)]}?"
        yield {"question": question, "answer": str(row % 977), "level": row % 5}


def write(path: Path, rows: int) -> None:
    import pyarrow
    import pyarrow.parquet

    made = records(rows)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in made)
        return
    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string()), ("level", pyarrow.int64())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while batch := [*islice(made, 2**20)]:  # the row groups that pyarrow and pandas write
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


def read(path: Path) -> None:
    import pyarrow.dataset

    subprocess.run(["cat", path], check=True, stdout=subprocess.DEVNULL)
    kind = "json" if path.suffix == ".jsonl" else "parquet"
    for batch in pyarrow.dataset.dataset(path, format=kind).scanner().to_batches():
        assert batch.num_rows >= 0


def opened(path: Path) -> Any:
    """Prepare a run on the file as the command does; return its prompts."""
    import rlctl.jobs.train  # noqa: F401 - as the command does
    from rlctl.methods.configuration import resolve
    from rlctl.preparation.job import prepare_job

    flags = {"data.name": str(path), "data.params": {}, "data.prompt_field": "question", "validation.every": 0,
             "validation.at_start": False, "validation.at_end": False,
             "reward.terms": [{"name": "exact-match"}]}  # fmt: skip
    return prepare_job(resolve("laptop", flags=flags), starts=lambda config, plan, workers: None).prompts


def digest(prompts: Any, first: int) -> str:
    rows = [prompts.prompt_at(position) for position in range(first, first + PROMPTS)]
    return hashlib.sha256(repr([(row.index, row.where, row.prompt, row.answer) for row in rows]).encode()).hexdigest()


def start(path: Path) -> dict[str, Any]:
    return {"first": digest(opened(path), 0)}


def draw(path: Path, count: int) -> dict[str, Any]:
    prompts = opened(path)
    begun, before = time.process_time(), resident_mb()
    for position in range(count):
        prompts.prompt_at(position)
    taken = (time.process_time() - begun) / count
    middle = len(prompts.datasets[0].prompts) // 2
    return {"ms_a_prompt": 1e3 * taken, "grown_mb": resident_mb() - before, "middle": digest(prompts, middle)}


def resume(path: Path) -> dict[str, Any]:
    prompts = opened(path)
    return {"middle": digest(prompts, len(prompts.datasets[0].prompts) // 2)}


def resident_mb(kind: str = "VmRSS") -> float:
    """Return the memory of this process, or its peak (VmHWM), which unlike `ru_maxrss` begins with the program."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024 / 1e6


def measured(part: str, path: Path, drawn: int) -> dict[str, Any]:
    """Run a part in a process of its own; return its result, seconds by the clock and of the processor, and its peak
    of memory in megabytes."""
    command = [sys.executable, __file__, "--part", part, "--path", str(path), "--drawn", str(drawn)]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    result = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{part} failed: {' '.join(command)}")
    clock = time.perf_counter() - begun
    made = json.loads(result.splitlines()[-1])
    return {"clock_s": clock, "cpu_s": usage.ru_utime + usage.ru_stime} | made


def medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: round(statistics.median(one[key] for one in found), 2) for key in ("clock_s", "cpu_s", "peak_mb")}


def compared(path: Path, few: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts in turn on a file."""
    found: dict[str, list[dict[str, Any]]] = {"read": [], "start": [], "few": []}
    for _ in range(args.repeats):
        for part in found:
            place = few if part == "few" else path
            found[part].append(measured("start" if part == "few" else part, place, args.drawn))
    report: dict[str, Any] = {"megabytes": round(path.stat().st_size / 1e6)}
    report |= {part: medians(runs) for part, runs in found.items()}
    for unit in ("cpu_s", "clock_s"):
        ratios = [(s[unit] - f[unit]) / r[unit] for r, s, f in zip(*found.values(), strict=True)]
        report[f"ratio_{unit}"] = round(statistics.median(ratios), 2)
    report["peak_above_few_mb"] = round(report["start"]["peak_mb"] - report["few"]["peak_mb"])
    prompts, again = measured("draw", path, args.drawn), measured("resume", path, args.drawn)
    report["draw"] = {key: round(prompts[key], 3) for key in ("ms_a_prompt", "grown_mb", "peak_mb")}
    report["resume_equal"] = prompts["middle"] == again["middle"]
    return report | {"must": MUST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--kinds", nargs="+", choices=("jsonl", "parquet"), default=["jsonl", "parquet"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drawn", type=int, default=20_000, help="prompts that `draw` takes")
    parser.add_argument("--part", choices=("read", "start", "draw", "resume"), help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        parts: dict[str, Callable[[Path], Any]] = {
            "read": read, "start": start, "draw": partial(draw, count=args.drawn), "resume": resume
        }  # fmt: skip
        print(json.dumps((parts[args.part](args.path) or {}) | {"peak_mb": resident_mb("VmHWM")}))
        return
    report: dict[str, Any] = {"rows": args.rows, "load_average": round(os.getloadavg()[0], 1)}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="rlctl-data-") as folder:
            path, few = Path(folder, f"many.{kind}"), Path(folder, f"few.{kind}")
            write(path, args.rows)
            write(few, FEW)
            report[kind] = compared(path, few, args)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
