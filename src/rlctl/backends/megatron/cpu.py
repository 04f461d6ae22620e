"""Everything that lets Megatron-Core 0.16 to 0.19 run without CUDA.

Megatron-Core calls the CUDA runtime by name in some sixty places. Each of its modules gets a stand-in for its global
`torch`, with another `torch.cuda` and factory functions; the real torch stays unchanged. `PATCHES` patches other
functions one by one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from rlctl.backends.megatron import lean
from rlctl.backends.megatron.compat import fill_gaps
from rlctl.backends.results import squared_norm
from rlctl.vector_math import warm_up


def install() -> None:
    """Patch Megatron-Core without CUDA. Repeat after further imports; repeating is cheap."""
    warm_up()
    if torch.cuda.is_available():
        if find_spec("transformer_engine") is None:
            fill_gaps()
        return
    _import_megatron()
    fill_gaps()
    if not getattr(install, "patched", False):
        for patch in PATCHES:
            patch()
        install.patched = True  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = TORCH  # type: ignore[attr-defined]


def _import_megatron() -> None:
    """Import everything patched, including 0.19's lazily loaded checkpoint strategies."""
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
    """Skip torch.compile of fused functions at import: it needs a C++ compiler, a minute on a CPU, and seconds to
    import."""
    compile_function = torch.compile

    def leave(function: Any = None, **options: Any) -> Any:
        return (lambda f: f) if function is None else function

    torch.compile = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


# --- the stand-in for torch
CPU = torch.device("cpu")
FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "randn", "rand", "empty_strided")


