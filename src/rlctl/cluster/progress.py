"""Progress of workers within a call, published in Ray's store for the driver. Optional: missing values are not
shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from rlctl.cluster.ray_health import dead_process

EVERY_S = 0.5
"""Least time between two values that a worker tells."""
ANSWER_TIMEOUT_S = 2.0
"""How long Ray's store may take. Where it is lost, Ray would try for a minute, and then end the process that asks."""
MOST_WORKERS = 64
"""Workers that the driver looks at."""
NAMESPACE = b"rlctl-progress"


class _Shown:
    """This process's worker and its published progress."""

    key: bytes | None = None
    at = 0.0
    """When it was shown."""
    some = False
    """Whether the call under way shows something, which its end takes back."""


def _key(worker: str) -> bytes:
    import ray

    return f"{ray.get_runtime_context().get_job_id()}/{worker}".encode()


def host(worker: str) -> None:
    """Let `report` of this process tell the progress of `worker`, by the name of its log."""
    _Shown.key = _key(worker)


def report(done: int, total: int) -> None:
    """Publish `done` of `total`, and remove it at the end. Rate-limited; no effect outside a worker."""
    now, ended = time.monotonic(), done >= total
    if _Shown.key is None or (not _Shown.some if ended else now < _Shown.at + EVERY_S):
        return
    _Shown.at, _Shown.some = now, not ended
    try:
        if ended:
            _store().internal_kv_del(_Shown.key, False, NAMESPACE, timeout=ANSWER_TIMEOUT_S)
        else:
            value = b"%d %d" % (done, total)
            _store().internal_kv_put(_Shown.key, value, True, NAMESPACE, timeout=ANSWER_TIMEOUT_S)
    except Exception:  # noqa: BLE001 - whatever keeps a number from being shown ends no generation
        _Shown.key = None


def look(workers: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the progress of `workers` as (done, total), if any."""
    if dead_process() is not None:  # its store would be waited for without end
        return {}
    keys = {_key(worker): worker for worker in list(workers)[:MOST_WORKERS]}
    try:
        told = _store().internal_kv_multi_get(list(keys), NAMESPACE, timeout=ANSWER_TIMEOUT_S)
    except Exception:  # noqa: BLE001 - as above
        return {}
    pairs = {keys[key]: value.split() for key, value in told.items()}
    return {worker: (int(done), int(total)) for worker, (done, total) in pairs.items()}


def _store() -> Any:
    return sys.modules["ray"].experimental.internal_kv.internal_kv_get_gcs_client()
