"""What an engine holds of a device that it shares with the policy: given back while the policy computes.

vLLM's sleep mode moves the weights to host memory and drops the cache; both come back at the addresses that they had.
Its CPU platform has none of it but the bookkeeping; on a GPU this has not been run.
"""

from __future__ import annotations

from typing import Any

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names


class DeviceMemory:
    """Which parts of an engine's memory are on the device."""

    def __init__(self, llm_engine: Any, *, shared: bool) -> None:
        """Not `shared`: the engine has its device to itself, and nothing ever moves."""
        self._engine, self._shared = llm_engine, shared
        self._away: set[str] = set()

    @property
    def whole(self) -> bool:
        return not self._away

    def sleep(self) -> None:
        """Weights to host memory; the cache is dropped, and what it held of prefixes with it."""
        if self._shared and WEIGHTS not in self._away:
            self._engine.sleep(level=1)
            self._away = {WEIGHTS, CACHE}

    def wake(self, *parts: str) -> None:
        """Bring back `parts` (none named: everything); the cache comes back empty."""
        if back := sorted(self._away & set(parts or (WEIGHTS, CACHE))):
            self._engine.wake_up(tags=back)
            self._away -= set(back)
