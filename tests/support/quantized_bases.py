"""Tiny models with packed linear layers in the published formats, and the same models as plain numbers.

Codes are packed here place by place from the formats' definitions; those of compressed-tensors by its library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlctl.tiny_models.text import write_tiny_family

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's order: the number at place p of an int32 is output AWQ_PLACES[p] of its eight."""


def words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [.., n] into int32 [.., n bits / 32]."""
    per = 32 // bits
    out = np.zeros((codes.shape[0], codes.shape[1] // per), dtype=np.uint32)
    for place, which in enumerate(places or range(per)):
        out |= codes[:, which::per].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32))


def settings_of(form: str, bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    """`quantization_config` as the formats' own tools write it."""
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
                "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    if form == "gptq":
        return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False,
                "checkpoint_format": "gptq"}  # fmt: skip
    weights = {
        "num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric,
        "dynamic": False, "actorder": None,
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
            "ignore": ["lm_head"], "quantization_status": "compressed"}  # fmt: skip


def write_quantized(
    directory: Path, form: str, *, bits: int = 4, group: int = 32, symmetric: bool = True, **sizes: Any
) -> tuple[Path, Path]:
    """Write a packed model and the plain one that it stands for, and return both directories."""
    plain, packed = (write_tiny_family(directory / name, dtype="bfloat16", **sizes) for name in ("plain", form))
    tensors = load_file(plain / "model.safetensors")
    stored, generator = dict(tensors), np.random.default_rng(3)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        outputs, inputs = tensors[name].shape
        codes = generator.integers(0, 1 << bits, (outputs, inputs))
        zeros = generator.integers(0, 1 << bits, (outputs, inputs // group))
        if form == "gptq" or (form != "awq" and symmetric):
            zeros[:] = 1 << (bits - 1)
        scales = torch.from_numpy(generator.uniform(0.5, 2.0, zeros.shape) * 0.8 / (1 << bits)).half()
        # A bfloat16 engine rounds the published float16 scales, and once more the product.
        exact = torch.from_numpy(codes - zeros.repeat(group, 1)).double()
        exact = exact * scales.bfloat16().double().repeat_interleave(group, 1)
        tensors[name] = exact.bfloat16().float()
        stem = name.removesuffix(".weight")
        del stored[name]
        stored |= {f"{stem}.{part}": value for part, value in
                   _parts(form, codes, zeros, scales, bits, symmetric, group).items()}  # fmt: skip
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file({name: value.contiguous() for name, value in stored.items()}, packed / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = settings_of(form, bits, group, symmetric)
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def _parts(
    form: str, codes: np.ndarray, zeros: np.ndarray, scales: Tensor, bits: int, symmetric: bool, group: int
) -> dict[str, Tensor]:
    if form == "awq":
        return {"qweight": words(codes.T, 4, AWQ_PLACES), "qzeros": words(zeros.T, 4, AWQ_PLACES), "scales": scales.T}
    if form == "gptq":
        below = words(zeros.T - 1, bits)  # zero points are stored less one
        order = torch.arange(codes.shape[1], dtype=torch.int32) // group
        return {"qweight": words(codes, bits).T, "qzeros": below, "scales": scales.T, "g_idx": order}
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    middle = 1 << (bits - 1)
    signed = [torch.from_numpy(values - middle).to(torch.int8) for values in (codes, zeros)]
    parts = {
        "weight_packed": pack_to_int32(signed[0], bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    return parts if symmetric else parts | {"weight_zero_point": pack_to_int32(signed[1], bits, packed_dim=0)}
