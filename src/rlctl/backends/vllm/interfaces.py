"""The interfaces of vLLM that rlctl uses, compared with a vLLM package by reading its source; nothing is imported.

Run when an engine starts and by `rlctl doctor`, so that a version in which one is gone says so by name, and not by a
traceback in the middle of a refit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Interface:
    """A class, function, method or attribute: `module:Name` or `module:Class.name`, with the parameters passed by name.
    Modules of different versions are apart by `|`."""

    where: str
    parameters: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ("cpu", "cuda")


LAYERS = "vllm.model_executor.layers"
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
LAYERS_RELOADING = "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo"
TRANSFER = "vllm.distributed.weight_transfer"
CORE = "vllm.v1.engine.core:EngineCore"
ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase"
EXPERTS = f"{LAYERS}.fused_moe.routed_experts:RoutedExperts|{LAYERS}.fused_moe.layer:FusedMoE"
CPU, CUDA = ("cpu",), ("cuda",)

INTERFACES: tuple[Interface, ...] = (
    # Generation (engine.py, compat.py)
    Interface("vllm.entrypoints.llm:LLM"),
    *(
        Interface(f"vllm.engine.arg_utils:EngineArgs.{name}")
        for name in (
            "model", "tokenizer", "trust_remote_code", "dtype", "max_model_len", "tensor_parallel_size", "seed",
            "logprobs_mode", "disable_log_stats", "worker_extension_cls", "weight_transfer_config", "block_size",
            "max_num_seqs", "kv_cache_memory_bytes", "enforce_eager", "gpu_memory_utilization", "enable_sleep_mode",
            "distributed_executor_backend", "pipeline_parallel_size", "enable_expert_parallel",
        )
    ),
    *(
        Interface(f"vllm.sampling_params:SamplingParams.{name}")
        for name in (
            "max_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed", "logprobs",
            "flat_logprobs", "skip_special_tokens",
        )
    ),
    Interface(f"{ENGINE}.add_request", ("request_id", "prompt", "params")),
    Interface(f"{ENGINE}.step"),
    Interface(f"{ENGINE}.abort_request", ("request_ids",)),
    Interface(f"{ENGINE}.collective_rpc", ("method", "args")),
    Interface(f"{ENGINE}.reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    Interface(f"{ENGINE}.sleep", ("level", "mode")),
    Interface(f"{ENGINE}.wake_up", ("tags",)),
    Interface("vllm.v1.engine.core_client:InprocClient.engine_core"),
    Interface(f"{CORE}.pause_scheduler", ("mode", "clear_cache")),
    Interface(f"{CORE}.resume_scheduler"),
    Interface(f"{CORE}.is_scheduler_paused"),
    Interface(f"{CORE}.batch_queue"),
    Interface(f"{CORE}.shutdown"),
    Interface(f"{CORE}.model_executor"),
    Interface("vllm.v1.executor.abstract:Executor.sleeping_tags"),
    Interface("vllm.utils.torch_utils:current_stream", platforms=CUDA),
    # Pipeline stages and replicas (replicas.py, compat.py)
    Interface("vllm.distributed.parallel_state:get_pp_group"),
    Interface(f"{RUNNER}.intermediate_tensors"),
    Interface(f"{CORE}.step_fn"),
    Interface(f"{CORE}.execute_dummy_batch"),
    *(Interface(f"vllm.config.parallel:ParallelConfig.{name}") for name in ("data_parallel_rank", "world_size")),
    *(
        Interface(f"vllm.envs:VLLM_DP_{name}")
        for name in ("SIZE", "RANK", "RANK_LOCAL", "MASTER_IP", "MASTER_PORT")
    ),
    Interface("vllm.envs:enable_envs_cache"),
    Interface("vllm.envs:disable_envs_cache"),
    *(Interface(f"{COMMUNICATOR}.{name}", platforms=CPU) for name in ("all_gather", "all_gatherv", "reduce_scatterv")),
    # Weight transfer (weights/transfer.py)
    Interface(f"{TRANSFER}.base:WeightTransferEngine.parse_update_info", ("update_dict",)),
    Interface(f"{TRANSFER}.base:WeightTransferEngine.start_weight_update"),
    Interface(f"{TRANSFER}.base:WeightTransferEngine.update_weights", ("update_info",)),
    Interface(f"{TRANSFER}.base:WeightTransferEngine.finish_weight_update"),
    Interface(f"{TRANSFER}.base:WeightTransferInitInfo"),
    Interface(f"{TRANSFER}.base:WeightTransferUpdateInfo"),
    Interface(f"{TRANSFER}.factory:WeightTransferEngineFactory.register_engine"),
    Interface(f"{TRANSFER}.factory:WeightTransferEngineFactory._registry"),
    Interface(f"{WORKER}.init_weight_transfer_engine", ("init_info",)),
    Interface(f"{WORKER}.start_weight_update"),
    Interface(f"{WORKER}.update_weights", ("update_info",)),
    Interface(f"{WORKER}.finish_weight_update"),
    Interface(f"{WORKER}._weight_update_active"),
    Interface(f"{WORKER}.weight_transfer_engine"),
    # The loader (weights/reload.py, compat.py)
    Interface(f"{LAYERWISE}:initialize_layerwise_reload", ("model",)),
    Interface(f"{LAYERWISE}:finalize_layerwise_reload"),
    Interface(f"{LAYERWISE}:get_layerwise_info", ("layer",)),
    Interface(f"{LAYERWISE}:_place_kernel_tensors", ("layer", "info")),
    Interface(f"{LAYERWISE}:LOADING_LAYERS"),
    Interface(f"{LAYERS_RELOADING}.can_load"),
    Interface(f"{LAYERS_RELOADING}.load_numel"),
    Interface(f"{LAYERS}.attention.mla_attention:MLAAttention.process_weights_after_loading"),
    # Where weights live (weights/locate.py, compat.py)
    Interface(f"{LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding.shard_indices"),
    Interface(f"{LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding.org_vocab_size"),
    Interface(f"{LAYERS}.linear:QKVParallelLinear.total_num_heads"),
    Interface(f"{LAYERS}.linear:QKVParallelLinear.total_num_kv_heads"),
    Interface(f"{LAYERS}.linear:QKVParallelLinear.head_size"),
    Interface(f"{LAYERS}.linear:MergedColumnParallelLinear.output_sizes"),
    Interface(f"{LAYERS}.linear:LinearBase.disable_tp"),
    Interface(f"{LAYERS}.attention.mla_attention:MLAAttention.kv_b_proj"),
    Interface(f"{EXPERTS}.quant_method"),
    Interface(f"{EXPERTS}.moe_config"),
    Interface(f"{EXPERTS}.local_num_experts"),
    Interface(f"{EXPERTS}.ckpt_gate_proj_name"),
    Interface(f"{LAYERS}.fused_moe.config:FusedMoEConfig.tp_size"),
    Interface(f"{LAYERS}.fused_moe.config:FusedMoEConfig.tp_rank"),
    Interface(f"{LAYERS}.fused_moe.config:FusedMoEConfig.intermediate_size_per_partition"),
    Interface(f"{LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.unquantized_backend"),
    Interface("vllm._custom_ops:_supports_onednn", platforms=CPU),
    *(Interface(f"{RUNNER}.{name}", platforms=CPU) for name in ("sample_tokens", "discard_request_mask")),
    Interface("vllm.v1.worker.gpu_input_batch:InputBatch.generators", platforms=CPU),
    Interface(
        f"{LAYERS}.rotary_embedding.base:RotaryEmbedding.forward_cpu", ("positions", "query", "key"), platforms=CPU
    ),
    Interface(
        f"{LAYERS}.fused_moe.experts.cpu_moe:CPUUnquantizedExperts|{LAYERS}.fused_moe.cpu_fused_moe:CPUFusedMOE.isa",
        platforms=CPU,
    ),
    Interface("vllm._custom_ops:cpu_prepack_moe_weight", ("weight", "isa"), CPU),
)  # fmt: skip

TRANSFER_ENGINE = f"{TRANSFER}.base:WeightTransferEngine"
OWN_METHODS = frozenset(
    {
        "init_transfer_engine", "start_weight_update", "update_weights", "receive_weights", "finish_weight_update",
        "shutdown", "trainer_send_weights",
    }
)  # fmt: skip
"""The methods of rlctl's transfer engine. A vLLM that asks for more of an engine cannot make it."""


