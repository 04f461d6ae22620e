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


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for reference cycles after 200,000 new objects instead of 700. A step makes several objects for each
    rollout, none of them in a cycle; with Python's default, scanning them takes most of the driver's time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
