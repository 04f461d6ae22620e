"""The record of the vLLM backend."""

from __future__ import annotations

from rlctl.backends.base import Device, EngineSpec
from rlctl.backends.lookup import EngineBackend, SectionArguments
from rlctl.backends.vllm.args import engine_spec, refuse_unsupported
from rlctl.backends.vllm.cpu import has_triton


def arguments(spec: EngineSpec) -> list[SectionArguments]:
    ours = {key: value for key, value in spec.arguments.items() if key not in spec.passed} | spec.replaced
    return [SectionArguments("vllm", "EngineArgs", ours, spec.passed)]


def exact_top_k(device: Device) -> bool:
    """vLLM's Triton kernel keeps exactly k tokens, its torch path all that are as likely as the last one. The kernel
    samples where vLLM uses Triton (0.32; before, on GPUs only in batches of eight or more)."""
    return device == "cuda" or has_triton()


BACKEND = EngineBackend(
    "vllm",
    "rlctl.backends.vllm.engine:VllmEngine",
    engine_spec,
    arguments,
    refuse_unsupported,
    without_graphs="--set vllm.enforce_eager=true",
    exact_top_k=exact_top_k,
    libraries=("vllm", "vllm.entrypoints.llm"),
)
