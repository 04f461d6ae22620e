"""Arguments and environment of a vLLM engine from rlctl's configuration. Imports no vLLM. CPU and GPU differences are
in `_cpu_arguments` and `_gpu_arguments`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlctl.backends.base import Device, Dtype, EngineSpec, resolve_dtype
from rlctl.backends.vllm.cpu import (
    cpu_experts_spread,
    cpu_has_kernel,
    cpu_head_sizes,
    cpu_latent_widths,
    has_class,
    packs_latent_attention,
)
from rlctl.checkpoints.hf.tokenizer_files import has_both_forms
from rlctl.errors import ConfigError
from rlctl.models.constraints import OVERFLOWS_IN_FLOAT16, require_engine_sizes
from rlctl.models.facts import ModelFacts, RopeFacts
from rlctl.models.families import has_file
from rlctl.models.matrices import Role
from rlctl.settings.config import EngineConfig

WORKER_EXTENSION = "rlctl.backends.vllm.weights.transfer.RlctlWorkerExtension"
PLAIN_PARAMETERS, EXACT = "RLCTL_PLAIN_PARAMETERS", "RLCTL_EXACT"
"""Variables of an engine's processes: `1` keeps parameters as published, and computes with the policy's operations."""
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that draft from the tokens so far, without weights."""

DELTA_RULE = ("KimiLinearForCausalLM", "OlmoHybridForCausalLM")
"""Families with a gated delta rule in modules of other names than `linear_attn`."""

# vLLM's CPU attention requires multiples of 32; the smallest lets the samples of a prompt share more of its prefill
# (the default of 128 shares nothing of a shorter prompt).
CPU_BLOCK_TOKENS = 32
CPU_DEFAULT_CONCURRENT = 64
CPU_MAX_CACHE_BYTES = 4 << 30
# On processors with AMX vLLM prefers another one, which takes no float32, and packs weights so that they cannot be read
# back after a refit.
CPU_LATENT_ATTENTION, AMX_LATENT_ATTENTION = "CPU_MLA", "AMX_MLA"
# Weights, KV cache and the trainer's memory share a colocated GPU; the planner replaces this value by its result.
GPU_COLOCATED_FRACTION = 0.5
GPU_ALONE_FRACTION = 0.9


def engine_spec(
    config: EngineConfig,
    facts: ModelFacts,
    model_dir: Path | str,
    *,
    device: Device,
    dtype: Literal["auto"] | Dtype | None = None,
    max_length: int | None = None,
    tp: int | None = None,
    threads: int | None = None,
    colocated: bool = True,
    dummy_weights: bool = False,
) -> EngineSpec:
    """Return the engine of `config` with the planner's values as keyword arguments. `dummy_weights`: start empty and
    wait for a refit. Raises ConfigError for combinations that vLLM cannot run."""
    generation = config.generation
    tp = tp or generation.tp or 1
    threads = threads or generation.threads
    pp, dp = generation.pp or 1, generation.dp or 1
    refuse_unsupported(config, facts, device, tp)
    arguments = _common_arguments(config, tp, dummy_weights) | {
        "model": str(model_dir),
        "tokenizer": str(config.model.tokenizer or model_dir),
        "dtype": resolve_dtype(dtype or config.model.dtype, device),
        "max_model_len": max_length or config.model.max_length or facts.max_length,
    }
    if has_both_forms(arguments["tokenizer"]):
        arguments["tokenizer_mode"] = "hf"
    if overrides := _config_overrides(facts):
        arguments["hf_overrides"] = overrides
    _refuse_beyond_yarn(facts, arguments["max_model_len"])
    specific = _cpu_arguments if device == "cpu" else _gpu_arguments
    arguments |= specific(config, facts, arguments, colocated)
    passed = _passed(config, arguments)
    replaced = {key: value for key, value in arguments.items() if key in passed}
    # If a CPU's policy waits in host memory, engines that sample ahead pause like engines on a GPU.
    pauses = device == "cpu" and colocated and config.samples_while_training and bool(config.training.offload)
    environment = engine_env(device, threads, ranks=tp * pp * dp, plain_parameters=generation.plain_parameters)
    environment |= ({EXACT: "1"} if config.checks.computes_exactly else {}) | generation.env
    sleeps = bool((arguments | passed).get("enable_sleep_mode"))
    if generation.discard_weights and not sleeps:
        raise ConfigError(
            "generation.discard_weights is for engines that share GPUs with the policy; these keep their weights.",
            "Remove it, or generate on the training GPUs (generation.colocated=true).",
        )
    return EngineSpec(
        device,
        arguments | passed,
        threads,
        environment,
        passed,
        replaced,
        config.refit.in_flight or "wait",
        config.refit.timeout_s,
        config.training.router_replay,
        sleeps=pauses or sleeps,
        discards=generation.discard_weights,
        replicas=dp,
    )


