"""Value changes between a tensor and its param, executed by `weights.plan_execution`. Each declares other tensors,
block alignment, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.settings.training import Rounding


@dataclass(frozen=True, slots=True)
class Transform:
    """A step from tensor values to param values."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of further params, on the side that holds the data, that the step reads whole."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the params that reading the tensor back takes in addition to the data."""
        back = self.inverse()
        return back.inputs if back is not None else ()

    def inverse(self) -> Transform | None:
        """The step back; None: information is lost."""
        return None


@dataclass(frozen=True, slots=True)
class Cast(Transform):
    """Change of dtype. Exact, and so invertible, only towards a wider type."""

    source: str
    target: str

    @property
    def exact(self) -> bool:
        """Whether every value survives."""
        wider = {"bfloat16": {"float32", "float64"}, "float16": {"float32", "float64"}, "float32": {"float64"}}
        return self.target in wider.get(self.source, set())

    def inverse(self) -> Transform | None:
        return Cast(self.target, self.source) if self.exact else None


@dataclass(frozen=True, slots=True)
class Add(Transform):
    """param = tensor + value: norm gains stored as a distance from one."""

    value: float

    def inverse(self) -> Transform | None:
        return Add(-self.value)


@dataclass(frozen=True, slots=True)
class Dequantize(Transform):
    """tensor = param * scale[row // block, column // block] (DeepSeek-V3's `weight_scale_inv`), in float32."""

    scale: str
    block_size: tuple[int, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.scale,)


@dataclass(frozen=True, slots=True)
class MergeLora(Transform):
    """tensor = param + scale * (b @ a) (arXiv 2106.09685), with the base weight first rounded to `dtype` by `rounding`,
    as in training."""

    a: str
    b: str
    scale: float
    dtype: str = "float32"
    rounding: Rounding = "nearest"
    transposed: bool = False
    """The tensor has inputs before outputs."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.a, self.b)


@dataclass(frozen=True, slots=True)
class ReadThrough(Transform):
    """The param holds the tensor in a form that `reader` turns back; such params are read and not written."""

    reader: Transform

    def inverse(self) -> Transform | None:
        return self.reader
