"""Models that are published with packed linear layers: their formats, the layers, and their bytes. Torch-free.

Trainer and engine must compute with the same numbers. A format is taken if the engine dequantizes weights and leaves
activations as they are: AWQ, GPTQ, and compressed-tensors' `pack-quantized`. Engines of W8A8 round activations too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts, QuantizedBase
from rlctl.models.families import weights_of
from rlctl.models.matrices import Matrix, Role
from rlctl.models.quantized import is_linear

PUBLISHED_FLOATS = (None, "fp8", "mxfp4")
"""Values of `quant_method` whose weights are read as numbers."""
PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "pack-quantized": ("weight_packed", "weight_zero_point", "weight_scale", "weight_shape"),
}
"""Names of a layer's stored tensors: codes, zero points, scales, and others."""
EXPERTS = frozenset({Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN, Role.EXPERT_STACK})
ZERO_BYTES, SCALE_BYTES = 1, 2
"""Bytes of a zero point and of a scale in the trainer."""
NF4_GROUP, NF4_OUTER = 64, 256
"""Weights that share a scale in bitsandbytes, and scales that share one with `bnb_4bit_use_double_quant`."""


class _Unread(Exception):
    """Why a format is not read."""


def quantized_base(config: Mapping[str, Any]) -> QuantizedBase | None:
    """Return how a model's `config.json` says that linear layers are packed; None: they are not. Raises InputError for
    formats that trainer and engine would not read as the same numbers."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method in PUBLISHED_FLOATS:
        return None
    assert isinstance(settings, Mapping)
    try:
        if method not in _READERS:
            raise _Unread(f"it reads {', '.join((*_READERS, *filter(None, PUBLISHED_FLOATS)))}")
        return _READERS[method](settings)
    except _Unread as reason:
        raise InputError(
            f"The model is quantized in a way that rlctl does not read (quant_method {method}): {reason}.",
            "Use a model that is not quantized, or one in AWQ or compressed-tensors' pack-quantized with 4 or 8 bits.",
        ) from None


def _awq(settings: Mapping[str, Any]) -> QuantizedBase:
    bits, version = settings.get("bits", settings.get("w_bit")), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _Unread(f"of AWQ it reads 4 bits in version gemm, and this is {bits} bits in version {version}")
    group = _group(settings.get("group_size", settings.get("q_group_size")))
    if settings.get("zero_point", True) is not True:
        raise _Unread("AWQ without zero points stores none of the numbers that its engines read")
    return QuantizedBase("awq", 4, group, False, tuple(settings.get("modules_to_not_convert") or ()))


def _gptq(settings: Mapping[str, Any]) -> QuantizedBase:
    bits = settings.get("bits")
    for wrong, reason in (
        (bits not in (4, 8), f"{bits} bits; engines have kernels for 4 and 8 bits"),
        (settings.get("sym") is not True, "asymmetric GPTQ, which vLLM does not load"),
        (settings.get("desc_act"), "desc_act, an order of the inputs that the trainer does not follow"),
        (settings.get("checkpoint_format", "gptq") != "gptq", f"checkpoint_format {settings.get('checkpoint_format')}"),
        (settings.get("dynamic") or settings.get("modules_in_block_to_quantize"), "settings for single modules"),
    ):
        if wrong:
            raise _Unread(f"it has {reason}")
    return QuantizedBase("gptq", int(bits or 0), _group(settings.get("group_size")), True, ())


def _compressed_tensors(settings: Mapping[str, Any]) -> QuantizedBase:
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _Unread(f"it has {len(groups)} config_groups, and one is read")
    group, form = groups[0], groups[0].get("format") or settings.get("format")
    weights = group.get("weights") or {}
    activations = group.get("input_activations") or group.get("output_activations")
    for wrong, reason in (
        (activations, "its engines round activations too (W8A8), so that they compute other numbers than the trainer"),
        (form != "pack-quantized", f"its format is {form}, and pack-quantized is read"),
        (list(group.get("targets") or ()) != ["Linear"], f"its targets are {group.get('targets')}, not all Linear"),
        (weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8),
         f"its weights are {weights.get('type')} of {weights.get('num_bits')} bits, and int of 4 or 8 bits are read"),
        (weights.get("strategy") not in ("group", "channel"), f"its strategy is {weights.get('strategy')}"),
        (weights.get("dynamic"), "its scales are dynamic"),
        (weights.get("actorder") in ("group", "dynamic", True),
         f"actorder {weights.get('actorder')} is an order of the inputs that the trainer does not follow"),
        (settings.get("kv_cache_scheme"), "its engines round the KV cache (kv_cache_scheme)"),
        (settings.get("sparsity_config") and settings["sparsity_config"].get("format", "dense") != "dense",
         "it is sparse (sparsity_config)"),
    ):  # fmt: skip
        if wrong:
            raise _Unread(reason)
    size = weights.get("group_size") if weights["strategy"] == "group" else -1
    ignored = tuple(settings.get("ignore") or ())
    symmetric = weights.get("symmetric", True) is not False
    return QuantizedBase("pack-quantized", weights["num_bits"], _group(size), symmetric, ignored)


def _bitsandbytes(settings: Mapping[str, Any]) -> QuantizedBase:
    """QLoRA's four bits (arXiv 2305.14314)."""
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        raise _Unread("eight bits of bitsandbytes round activations too, which the trainer does not")
    skipped = tuple(settings.get("llm_int8_skip_modules") or ())
    return QuantizedBase(
        "bitsandbytes", 4, NF4_GROUP, True, skipped, double=bool(settings.get("bnb_4bit_use_double_quant"))
    )


