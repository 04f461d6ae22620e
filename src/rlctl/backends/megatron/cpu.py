"""Everything that lets Megatron-Core run without CUDA. Where CUDA is available only the `gaps` that it has without
TransformerEngine are filled. For megatron-core 0.16 to 0.19.

Megatron-Core calls the CUDA runtime by name (streams, devices, random state) in some sixty places. Each of its
modules gets a stand-in for its module-global `torch`, which differs from the real one in `torch.cuda` and in factory
functions that are asked for a CUDA tensor. The real torch is not touched. What the stand-in cannot reach is in
`cpu_patches`, one function each.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from rlctl.backends.megatron import gaps
from rlctl.backends.megatron.cpu_patches import PATCHES
from rlctl.backends.megatron.cpu_torch import TORCH


def install() -> None:
    """Patches Megatron-Core for this process if there is no CUDA. Cheap to repeat: covers modules imported since."""
    if torch.cuda.is_available():
        if find_spec("transformer_engine") is None:
            gaps.fill()
        return
    _import_megatron()
    gaps.fill()
    if not getattr(install, "patched", False):
        for patch in PATCHES:
            patch()
        install.patched = True  # type: ignore[attr-defined]
    _cover_modules()


def _import_megatron() -> None:
    """Imports what is patched. 0.19 loads its checkpoint strategies late; importing them now lets them be covered."""
    with warnings.catch_warnings(), _functions_left_uncompiled():
        warnings.simplefilter("ignore")  # says at length that Apex and TransformerEngine are absent
        for name in (
            "models.gpt.gpt_model",
            "models.gpt.gpt_layer_specs",
            "optimizer",
            "distributed",
            "distributed.finalize_model_grads",
            "pipeline_parallel",
            "dist_checkpointing",
            "dist_checkpointing.strategies.torch",
            "transformer.moe.token_dispatcher",
            "transformer.multi_latent_attention",
            "post_training.modelopt.layers",
        ):
            importlib.import_module(f"megatron.core.{name}")
        strategies = importlib.import_module("megatron.core.dist_checkpointing.strategies")
        for module in pkgutil.iter_modules(strategies.__path__):
            with contextlib.suppress(ImportError):  # optional storage clients
                importlib.import_module(f"{strategies.__name__}.{module.name}")


@contextlib.contextmanager
def _functions_left_uncompiled() -> Iterator[None]:
    """Megatron-Core decorates its fused functions with torch.compile while it is imported; compiling them needs a C++
    compiler and a minute on a CPU, and the decorator alone imports the inductor for seconds."""
    compile_function = torch.compile

    def leave(function: Any = None, **options: Any) -> Any:
        return (lambda f: f) if function is None else function

    torch.compile = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


def _cover_modules() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = TORCH  # type: ignore[attr-defined]
