"""Limits of the CPU build of the installed vLLM, read from its files; nothing is imported."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def installed_package() -> Path | None:
    """The folder of the installed vLLM, found without importing it."""
    spec = find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def cpu_experts_spread() -> bool:
    """Whether the installed vLLM has the product of experts that `compat.find_own_experts` completes on CPUs."""
    package = installed_package()
    text = "" if package is None else _text(package / "model_executor/layers/fused_moe/experts/cpu_moe.py")
    return package is None or all(name in text for name in ("class CPUUnquantizedExperts", "topk_ids", "expert_map"))


def cpu_head_sizes() -> tuple[int, ...]:
    """The sizes of heads that the CPU attention of the installed vLLM takes; empty: they are not known."""
    package = installed_package()
    text = "" if package is None else _text(package / "v1/attention/backends/cpu_attn.py")
    found = re.search(r"def get_supported_head_sizes\(cls\) -> list\[int\]:\s+return \[([\d, ]+)\]", text)
    return tuple(map(int, found[1].split(","))) if found else ()


def cpu_latent_widths() -> tuple[int, ...]:
    """The widths of latent attention's cache that the CPU kernel of the installed vLLM takes; of DeepSeek's models
    where there is no vLLM."""
    package = installed_package()
    if package is None:
        return (576,)
    text = _text(package / "v1/attention/backends/mla/cpu_mla.py")
    found = re.search(r"def get_supported_head_sizes\(cls\) -> list\[int\]:(?:\s+#.*)*\s+return \[([\d, ]+)\]", text)
    return tuple(map(int, found[1].split(","))) if found else ()


def cpu_has_kernel(name: str) -> bool:
    """Whether the compiled part of the installed vLLM knows a kernel of that name; True where there is no vLLM."""
    package = installed_package()
    return package is None or any(name.encode() in file.read_bytes() for file in package.glob("_C*.so"))


def packs_latent_attention() -> bool:
    """Whether the installed vLLM has an attention for processors with AMX that packs weights of latent attention."""
    package = installed_package()
    return package is not None and (package / "v1/attention/backends/mla/amx_mla.py").is_file()
