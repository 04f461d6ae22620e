"""Python's garbage collector where many objects that stay are made: imports, large plans, an engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def many_objects() -> Iterator[None]:
    """Pause the garbage collector, which would repeatedly scan objects that stay: a sixth of the time that vLLM's
    imports take."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
