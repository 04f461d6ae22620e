"""The names of vLLM that rlctl uses, looked for in the source files of a vLLM package; nothing is imported.

Looked for when an engine starts and by `rlctl doctor`, so that a version in which one is gone is refused by that name,
and not by a traceback in the middle of a refit. The arguments of an engine are compared by `compat.require_arguments`.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

LAYERS, CORE, RUNNER = "model_executor/layers/", "v1/engine/core.py", "v1/worker/gpu_model_runner.py"
LAYERWISE = "model_executor/model_loader/reload/"
# File of the package (or several, by version) -> what it must define.
USED = {
    # Generation (engine.py, replicas.py, compat.py)
    "entrypoints/llm.py": "LLM",
    "sampling_params.py": "max_tokens temperature top_p top_k stop stop_token_ids seed logprobs flat_logprobs "
    "skip_special_tokens",
    "v1/engine/llm_engine.py": "add_request request_id prompt params step abort_request request_ids collective_rpc "
    "reset_prefix_cache reset_running_requests reset_connector sleep wake_up",
    "v1/engine/core_client.py": "engine_core",
    CORE: "pause_scheduler clear_cache resume_scheduler is_scheduler_paused batch_queue shutdown model_executor "
    "step_fn execute_dummy_batch",
    "v1/executor/abstract.py": "sleeping_tags",
    "distributed/parallel_state.py": "get_pp_group",
    RUNNER: "intermediate_tensors",
    "config/vllm.py": "set_current_vllm_config",
    "config/parallel.py": "data_parallel_rank world_size",
    "envs.py": "VLLM_DP_SIZE VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT enable_envs_cache "
    "disable_envs_cache",
    # The loader (weights/reload.py, compat.py)
    f"{LAYERWISE}layerwise.py": "initialize_layerwise_reload finalize_layerwise_reload get_layerwise_info "
    "_place_kernel_tensors LOADING_LAYERS",
    f"{LAYERWISE}types.py": "can_load load_numel",
    # Where weights live (weights/locate.py, compat.py)
    f"{LAYERS}attention/mla_attention.py": "process_weights_after_loading kv_b_proj",
    f"{LAYERS}vocab_parallel_embedding.py": "shard_indices org_vocab_size",
    f"{LAYERS}linear.py": "total_num_heads total_num_kv_heads head_size output_sizes disable_tp",
    f"{LAYERS}fused_moe/routed_experts.py|{LAYERS}fused_moe/layer.py": "quant_method moe_config local_num_experts "
    "ckpt_gate_proj_name",
    f"{LAYERS}fused_moe/config.py": "tp_size tp_rank intermediate_size_per_partition",
    f"{LAYERS}fused_moe/unquantized_fused_moe_method.py": "unquantized_backend",
}
USED_ON = {
    "cuda": {"utils/torch_utils.py": "current_stream"},
    "cpu": {
        "distributed/device_communicators/base_device_communicator.py": "all_gather all_gatherv reduce_scatterv",
        "_custom_ops.py": "_supports_onednn cpu_prepack_moe_weight isa",
        RUNNER: "sample_tokens discard_request_mask",
        "v1/worker/gpu_input_batch.py": "generators",
        f"{LAYERS}rotary_embedding/base.py": "forward_cpu positions query key",
        f"{LAYERS}fused_moe/experts/cpu_moe.py|{LAYERS}fused_moe/cpu_fused_moe.py": "isa",
    },
}


def missing(package: Path, platform: str) -> list[str]:
    """Return the names that the vLLM in the folder `package` lacks on `platform`, `cpu` or `cuda`."""
    lacking = []
    for files, names in (*USED.items(), *USED_ON[platform].items()):
        text = "".join(map(_text, (package / file for file in files.split("|"))))
        lacking += [f"{files.split('|')[0]}: {name}" for name in names.split() if not _defines(text, name)]
    return lacking


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _defines(text: str, name: str) -> bool:
    """Whether a source defines, assigns or annotates a name, or has it as a parameter."""
    return bool(re.search(rf"\b(?:def|class) {name}\b|\b{name}(?: = |: |,$|\")", text, re.MULTILINE))


def installed_package() -> Path | None:
    """The folder of the installed vLLM, found without importing it."""
    spec = find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def cpu_experts_spread() -> bool:
    """Whether the installed vLLM has the product of experts that `compat.find_own_experts` completes on CPUs."""
    package = installed_package()
    text = "" if package is None else _text(package / f"{LAYERS}fused_moe/experts/cpu_moe.py")
    return package is None or all(_defines(text, name) for name in ("CPUUnquantizedExperts", "topk_ids", "expert_map"))


def cpu_head_sizes() -> tuple[int, ...]:
    """The sizes of heads that the CPU attention of the installed vLLM takes; empty: they are not known."""
    package = installed_package()
    text = "" if package is None else _text(package / "v1/attention/backends/cpu_attn.py")
    found = re.search(r"def get_supported_head_sizes\(cls\) -> list\[int\]:\s+return \[([\d, ]+)\]", text)
    return tuple(map(int, found[1].split(","))) if found else ()


def cpu_has_kernel(name: str) -> bool:
    """Whether the compiled part of the installed vLLM knows a kernel of that name; True where there is no vLLM."""
    package = installed_package()
    return package is None or any(name.encode() in file.read_bytes() for file in package.glob("_C*.so"))


def packs_latent_attention() -> bool:
    """Whether the installed vLLM has an attention for processors with AMX that packs weights of latent attention."""
    package = installed_package()
    return package is not None and (package / "v1/attention/backends/mla/amx_mla.py").is_file()
