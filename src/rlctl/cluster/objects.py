"""The object store, as a function that can be handed to code that knows nothing of Ray."""

from __future__ import annotations

from typing import Any

from rlctl.cluster.ray_session import RAYLET, require_processes


def fetch(handle: Any) -> Any:
    """The value behind a handle, or the values behind a list of them. Arrays are mapped read-only, not copied, on the
    node that holds them."""
    import ray

    require_processes(RAYLET)
    return ray.get(handle)


def put(value: Any) -> object:
    """Put a value into the object store of this node; return its handle."""
    import ray

    return ray.put(value)
