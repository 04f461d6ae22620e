"""Checks that two processes of this machine can sum a tensor as a policy's ranks do, over NCCL or gloo."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rlctl.config.files import temporary_folder
from rlctl.doctor.finding import Check

RANKS = 2
LIMIT_S = 120.0
RANK = """
import datetime, sys, torch
rank, world, meeting, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if backend == "nccl":
    torch.cuda.set_device(rank)
torch.distributed.init_process_group(
    backend, init_method=f"file://{meeting}", rank=rank, world_size=world,
    timeout=datetime.timedelta(seconds=float(sys.argv[5])),
)
values = torch.full((1 << 16,), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
torch.distributed.all_reduce(values)
right = bool((values == world * (world + 1) / 2).all())
torch.distributed.destroy_process_group()
sys.exit(0 if right else 3)
"""


def check_ranks(gpus: int, *, python: str = sys.executable, limit_s: float = LIMIT_S, code: str = RANK) -> Check:
    """Let two processes sum a tensor, over NCCL where there are two GPUs and over gloo elsewhere."""
    backend = "nccl" if gpus >= RANKS else "gloo"
    fix = (
        "Try again with NCCL_DEBUG=INFO; start a container with --ipc=host and --ulimit memlock=-1."
        if backend == "nccl"
        else "Allow connections on the loopback interface, and check that `python -c 'import torch'` works."
    )
    begun = time.perf_counter()
    with temporary_folder("doctor") as logs:
        codes = run_ranks(backend, python, limit_s, code, logs)
        said = [last_line(logs / f"{rank}") for rank in range(RANKS)]
    seconds = time.perf_counter() - begun
    if codes == [0] * RANKS:
        return Check(
            "ranks", "ok", f"{RANKS} processes summed a tensor over {backend} in {seconds:.1f} s, their start included"
        )
    for rank, code_ in enumerate(codes):
        if code_ is None:
            return Check("ranks", "fail", f"rank {rank} of {RANKS} over {backend} did not end in {limit_s:.0f} s", fix)
        if code_ == 3:
            return Check("ranks", "fail", f"rank {rank} received a wrong sum over {backend}", fix)
    wrong = next(rank for rank, code_ in enumerate(codes) if code_)
    return Check("ranks", "fail", f"rank {wrong} of {RANKS} failed over {backend}: {said[wrong]}", fix)


def run_ranks(backend: str, python: str, limit_s: float, code: str, logs: Path) -> list[int | None]:
    """Return the exit codes of the ranks; None stands for a rank that was still running at the limit and was killed."""
    processes = []
    meeting = logs / "store"  # a port looked for beforehand may be another's by then
    for rank in range(RANKS):
        # -P: no module of the directory that the user works in replaces one of Python's.
        arguments = [python, "-P", "-c", code, str(rank), str(RANKS), str(meeting), backend, str(limit_s)]
        with (logs / f"{rank}").open("wb") as log:
            processes.append(subprocess.Popen(arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
    deadline = time.monotonic() + limit_s
    codes: list[int | None] = []
    try:
        for process in processes:
            try:
                codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return codes


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
