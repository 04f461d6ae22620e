"""The arguments and the environment of engines on several devices, and what is refused of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.backends.base import EngineSpec
from rlctl.backends.vllm import args, compat
from rlctl.checkpoints.hf.model_facts import facts_in, known_facts
from rlctl.errors import ConfigError, InputError
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.tiny_models.text import write_tiny_family
from support.layout_families import FAMILIES


def spec(model: Path, training: dict[str, Any] | None = None, **generation: int) -> EngineSpec:
    config = RlConfig.model_validate({"generation": generation, "training": training or {}})
    return args.engine_spec(config, facts_in(model), model, device="cpu", threads=8)


def test_each_size_reaches_vllm_and_the_threads_are_divided(tiny_qwen3_moe: Path) -> None:
    made = spec(tiny_qwen3_moe, tp=2, pp=2)
    given = {key: made.arguments.get(key) for key in ("tensor_parallel_size", "pipeline_parallel_size")}
    assert given == {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert made.arguments["distributed_executor_backend"] == "mp"
    assert "enable_expert_parallel" not in made.arguments
    assert (made.replicas, made.environment["OMP_NUM_THREADS"]) == (1, "2")
    spread = spec(tiny_qwen3_moe, dp=2, ep=2)
    assert spread.arguments["enable_expert_parallel"] is True
    assert spread.arguments["distributed_executor_backend"] == "uni"  # else vLLM would ask Ray for workers
    assert (spread.replicas, spread.environment["OMP_NUM_THREADS"]) == (2, "4")


def test_on_gpus_experts_are_kept_in_an_order_that_is_known(tiny_qwen3_moe: Path, tiny_llama: Path) -> None:
    """On Blackwell vLLM would choose a kernel that keeps them in tiles of its own."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

    def kernel(model: Path, **passed: Any) -> str | None:
        config = RlConfig.model_validate({"vllm": passed})
        return args.engine_spec(config, facts_in(model), model, device="cuda").arguments.get("moe_backend")

    def order(backend: str) -> compat.ExpertOrder:
        method = type("UnquantizedMethod", (), {"unquantized_backend": oracle.map_unquantized_backend(backend)})()
        return compat.expert_order(SimpleNamespace(quant_method=method))

    assert kernel(tiny_llama) is None
    chosen = kernel(tiny_qwen3_moe)
    assert chosen is not None
    assert order(chosen) == compat.ExpertOrder()
    assert order("flashinfer_cutlass") == compat.ExpertOrder(swapped=True)
    assert order("flashinfer_trtllm").reason
    assert kernel(tiny_qwen3_moe, moe_backend="flashinfer_cutlass") == "flashinfer_cutlass"
    assert kernel(tiny_qwen3_moe, quantization="fp8") is None


def test_what_replicas_and_spread_experts_cannot_do_is_refused(
    tiny_llama: Path, tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"generation\.dp = 2: the replicas of an engine share its experts"):
        spec(tiny_llama, dp=2)
    with pytest.raises(ConfigError, match=r"generation\.ep = 2: expert parallelism spans TP x DP = 1"):
        spec(tiny_qwen3_moe, ep=2)
    with pytest.raises(ConfigError, match=r"generation\.pp = 3: 2 layers are fewer than 3 stages"):
        spec(tiny_llama, pp=3)
    with pytest.raises(ConfigError, match=r"training\.router_replay.*generation\.dp = 2"):
        spec(tiny_qwen3_moe, {"router_replay": True}, dp=2)
    monkeypatch.setattr(args, "cpu_experts_spread", lambda: False)
    with pytest.raises(ConfigError, match=r"generation\.ep = 2: on a CPU this vLLM's product of experts"):
        spec(tiny_qwen3_moe, tp=2, ep=2)


def test_frequencies_that_change_beyond_the_longest_length_are_the_plain_ones(tmp_path: Path) -> None:
    """vLLM would compute those of the longest length for every rollout, and transformers those of its own length."""
    model = write_tiny_family(tmp_path / "model", "llama-dynamic")
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert spec(model).arguments["hf_overrides"] == {"rope_parameters": plain}
    assert spec(model).arguments["max_model_len"] == facts_in(model).max_length
    with pytest.raises(InputError, match="rope type `dynamic` with `alpha`"):
        write_tiny_family(tmp_path / "other", "llama", rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0})


