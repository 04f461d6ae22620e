"""Limits and workarounds of vLLM's CPU platform, read from the installed version. GPU engines use none."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def install() -> None:
    """Repair this process's CPU platform; before the model is loaded."""
    rotate_every_head()
    find_own_experts()
    choose_experts_without_groups()
    draw_for_kept_tokens_alone()
    gather_unequal_parts()
    start_from_zeros()


def has_triton() -> bool:
    """Whether CPU engines use Triton kernels: where Triton has a CPU backend (`HAS_TRITON` in vllm/triton_utils)."""
    triton = find_spec("triton")
    return triton is not None and triton.origin is not None and (Path(triton.origin).parent / "backends/cpu").is_dir()


def keep_parameters_plain() -> None:
    """Make this process's CPU layers compute with parameters as published; to be called before the model is loaded."""
    import vllm._custom_ops as ops

    ops._supports_onednn = False


@cache
def rotate_every_head() -> None:
    """Pass rotary queries in the shape that the CPU kernel handles; call before loading. It rotates [tokens, heads,
    size], used by latent attention, by wrong angles (0.32: DeepSeek-V3's log-probs are off by 0.5); [tokens, heads x
    size] is right."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        if query.dim() < 3:
            return kernel(self, positions, query, key)
        flat_query = query.flatten(-2)
        flat_key = key.flatten(-2) if key is not None and key.dim() > 2 else key
        kernel(self, positions, flat_query, flat_key)
        for whole, flat in ((query, flat_query), (key, flat_key)):  # the kernel works in place, and so must this
            if (
                whole is not None and flat is not None and whole.data_ptr() != flat.data_ptr()
            ):  # else it is the same memory
                whole.copy_(flat.view(whole.shape))
        return query, key

    RotaryEmbedding.forward_cpu = forward_cpu


@cache
def find_own_experts() -> None:
    """Make the CPU expert kernel use local positions; call before loading. It uses global expert numbers even with a
    part of the experts (0.32: it reads out of bounds and dies). Absent experts add nothing."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return
    kernel = CPUUnquantizedExperts.apply

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        places = kwargs.get("expert_map")
        if places is not None:
            local_ids = places[kwargs["topk_ids"].long()]
            kwargs["topk_weights"] = kwargs["topk_weights"].masked_fill(local_ids < 0, 0.0)
            kwargs["topk_ids"] = local_ids.clamp(min=0).to(kwargs["topk_ids"].dtype)
        kernel(self, *args, **kwargs)

    CPUUnquantizedExperts.apply = apply


@cache
def choose_experts_without_groups() -> None:
    """Make the CPU router treat all experts as one group; call before loading. Without groups it
    refuses scores by sigmoid, and leaves out the correction bias of scores by softmax (0.32: ERNIE 4.5's log-probs are
    off by 1.3)."""
    try:
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    except ImportError:
        return
    make = CPURouter.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        if not (self.use_grouped_topk or plain or self.custom_routing_function) and self.scoring_func in GROUPED:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    CPURouter.__init__ = __init__  # type: ignore[method-assign]


GROUPED = ("softmax", "sigmoid")
"""Scores that the CPU router computes for groups of experts."""


