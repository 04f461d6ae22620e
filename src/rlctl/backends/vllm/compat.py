"""Everything that depends on vLLM's version (0.26 to 0.32, on CPUs). Private names of vLLM are used only here and in
`cpu`."""

from __future__ import annotations

import gc
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rlctl.backends.messages import NEVER, QUANTIZED, Sampling
from rlctl.data.images import Piece, joined, line_merges
from rlctl.errors import INSTALL_CPU, ConfigError, MachineError, first_line, install_extra
from rlctl.models.families import family_of
from rlctl.weights.vllm import ExpertSizes

if TYPE_CHECKING:
    import torch

OLDEST, NEWEST = (0, 26), (0, 32)
"""The versions that rlctl was run with. pyproject.toml asks for the same."""
REPLICA = tuple(f"VLLM_DP_{name}" for name in ("SIZE", "RANK", "RANK_LOCAL", "MASTER_IP", "MASTER_PORT"))
"""The variables that number an engine's replica for vLLM."""
MODELS = "vllm.model_executor.models."
"""The package of vLLM's models."""
RESHAPES = re.compile(r"\b(loaded_weight|weight|tensor|w) = \S*\.(t|view|transpose|reshape|permute|flatten)\(")
"""An assignment in which a loader reorders a tensor."""
CPU_ORDERS = ("vec", "amx", "neon", "vsx")
"""Instruction sets for whose kernels vLLM reorders experts on CPUs."""


def check_version() -> None:
    """Raise MachineError where vLLM is missing or too old."""
    try:
        import vllm
    except ImportError as error:
        raise MachineError(
            f"vLLM cannot be imported: {error}.", f"Install {INSTALL_CPU}, or {install_extra('cuda')} for GPUs."
        ) from error
    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST:
        raise MachineError(
            f"vLLM {vllm.__version__} is too old: rlctl needs {OLDEST[0]}.{OLDEST[1]} or newer.",
            "Install the versions of the constraints file.",
        )


def without_own_nccl_settings() -> AbstractContextManager[None]:
    """Create communicators shared with processes without vLLM. With VLLM_BATCH_INVARIANT=1 vLLM sets NCCL variables in
    its workers, and communicators with different variables hang. Raises MachineError if the variables cannot be
    restored."""
    from vllm import envs

    if not envs.VLLM_BATCH_INVARIANT:
        return nullcontext()
    try:
        from vllm.utils import nccl
    except ImportError:  # before 0.32
        nccl = None
    # NCCL before 2.29.7 keeps its first reading; vLLM then has nothing to reset.
    if nccl is None or not hasattr(nccl, "unpinned_nccl_env") or nccl._unpinned_env == {}:
        raise MachineError(
            "VLLM_BATCH_INVARIANT=1: vLLM sets NCCL variables in its workers, which these versions of vLLM and NCCL "
            "cannot set back for the refit's communicator. Members whose variables differ would hang.",
            "Install vLLM 0.32 with NCCL 2.29.7 or newer, unset VLLM_BATCH_INVARIANT, or refit with refit.mover=disk.",
        )
    return nccl.unpinned_nccl_env()


def sampling_params(sampling: Sampling, seed: int) -> Any:
    """vLLM's parameters for the tokens of one sample."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        seed=seed,
        logit_bias=dict.fromkeys(sampling.never, NEVER) or None,  # log-probs follow it
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,
        skip_special_tokens=False,  # tags such as <answer> may be special tokens
        spaces_between_special_tokens=False,
    )


def is_of_known_family(model: torch.nn.Module) -> bool:
    """Whether the model's family has a file in `models/`, which gives names and orders."""
    return family_of((type(model).__name__,)) is not None


def reads_images(model: torch.nn.Module) -> bool:
    return bool(getattr(model, "supports_multimodal", False))


def reshaping_loader(model: torch.nn.Module) -> str:
    """Return the class in a model whose `load_weights` reshapes tensors (by its source); empty: none."""
    if is_of_known_family(model):
        return ""
    kinds = {type(module) for module in model.modules()}
    loaders = (kind for kind in kinds if "load_weights" in vars(kind) and kind.__module__.startswith(MODELS))
    return next((kind.__name__ for kind in loaders if RESHAPES.search(inspect.getsource(kind))), "")