def test_latent_attention_on_a_cpu_can_be_read_back(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with AMX vLLM would take another attention, which packs weights."""

    mla = FAMILIES["deepseek_v3"].mla
    assert mla is not None
    facts = replace(FAMILIES["deepseek_v3"], mla=replace(mla, kv_lora_rank=512, qk_rope_head_dim=64))

    def arguments(*sets: str) -> dict[str, Any]:
        config = resolve(sets=list(sets), environment={}).config
        return args.engine_spec(config, facts, tiny_llama, device="cpu", max_length=64).arguments

    assert arguments()["attention_backend"] == "CPU_MLA"
    assert "attention_backend" not in spec(tiny_llama).arguments
    amx = "vllm.attention_backend=AMX_MLA"
    assert arguments(amx, "model.dtype=bfloat16")["attention_backend"] == "AMX_MLA"
    with pytest.raises(ConfigError, match=r"vllm\.attention_backend = AMX_MLA takes no float32"):
        arguments(amx, "model.dtype=float32")
    monkeypatch.setattr(args, "packs_latent_attention", lambda: False)
    assert "attention_backend" not in arguments()


def test_families_whose_activations_overflow_are_refused_in_float16(tmp_path: Path) -> None:
    facts = FAMILIES["gemma3"]
    config = RlConfig.model_validate({"model": {"dtype": "float16"}})
    with pytest.raises(ConfigError, match=r"activations of gemma3 overflow in it, and vLLM refuses it"):
        args.refuse_unsupported(config, facts, "cuda")
    args.refuse_unsupported(RlConfig.model_validate({"model": {"dtype": "bfloat16"}}), facts, "cuda")


@pytest.mark.parametrize("drafts", [{"method": "eagle3", "model": "a/b"}, {"method": "mtp"}, {"model": "a/b"}])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drafts_that_would_have_random_weights_are_refused(tiny_llama: Path, drafts: dict, device: Any) -> None:
    config = RlConfig.model_validate({"vllm": {"speculative_config": {**drafts, "num_speculative_tokens": 3}}})
    method = drafts.get("method")
    with pytest.raises(ConfigError, match=rf"vllm\.speculative_config\.method = {method}: the draft needs weights"):
        args.refuse_unsupported(config, facts_in(tiny_llama), device)


def test_sizes_of_images_for_the_engine_alone_are_refused() -> None:
    config = RlConfig.model_validate({"vllm": {"mm_processor_kwargs": {"max_pixels": 50176}}})
    whole, text = (known_facts("Qwen/Qwen2.5-VL-7B-Instruct", images=images) for images in (True, False))
    assert whole is not None
    assert text is not None
    with pytest.raises(ConfigError, match=r"vllm\.mm_processor_kwargs = .* other sizes than the trainer"):
        args.refuse_unsupported(config, whole, "cuda")
    args.refuse_unsupported(config, text, "cuda")


def test_drafts_without_weights_are_for_gpus(tiny_llama: Path) -> None:
    """On a CPU the log-probs of accepted tokens are wrong (vLLM 0.32)."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = RlConfig.model_validate({"vllm": {"speculative_config": drafts}})
    with pytest.raises(ConfigError, match=r"speculative_config\.method = ngram: on a CPU vLLM reports wrong log-probs"):
        args.refuse_unsupported(config, facts_in(tiny_llama), "cpu")
    made = args.engine_spec(config, facts_in(tiny_llama), tiny_llama, device="cuda")
    assert made.arguments["speculative_config"] == drafts


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
ROPES = {
    "plain yarn": YARN,
    "attention factor": YARN | {"attention_factor": 1.3},
    "smaller attention factor": YARN | {"attention_factor": 0.8},
    "mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "one mscale": YARN | {"mscale": 0.7},
    "betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.1},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize("given", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("latent", [False, True])
def test_vllm_has_the_cosines_of_transformers(tmp_path: Path, latent: bool, given: dict[str, Any]) -> None:
    import torch
    import vllm.model_executor.layers.rotary_embedding as rotary
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config

    if latent and given["rope_type"] == "dynamic":
        pytest.skip("refused for DeepSeek-V3")
    model = write_tiny_family(tmp_path, "deepseek_v3" if latent else "llama")
    config = json.loads((model / "config.json").read_text()) | {"rope_parameters": given}
    config.pop("rope_scaling", None)
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    if latent and "truncate" in given:
        with pytest.raises(ConfigError, match="truncate: false"):
            spec(model)
        return
    made = spec(model).arguments
    read = AutoConfig.from_pretrained(model)
    theirs = (DeepseekV3RotaryEmbedding if latent else LlamaRotaryEmbedding)(read)
    cos, sin = theirs(torch.zeros(1), torch.arange(512)[None])
    width = cos.shape[-1]
    parameters = made.get("hf_overrides", {}).get("rope_parameters", read.rope_parameters)
    if latent:  # as its model does
        parameters = parameters | {"rope_type": "deepseek_yarn"}
    rotary._ROPE_DICT.clear()
    with set_current_vllm_config(VllmConfig()):
        ours = rotary.get_rope(width, 512, is_neox_style=not latent, rope_parameters=parameters, dtype=torch.float32)
    expected = torch.cat([cos[0, :, : width // 2], sin[0, :, : width // 2]], -1)
    torch.testing.assert_close(ours.cos_sin_cache[:512].float(), expected, rtol=1e-5, atol=1e-5)
    if "attention_factor" in parameters:  # what versions before 0.31 read in its place
        assert (parameters["attn_factor"], parameters["apply_yarn_scaling"]) == (parameters["attention_factor"], False)


def test_vllm_is_told_the_router_that_transformers_has(tmp_path: Path) -> None:
    """Without these keys vLLM takes softmax scores and no correction bias, and ends in a KeyError at the bias."""
    model = write_tiny_family(tmp_path, "deepseek_v3")
    overrides = spec(model).arguments["hf_overrides"]
    assert overrides == {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    config = RlConfig.model_validate({"vllm": {"hf_overrides": {"own": 1}}})
    made = args.engine_spec(config, facts_in(model), model, device="cpu", threads=8)
    assert made.arguments["hf_overrides"] == overrides | {"own": 1}


def test_latent_attention_without_a_kernel_is_refused_on_a_cpu(tmp_path: Path) -> None:
    model = write_tiny_family(tmp_path, "deepseek_v3")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 256}))
    with pytest.raises(ConfigError, match=r"latent attention of width 320 \(kv_lora_rank.*for width 576 alone"):
        spec(model)
    args.engine_spec(RlConfig(), facts_in(model), model, device="cuda")


def test_sequences_beyond_the_positions_of_a_yarn_are_refused(tmp_path: Path) -> None:
    model = write_tiny_family(tmp_path, "llama", rope_parameters=YARN | {"factor": 2.0}, max_position_embeddings=512)
    with pytest.raises(ConfigError, match=r"128 positions of this model's yarn.*512 tokens"):
        spec(model)
    fitting = RlConfig.model_validate({"model": {"max_length": 128}})
    args.engine_spec(fitting, facts_in(model), model, device="cpu", threads=8)


FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
libc.memset(ctypes.c_void_p(libc.malloc(256 << 20)), 1, 256 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(), reason="huge pages are not given on request"
)
def test_matrices_of_engines_on_cpus_are_packed_into_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB are 65,536 small pages, each of which is a page fault."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    faults = []
    for more in ({}, args.engine_env("cpu", 1)):
        program = [sys.executable, "-S", "-c", FAULTS]
        faults.append(int(subprocess.run(program, env=os.environ | more, check=True, stdout=subprocess.PIPE).stdout))
    assert faults[0] > 60_000
    assert faults[1] < 20_000
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert args.engine_env("cpu", 1)["GLIBC_TUNABLES"] == "glibc.malloc.check=1"
