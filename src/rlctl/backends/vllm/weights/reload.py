"""Run vLLM's layerwise reload on part of a model, with workarounds for three silent errors.

1. Experts on a CPU: setup skips prepacking if a kernel object exists, so unpacked bytes land in packed storage. 2.
Experts on a GPU: a reload replaces the kernel object, but CUDA graphs read the freed strides of the first. The first is
restored. 3. Output embedding on a CPU: its repacked copy is not updated when only the tied parameter was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from vllm.platforms import current_platform

from rlctl.backends.vllm import compat
from rlctl.backends.vllm.weights.assign import MODEL
from rlctl.errors import VerificationError

_kernels: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The kernel, and its settings, that the method of each layer of experts had before its reload began."""


class Reload:
    """A reload of the modules at `paths` and below. Between `begin` and `finish` the loader needs exactly their
    tensors."""

    def __init__(self, model: torch.nn.Module, paths: Sequence[str], unknown_storage: Sequence[str] = ()) -> None:
        """`unknown_storage`: paths that the loader must fill, because they cannot be read back."""
        self.model, self.unknown_storage = model, unknown_storage
        # vLLM's functions walk all modules below their argument; this list restricts them to the reloaded ones.
        self.part = model if MODEL in paths else torch.nn.ModuleList([model.get_submodule(path) for path in paths])
        self.fixes = _Fixes(self.part)

    def begin(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.fixes.before()
        for parameter in self.part.parameters():  # vLLM reads the names of loaders, and MiniMax-M2's are partial
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, partial) and not hasattr(loader, "__name__"):
                loader.__name__ = getattr(loader.func, "__name__", "loader")  # type: ignore[attr-defined]
        initialize_layerwise_reload(self.part)

    def finish(self, config: Any) -> None:
        """Put the modules back with loaded weights. Raises VerificationError naming a module without data."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        left = [path for path in self.unknown_storage if compat.waits_for_weights(self.model.get_submodule(path))]
        if left:
            raise VerificationError(
                f"vLLM's loader was given no weights for {len(left)} of its modules ({left[0]}).",
                "--receive loader sends it all tensors of the model at once.",
            )
        with torch.no_grad():
            finalize_layerwise_reload(self.part, config)
            for module in compat.made_of_others(self.model, self.part):
                module.process_weights_after_loading(config.dtype)
            self.fixes.after()
        _put_kernels_back()


def abandon(model: torch.nn.Module) -> None:
    """Put modules of an unfinished reload back, with mixed weights until a full refit."""
    compat.abandon_layerwise_reload(model)
    _put_kernels_back()


def _put_kernels_back() -> None:
    for method, (kernel, settings) in _kernels.items():
        if method.moe_kernel is None or not current_platform.is_cpu():
            method.moe_kernel, method.moe_quant_config = kernel, settings
    _kernels.clear()


class _Fixes:
    """`before` a layerwise reload begins and `after` it is finished."""

    def __init__(self, part: torch.nn.Module) -> None:
        self.part, self.on_cpu = part, current_platform.is_cpu()

    def before(self) -> None:
        for module in self.part.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                _kernels[method] = method.moe_kernel, method.moe_quant_config
                if self.on_cpu:
                    method.moe_kernel = None

    def after(self) -> None:
        if not self.on_cpu:
            return
        for module in self.part.modules():
            if type(module).__name__ in ("ParallelLMHead", "VocabParallelEmbedding") and hasattr(module, "cpu_linear"):
                cast(Any, module.quant_method).process_weights_after_loading(module)