@cache
def embed_for_each_layer() -> None:
    """Make text-only Gemma 3n add each layer's token embedding; call before loading. vLLM computes these only in its
    multimodal model (0.32: wrong log-probs, no error). Zero vectors are not divided by their length, and the projection
    norm's epsilon is rescaled, as in transformers."""
    try:
        from vllm.model_executor.models import gemma3n
    except ImportError:
        return
    plain = gemma3n.Gemma3nForCausalLM.forward

    def forward(self: Any, input_ids: Any, positions: Any, *, per_layer_inputs: Any = None, **kwargs: Any) -> Any:
        if per_layer_inputs is None and input_ids is not None:
            sizes, decoder = (
                (self.config.num_hidden_layers, self.config.hidden_size_per_layer_input),
                self.model.self_decoder,
            )
            per_layer_inputs = decoder.get_per_layer_input_embeddings(input_ids).view(-1, *sizes)
            decoder.per_layer_projection_norm.variance_epsilon = self.config.rms_norm_eps * self.config.hidden_size
        return plain(self, input_ids, positions, per_layer_inputs=per_layer_inputs, **kwargs)

    gemma3n.Gemma3nForCausalLM.forward = forward
    gemma3n.EPS = gemma3n.EPS.new_tensor(1e-5).sqrt()


@cache
def join_lines_at_images_alone() -> None:
    """Have Gemma 3's processor join newlines only with the blank lines around an image; before a prompt is read.

    vLLM joins all newlines of a prompt (0.32), including newlines that the model sampled one by one in an earlier turn.
    """
    from vllm.model_executor.models.gemma3_mm import Gemma3MultiModalProcessor as Processor

    plain: Any = Processor.__bases__[0]

    def apply(self: Any, prompt: list[int], mm_prompt_updates: Any) -> Any:
        tokens, matched = plain._apply_token_matches(self, prompt, mm_prompt_updates)
        config, vocabulary = self.info.get_hf_config(), self.info.get_tokenizer().get_vocab()
        lines = [vocabulary["\n" * count] for count in range(1, 5)]
        around = zip([None, *tokens], tokens, [*tokens[1:], None], strict=False)
        pieces = [
            Piece(token, (), 0 if before == config.eoi_token_index or behind == config.boi_token_index else None)
            for before, token, behind in around
        ]
        for first, second, merged in line_merges(*lines):
            pieces = joined(pieces, first, second, merged)
        return [piece.token for piece in pieces], matched

    Processor._apply_token_matches = apply


@cache
def skip_chat_warm_up() -> None:
    """Start engines of text without compiling the chat template, which they never use: prompts come as tokens. Call
    before an engine is made."""
    try:
        from vllm.renderers.base import BaseRenderer
    except ImportError:
        return
    plain = getattr(BaseRenderer, "warmup", None)
    if plain is None:
        return

    def warmup(self: Any, chat_params: Any) -> None:
        if self.model_config.is_multimodal_model:  # it also warms up the processor of images
            plain(self, chat_params)

    BaseRenderer.warmup = warmup  # type: ignore[method-assign]


def renew_input_norms(runner: Any) -> None:
    """Restore constants of pixel scaling before a tower, which vLLM's dummy loading randomizes (0.32) and no refit
    sends."""
    norms = [module for module in runner.get_model().modules() if type(module).__name__ == "FusedMMInputNorm"]
    if not norms:
        return
    import torch
    from vllm.model_executor.layers.fusion.mm_input_norm import _load_norm_params

    params = _load_norm_params(runner.model_config)
    mean, std = (torch.tensor(values, dtype=torch.float32) for values in (params.image_mean, params.image_std))
    for norm in norms:
        norm.weight.copy_(params.rescale_factor / std)
        norm.bias.copy_(-mean / std)


DISTURBANCES = (
    ("Error in memory profiling", "Another process on this GPU released memory while vLLM measured it"),
    ("Memory usage increased after sleeping", "Another process on this GPU took memory while vLLM gave its own back"),
)
"""Messages of vLLM's assertions about a GPU's free memory, and their cause."""


