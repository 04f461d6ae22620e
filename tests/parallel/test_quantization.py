"""Policies whose weights are on NVFP4's grid: what they compute with and send, under every layout and on both
backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.nvfp4 import rounded
from rlctl.config.parallel import ParallelSpec
from rlctl.settings.training import QuantizationConfig
from support.family_models import hf_model as family_model
from support.parallel_cases import Case
from support.parallel_families import make_batch as family_batch
from support.pool import Pool, slowly
from support.quantization_cases import Boxes, run_reference_and_resumed, run_steps
from support.reference_policy import make_batch

Pools = Callable[[int], Pool]
Published = Callable[[str], Path]
NVFP4 = QuantizationConfig(format="nvfp4")
MLP = QuantizationConfig(format="nvfp4", block=32, tensors=("*.mlp.*",), exclude=("*.layers.0.*",))
CASES = {
    "megatron": Case("qwen3", backend="megatron"),
    "megatron-tp2": Case("qwen3", ParallelSpec(tp=2)),
    "megatron-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "megatron-overlap": Case(
        "qwen3", ParallelSpec(dp=2), ddp={"overlap_param_gather": True, "overlap_grad_reduce": True}
    ),
    "megatron-host": Case("qwen3", optimizer_offload=True),
    "fsdp": Case("qwen3", backend="dtensor"),
    "fsdp-dp2": Case("qwen3moe", ParallelSpec(dp=2), backend="dtensor"),
    "fsdp-tp2": Case("qwen3", ParallelSpec(tp=2), backend="dtensor"),
    "fsdp-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2), backend="dtensor"),
}
EVEN = 252
"""Tokens of a vocabulary that two ranks divide."""
GRIDS = {f"{name}-{form}": (name, settings) for form, settings in (("all", NVFP4), ("mlp", MLP)) for name in CASES}
GUARDED_GRIDS = ("megatron-host-all", "megatron-tp2-all", "megatron-ep2-mlp", "fsdp-tp2-mlp", "fsdp-ep2-all")
"""Each backend and each kind of division once, and both forms with each backend."""
FUSED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def narrow(directory: Path, place: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> Path:
    """The model with `change` of its weights in bfloat16, in a directory of its own."""
    weights = {key: value.bfloat16() for key, value in load_file(directory / "model.safetensors").items()}
    place.mkdir()
    save_file(change(weights), place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text((directory / "config.json").read_text())
    return place


def whole(ranks: list[Boxes], shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors from the shares of all ranks."""
    found = {name: torch.full(value.shape, torch.nan, dtype=torch.bfloat16) for name, value in shapes.items()}
    for tensor, box, values in (one for boxes in ranks for one in boxes):
        place = tuple(slice(span.start, span.last + 1, span.step) for span in box)
        found[tensor][place] = values.view(found[tensor][place].shape)
    return found


def on_grid(weights: dict[str, Tensor], settings: QuantizationConfig) -> dict[str, Tensor]:
    """What a policy with these weights computes with: written from the names of a Qwen3's tensors."""
    found = {}
    for name, value in weights.items():
        inside = "proj" in name and (settings is NVFP4 or (".mlp." in name and ".layers.0." not in name))
        fused = next((group for group in FUSED for part in group if f".{part}." in name), None)
        parts = [name.replace(one, other) for one in fused or () if f".{one}." in name for other in fused or ()]
        largest = max(float(weights[part].abs().max()) for part in parts or [name])
        found[name] = rounded(value, torch.tensor(largest), settings.block) if inside else value
    return found


