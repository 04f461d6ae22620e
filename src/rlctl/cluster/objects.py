"""The object store, as a function that can be handed to code that knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.cluster.ray_session import RAYLET, require_processes
from rlctl.errors import WorkerError


def fetch(handle: Any) -> Any:
    """The value behind a handle, or the values behind a list of them. Arrays are mapped read-only, not copied, on the
    node that holds them."""
    import ray

    require_processes(RAYLET)
    return ray.get(handle)


def keep_here(handles: Sequence[Any]) -> None:
    """Copy the values behind `handles` to this node, so that they outlive the one that made them. Raises WorkerError
    where one is lost with its node."""
    import ray
    from ray.exceptions import ObjectLostError

    require_processes(RAYLET)
    try:
        ray.get(list(handles))
    except ObjectLostError as error:
        raise WorkerError(f"Rollouts were lost with the node that held them: {type(error).__name__}.") from None


def put(value: Any) -> object:
    """Put a value into the object store of this node; return its handle."""
    import ray

    return ray.put(value)