def _config_overrides(facts: ModelFacts) -> dict[str, Any]:
    """Return values of config.json that vLLM would read differently from transformers."""
    overrides: dict[str, Any] = {}
    if facts.family == "deepseek_v3":  # vLLM looks for these keys, transformers knows one way for this model type
        overrides |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    ropes = {"full_attention": facts.rope, "sliding_attention": facts.window_rope}
    rope_overrides = {kind: _rope_parameters(rope, facts) for kind, rope in ropes.items() if rope is not None}
    if any(different for _, different in rope_overrides.values()):
        values = {kind: parameters for kind, (parameters, _) in rope_overrides.items()}
        overrides["rope_parameters"] = values if len(values) > 1 else values["full_attention"]
    return overrides


def _rope_parameters(rope: RopeFacts, facts: ModelFacts) -> tuple[dict[str, Any], bool]:
    """Return rotary parameters with which every version of vLLM computes like transformers, and whether it needs
    them."""
    plain, factor, length = rope.parameters, rope.attention_factor, rope.scaling.get("factor", 1.0)
    if rope.kind == "dynamic":  # vLLM computes frequencies for the longest length, transformers for a rollout's
        return {k: v for k, v in plain.items() if k != "factor"} | {"rope_type": "default"}, True
    if rope.kind != "yarn" or length <= 1:
        return plain, False
    grown = 0.1 * math.log(length)
    if facts.mla is None:  # before 0.31 vLLM reads two other keys in place of `attention_factor` and `mscale`
        factors = {"attention_factor": factor, "attn_factor": factor, "apply_yarn_scaling": False}
        return plain | factors, abs(factor - (grown + 1)) > 1e-9
    # latent attention: vLLM has the quotient of both in cosines and sines, and the second one in the scale of attention
    whole = grown * rope.scaling.get("mscale_all_dim", 0.0) + 1
    differs = "attention_factor" in plain or abs(factor - (grown * rope.scaling.get("mscale", 1.0) + 1) / whole) > 1e-9
    plain.pop("attention_factor", None)
    return plain | {"mscale": (factor * whole - 1) / grown}, differs


