"""Let the CUDA build of torchvision, the only one on PyPI, be imported next to a CPU build of torch.

`make venv` writes a .pth file that calls `install` in every process of the environment. The compiled half of
torchvision needs CUDA and declares two operators. The Python half, which transformers and vLLM use, needs no more than
their declarations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")
_libraries: list[Any] = []
"""torch withdraws the operators of a library that nothing refers to."""


class Finder:
    """Finds torchvision with a loader that declares the operators first. Imports nothing itself: Python (3.11) holds
    the lock of all imports while a finder runs, and a module that takes another lock then can wait for ever."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name == "torchvision" else None
        if spec is not None and spec.loader is not None:
            loader: Any = Loader(spec, spec.loader)
            spec.loader = loader
        return spec


class Loader:
    """Declares the operators and hands over to Python's own loader."""

    def __init__(self, spec: ModuleSpec, loader: Any) -> None:
        self._spec, self._loader = spec, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        declare_operators()
        self._loader.exec_module(module)


def declare_operators() -> None:
    """Declare the operators of torchvision's compiled half where it cannot be loaded."""
    from importlib.metadata import version

    import torch

    if torch.version.cuda is None and not version("torchvision").endswith("+cpu"):
        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


def install() -> None:
    """Let this process import torchvision; costs nothing where it does not."""
    if not is_installed():
        sys.meta_path.insert(0, Finder())


def is_installed() -> bool:
    """Return whether this process has called `install`."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)
