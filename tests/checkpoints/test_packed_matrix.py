"""Packed linear layers of AWQ, GPTQ and compressed-tensors are read as the numbers that their definitions give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.errors import InputError
from rlctl.models.quantized_base import quantized_base
from support.quantized_bases import settings_of, write_quantized

FORMS = {
    "awq": {"form": "awq"},
    "gptq": {"form": "gptq"},
    "gptq-8": {"form": "gptq", "bits": 8},
    "w4a16": {"form": "pack-quantized"},
    "w4a16-zeros": {"form": "pack-quantized", "symmetric": False},
    "w8a16": {"form": "pack-quantized", "bits": 8},
}


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
def test_packed_weights_are_read_as_their_definition_says(case: dict[str, Any], tmp_path: Path) -> None:
    packed, plain = write_quantized(tmp_path, **case)
    model, expected = open_hf_model(packed), load_file(plain / "model.safetensors")
    assert model.layout.params.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(model.source.read(name).float(), value), name


def test_compressed_tensors_reads_the_same_weights(tmp_path: Path) -> None:
    """Its own decompression, in float32, rounds to them."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy

    packed, _ = write_quantized(tmp_path, "pack-quantized", symmetric=False)
    stored, model = load_file(packed / "model.safetensors"), open_hf_model(packed)
    weights = QuantizationArgs(num_bits=4, strategy=QuantizationStrategy.GROUP, group_size=32, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    stems = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    assert stems
    for stem in stems:
        parts = {name.removeprefix(f"{stem}."): value for name, value in stored.items() if name.startswith(f"{stem}.")}
        parts["weight_scale"] = parts["weight_scale"].bfloat16().float()
        theirs = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        assert torch.equal(model.source.read(f"{stem}.weight"), theirs.bfloat16()), stem


def test_orders_of_inputs_and_wrong_shapes_are_refused(tmp_path: Path) -> None:
    packed, _ = write_quantized(tmp_path, "gptq")
    stored = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    for part, value, reason in (
        ("g_idx", stored[f"{name}.g_idx"].flip(0), r"down_proj\.g_idx orders the inputs \(desc_act\)"),
        ("scales", stored[f"{name}.scales"][1:], r"down_proj\.scales has shape .* but config\.json implies"),
    ):
        save_file(stored | {f"{name}.{part}": value.contiguous()}, packed / "model.safetensors")
        with pytest.raises(InputError, match=reason):
            open_hf_model(packed).source.read(f"{name}.weight")


def changed(settings: dict[str, Any], **weights: Any) -> dict[str, Any]:
    values = json.loads(json.dumps(settings))
    values["config_groups"]["group_0"]["weights"] |= weights
    return values


CT = settings_of("pack-quantized", 4, 128, symmetric=True)
W8A8 = json.loads(json.dumps(CT))
W8A8["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (W8A8, "engines round activations too (W8A8)"),
        (CT | {"format": "float-quantized"}, "its format is float-quantized"),
        (changed(CT, num_bits=2), "int of 4 or 8 bits are read"),
        (changed(CT, actorder="group"), "actorder group is an order of the inputs"),
        (CT | {"kv_cache_scheme": {"num_bits": 8}}, "round the KV cache"),
        (settings_of("awq", 4, 128, False) | {"version": "gemv"}, "this is 4 bits in version gemv"),
        (settings_of("gptq", 4, 128, True) | {"sym": False}, "asymmetric GPTQ"),
        (settings_of("gptq", 4, 128, True) | {"desc_act": True}, "desc_act"),
        (settings_of("gptq", 3, 128, True), "3 bits; engines have kernels for 4 and 8 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "eight bits of bitsandbytes round activations"),
        ({"quant_method": "hqq"}, "it reads awq, gptq, compressed-tensors, bitsandbytes, fp8, mxfp4"),
    ],
)
def test_formats_with_other_numbers_are_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError) as caught:
        quantized_base({"quantization_config": settings})
    assert reason in caught.value.message
    assert f"(quant_method {settings['quant_method']})" in caught.value.message
