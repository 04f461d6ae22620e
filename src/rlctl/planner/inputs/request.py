"""The request for a plan: model, machine, work, pinned values and the constants that costs are computed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import PLAIN_ENGINE, Adapters, EngineNumbers, Precision
from rlctl.planner.inputs.cluster import ClusterFacts
from rlctl.planner.inputs.constants import DEFAULTS, Constants
from rlctl.planner.inputs.workload import Workload

HEADROOM = {"fast": 0.95, "frugal": 0.95, "safe": 0.82}
"""Share of a device's memory that a plan may count on, by goal."""


@dataclass(frozen=True)
class Request:
    """Everything that a plan depends on. `pins` are configuration keys with the values they must have."""

    facts: ModelFacts
    cluster: ClusterFacts
    workload: Workload = field(default_factory=Workload)
    pins: Mapping[str, Any] = field(default_factory=dict)
    constants: Constants = DEFAULTS
    precision: Precision = "bf16"
    adapters: Adapters | None = None
    generation_bytes: float = 2.0
    engine: EngineNumbers = PLAIN_ENGINE
    grouped_experts: bool = True
    """Megatron computes the experts of a rank as one product."""
    gradient_bytes: int = 4
    moment_bytes: int = 8
    teacher: ModelFacts | None = None
    backend: str = "megatron"
    """The backend that trains, also where none is pinned."""

    def pin(self, key: str, default: Any = None) -> Any:
        value = self.pins.get(key)
        return default if value is None else value

    def values(self, key: str, options: list[int]) -> list[int]:
        """The value of a key that is pinned, else `options`."""
        value = self.pins.get(key)
        return options if value is None else [value]

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 trains."""
        return self.backend == "dtensor"

    @property
    def budget(self) -> float:
        """Bytes that the phases may use on one device (on a CPU: all processes of a node together)."""
        return HEADROOM[self.workload.goal] * self.cluster.device.memory * (0.9 if self.cluster.is_cpu else 1.0)
