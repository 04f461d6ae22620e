"""The record of the vLLM backend."""

from __future__ import annotations

from rlctl.backends.base import EngineSpec
from rlctl.backends.lookup import EngineBackend, SectionArguments
from rlctl.backends.vllm.args import engine_spec, refuse_unsupported


def arguments(spec: EngineSpec) -> list[SectionArguments]:
    ours = {key: value for key, value in spec.arguments.items() if key not in spec.passed} | spec.replaced
    return [SectionArguments("vllm", "EngineArgs", ours, spec.passed)]


BACKEND = EngineBackend(
    "vllm",
    "rlctl.backends.vllm.engine:VllmEngine",
    engine_spec,
    arguments,
    refuse_unsupported,
    without_graphs="--set vllm.enforce_eager=true",
    libraries=("vllm", "vllm.entrypoints.llm"),
)
