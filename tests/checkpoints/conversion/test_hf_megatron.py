"""`rlctl convert`: bit-exact round trips that other readers load, and refusals before work starts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.checkpoints import staging
from rlctl.checkpoints.conversion import hf_megatron as convert
from rlctl.checkpoints.conversion.hf_megatron import Options, hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.checkpoints.inspection import inspect
from rlctl.checkpoints.megatron import pickles
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader, TorchDistWriter
from rlctl.errors import InputError, MachineError, VerificationError
from rlctl.tiny_models.text import write_tiny_family
from support.family_models import hf_model


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = SafetensorsDirectory.open(directory)
    return {name: files.read(name).clone() for name in files.tensors}


def same(one: Path, two: Path) -> None:
    first, second = tensors(one), tensors(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the weights of a model directory."""
    path = directory / "model.safetensors"
    held = load_file(path)
    edit(held)
    save_file({name: value.contiguous() for name, value in held.items()}, path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_family(tmp_path / "model")


# --- round trips ---


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_is_bit_exact_and_transformers_agrees(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_tiny_family(tmp_path / "model", "llama-tied" if tied else "llama")
    (model / "tokenization_own.py").write_text("# named by auto_map, and read with model.trust_remote_code\n")
    there = hf_to_megatron(model, tmp_path / "megatron")
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", options=Options(shard_bytes=400_000))
    assert there.verified
    assert back.verified
    assert there.tensors == back.tensors == len(tensors(model))
    same(model, tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1
    ids = torch.arange(12)[None]
    first, second = (AutoModelForCausalLM.from_pretrained(d)(ids).logits for d in (model, tmp_path / "back"))
    assert torch.equal(first, second)
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template
    assert (tmp_path / "back" / "tokenization_own.py").is_file()


def test_dtype_is_that_of_the_flag_and_of_the_config(model: Path, tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "megatron", Options(dtype="bfloat16"))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    for name, value in tensors(model).items():
        assert torch.equal(tensors(tmp_path / "back")[name], value.to(torch.bfloat16)), name


def test_layout_is_megatrons(model: Path, tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    reader = TorchDistReader.open(tmp_path / "megatron" / "release")
    assert reader.shapes["decoder.layers.self_attention.linear_qkv.weight"].shape == (2, 256, 128)
    assert reader.common["checkpoint_version"] == 3.0
    assert reader.common["args"].num_layers == 2
    assert (tmp_path / "megatron" / "huggingface" / "tokenizer.json").is_file()


def test_nans_are_reported_and_kept(model: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(model, lambda held: held[name].view(-1)[:3].fill_(float("nan")))
    report = hf_to_megatron(model, tmp_path / "megatron")
    assert report.nans == (name,)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert int(torch.isnan(tensors(tmp_path / "back")[name]).sum()) == 3


def test_block_scaled_float8_is_dequantized(tmp_path: Path) -> None:
    model = write_tiny_family(tmp_path / "model", quantization_config={"weight_block_size": [48, 64]})
    expected: dict[str, torch.Tensor] = {}

    def quantize(held: dict[str, torch.Tensor]) -> None:
        for name in [n for n in held if n.endswith("_proj.weight")]:
            rows, columns = held[name].shape
            scale = torch.rand(-(-rows // 48), -(-columns // 64)) + 0.5
            held[name] = held[name].to(torch.float8_e4m3fn)
            held[name + "_scale_inv"] = scale
            wide = scale.repeat_interleave(48, 0)[:rows].repeat_interleave(64, 1)[:, :columns]
            expected[name] = (held[name].float() * wide).to(torch.bfloat16)

    change(model, quantize)
    hf_to_megatron(model, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert len(expected) == 14
    for name, value in expected.items():
        assert torch.equal(back[name], value), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


# --- verification ---


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    """A tiny gpt-oss in bfloat16, whose experts hold values that four bits can."""
    import transformers

    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_local_experts=4, num_experts_per_tok=2, vocab_size=96, max_position_embeddings=64,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path / "gpt-oss")
    return tmp_path / "gpt-oss"


def pack(held: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Replace experts by random four-bit blocks; `expected` gets what transformers unpacks them to."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    for name in [n for n in held if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = held.pop(name).shape
        groups = (experts, rows, width // 32)
        blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, groups, dtype=torch.uint8, generator=generator)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)


def test_four_bit_experts_are_unpacked(gpt_oss: Path, tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    change(gpt_oss, lambda held: pack(held, expected))
    assert hf_to_megatron(gpt_oss, tmp_path / "ckpt").verified
    megatron_to_hf(tmp_path / "ckpt", tmp_path / "back")
    back, plain = tensors(tmp_path / "back"), tensors(gpt_oss)
    assert len(expected) == 4
    for name in back:
        assert torch.equal(back[name], expected.get(name, plain.get(name))), name


def test_four_bit_experts_without_scales_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    change(gpt_oss, lambda held: pack(held, {}))
    change(gpt_oss, lambda held: held.pop("model.layers.1.mlp.experts.down_proj_scales"))
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts\.down_proj_scales is missing"):
        hf_to_megatron(gpt_oss, tmp_path / "ckpt")


def test_a_wrong_byte_in_the_destination_is_exit_5_and_named(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    original = convert.TorchDistWriter.finish

    def finish(self: Any, common: dict[str, Any]) -> None:
        original(self, common)
        reader = TorchDistReader.open(self.directory)
        chunk = reader.chunks("decoder.layers.mlp.linear_fc2.weight")[1]
        values = reader.read(chunk)
        data = (self.directory / "__0_0.distcp").read_bytes()
        raw = values.numpy().tobytes()
        assert data.count(raw) == 1
        at = data.index(raw)
        (self.directory / "__0_0.distcp").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    monkeypatch.setattr(convert.TorchDistWriter, "finish", finish)
    with pytest.raises((VerificationError, InputError), match=r"down_proj|damaged"):
        hf_to_megatron(model, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_a_wrong_byte_of_an_export_is_named(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    name, original = "model.layers.1.mlp.up_proj.weight", convert.SafetensorsWriter.finish

    def finish(self: Any) -> None:
        original(self)
        path = tmp_path / ".back.partial" / "model.safetensors"
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        data[8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][1] - 1] ^= 0x80  # the last one's sign
        path.write_bytes(data)

    monkeypatch.setattr(convert.SafetensorsWriter, "finish", finish)
    with pytest.raises(VerificationError, match=rf"^1 of \d+ tensors differ .*: {re.escape(name)}\."):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_swapped_tensors_are_named(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    held: list[tuple[Any, torch.Tensor]] = []
    original = TorchDistWriter.write

    def swap(writer: Any, chunk: Any, values: torch.Tensor) -> None:
        if chunk.key == "decoder.layers.self_attention.linear_proj.weight":
            held.append((chunk, values.clone()))
            if len(held) == 2:
                (one, a), (two, b) = held
                original(writer, one, b)
                original(writer, two, a)
            return
        original(writer, chunk, values)

    monkeypatch.setattr(TorchDistWriter, "write", swap)
    with pytest.raises(
        VerificationError, match=r"layers\.0\.self_attn\.o_proj.*layers\.1\.self_attn\.o_proj"
    ) as caught:
        hf_to_megatron(model, tmp_path / "megatron")
    assert caught.value.exit_code == 5
    assert not (tmp_path / "megatron").exists()


def test_a_single_file_is_read_next_to_an_index_that_an_earlier_save_left(tmp_path: Path) -> None:
    """`save_pretrained` leaves the index of a save in shards behind, and transformers reads the single file."""
    made = hf_model("qwen3-moe")
    made.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    shards = sorted((tmp_path / "model").glob("model-*.safetensors"))
    with torch.no_grad():
        made.model.norm.weight += 1
    made.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    assert not any(path.exists() for path in shards)
    hf_to_megatron(tmp_path / "model", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    from transformers import AutoModelForCausalLM

    norm = load_file(tmp_path / "back" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(norm, AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.norm.weight)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize("inputs_first", [False, True])
def test_experts_in_stacks_are_read_as_by_transformers(family: str, inputs_first: bool, tmp_path: Path) -> None:
    """The tensors of transformers' modules as they are, and with the axes of a stack in the other order."""
    made = hf_model(family)
    made.save_pretrained(tmp_path / "published")
    shutil.copytree(tmp_path / "published", tmp_path / "stacked")
    tensors = {name: value.contiguous() for name, value in made.state_dict().items()}
    if inputs_first:
        tensors = {
            name: value.transpose(1, 2).contiguous() if value.dim() == 3 else value for name, value in tensors.items()
        }
    save_file(tensors, tmp_path / "stacked" / "model.safetensors", metadata={"format": "pt"})
    for name in ("published", "stacked"):
        hf_to_megatron(tmp_path / name, tmp_path / f"{name}-megatron")
        megatron_to_hf(tmp_path / f"{name}-megatron", tmp_path / f"{name}-back")
    published, stacked = (
        load_file(tmp_path / f"{name}-back" / "model.safetensors") for name in ("published", "stacked")
    )
    assert published.keys() == stacked.keys()
    assert all(torch.equal(published[name], stacked[name]) for name in published)


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_every_key_of_the_dtype_says_what_is_stored(model: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    config = json.loads((model / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (model / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "bfloat16")))
    hf_to_megatron(model, tmp_path / "megatron", Options(dtype="bfloat16"))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", options=Options(dtype="float32"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype is torch.float32
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: written.get(key) for key in ("dtype", "torch_dtype") if key in written} == dict.fromkeys(
        keys, "float32"
    )


# --- bad input ---


def drop(name: str) -> Callable[[Path], None]:
    return lambda directory: change(directory, lambda held: held.__delitem__(name))


def set_config(**values: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def index_of_absent(directory: Path) -> None:
    weight_map = dict.fromkeys(load_file(directory / "model.safetensors"), "model-00002-of-00002.safetensors")
    index_text(directory, json.dumps({"weight_map": weight_map}))


def index_text(directory: Path, text: str) -> None:
    """Put an index next to a shard; a single file would be read without it."""
    shard(directory, 1, 2)
    (directory / "model.safetensors.index.json").write_text(text)


def index_with(weight_map: Any) -> Callable[[Path], None]:
    return lambda directory: index_text(directory, json.dumps({"weight_map": weight_map}))


def shard(directory: Path, number: int, of: int) -> None:
    """Give the single file the name of a shard."""
    (directory / "model.safetensors").rename(directory / f"model-{number:05d}-of-{of:05d}.safetensors")


def adapters_alone(directory: Path) -> None:
    """Leave what PEFT writes of adapters."""
    (directory / "config.json").unlink()
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base-7b"}))


def two_saves(directory: Path) -> None:
    """Shards of a save in two and of one in three, without an index."""
    copy = (directory / "model.safetensors").read_bytes()
    for number, of in ((1, 2), (2, 2), (1, 3)):
        (directory / "model.safetensors").write_bytes(copy)
        shard(directory, number, of)


def edit_header(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change_header(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode().ljust(length)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return change_header


BAD = {
    "truncated": (truncate, "truncated.*"),
    "missing tensor": (drop("model.layers.1.mlp.down_proj.weight"), r"layers\.1\.mlp\.down_proj\.weight is missing"),
    "absent shard": (index_of_absent, "model-00002-of-00002.safetensors"),
    "one of two shards": (lambda d: shard(d, 1, 2), r"holds 1 of 2 shards, and no model\.safetensors\.index\.json"),
    "two saves": (two_saves, r"shards of two saves \(of 2 and of 3 files\)"),
    "adapters": (adapters_alone, "holds PEFT adapters of org/base-7b, and no model"),
    "lying header": (
        edit_header(lambda h: h["model.norm.weight"].update(shape=[64])),
        "truncated or damaged",
    ),
    "not a header": (lambda d: (d / "model.safetensors").write_bytes(b"nonsense" * 4), "not a safetensors file"),
    "config contradicts": (set_config(num_key_value_heads=4), r"k_proj\.weight has shape \[64, 128\].*\[128, 128\]"),
    "too few layers": (
        set_config(num_hidden_layers=1),
        r"a llama with this config.json has no tensor model\.layers\.1\.",
    ),
    "odd heads": (set_config(num_key_value_heads=3), "not a multiple of num_key_value_heads 3"),
    "unknown architecture": (set_config(architectures=["LamaForCausalLM"]), "LamaForCausalLM.*LlamaForCausalLM"),
    "wrong dtype": (
        lambda d: change(d, lambda h: h.update({"model.norm.weight": h["model.norm.weight"].to(torch.int32)})),
        r"model\.norm\.weight has dtype int32",
    ),
    "float8 without scales": (
        lambda d: change(d, lambda h: h.update({"lm_head.weight": h["lm_head.weight"].to(torch.float8_e4m3fn)})),
        r"lm_head\.weight_scale_inv is missing",
    ),
    "number for an object": (set_config(rope_scaling=8.0), "config.json holds a value of the wrong kind"),
    "number for a list": (set_config(architectures=3), "config.json holds a value of the wrong kind"),
    "header without a shape": (
        edit_header(lambda h: h["model.norm.weight"].pop("shape")),
        "missing field `shape`",
    ),
    "header with text": (edit_header(lambda h: h.update({"model.norm.weight": "text"})), "invalid JSON in header"),
    "index with a path": (index_with({"model.norm.weight": "../model.safetensors"}), "index.json is damaged"),
    "index without a map": (index_with([]), "index.json is damaged"),
    "index without a file": (index_with({"model.norm.weight": None}), "index.json is damaged"),
    "index without end": (lambda d: index_text(d, "[" * 100_000), "index.json cannot be read as JSON"),
    "configuration without end": (lambda d: (d / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
    "tied to another head": (set_config(tie_word_embeddings=True), r"lm_head\.weight differs from model\.embed_tokens"),
    "another activation": (set_config(hidden_act="gelu"), "`hidden_act` is 'gelu', but rlctl computes a llama"),
    "packed by a quantizer": (
        lambda d: change(d, lambda h: h.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(2, 2)})),
        r"config\.json names no quantization, and tensor model\.layers\.0\.mlp\.up_proj\.",
    ),
    "quantized as it computes": (
        set_config(quantization_config={"quant_method": "bitnet", "quantization_mode": "online"}),
        r"quantized in a way that rlctl does not read \(quant_method bitnet",
    ),
    "rope without its factor": (set_config(rope_scaling={"rope_type": "yarn"}), "`yarn` lacks `factor`"),
    "rope": (set_config(rope_scaling={"rope_type": "made-up"}), "made-up"),
    "biases": (set_config(attention_bias=True), r"tensor model\.layers\.0\.self_attn\.\w+\.bias is missing"),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_work_starts(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(model)
    with pytest.raises(InputError, match=message):
        hf_to_megatron(model, tmp_path / "megatron")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_inspect_names_the_problem(model: Path) -> None:
    assert inspect(model).problems == []
    drop("model.layers.1.mlp.down_proj.weight")(model)
    assert "model.layers.1.mlp.down_proj.weight is missing" in inspect(model).problems[0]


def test_a_vocabulary_that_does_not_divide_is_padded_by_its_reader(tmp_path: Path) -> None:
    model = write_tiny_family(tmp_path / "model", vocab_size=509)
    hf_to_megatron(model, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    same(model, tmp_path / "back")


@pytest.mark.parametrize("damage", ["shard", "truncate", "config"])
def test_a_damaged_megatron_checkpoint_is_refused(model: Path, tmp_path: Path, damage: str) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    shard = tmp_path / "megatron" / "release" / "__0_0.distcp"
    if damage == "shard":
        shard.unlink()
    elif damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:-5000])
    else:
        set_config(num_hidden_layers=3)(tmp_path / "megatron" / "huggingface")
    word = {"shard": "missing", "truncate": "truncated", "config": r"linear_.* has shape|layer_norm_weight has shape"}
    with pytest.raises(InputError, match=word[damage]):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert inspect(tmp_path / "megatron").problems


# --- hostile pickles ---


class Evil:
    """Unpickles to a call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.marker}",)


def poison(kind: str, release: Path, marker: Path) -> None:
    if kind == "metadata":
        (release / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    elif kind == "old protocol":
        (release / ".metadata").write_bytes(pickle.dumps(Evil(marker), protocol=0))
    elif kind == "common":
        torch.save({"args": Evil(marker)}, release / "common.pt")
    else:
        metadata = pickle.loads((release / ".metadata").read_bytes())
        name = {"tensor": "linear_fc1.weight", "object": "_extra_state"}[kind]
        key, info = next((k, v) for k, v in metadata.storage_data.items() if name in k.fqn)
        with (release / info.relative_path).open("ab") as stream:
            offset = stream.tell()
            torch.save(Evil(marker), stream)
            metadata.storage_data[key] = type(info)(info.relative_path, offset, stream.tell() - offset)
        (release / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("kind", ["metadata", "old protocol", "common", "tensor", "object"])
def test_no_pickled_code_runs(model: Path, tmp_path: Path, kind: str) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    release, marker = tmp_path / "megatron" / "release", tmp_path / "owned"
    pickles.scan(release)
    poison(kind, release, marker)
    if kind != "object":  # a conversion reads none
        with pytest.raises(InputError, match="system"):
            megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
        assert not (tmp_path / "back").exists()
    if kind != "tensor":  # resumes read these with `weights_only`
        with pytest.raises(pickles.RefusedPickleError, match="system"):
            pickles.scan(release)
    inspect(tmp_path / "megatron")
    assert not marker.exists()


def test_items_are_read_at_any_place_of_their_file(tmp_path: Path) -> None:
    """Mapped at multiples of 64 bytes, and copied elsewhere, as in checkpoints of Megatron-LM."""
    values, path, places = torch.randn(3, 40).bfloat16(), tmp_path / "shard", dict[int, int]()
    with path.open("wb") as file:
        for at in (64, 3001, 6400):
            file.seek(at)
            torch.save(values.T if at == 6400 else values, file)  # strides are kept
            places[at] = file.tell() - at
    for at, length in places.items():
        found = pickles.load_item(path, at, length, "key")
        assert torch.equal(found, values.T if at == 6400 else values)
        with pytest.raises(InputError, match=r"shard \(key\) is damaged"):
            pickles.load_item(path, at, length - 8, "key")


def test_engine_values_in_common_are_read_without_the_engine(tmp_path: Path) -> None:
    text = "import sys, types, enum, torch\n"
    text += "m = types.ModuleType('megatron.made_up'); sys.modules['megatron'] = types.ModuleType('megatron')\n"
    text += "m.Backend = enum.Enum('Backend', 'auto', module='megatron.made_up'); sys.modules['megatron.made_up'] = m\n"
    text += "torch.save({'backend': m.Backend.auto, 'iteration': 7, 't': torch.arange(3.)}, sys.argv[1])\n"
    subprocess.run([sys.executable, "-c", text, str(tmp_path / "common.pt")], check=True, timeout=120)
    found = pickles.load_common(tmp_path)
    assert found["iteration"] == 7
    assert torch.equal(found["t"], torch.arange(3.0))
    assert isinstance(found["backend"], pickles.Opaque)


# --- atomic, locked, refusing to overwrite ---


def test_an_existing_destination_is_kept_unless_forced(model: Path, tmp_path: Path) -> None:
    hf_to_megatron(model, tmp_path / "megatron")
    with pytest.raises(InputError, match="--force"):
        hf_to_megatron(model, tmp_path / "megatron")
    hf_to_megatron(model, tmp_path / "megatron", Options(force=True, dtype="bfloat16"))
    assert inspect(tmp_path / "megatron").dtype == "bfloat16"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["megatron", "model"]


def test_a_disk_that_fills_up_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert.TorchDistWriter, "write_object", full)
    with pytest.raises(MachineError, match=r"filled up while megatron was written; nothing of it is left"):
        hf_to_megatron(model, tmp_path / "megatron")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_disk_that_fills_up_at_the_last_flush_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    hf_to_megatron(model, tmp_path / "megatron")

    def full(stream: Any) -> None:
        stream.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging, "_flush_and_close", full)
    for convert_ in (
        lambda: hf_to_megatron(model, tmp_path / "new"),
        lambda: megatron_to_hf(tmp_path / "megatron", tmp_path / "new"),
    ):
        with pytest.raises(MachineError, match=r"filled up while new was written; nothing of it is left"):
            convert_()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["megatron", "model"]


def test_too_little_space_is_said_before_writing(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match="GB are needed"):
        hf_to_megatron(model, tmp_path / "megatron")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


HELD = """
import sys, pathlib
from rlctl.checkpoints.conversion import hf_megatron as convert
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistWriter
put = TorchDistWriter.write
def held(writer, chunk, values):
    put(writer, chunk, values)
    TorchDistWriter.write = put
    print('writing', flush=True)
    sys.stdin.readline()
TorchDistWriter.write = held
report = convert.hf_to_megatron(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
print('done', report.reused, flush=True)
"""


@contextlib.contextmanager
def held_up(model: Path, destination: Path) -> Iterator[subprocess.Popen]:
    """A conversion in the middle of its writing, which goes on when its input is closed; killed at the end."""
    command = [sys.executable, "-c", HELD, str(model), str(destination)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


def test_a_killed_conversion_leaves_nothing_that_looks_complete(model: Path, tmp_path: Path) -> None:
    with held_up(model, tmp_path / "megatron"):
        pass  # killed
    assert not (tmp_path / "megatron").exists()
    with pytest.raises(InputError):
        inspect(tmp_path / "megatron")
    assert hf_to_megatron(model, tmp_path / "megatron").verified
    assert sorted(p.name for p in tmp_path.iterdir()) == ["megatron", "model"]


def test_of_two_conversions_one_works_and_the_other_reuses(model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    with held_up(model, tmp_path / "megatron") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        too_long = threading.Timer(120, process.kill)  # else a wait that nobody was told of would never end
        too_long.start()

        def tell(text: str) -> None:
            told.append(text)
            if "waiting" in text:
                process.stdin.close()

        report = hf_to_megatron(model, tmp_path / "megatron", Options(tell=tell))
        said = process.stdout.read()
        too_long.cancel()
    assert said.endswith("done False\n")
    assert report.reused
    assert "waiting" in told[0]


@pytest.mark.slow
def test_memory_is_that_of_a_block_and_not_of_the_model(tmp_path: Path) -> None:
    """Peak memory above start-up stays far below the model's size."""
    model = write_tiny_family(tmp_path / "model", num_hidden_layers=60, hidden_size=512, intermediate_size=2048)
    size = open_hf_model(model).files.bytes
    code = "import sys, resource, pathlib, torch; from rlctl.checkpoints.conversion import hf_megatron\n"
    code += "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    code += "hf_megatron.hf_to_megatron(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    code += "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)"
    command = [sys.executable, "-c", code, str(model), str(tmp_path / "megatron")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=500).stdout)
    assert size > 500e6
    assert grown < size / 4