@contextmanager
def memory_to_itself() -> Iterator[None]:
    """Raise MachineError where vLLM stops in the block because another process changed the GPU's free memory."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:  # the latter from ranks in other processes
        if cause := next((cause for words, cause in DISTURBANCES if words in str(error)), None):
            reason = f"{cause} ({first_line(error).rstrip('.')})."
            raise MachineError(reason, "Stop that process (`nvidia-smi` lists it), or start again.") from error
        raise


def join_replicas(rank: int, replicas: int, address: str, port: int) -> None:
    """Make the next engine of this process one of several replicas with shared experts; vLLM reads this only from the
    environment."""
    local_rank = 0  # the process sees its own replica's devices only
    values = map(str, (replicas, rank, local_rank, address, port))
    os.environ.update(zip(REPLICA, values, strict=True))
    from vllm import envs

    envs.disable_envs_cache()  # vLLM keeps its reading of the environment once an engine runs


def leave_replicas() -> None:
    """Make later engines standalone."""
    from vllm import envs

    for name in REPLICA:
        os.environ.pop(name, None)
    envs.disable_envs_cache()
    envs.enable_envs_cache()


def over_hosts(arguments: Mapping[str, Any], host: int, hosts: int, address: str, port: int, replicas: int) -> Any:
    """Return vLLM's arguments for a replica's ranks on host number `host`. All replicas form one process group at that
    port."""
    # vLLM divides hosts evenly among replicas that share one; each of these has a separate host.
    where = {"nnodes": hosts, "node_rank": host, "master_addr": address, "master_port": port}
    return {**arguments, **where, "data_parallel_size_local": replicas}


def start_ranks(arguments: Mapping[str, Any], ended: Callable[[], None]) -> Any:
    """Start a replica's ranks on a host other than its first and return their executor. `ended` is called if one
    exits."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    # By its context vLLM chooses how many tokens a step may have.
    executor = MultiprocExecutor(EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True))
    executor.register_failure_callback(ended)
    return executor


def memory_of_weights(config: Any) -> AbstractContextManager[Any]:
    """Allocate tensors that sleep and wake with the model's weights, where the engine can sleep."""
    from vllm.platforms import current_platform

    if not (config.model_config.enable_sleep_mode and current_platform.is_cuda_alike()):
        return nullcontext()
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().use_memory_pool(tag="weights")


def give_up(llm_engine: Any) -> None:
    """End the ranks of this host, and whoever waits for their answers."""
    executor = llm_engine.engine_core.engine_core.model_executor
    executor.is_failed = True
    executor.shutdown()


class StepTogether:
    """Steps of one of several replicas: each has one forward pass, of the replica's samples or of none."""

    def __init__(self, llm_engine: Any) -> None:
        self._engine, self._core = llm_engine, llm_engine.engine_core.engine_core
        self._step, self._computed = self._core.step_fn, False
        self._core.step_fn = self._noting

    def _noting(self) -> tuple[Any, bool]:
        outputs, self._computed = self._step()
        return outputs, self._computed

    def step(self) -> list[Any]:
        self._computed = False
        outputs = self._engine.step()
        if not self._computed:
            self._core.execute_dummy_batch()
        return outputs


def pause(llm_engine: Any) -> list[Any]:
    """Hold vLLM's scheduler where it is, and return the outputs of steps that are already on their way."""
    core = llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="keep", clear_cache=False)
    outputs: list[Any] = []
    while getattr(core, "batch_queue", None):
        outputs += llm_engine.step()
    return outputs


def resume(llm_engine: Any) -> None:
    """Let the scheduler go on, if it was held."""
    core = llm_engine.engine_core.engine_core
    if core.is_scheduler_paused():
        core.resume_scheduler()


def asleep(llm_engine: Any) -> frozenset[str]:
    """The parts of the engine's memory that are not on its device, by vLLM's names: `weights`, `kv_cache`."""
    return frozenset(llm_engine.engine_core.engine_core.model_executor.sleeping_tags)


def stream_of_engine(llm_engine: Any) -> Callable[[], None]:
    """Return a function that moves its caller's thread to this thread's CUDA stream; no effect without a GPU. vLLM uses
    one stream per thread (`current_stream` in vllm/utils/torch_utils.py), and streams do not wait for each other."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or llm_engine.vllm_config.parallel_config.world_size > 1:
        return lambda: None
    import torch
    from vllm.utils.torch_utils import current_stream

    stream = current_stream()
    return lambda: torch.cuda.set_stream(stream)


def shut_down(llm: Any) -> None:
    """End the engine's worker processes in versions that do not. This process ends next: nobody needs vLLM's search for
    garbage among all that was imported, which takes a second."""
    core = getattr(llm.llm_engine, "engine_core", None)
    if core is None or not hasattr(core, "shutdown"):
        return
    unfreeze = gc.unfreeze
    gc.freeze()
    gc.unfreeze = lambda: None
    try:
        core.shutdown()
    finally:
        gc.unfreeze = unfreeze


def abandon_layerwise_reload(model: torch.nn.Module) -> bool:
    """Undo an unfinished layerwise reload and return whether there was one. Layers keep mixed weights until a full
    reload."""
    from vllm.model_executor.model_loader.reload import layerwise

    abandoned = False
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            abandoned = True
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    return abandoned


def reloads_as_a_whole(model: torch.nn.Module) -> bool:
    """Whether the model's loader begins and ends a layerwise reload of all layers: torchao's models."""
    return bool(getattr(model, "_do_torchao_reload", False))


def waits_for_weights(module: torch.nn.Module) -> bool:
    """Whether a module in a layerwise reload has no data yet."""
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(module)
    return info.can_load() and info.load_numel == 0


def made_of_others(model: torch.nn.Module, part: torch.nn.Module) -> list[Any]:
    """Modules outside `part` that derive tensors from weights inside (latent attention: halves of kv_b) and must
    recompute them."""
    inside = set(part.modules())
    return [
        module
        for module in model.modules()
        if module not in inside
        and any(base.__name__ == "MLAAttention" for base in type(module).__mro__)
        and getattr(module, "kv_b_proj", None) in inside
    ]


def why_quantized(module: Any) -> str:
    """Return why a layer's parameters differ from published ones; empty: they do not."""
    method = getattr(module, "quant_method", None)
    plain = method is None or type(method).__name__.startswith("Unquantized")
    return "" if plain else f"{QUANTIZED} {type(method).__name__}"


