"""The stand-in for torch that Megatron-Core's modules get on a machine without CUDA.

It differs from the real one in `torch.cuda` and in factory functions that are asked for a CUDA tensor.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "randn", "rand", "empty_strided")


class Stream:
    """A CUDA stream or event: work on a CPU is done when the call returns, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


class NoRanges(types.ModuleType):
    """torch.cuda.nvtx: profiler ranges that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: contextlib.nullcontext()


class CudaOnCpu(types.ModuleType):
    """What Megatron-Core uses of torch.cuda, on a CPU; other names are torch.cuda's own."""

    Stream = Stream
    Event = Stream
    nvtx = NoRanges("nvtx")

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.random = types.SimpleNamespace(get_rng_state=self.get_rng_state, set_rng_state=self.set_rng_state)

    def current_device(self) -> torch.device:
        return CPU

    def device_count(self) -> int:
        return 0

    def is_available(self) -> bool:
        return False

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    default_stream = current_stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)


def _factory(name: str) -> Callable[..., torch.Tensor]:
    """torch.`name` that makes a plain CPU tensor when asked for a CUDA or a pinned one."""
    real = getattr(torch, name)

    @functools.wraps(real)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return real(*args, **kwargs)

    return make


class TorchOnCpu(types.ModuleType):
    """torch, as Megatron-Core's modules see it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = CudaOnCpu()
        for name in FACTORIES:
            setattr(self, name, _factory(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


TORCH = TorchOnCpu()
