"""Checks of the operating system around a run: limits, ports, clock, what earlier runs left, access to models."""

from __future__ import annotations

import contextlib
import email.utils
import os
import resource
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from rlctl.config.paths import user_path
from rlctl.doctor.check import Check, gib

LEAST_LOCKED = 64 << 20
LEAST_PORTS = 2000
LARGEST_SKEW_S = 60.0
LEFT_OVER_AGE_S = 600.0
HUB = "https://huggingface.co"
# Organisations whose models the hub gives out only to accounts that accepted their terms.
GATED = ("meta-llama/", "google/gemma", "mistralai/", "CohereForAI/", "bigcode/starcoder")


def check_locked_memory(gpus: int, limit: int | None = None) -> Check:
    """Pinned memory for transfers between GPUs and hosts counts against this limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return Check("locked-memory", "ok", "unlimited")
    detail = f"at most {gib(limit)} of memory can be locked"
    if gpus and limit < LEAST_LOCKED:
        fix = "Raise it with `ulimit -l unlimited`; in a container: --ulimit memlock=-1."
        return Check("locked-memory", "warn", f"{detail}: RDMA between nodes fails", fix)
    return Check("locked-memory", "ok", detail)


def check_ports(
    span: tuple[int, int] | None = None, file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")
) -> Check:
    """Ports that Ray, process groups and engines can be given."""
    if span is None and file.exists():
        low, high = file.read_text().split()
        span = (int(low), int(high))
    low, high = span or (32768, 60999)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(16):
                stack.enter_context(socket.create_server(("", 0)))
    except OSError as error:
        return Check("ports", "fail", f"no port can be opened: {error}", "Allow the process to listen on ports.")
    detail = f"{high - low + 1} ports to choose from ({low} to {high})"
    if high - low + 1 < LEAST_PORTS:
        fix = "Widen it: `sysctl -w net.ipv4.ip_local_port_range='32768 60999'`."
        return Check("ports", "warn", f"{detail}: a run of many processes takes thousands", fix)
    return Check("ports", "ok", detail)


def check_clock(now: float | None = None, reference: float | None = None) -> Check:
    """This machine's clock, against the hub's where it answers, and never before these files were installed."""
    now = time.time() if now is None else now
    installed = Path(__file__).stat().st_mtime
    fix = "Set it, for example with `timedatectl set-ntp true`."
    if now < installed - LARGEST_SKEW_S:
        return Check("clock", "fail", f"{stamp(now)}: before rlctl was installed ({stamp(installed)})", fix)
    reference = hub_time() if reference is None else reference
    if reference is not None and abs(now - reference) > LARGEST_SKEW_S:
        return Check("clock", "warn", f"{stamp(now)}: {now - reference:+.0f} s off the hub's", fix)
    return Check("clock", "ok", stamp(now) + ("" if reference is None else ", as the hub's"))


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def hub_time(url: str = HUB) -> float | None:
    """The hub's clock, or None where it cannot be reached (or must not be asked)."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5) as answer:
            found = email.utils.parsedate_to_datetime(answer.headers.get("Date", ""))
            return found.timestamp()
    except (urllib.error.URLError, OSError, ValueError, TypeError):
        return None


def check_token(model: str | None, environment: Mapping[str, str] | None = None, stored: bool | None = None) -> Check:
    """A token of the hub where the model's terms have to be accepted."""
    environment = os.environ if environment is None else environment
    has = bool(environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN"))
    has = has or (stored_token() if stored is None else stored)
    gated = bool(model) and not user_path(model or "").exists() and (model or "").startswith(GATED)
    if gated and not has:
        fix = f"Accept the terms at {HUB}/{model}, then `hf auth login` or set HF_TOKEN."
        return Check("hub-token", "warn", f"{model} is given out to accounts only, and there is no token", fix)
    return Check("hub-token", "ok", "a token is there" if has else "none, and none needed for what was asked")


def stored_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def left_over(directory: Path = Path("/dev/shm"), alive: Iterable[int] | None = None) -> list[Path]:
    """Shared memory of rlctl (`rlctl-<pid>-...`) whose process is gone, and that is not new."""
    pids = set(psutil.pids() if alive is None else alive)
    found = []
    for path in sorted(directory.glob("rlctl-*-*")) if directory.is_dir() else ():
        pid = path.name.split("-")[1]
        with contextlib.suppress(FileNotFoundError):
            old = time.time() - path.stat().st_mtime > LEFT_OVER_AGE_S
            if pid.isdigit() and int(pid) not in pids and old:
                found.append(path)
    return found


def check_left_over(directory: Path = Path("/dev/shm"), alive: Iterable[int] | None = None) -> Check:
    """Nothing of runs that were killed takes shared memory."""
    found = left_over(directory, alive)
    if not found:
        return Check("left-over-memory", "ok", f"nothing of earlier runs in {directory}")
    size = sum(path.stat().st_size for path in found)
    detail = f"{len(found)} segments of runs that are gone hold {gib(size)} in {directory}"
    fix = "Remove them: `rlctl doctor --fix`."
    return Check("left-over-memory", "warn", detail, fix, lambda: remove(found))


def remove(paths: Iterable[Path]) -> str:
    count = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            count += 1
    return f"removed {count} files"