class Nothing:
    """A CUDA stream, event or profiler range on a CPU: a no-op."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *exc: object) -> None: ...


def get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


class CudaOnCpu(types.ModuleType):
    """The parts of torch.cuda that Megatron-Core uses, on a CPU; other names are torch.cuda's."""

    Stream = Event = Nothing
    nvtx = stream = current_stream = default_stream = set_device = synchronize = empty_cache = Nothing()
    random = types.SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    get_rng_state, set_rng_state = staticmethod(get_rng_state), staticmethod(set_rng_state)

    def current_device(self) -> torch.device:
        return CPU

    def device_count(self) -> int:
        return 0

    def is_available(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

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
        self.cuda = CudaOnCpu("torch.cuda")
        for name in FACTORIES:
            setattr(self, name, _factory(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


TORCH = TorchOnCpu()


# --- patches


def _rewrite_constants(code: types.CodeType, table: dict[str, str]) -> types.CodeType:
    def replaced(constant: Any) -> Any:
        if isinstance(constant, str):
            return table.get(constant, constant)
        if isinstance(constant, tuple | frozenset):
            return type(constant)(replaced(item) for item in constant)
        if isinstance(constant, types.CodeType):
            return _rewrite_constants(constant, table)
        return constant

    return code.replace(co_consts=tuple(replaced(constant) for constant in code.co_consts))


def _accept_cpu_parameter_types() -> None:
    """Megatron's optimizers compare `param.type()` with names such as 'torch.cuda.FloatTensor'."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    table = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}
    distributed, mixed = distrib_optimizer.DistributedOptimizer, optimizer.Float16OptimizerWithFloat16Params
    sites = (
        (distributed, "_build_model_and_main_param_groups"),
        (distributed, "_init_optimizer_states_with_dummy_values"),
        (mixed, "__init__"),
        (clip_grads, "clip_grad_by_total_norm_fp32"),
    )
    for owner, name in sites:
        if (original := vars(owner).get(name)) is not None:
            function: Any = getattr(original, "__func__", original)  # of a classmethod
            function.__code__ = _rewrite_constants(function.__code__, table)


def _add_up_squares_in_chunks() -> None:
    """Without TransformerEngine and Apex, the gradient norm uses torch's norms of whole parameters."""
    from megatron.core.optimizer import clip_grads

    def norm(chunk_size: Any, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: Any) -> Any:
        squares = [squared_norm(tensor) for tensors in tensor_lists for tensor in tensors]
        return torch.stack(squares).sum().sqrt().float()[None], None

    clip_grads.l2_norm_impl = norm


def _keep_tensors_on_cpu() -> None:
    """`x.cuda()` on tensors: read as `x.cpu()` in the function that does it (tied embeddings)."""
    from megatron.core.models.common.language_module import language_module

    function = language_module.LanguageModule.setup_embeddings_and_output_layer
    names = tuple("cpu" if used == "cuda" else used for used in function.__code__.co_names)
    function.__code__ = function.__code__.replace(co_names=names)


def _use_cpu_random_state() -> None:
    """tensor_parallel.random reaches into torch.cuda's internals for its random states."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_rng_state, set_rng_state


@contextlib.contextmanager
def no_weights_drawn() -> Iterator[None]:
    """Leave the weights of models that are built as they are allocated. `load_rank` writes each element, and on a CPU
    each rank would draw the whole model in float32 on one core to keep its part."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import experts

    def mark(
        weight: torch.Tensor,
        output_size: int,
        input_size: int,
        per_partition_size: int,
        partition_dim: int,
        init_method: Any,
        stride: int = 1,
        **options: Any,
    ) -> None:
        if not options.get("skip_set_tensor_parallel_attributes"):
            layers.set_tensor_model_parallel_attributes(
                tensor=weight, is_parallel=True, dim=partition_dim, stride=stride
            )

    modules: list[Any] = [module for module in (layers, experts) if hasattr(module, "_initialize_affine_weight_cpu")]
    drawn = [module._initialize_affine_weight_cpu for module in modules]
    try:
        for module in modules:
            module._initialize_affine_weight_cpu = mark
        yield
    finally:
        for module, function in zip(modules, drawn, strict=True):
            module._initialize_affine_weight_cpu = function


def _split_rotary_without_pinning() -> None:
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding

    def slice_of_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        size, rank = cp_group.size(), cp_group.rank()
        chunks = pos_emb.chunk(2 * size, seq_dim)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], seq_dim)

    for module in (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding):
        if hasattr(module, "get_pos_emb_on_this_cp_rank"):
            vars(module)["get_pos_emb_on_this_cp_rank"] = slice_of_rank


def _convert_cpu_splits() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        vars(module)["maybe_move_tensor_to_cpu"] = to_cpu


def _exchange_uneven_parts() -> None:
    """gloo has no uneven all-gather or reduce-scatter (expert tensor parallelism); both are done by all-to-all."""
    from megatron.core.tensor_parallel import mappings

    def gather(part: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
        count, out = group.size(), part.new_empty((sum(sizes), *part.shape[1:]))
        copies = part.repeat((count,) + (1,) * (part.dim() - 1))
        torch.distributed.all_to_all_single(out, copies, sizes, [part.shape[0]] * count, group=group)
        return out

    def reduce_scatter(whole: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
        count, mine = group.size(), sizes[group.rank()]
        out = whole.new_empty((mine * count, *whole.shape[1:]))
        torch.distributed.all_to_all_single(out, whole.contiguous(), [mine] * count, sizes, group=group)
        return out.view(count, mine, *whole.shape[1:]).sum(0)

    def uneven(
        usual: Callable[..., torch.Tensor], exchange: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        def exchanged(tensor: torch.Tensor, group: Any, split_sizes: Any = None, *args: Any) -> torch.Tensor:
            if split_sizes is None or group.size() == 1:
                return usual(tensor, group, split_sizes, *args)
            return exchange(tensor, group, [int(size) for size in split_sizes])

        return exchanged

    mappings._gather_along_first_dim = uneven(mappings._gather_along_first_dim, gather)
    mappings._reduce_scatter_along_first_dim = uneven(mappings._reduce_scatter_along_first_dim, reduce_scatter)


def _use_few_passes() -> None:
    """Replace functions that Megatron leaves to a compiler with the functions of `lean`."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.models.common.embeddings import rope_utils

    usual_back, usual_rotation = fused_bias_swiglu.swiglu_back, rope_utils._apply_rotary_pos_emb_bshd

    def swiglu_back(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return lean.swiglu_back(grad, y) if grad.dtype == y.dtype else usual_back(grad, y)

    def rotate(
        t: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        *,
        mla_rotary_interleaved: bool = False,  # 0.19's name for it, and in its place
    ) -> torch.Tensor:
        width, latent = freqs.shape[-1], multi_latent_attention or mla_rotary_interleaved
        if rotary_interleaved or latent or width != t.shape[-1]:
            return usual_rotation(t, freqs, rotary_interleaved, latent, mscale)
        angles = freqs[..., : width // 2]  # the second half repeats it
        return lean.Rotated.apply(t, (angles.cos() * mscale).to(t.dtype), (angles.sin() * mscale).to(t.dtype))

    fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = lean.swiglu, swiglu_back
    rope_utils._apply_rotary_pos_emb_bshd = rotate


def _scale_gradients_in_place() -> None:
    """Megatron's replacement for Apex's scaling makes a copy of each gradient first."""
    from megatron.core.optimizer import clip_grads

    def scale(chunk_size: Any, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], factor: float) -> None:
        source, target = tensor_lists
        if any(element is not other for element, other in zip(source, target, strict=True)):
            torch._foreach_copy_(target, source)
        torch._foreach_mul_(target, factor)

    clip_grads.multi_tensor_scale_impl = scale


def _exchange_nothing_alone() -> None:
    """A group of one process reduces and gathers gradients and weights in place; gloo copies them three times."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def unless_alone(usual: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(usual)
        def exchange(target: torch.Tensor, source: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
            if group is not None and group.size() == 1 and target.data_ptr() == source.data_ptr():
                return None
            return usual(target, source, *args, group=group, **options)

        return exchange

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, unless_alone(getattr(buffers, name)))


def _add_to_gradients_in_place() -> None:
    """`gradient_accumulation_fusion`: the product of a weight's gradient adds to its buffer, in place of Megatron's
    CUDA extension; an embedding does likewise."""
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=lean.add_product, wgrad_gemm_accum_fp16=lean.add_product
    )
    layers._grad_accum_fusion_available = True
    layers.F = types.SimpleNamespace(embedding=lean.look_up)  # the one function of it that this module calls


PATCHES: tuple[Callable[[], None], ...] = (
    _accept_cpu_parameter_types,
    _add_up_squares_in_chunks,
    _keep_tensors_on_cpu,
    _use_cpu_random_state,
    _split_rotary_without_pinning,
    _convert_cpu_splits,
    _exchange_uneven_parts,
    _use_few_passes,
    _scale_gradients_in_place,
    _exchange_nothing_alone,
    _add_to_gradients_in_place,
)