def missing(package: Path, platform: str) -> list[str]:
    """Return the interfaces that the vLLM in the folder `package` lacks on `platform`, `cpu` or `cuda`."""
    lacking = [why for one in INTERFACES if platform in one.platforms for why in _missing(package, one)]
    return lacking + [
        f"{TRANSFER_ENGINE}.{name} is asked for" for name in _asked_for(package) if name not in OWN_METHODS
    ]


def installed_package() -> Path | None:
    """The folder of the installed vLLM, found without importing it."""
    spec = find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def cpu_experts_spread() -> bool:
    """Whether the installed vLLM has the product of experts that `compat.find_own_experts` completes on CPUs."""
    package, product = installed_package(), f"{LAYERS}.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply"
    return package is None or not list(
        _missing(package, Interface(product, ("topk_weights", "topk_ids", "expert_map")))
    )


def cpu_head_sizes() -> tuple[int, ...]:
    """The sizes of heads that the CPU attention of the installed vLLM takes; empty: they are not known."""
    package = installed_package()
    tree = _parsed(package / "v1" / "attention" / "backends" / "cpu_attn.py") if package is not None else None
    method = _find(tree, "CPUAttentionBackend", "get_supported_head_sizes") if tree else None
    returned = [one.value for one in ast.walk(method) if isinstance(one, ast.Return)] if method else []
    if len(returned) != 1 or not isinstance(returned[0], ast.List):
        return ()
    return tuple(one.value for one in returned[0].elts if isinstance(one, ast.Constant) and isinstance(one.value, int))


