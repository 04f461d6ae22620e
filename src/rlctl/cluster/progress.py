"""Progress of workers within a call, published in Ray's store. The driver shows no missing values."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from rlctl.cluster.ray_health import dead_process

EVERY_S = 0.5
"""Minimum seconds between two values of a worker."""
ANSWER_TIMEOUT_S = 2.0
"""Time limit of Ray's store. Without one, Ray tries a lost store for a minute and then ends the asking process."""
MOST_WORKERS = 64
"""Maximum number of workers that the driver reads."""
NAMESPACE = b"rlctl-progress"


class _Shown:
    """The published progress of this process's worker."""

    key: bytes | None = None
    at = 0.0
    """Time of publication."""
    some = False
    """Whether the current call has a published value, which its end removes."""


def _key(worker: str) -> bytes:
    import ray

    return f"{ray.get_runtime_context().get_job_id()}/{worker}".encode()


def host(worker: str) -> None:
    """Have `report` publish for `worker`, the name of its log."""
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
    except Exception:  # noqa: BLE001 - a failed report must not end a generation
        _Shown.key = None


def look(workers: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the progress of `workers` as (done, total), if any."""
    if dead_process() is not None:  # the wait for its store would not end
        return {}
    keys = {_key(worker): worker for worker in list(workers)[:MOST_WORKERS]}
    try:
        values = _store().internal_kv_multi_get(list(keys), NAMESPACE, timeout=ANSWER_TIMEOUT_S)
    except Exception:  # noqa: BLE001 - as above
        return {}
    pairs = {keys[key]: value.split() for key, value in values.items()}
    return {worker: (int(done), int(total)) for worker, (done, total) in pairs.items()}


def _store() -> Any:
    return sys.modules["ray"].experimental.internal_kv.internal_kv_get_gcs_client()
