"""What vLLM's layerwise reload gets silently wrong on the CPU platform, put right around it.

1. Experts: the set-up of their kernel skips the prepacking when a kernel object already exists, so that unpacked bytes
   land in packed storage.
2. Output embedding: its repacked copy is not renewed when the reload wrote only the shared (tied) parameter.
"""

from __future__ import annotations

import torch


class ReloadFixes:
    """`before` a layerwise reload begins and `after` it is finished. Does nothing on other platforms."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.platforms import current_platform

        self.model, self.active = model, current_platform.is_cpu()

    def before(self) -> None:
        if not self.active:
            return
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def after(self) -> None:
        if not self.active:
            return
        for module in self.model.modules():
            if type(module).__name__ in ("ParallelLMHead", "VocabParallelEmbedding") and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