@pytest.mark.parametrize(("name", "settings"), slowly(GRIDS, guards=GUARDED_GRIDS))
def test_a_policy_computes_with_weights_on_the_grid_and_sends_them(
    pools: Pools, published: Published, tmp_path: Path, name: str, settings: QuantizationConfig
) -> None:
    """Its first step is that of a policy that was given rounded weights, and after two steps they are on the grid."""
    case = replace(CASES[name], dtype="bfloat16", quantization=settings)
    directory, run = narrow(published(case.kind), tmp_path / "model"), pools(case.parallel.world_size).run
    weights = load_file(directory / "model.safetensors")
    expected = on_grid(weights, settings)
    assert any(not torch.equal(value, weights[key]) for key, value in expected.items())
    begun, after, results, logprobs = zip(*run(run_steps, case, directory, make_batch(), 2), strict=True)
    first = whole(list(begun), weights)
    assert [key for key, value in first.items() if not torch.equal(value, expected[key])] == []
    last = whole(list(after), weights)
    assert any(not torch.equal(value, first[key]) for key, value in last.items())
    assert [key for key, value in on_grid(last, settings).items() if not torch.equal(value, last[key])] == []

    given = narrow(directory, tmp_path / "given", lambda weights: on_grid(weights, settings))
    plain = replace(case, quantization=QuantizationConfig())
    _, _, others, theirs = zip(*run(run_steps, plain, given, make_batch(), 1), strict=True)
    for one, other in zip(results, others, strict=True):
        if one[0] is not None:
            assert (one[0].loss, one[0].grad_norm) == (other[0].loss, other[0].grad_norm)
    for one, other in zip(logprobs, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_family_without_a_file_is_rounded_by_its_published_names(pools: Pools, tmp_path: Path, ep: int) -> None:
    """Nemotron-H: state-space layers, attention, and stacked experts that are published one by one."""
    family_model("nemotron-h", EVEN).save_pretrained(tmp_path / "begun")
    directory = narrow(tmp_path / "begun", tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    alone: dict[str, Any] = {"packing": False, "dynamic": True, "share_prompts": False, "micro_batch_tokens": 48}
    case = Case("llama", ParallelSpec(dp=2, ep=ep), "bfloat16", backend="dtensor", quantization=NVFP4, **alone)
    facts = facts_in(directory)
    begun, after, *_ = zip(*pools(2).run(run_steps, case, directory, family_batch(), 1, facts), strict=True)
    first, last = whole(list(begun), weights), whole(list(after), weights)
    inside = [name for name in weights if name.endswith("_proj.weight")]
    assert any(".experts." in name for name in inside)
    for name, value in weights.items():
        expected = rounded(value, value.abs().max(), 16) if name in inside else value
        assert torch.equal(first[name], expected), name
        if name in inside:
            assert torch.equal(rounded(last[name], last[name].abs().max(), 16), last[name]), name


@pytest.mark.parametrize("name", ["megatron", "fsdp-dp2"])
def test_the_reference_is_not_rounded_and_a_checkpoint_goes_on(
    pools: Pools, published: Published, tmp_path: Path, name: str
) -> None:
    case = replace(CASES[name], dtype="bfloat16", quantization=NVFP4)
    directory, place = narrow(published(case.kind), tmp_path / "model"), tmp_path / "saved"
    place.mkdir()
    found = pools(case.parallel.world_size).run(run_reference_and_resumed, case, directory, make_batch(), place)
    for reference, plain, after, again in found:
        assert reference.keys() == plain.keys()
        assert all(torch.equal(value, plain[key]) for key, value in reference.items())
        for (tensor, _, value), (_, _, other) in zip(after, again, strict=True):
            assert torch.equal(value, other), tensor


def test_small_steps_add_up_in_the_float32_weights(pools: Pools, published: Published, tmp_path: Path) -> None:
    """A single small step changes next to nothing on the grid; many of them do, since nothing of them is lost."""
    case = replace(CASES["megatron"], dtype="bfloat16", quantization=NVFP4)
    directory = narrow(published(case.kind), tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    shares = []
    for steps in (1, 8):
        begun, after, *_ = pools(1).run(run_steps, case, directory, make_batch(), steps)[0]
        first, last = whole([begun], weights), whole([after], weights)
        key = next(key for key in weights if "down_proj" in key)
        shares.append(float((first[key] != last[key]).float().mean()))
    assert shares[1] > 2 * shares[0]