def _group(size: Any) -> int:
    if not isinstance(size, int) or not (size == -1 or (size > 0 and size % 8 == 0)):
        raise _Unread(f"its group_size is {size}, and multiples of 8 are read")
    return max(size, 0)


_READERS = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}

NO_READER = {
    "bitsandbytes": "rlctl plans it and has no reader of its four-bit floats (nf4 with quantized scales), and vLLM has "
    "no kernel for it on CPUs",
}
"""Why a format is planned and not trained."""


def refuse_unread(base: QuantizedBase) -> None:
    """Raise InputError for a format that is only planned."""
    if reason := NO_READER.get(base.method):
        raise InputError(
            f"The model is quantized in a way that rlctl does not train ({base.method}): {reason}.",
            "Use the same model in AWQ or in compressed-tensors' pack-quantized.",
        )


def is_only_planned(facts: ModelFacts) -> bool:
    """Return whether a model's format has a plan, and no reader."""
    return facts.quantized is not None and facts.quantized.method in NO_READER


def packed_tensors(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """Return the published tensors that are packed and their shapes [outputs, inputs], in the order of the model."""
    return {} if facts.quantized is None else _packed(facts)


@lru_cache(maxsize=8)
def _packed(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    base = facts.quantized
    assert base is not None
    return {
        matrix.tensor: (matrix.tensor_shape[0], matrix.tensor_shape[1])
        for matrix in weights_of(facts).matrices
        if _is_candidate(matrix) and not _is_left_out(base, matrix.tensor.removesuffix(".weight"))
    }


def _is_candidate(matrix: Matrix) -> bool:
    return is_linear(matrix) and matrix.layer is not None and len(matrix.tensor_shape) == 2


def _is_left_out(base: QuantizedBase, module: str) -> bool:
    if base.method != "pack-quantized":
        return any(part in module for part in base.left_out)
    patterns = (entry.removeprefix("re:") for entry in base.left_out if entry.startswith("re:"))
    return module in base.left_out or any(re.match(pattern, module) for pattern in patterns)


@dataclass(frozen=True)
class PackedSizes:
    """The packed layers of a whole model."""

    weights: int
    """Their weights."""
    trainer_bytes: float
    """Bytes that the trainer holds: codes, scales and zero points."""
    engine_bytes: float
    """Bytes that an engine holds."""
    largest: int
    """Weights of the largest matrix, which is dequantized at once."""


@lru_cache(maxsize=64)
def packed_sizes(facts: ModelFacts) -> PackedSizes:
    """Return the sizes of the packed layers, all 0 without any."""
    shapes, base = [*packed_tensors(facts).values()], facts.quantized
    if base is None or not shapes:
        return PackedSizes(0, 0.0, 0.0, 0)
    counts, scales = sum(map(prod, shapes)), sum(_scales(base, shape) for shape in shapes)
    codes = counts * base.bits / 8
    zeros = 0.0 if base.symmetric else base.bits / 8
    engine = codes + scales * (SCALE_BYTES + zeros)
    if base.method == "bitsandbytes":  # float32 scales, or bytes with a float32 for each block of them
        engine = codes + scales * (1 + 4 / NF4_OUTER if base.double else 4)
    trainer = engine if base.method in NO_READER else codes + scales * (SCALE_BYTES + ZERO_BYTES)
    return PackedSizes(counts, trainer, engine, max(map(prod, shapes)))


def _scales(base: QuantizedBase, shape: tuple[int, int]) -> int:
    return shape[0] * (shape[1] // base.group if base.group else 1)


def packed_problems(facts: ModelFacts, adapters: bool) -> Iterator[tuple[str, str]]:
    """Yield each key that does not go with packed layers, and why. `adapters`: adapters are trained, or nothing is."""
    base = facts.quantized
    if base is None:
        return
    if reason := NO_READER.get(base.method):
        yield "model.name", f"the model is quantized ({base.method}): {reason}"
    if not adapters:
        yield "training.lora.rank = 0", f"the model's weights are packed ({base.method}), so that only adapters train"
    if facts.listed or facts.vision is not None:
        yield "model.name", f"packed layers of {facts.family} are not read: it has no file in rlctl/models"
    if any(matrix.role in EXPERTS for matrix in weights_of(facts).matrices):
        yield "model.name", "routed experts are packed, for which the trainer has no layer"
    for tensor, (outputs, inputs) in packed_tensors(facts).items():
        if inputs % (base.group or 8) or outputs % 8:
            yield "model.name", f"{tensor} has shape {[outputs, inputs]}, in which groups of {base.group} do not fit"
            return
