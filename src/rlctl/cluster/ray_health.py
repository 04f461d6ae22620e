"""Whether the processes of Ray live and answer."""

from __future__ import annotations

import sys
from typing import Any

from rlctl.errors import ClusterError, WaitTimeoutError

ANSWER_TIMEOUT_S = 5.0
RAYLET, CONTROL = "raylet", "gcs_server"
PROCESSES = {RAYLET: "The raylet of this node", CONTROL: "Ray's control process (gcs_server)"}


def dead_process(*kinds: str) -> str | None:
    """Name the process of Ray (one of `kinds`; none named: any) that died in a session started here; None: all live."""
    ray_worker = sys.modules.get("ray._private.worker")
    node: Any = ray_worker and ray_worker._global_node
    for kind in (kinds or PROCESSES) if node else ():
        if any(info.process.poll() is not None for info in node.all_processes.get(kind, ())):
            return PROCESSES[kind]
    return None


def control_answers() -> bool:
    """Whether Ray's control process answers. Ray would wait a minute and then end this process silently."""
    from ray._private import worker
    from ray.exceptions import RayError

    connected: Any = worker.global_worker
    try:
        connected.gcs_client.internal_kv_get(b"rlctl", None, timeout=ANSWER_TIMEOUT_S)
    except RayError:
        return False
    return True


def require_processes(*kinds: str) -> None:
    """Raise ClusterError if a Ray process died, because Ray's own calls would wait forever or end this process
    silently."""
    if dead := dead_process(*kinds):
        raise ClusterError(
            f"{dead} died.",
            "Look for a lack of memory (`dmesg`), and at Ray's own logs, in `ray` next to the logs of the workers.",
        )


def require_control() -> None:
    """Raise ClusterError if Ray's control process died, WaitTimeoutError if it does not answer; Ray's calls would wait
    uninterruptibly."""
    require_processes()
    if not control_answers():
        raise WaitTimeoutError(
            "Ray's control process (gcs_server) does not answer.", "`ray status` shows whether the cluster runs."
        )