@dataclass(frozen=True)
class ExpertOrder:
    """How a kernel of experts keeps their stacked matrices."""

    isa: str = ""
    """The CPU platform's order for this instruction set; empty: rows and columns as published."""
    swapped: bool = False
    """Up before gate."""
    reason: str = ""
    """Why the order is not known; empty: it is."""


def expert_order(experts: Any) -> ExpertOrder:
    """How `experts`, vLLM's container of a layer's experts, keeps them."""
    method = experts.quant_method
    if reason := why_quantized(experts):
        return ExpertOrder(reason=reason)
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
    if backend in ("TRITON", "BATCHED_TRITON"):
        return ExpertOrder()
    if backend == "FLASHINFER_CUTLASS":
        return ExpertOrder(swapped=True)
    kernel: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    kernel = kernel or getattr(method, "cpu_fused_moe", None)  # up to 0.26
    if backend == "CPU" and getattr(kernel, "isa", "") in CPU_ORDERS and not getattr(kernel, "_use_zentorch", False):
        return ExpertOrder(isa=kernel.isa)
    return ExpertOrder(reason=f"is kept in the order of the kernel {type(kernel).__name__} ({backend or 'unknown'})")


def expert_sizes(experts: Any) -> ExpertSizes:
    """The part of each expert that this rank holds."""
    config = experts.moe_config
    hidden = getattr(config, "hidden_dim_unpadded", None) or config.hidden_dim
    width = getattr(config, "intermediate_size_per_partition_unpadded", None) or config.intermediate_size_per_partition
    return ExpertSizes(hidden, width, config.tp_size, config.tp_rank)


def local_experts(experts: Any) -> list[int]:
    """Global number of each expert in this rank's stack."""
    where = getattr(experts, "_expert_map", None)
    if where is None:
        return list(range(experts.local_num_experts))
    numbers = {int(local): number for number, local in enumerate(where.tolist()) if local >= 0}
    return [numbers[local] for local in range(len(numbers))]


def expert_names(experts: Any) -> tuple[str, str, str]:
    """The names of an expert's gate, up and down projection in the published tensors."""
    return experts.ckpt_gate_proj_name, experts.ckpt_up_proj_name, experts.ckpt_down_proj_name


def routers(model: torch.nn.Module) -> dict[int, Any]:
    """Return each layer's expert router. Raises ConfigError if a kernel selects experts internally, MachineError
    without routers."""
    from vllm.distributed.parallel_state import get_pp_group

    try:
        from vllm.model_executor.layers.fused_moe.layer import (
            MoERunner,  # pyright: ignore[reportPrivateImportUsage]  # its own module differs between versions
        )
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    except ImportError as error:
        raise MachineError(
            f"training.router_replay: this vLLM has no routers that can be listened to ({error}).", "Turn it off."
        ) from error

    router_modules = {}
    for module in model.modules():
        if not isinstance(module, MoERunner):
            continue
        if module._quant_method.is_monolithic or not isinstance(module.router, BaseRouter):
            raise ConfigError(
                f"training.router_replay: {type(module.router).__name__} of layer {module.layer_id} does not tell "
                "which experts it chooses.",
                "Turn it off for this model.",
            )
        router_modules[module.layer_id] = module.router
    if not router_modules and get_pp_group().world_size == 1:
        raise ConfigError("training.router_replay: the engine's model has no routers.", "Turn it off.")
    return router_modules


def computed_before(scheduled: Any) -> dict[str, int]:
    """Position of the first token that a step computes for each of its requests."""
    cached = scheduled.scheduled_cached_reqs
    return {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs} | dict(
        zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )


def request_name(request: str) -> str:
    """The name that a request was given; vLLM adds a random ending."""
    return request.partition("-")[0]