def cpu_has_kernel(name: str) -> bool:
    """Whether the compiled part of the installed vLLM knows a kernel of that name; True where there is no vLLM."""
    package = installed_package()
    return package is None or any(name.encode() in file.read_bytes() for file in package.glob("_C*.so"))


def packs_latent_attention() -> bool:
    """Whether the installed vLLM has an attention for processors with AMX that packs weights of latent attention."""
    package = installed_package()
    return package is not None and (package / "v1" / "attention" / "backends" / "mla" / "amx_mla.py").is_file()


def _missing(package: Path, interface: Interface) -> Iterator[str]:
    alternatives, name = _alternatives(interface.where)
    found = None
    for module, owner in alternatives:
        tree = _parsed(package.joinpath(*module.split(".")[1:]).with_suffix(".py"))
        found = found or (tree and _find(tree, owner, name))
    if found is None:
        yield interface.where
    elif isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        given = found.args
        names = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        lacking = [name for name in interface.parameters if name not in names]
        if lacking and not given.kwarg:
            yield f"{interface.where} takes no {', '.join(lacking)}"


def _asked_for(package: Path) -> Iterator[str]:
    """The abstract methods of vLLM's weight-transfer engine."""
    module, owner = TRANSFER_ENGINE.split(":")
    tree = _parsed(package.joinpath(*module.split(".")[1:]).with_suffix(".py"))
    for node in tree.body if tree else ():
        if isinstance(node, ast.ClassDef) and node.name == owner:
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (one.name for one in methods if "abstractmethod" in map(ast.unparse, one.decorator_list))


def _alternatives(where: str) -> tuple[list[tuple[str, str]], str]:
    """([(module, class or "")], name) of `module:Class|module:Class.name` or `module:name`."""
    path, dot, name = where.rpartition(".")
    if not dot or ":" in name:
        path, _, name = where.rpartition(":")
        return [(path, "")], name
    if ":" not in path:
        raise ValueError(f"not an interface: {where}")
    pairs = [alternative.split(":") for alternative in path.split("|")]
    return [(module, owner) for module, owner in pairs], name


@lru_cache(maxsize=128)
def _parsed(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text(encoding="utf-8")) if path.exists() else None


def _find(tree: ast.Module, owner: str, name: str) -> ast.AST | None:
    """The definition of a module's name, or of a class's method or attribute, its bases in the module included."""
    if not owner:
        return next((node for node in ast.walk(tree) if _defines(node, name)), None)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    todo, seen = [owner], set[str]()
    while todo:
        one = todo.pop()
        if one in seen or one not in classes:
            continue
        seen.add(one)
        for node in ast.walk(classes[one]):
            if _defines(node, name) or _sets_on_self(node, name):
                return node
        todo += [base.id for base in classes[one].bases if isinstance(base, ast.Name)]
    return None


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def _sets_on_self(node: ast.AST, name: str) -> bool:
    """`self.name = ...`, also as a part of a tuple."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