@cache
def draw_for_kept_tokens_alone() -> None:
    """Keep a sample's generator out of steps that end inside its prompt; call before creating the engine. vLLM rewinds
    it for the discarded token by an offset that CPU generators lack (0.32: the engine dies if prompts exceed
    max_num_batched_tokens). Such a step draws from the engine's generator."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    plain = GPUModelRunner.sample_tokens

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        inside_prompt = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        set_aside = {place: generators.pop(place) for place in inside_prompt if place in generators}
        try:
            return plain(self, *args, **kwargs)
        finally:
            generators.update(set_aside)

    GPUModelRunner.sample_tokens = sample_tokens  # type: ignore[method-assign]


def gather_unequal_parts() -> None:
    """Add collectives for unequal token counts, which replicas with shared experts need; call before loading (0.32:
    NotImplementedError)."""
    import torch
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if CpuCommunicator.all_gatherv is not DeviceCommunicatorBase.all_gatherv:
        return

    def gathered(self: Any, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        most = max(sizes)
        padded = tensor.new_zeros(most, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = self.all_gather(padded, 0).split(most)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        tensors = [input_] if isinstance(input_, torch.Tensor) else input_
        gathered_tensors = [gathered(self, tensor, sizes or [len(tensor)] * self.world_size) for tensor in tensors]
        return gathered_tensors[0] if isinstance(input_, torch.Tensor) else gathered_tensors

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        assert dim == 0
        lengths, rank = sizes or [len(input_) // self.world_size] * self.world_size, self.rank_in_group
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(lengths)[rank].clone()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


@cache
def start_from_zeros() -> None:
    """Fill weights that the first refit overwrites with zeros; call before loading. vLLM draws a random number for each
    on one core."""
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    plain = weight_utils.initialize_single_dummy_weight

    def initialize(param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        is_plain = param.device.type == "cpu" and param.is_floating_point() and param.element_size() > 1
        if is_plain and getattr(param, "dummy_weight_value", None) is None:
            param.data.zero_()
        else:
            plain(param, *args, **kwargs)

    for module in (dummy_loader, weight_utils):
        if hasattr(module, plain.__name__):
            setattr(module, plain.__name__, initialize)


def make_stage_inputs(runner: Any) -> None:
    """Allocate a later pipeline stage's inputs, which vLLM's CPU platform skips with its trial run."""
    from vllm.distributed.parallel_state import get_pp_group

    if get_pp_group().is_first_rank or getattr(runner, "intermediate_tensors", True) is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def installed_package() -> Path | None:
    """The folder of the installed vLLM, found without importing it."""
    spec = find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def has_class(architecture: str) -> bool:
    """Whether the installed vLLM lists a class of models; without vLLM, true."""
    package = installed_package()
    listed = _text(package / "model_executor" / "models" / "registry.py") if package else ""
    return not listed or f'"{architecture}"' in listed


def cpu_experts_spread() -> bool:
    """Whether the installed vLLM has the product of experts that `find_own_experts` completes on CPUs."""
    package = installed_package()
    text = "" if package is None else _text(package / "model_executor/layers/fused_moe/experts/cpu_moe.py")
    return package is None or all(name in text for name in ("class CPUUnquantizedExperts", "topk_ids", "expert_map"))


def cpu_head_sizes() -> tuple[int, ...]:
    """The sizes of heads that the CPU attention of the installed vLLM takes; empty: they are not known."""
    package = installed_package()
    text = "" if package is None else _text(package / "v1/attention/backends/cpu_attn.py")
    match = re.search(r"def get_supported_head_sizes\(cls\) -> list\[int\]:\s+return \[([\d, ]+)\]", text)
    return tuple(map(int, match[1].split(","))) if match else ()


def cpu_latent_widths() -> tuple[int, ...]:
    """Cache widths of latent attention in the installed CPU kernel; DeepSeek's without vLLM."""
    package = installed_package()
    if package is None:
        return (576,)
    text = _text(package / "v1/attention/backends/mla/cpu_mla.py")
    match = re.search(r"def get_supported_head_sizes\(cls\) -> list\[int\]:(?:\s+#.*)*\s+return \[([\d, ]+)\]", text)
    return tuple(map(int, match[1].split(","))) if match else ()


def cpu_has_kernel(name: str) -> bool:
    """Whether the installed vLLM has a compiled kernel of that name; True without vLLM."""
    package = installed_package()
    return package is None or any(name.encode() in file.read_bytes() for file in package.glob("_C*.so"))


def packs_latent_attention() -> bool:
    """Whether the installed vLLM has an attention for processors with AMX that packs weights of latent attention."""
    package = installed_package()
    return package is not None and (package / "v1/attention/backends/mla/amx_mla.py").is_file()
