"""What depends on vLLM's version. Written for 0.26 to 0.33; run on 0.32 (CPU).

Private names of vLLM are used here and nowhere else.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rlctl.errors import MachineError

if TYPE_CHECKING:
    import torch

OLDEST, NEWEST = (0, 26), (0, 33)
CHECKED = ("0.32.0",)


def check_version() -> str:
    """vLLM's version; raises MachineError where it is missing or older than what the interfaces used here need."""
    try:
        import vllm
    except ImportError as error:
        raise MachineError(f"vLLM cannot be imported: {error}.", "Install rlctl[cpu] or rlctl[cuda].") from error
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < OLDEST:
        raise MachineError(
            f"vLLM {vllm.__version__} is too old: rlctl needs {OLDEST[0]}.{OLDEST[1]} or newer.",
            "Install the versions of the constraints file.",
        )
    return str(vllm.__version__)


def supported_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` without those that this vLLM does not know and that only tune it; raises on others.

    Raises MachineError naming an argument without which the engine would not do what was asked.
    """
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    missing = sorted(set(arguments) - known)
    if missing:
        raise MachineError(
            f"This vLLM does not know the engine arguments {', '.join(missing)}.",
            f"rlctl is written for vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}.",
        )
    return arguments


def register_transfer_engine(name: str, engine: type) -> None:
    """Make `engine` available as the weight-transfer backend `name`; importing a module twice is not an error."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if name not in Factory._registry:
        Factory.register_engine(name, engine)


def keep_parameters_plain() -> None:
    """Make this process's CPU layers compute with parameters as published; to be called before the model is loaded."""
    import vllm._custom_ops as ops

    ops._supports_onednn = False


def set_weight_version(llm_engine: Any, version: str) -> None:
    """Tell vLLM's own record of the weight version, in versions that keep one."""
    if hasattr(llm_engine, "set_weight_version"):
        llm_engine.set_weight_version(version)


def shut_down(llm: Any) -> None:
    """End the engine's worker processes, in versions where the object does not do it by itself."""
    core = getattr(llm.llm_engine, "engine_core", None)
    if core is not None and hasattr(core, "shutdown"):
        core.shutdown()


def abandon_layerwise_reload(model: torch.nn.Module) -> bool:
    """Undo a layerwise reload that was begun and not finished, so that another can begin; True where there was one.

    The layers keep whatever weights they had when the reload broke off: a mixture, until a full one succeeds.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    found = False
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            found = True
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    return found