def _refuse_beyond_yarn(facts: ModelFacts, longest: int) -> None:
    """Raise ConfigError for sequences beyond the positions that vLLM has cosines of."""
    for rope in (facts.rope, facts.window_rope):
        if (
            rope is None
            or rope.kind != "yarn"
            or longest <= (most := round(rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"]))
        ):
            continue
        raise ConfigError(
            f"vLLM computes {most:,} positions of this model's yarn (factor x original_max_position_embeddings), and "
            f"sequences may have {longest:,} tokens.",
            f"Set --max-length {most} or less.",
        )


def refuse_unsupported(config: EngineConfig, facts: ModelFacts, device: Device, tp: int | None = None) -> None:
    """Raise ConfigError for a combination that vLLM cannot run."""
    generation = config.generation
    pp, dp, ep = generation.pp or 1, generation.dp or 1, generation.ep or 1
    if generation.min_p and config.vllm.passed.get("speculative_config"):
        raise ConfigError(
            f"generation.min_p = {generation.min_p:g} does not go with vllm.speculative_config: vLLM samples drafts "
            "without it.",
            "Use generation.top_p or top_k, or leave speculative decoding out.",
        )
    require_engine_sizes(facts, tp=tp or generation.tp or 1, pp=pp, dp=dp, ep=ep)
    if config.model.dtype == "float16" and facts.family in OVERFLOWS_IN_FLOAT16:
        raise ConfigError(
            f"model.dtype = float16: activations of {facts.family} overflow in it, and vLLM refuses it.",
            "Set model.dtype=bfloat16.",
        )
    if facts.vision is not None and (processor_options := config.vllm.passed.get("mm_processor_kwargs")):
        raise ConfigError(
            f"vllm.mm_processor_kwargs = {processor_options}: the engine would read images in "
            "other sizes than the trainer.",
            "Change them in preprocessor_config.json in the model's directory, which both read.",
        )
    if layers := _without_class(facts):
        raise ConfigError(
            f"model.name: {config.model.name} has {layers}, and this vLLM has no class {facts.family}.",
            "Train it on texts, without an engine (`rlctl train sft`), or take another model.",
        )
    _refuse_drafts(config.vllm.passed.get("speculative_config"), device)
    if pp > 1 and config.training.router_replay:
        raise ConfigError(
            f"training.router_replay: an engine in stages (generation.pp = {pp}) does not record which experts it "
            "chooses.",
            "Use generation.tp instead of generation.pp, or turn it off.",
        )
    if facts.mla is not None and facts.rope.scaling.get("truncate", 1.0) == 0.0:
        raise ConfigError(
            "config.json says truncate: false, and vLLM rounds the range of yarn in latent attention.",
            "Train on texts, without an engine, or take another model.",
        )
    if device == "cpu":
        _refuse_on_cpu(config, facts)


def _refuse_on_cpu(config: EngineConfig, facts: ModelFacts) -> None:
    """Raise ConfigError for what vLLM's build for CPUs cannot run."""
    dp, ep = config.generation.dp or 1, config.generation.ep or 1
    if ep > 1 and not cpu_experts_spread():
        raise ConfigError(
            f"generation.ep = {ep}: on a CPU this vLLM's product of experts takes them all on each rank.",
            "Leave it out, or install the version of the constraints file.",
        )
    if dp > 1 and config.training.router_replay:
        raise ConfigError(
            f"training.router_replay: on a CPU the replicas of an engine (generation.dp = {dp}) do not record which "
            "experts they choose.",
            "Use generation.engines instead of generation.dp, or turn it off.",
        )
    if config.vllm.passed.get("enforce_eager") is False:
        raise ConfigError("vllm.enforce_eager = False: engines on a CPU do not compile the model.", "Leave it out.")
    if layers := _without_cpu_kernel(facts):
        raise ConfigError(
            f"model.name: {config.model.name} has {layers}, which this vLLM supports only on GPUs.",
            "Take another model, or run it on GPUs.",
        )
    width = facts.mla.kv_lora_rank + facts.mla.qk_rope_head_dim if facts.mla is not None else 0
    if width and width not in (widths := cpu_latent_widths()):
        supported = f"for width {', '.join(map(str, widths))} alone" if widths else "for none"
        raise ConfigError(
            f"model.name: {config.model.name} has latent attention of width {width} (kv_lora_rank + qk_rope_head_dim), "
            f"and on a CPU this vLLM has a kernel {supported}.",
            "Take another model, or run it on GPUs.",
        )
    sizes = () if facts.mla is not None else cpu_head_sizes()  # latent attention has separate kernels
    if sizes and facts.head_dim not in sizes:
        raise ConfigError(
            f"model.name: {config.model.name} has attention heads of size {facts.head_dim}, and on a CPU this vLLM has "
            f"attention for heads of size {', '.join(map(str, sizes))} alone.",
            "Take another model, or run it on GPUs.",
        )


def _refuse_drafts(drafts: Any, device: Device) -> None:
    """Raise ConfigError for drafts with random weights, and for any draft on CPUs, where vLLM 0.32 reports NaN or wrong
    log-probs of accepted tokens."""
    if drafts is None:
        return
    method = drafts.get("method") if isinstance(drafts, Mapping) else None
    if method not in WITHOUT_WEIGHTS:
        raise ConfigError(
            f"vllm.speculative_config.method = {method}: the draft needs weights, but engines start with "
            "empty weights, and a refit sends only the policy's.",
            "Set vllm.speculative_config.method to ngram or suffix, or remove vllm.speculative_config.",
        )
    if device == "cpu":
        raise ConfigError(
            f"vllm.speculative_config.method = {method}: on a CPU vLLM reports wrong log-probs of the tokens that it "
            "accepts from a draft.",
            "Remove vllm.speculative_config, or generate on GPUs.",
        )


def _without_class(facts: ModelFacts) -> str:
    """Return the layers that need a class in vLLM and have none; empty: all have one. With other layers vLLM runs
    transformers' modules, whose attention alone it replaces."""
    if has_file(facts.family) or has_class(facts.family):
        return ""
    if any(".kv_a_proj" in tensor.name for tensor in facts.listed):
        return "latent attention"
    return "layers that are no attention of transformers' interface" if facts.unpacked else ""


def _without_cpu_kernel(facts: ModelFacts) -> str:
    """Return the model's layers that vLLM's CPU build lacks; empty: none."""
    # 0.32: Qwen3.5's and Qwen3-Next's take no float32, and in bfloat16 a tiny model's log-probs are not numbers.
    if facts.family in DELTA_RULE or any(".linear_attn." in tensor.name for tensor in facts.listed):
        return "layers of a gated delta rule"
    if any(".indexer." in tensor.name for tensor in facts.listed):
        return "sparse attention"
    scans = any(tensor.name.endswith(".A_log") and len(tensor.shape) > 1 for tensor in facts.listed)
    if scans and not cpu_has_kernel("selective_scan_fwd"):
        return "state-space layers of Mamba's first kind"
    roles = {tensor.role for tensor in facts.listed}
    if Role.EXPERT_UP in roles and Role.EXPERT_GATE not in roles:
        return "experts without a gate"
    return ""


def _passed(config: EngineConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    passed = dict(config.vllm.passed)
    if isinstance(passed.get("hf_overrides"), dict):
        passed["hf_overrides"] = arguments.get("hf_overrides", {}) | passed["hf_overrides"]
    if passed.get("attention_backend") == AMX_LATENT_ATTENTION and arguments["dtype"] == "float32":
        raise ConfigError(
            f"vllm.attention_backend = {AMX_LATENT_ATTENTION} takes no float32, in which this engine computes.",
            "Leave it out, or set model.dtype to bfloat16.",
        )
    return passed


def _common_arguments(config: EngineConfig, tp: int, dummy_weights: bool) -> dict[str, Any]:
    pp, ep = config.generation.pp or 1, config.generation.ep or 1
    arguments: dict[str, Any] = {
        "trust_remote_code": config.model.trust_remote_code,
        "tensor_parallel_size": tp,
        "seed": config.run.seed,
        # Log-probs of the distribution that was sampled from: after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if dummy_weights:
        arguments["load_format"] = "dummy"
    if pp > 1:
        arguments["pipeline_parallel_size"] = pp
    if ep > 1:
        arguments["enable_expert_parallel"] = True  # over all ranks of a pipeline stage, in all replicas
    if tp * pp > 1 or (config.generation.dp or 1) > 1:
        # Workers of this process: inside a Ray actor vLLM would request them from Ray, which its CPU platform does not
        # support.
        arguments["distributed_executor_backend"] = "mp" if tp * pp > 1 else "uni"
    if config.generation.max_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.generation.max_batched_tokens
    return arguments


def _cpu_arguments(
    config: EngineConfig, facts: ModelFacts, arguments: dict[str, Any], colocated: bool
) -> dict[str, Any]:
    concurrent = config.generation.max_concurrent or CPU_DEFAULT_CONCURRENT
    length = arguments["max_model_len"]
    cache = config.generation.kv_cache_bytes or default_cache_bytes(facts, length, concurrent, arguments["dtype"])
    latent = facts.mla is not None and packs_latent_attention()
    return {
        **({"attention_backend": CPU_LATENT_ATTENTION} if latent else {}),
        "block_size": CPU_BLOCK_TOKENS,
        "max_num_seqs": concurrent,
        # Without it vLLM sizes the cache from the memory of one NUMA node.
        "kv_cache_memory_bytes": cache,
        "enforce_eager": True,  # compiling the model takes longer than a small run
    }


def _gpu_arguments(
    config: EngineConfig, facts: ModelFacts, arguments: dict[str, Any], colocated: bool
) -> dict[str, Any]:
    fraction = config.generation.memory_fraction or (GPU_COLOCATED_FRACTION if colocated else GPU_ALONE_FRACTION)
    plain_experts = facts.moe is not None and not config.vllm.passed.get("quantization")
    values = {
        # Its order of experts is known. On Blackwell vLLM would choose a kernel with another order.
        "moe_backend": "triton" if plain_experts else None,
        "enable_return_routed_experts": config.training.router_replay or None,
        "gpu_memory_utilization": fraction,
        "enable_sleep_mode": colocated,
        "max_num_seqs": config.generation.max_concurrent,
        "kv_cache_memory_bytes": config.generation.kv_cache_bytes,
    }
    return {key: value for key, value in values.items() if value is not None}


def default_cache_bytes(facts: ModelFacts, length: int, concurrent: int, dtype: str) -> int:
    """KV cache for `concurrent` sequences of full length, at most 4 GiB, and never less than two sequences need."""
    block = CPU_BLOCK_TOKENS
    tokens = -(-length // block) * block
    width = 4 if dtype == "float32" else 2
    if facts.mla is not None:
        a_token = facts.layers * (facts.mla.kv_lora_rank + facts.mla.qk_rope_head_dim) * width
    else:
        a_token = facts.layers * 2 * facts.kv_heads * facts.head_dim * width
    a_sequence = tokens * a_token
    return max(min(concurrent * a_sequence, CPU_MAX_CACHE_BYTES), 2 * a_sequence, 16 << 20)


def engine_env(
    device: Device, threads: int | None = None, *, ranks: int = 1, plain_parameters: bool = False
) -> dict[str, str]:
    """Return environment variables that vLLM reads at import, for the engine's process or the first of its `ranks`."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The engine's core in this process: refit reaches its worker directly, and only one process can die.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        env |= {
            # Ray places the process; vLLM's own core binding collides with the trainer's.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The sampler would be compiled at the first request: half a minute without benefit on small models.
            "TORCHDYNAMO_DISABLE": "1",
            # Threads that spin at barriers starve each other where cores are shared with the trainer or other programs
            # (measured with six busy processes on 2 cores: a step of 2 s instead of 30).
            "OMP_WAIT_POLICY": "passive",
            # A refit packs matrices into new memory. In small pages two thirds of its CPU time are page faults.
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        }
    else:  # as nvidia-smi and Ray count GPUs; CUDA orders by speed
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if plain_parameters and device == "cpu":
        env[PLAIN_PARAMETERS] = "1"
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(max(1, threads // ranks) if device == "cpu" else threads)
    return env
