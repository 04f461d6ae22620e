"""The object store, as two functions that can be handed to code that knows nothing of Ray."""

from __future__ import annotations

from typing import Any


def put(value: Any) -> Any:
    """Store `value` and return a handle that any process of the session can fetch it by."""
    import ray

    return ray.put(value)


def fetch(handle: Any) -> Any:
    """The value behind a handle, or the values behind a list of them.

    Arrays are mapped read-only, not copied, on the node that holds them.
    """
    import ray

    return ray.get(handle)
