"""What an engine holds of a device that it shares with the policy: given back while the policy computes.

vLLM's sleep mode moves the weights to host memory and drops the cache; both come back at the addresses that they had.
Its CPU platform has none of it but the bookkeeping; on a GPU this has not been run.
"""

from __future__ import annotations

from typing import Any

from rlctl.backends.vllm import compat

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names


class DeviceMemory:
    """Which parts of an engine's memory are on the device: as vLLM's own books say, which are the only ones."""

    def __init__(self, llm_engine: Any, *, shared: bool) -> None:
        """Not `shared`: the engine has its device to itself, and nothing ever moves."""
        self._engine, self._shared = llm_engine, shared

    @property
    def _away(self) -> frozenset[str]:
        return compat.asleep(self._engine) if self._shared else frozenset()

    @property
    def whole(self) -> bool:
        return not self._away

    def sleep(self) -> None:
        """Weights to host memory; the cache is dropped, and what it held of prefixes with it.

        Up to vLLM 0.30 an engine of which the weights alone are awake stays as it is.
        """
        if self._shared and WEIGHTS not in self._away:
            self._engine.sleep(level=1)

    def wake(self, *parts: str) -> None:
        """Bring back `parts` (none named: everything); the cache comes back empty."""
        if back := sorted(self._away & set(parts or (WEIGHTS, CACHE))):
            self._engine.wake_up(tags=back)
