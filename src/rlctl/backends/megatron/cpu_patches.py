"""What of Megatron-Core does not run without CUDA and `cpu_torch` cannot reach; a function each. For megatron-core 0.16
to 0.19.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


def _rewrite_constants(code: types.CodeType, table: dict[str, str]) -> types.CodeType:
    """`code` with string constants replaced, in nested tuples and functions too."""

    def replaced(constant: Any) -> Any:
        if isinstance(constant, str):
            return table.get(constant, constant)
        if isinstance(constant, tuple | frozenset):
            return type(constant)(replaced(item) for item in constant)
        if isinstance(constant, types.CodeType):
            return _rewrite_constants(constant, table)
        return constant

    return code.replace(co_consts=tuple(replaced(constant) for constant in code.co_consts))


def _function(owner: Any, name: str) -> Any:
    """The plain function `name` of a class or module, or None where this version has none."""
    found = vars(owner).get(name)
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def _accept_cpu_parameter_types() -> None:
    """The optimizers compare `param.type()` with 'torch.cuda.FloatTensor' and the like."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    table = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}
    distributed, mixed = distrib_optimizer.DistributedOptimizer, optimizer.Float16OptimizerWithFloat16Params
    sites = (
        (distributed, "_build_model_and_main_param_groups"),
        (distributed, "load_parameter_state_from_dp_zero"),
        (distributed, "_init_optimizer_states_with_dummy_values"),
        (distributed, "get_parameter_state_dp_reshardable"),
        (mixed, "__init__"),
        (clip_grads, "clip_grad_by_total_norm_fp32"),
    )
    for owner, name in sites:
        if (function := _function(owner, name)) is not None:
            function.__code__ = _rewrite_constants(function.__code__, table)


def _keep_tensors_on_cpu() -> None:
    """`x.cuda()` on tensors: read as `x.cpu()` in the functions that do it (tied embeddings, gathered optimizer
    state)."""
    from megatron.core.models.common.language_module import language_module
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for owner, name in (
        (language_module.LanguageModule, "setup_embeddings_and_output_layer"),
        (DistributedOptimizer, "get_parameter_state_dp_zero"),
    ):
        if (function := _function(owner, name)) is not None:
            names = tuple("cpu" if used == "cuda" else used for used in function.__code__.co_names)
            function.__code__ = function.__code__.replace(co_names=names)


def _use_cpu_random_state() -> None:
    """tensor_parallel.random reaches into torch.cuda's internals for its random states."""
    from megatron.core.tensor_parallel import random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state


def _split_rotary_without_pinning() -> None:
    """The context-parallel slice of rotary embeddings pins memory and moves it to CUDA."""
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding

    def slice_of_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        size, rank = cp_group.size(), cp_group.rank()
        chunks = pos_emb.chunk(2 * size, seq_dim)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], seq_dim)

    for module in (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding):
        if hasattr(module, "get_pos_emb_on_this_cp_rank"):
            module.get_pos_emb_on_this_cp_rank = slice_of_rank


def _convert_cpu_splits() -> None:
    """The MoE dispatcher turns its all-to-all splits into numpy only when they are CUDA tensors."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = to_cpu


def _exchange_uneven_parts() -> None:
    """gloo has no uneven all-gather or reduce-scatter (expert tensor parallelism); both are done by all-to-all."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kwargs)
        count, sizes = group.size(), [int(size) for size in output_split_sizes]
        out = input_.new_empty((sum(sizes), *input_.shape[1:]))
        copies = input_.repeat((count,) + (1,) * (input_.dim() - 1))
        torch.distributed.all_to_all_single(out, copies, sizes, [input_.shape[0]] * count, group=group)
        return out

    def scatter_uneven(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, *args, **kwargs)
        count, sizes = group.size(), [int(size) for size in input_split_sizes]
        mine = sizes[group.rank()]
        out = input_.new_empty((mine * count, *input_.shape[1:]))
        torch.distributed.all_to_all_single(out, input_.contiguous(), [mine] * count, sizes, group=group)
        return out.view(count, mine, *input_.shape[1:]).sum(0)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven


PATCHES: tuple[Callable[[], None], ...] = (
    _accept_cpu_parameter_types,
    _keep_tensors_on_cpu,
    _use_cpu_random_state,
    _split_rotary_without_pinning,
    _convert_cpu_splits,
    _exchange_uneven_parts,
)
