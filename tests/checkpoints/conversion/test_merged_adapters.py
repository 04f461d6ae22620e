"""Several PEFT adapters as one and merged into their base, against PEFT."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlctl.checkpoints.conversion.hf_megatron import Options
from rlctl.checkpoints.conversion.merged_adapters import Weighted, combine, merge_into_base
from rlctl.checkpoints.hf.peft_files import read_pairs, read_peft_config
from rlctl.checkpoints.model_files import ModelFiles
from rlctl.errors import InputError
from support.peft_models import base_model, engine_logprobs, logprobs, peft_library, with_adapter, write_adapter

LIMIT = 1e-5
WEIGHTS = (0.7, -0.4)


def parts(*directories: Path) -> list[Weighted]:
    return [Weighted(read_peft_config(d), weight) for d, weight in zip(directories, WEIGHTS, strict=True)]


@pytest.fixture
def two(tiny_llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two adapters of equal rank, of which one has more modules and other scales of some."""
    first = write_adapter(tmp_path / "a", tiny_llama, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    second = write_adapter(
        tmp_path / "b", tiny_llama, seed=1, r=4, lora_alpha=6, use_rslora=True, alpha_pattern={"down_proj": 2},
        target_modules=["q_proj", "v_proj", "down_proj"],
    )  # fmt: skip
    return first, second


@pytest.mark.parametrize("combination", ["cat", "linear"])
def test_a_combined_adapter_is_that_of_peft(
    two: tuple[Path, Path], tiny_llama: Path, tmp_path: Path, combination: str
) -> None:
    model = with_adapter(tiny_llama, two[0])
    model.load_adapter(two[1], "second")
    model.add_weighted_adapter(["default", "second"], list(WEIGHTS), "both", combination_type=combination)
    model.set_adapter("both")
    report = combine(parts(*two), tmp_path / "both", combination)  # type: ignore[arg-type]
    assert report.verified
    assert json.loads((tmp_path / "both/adapter_config.json").read_text())["r"] == (8 if combination == "cat" else 4)
    difference = logprobs(with_adapter(tiny_llama, tmp_path / "both")) - logprobs(model)
    assert float(difference.abs().max()) < LIMIT
    moved = logprobs(model) - logprobs(base_model(tiny_llama))
    assert float(moved.abs().max()) > 0.1


def test_adapters_of_other_ranks_are_combined_exactly(tiny_llama: Path, tmp_path: Path) -> None:
    """The sum of PEFT's updates of both, in float64, is the update of the combination."""
    first = write_adapter(tmp_path / "a", tiny_llama, r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"])
    ranks = {"o_proj": 3}
    second = write_adapter(
        tmp_path / "b", tiny_llama, seed=1, r=2, lora_alpha=8, rank_pattern=ranks, target_modules=["o_proj", "up_proj"]
    )
    with pytest.raises(InputError, match="--combine linear adds adapters of one rank, and these have 2, 4"):
        combine(parts(first, second), tmp_path / "both", "linear")
    combine(parts(first, second), tmp_path / "both", "cat")
    expected: dict[str, torch.Tensor] = {}
    for directory, weight in zip((first, second), WEIGHTS, strict=True):
        model = with_adapter(tiny_llama, directory)
        for name, module in model.base_model.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                update = weight * module.get_delta_weight("default").double()
                expected[name] = expected.get(name, torch.zeros_like(update)) + update
    found = with_adapter(tiny_llama, tmp_path / "both").base_model.model
    assert expected.keys() == {name for name, module in found.named_modules() if hasattr(module, "get_delta_weight")}
    for name, update in expected.items():
        torch.testing.assert_close(
            found.get_submodule(name).get_delta_weight("default").double(), update, rtol=1e-5, atol=1e-6
        )


def test_adapters_merged_into_the_base_compute_what_peft_computes(
    two: tuple[Path, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    model = with_adapter(tiny_llama, two[0])
    model.load_adapter(two[1], "second")
    model.add_weighted_adapter(["default", "second"], list(WEIGHTS), "both", combination_type="cat")
    # PEFT's combination has the first adapter's use_rslora, and is right in this order only.
    model.set_adapter("both")
    report = merge_into_base(parts(*two), ModelFiles(tiny_llama, "base"), tmp_path / "merged")
    assert report.verified
    difference = logprobs(base_model(tmp_path / "merged")) - logprobs(model)
    assert float(difference.abs().max()) < LIMIT


def test_adapters_of_experts_are_combined_and_merged(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """PEFT 0.21.2 combines no adapters of experts. Its updates of each adapter are the expected values."""
    names = ["q_proj", "gate_proj", "up_proj", "down_proj", "gate"]
    first = write_adapter(tmp_path / "a", tiny_qwen3_moe, r=2, lora_alpha=4, target_modules=names)
    second = write_adapter(
        tmp_path / "b", tiny_qwen3_moe, seed=1, r=3, lora_alpha=2, target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj"],
    )  # fmt: skip
    peft_library()
    expected = base_model(tiny_qwen3_moe).state_dict()
    base = {name: value.clone() for name, value in expected.items()}
    for directory, weight in zip((first, second), WEIGHTS, strict=True):
        merged = with_adapter(tiny_qwen3_moe, directory).merge_and_unload().state_dict()
        assert sum(not torch.equal(merged[name], base[name]) for name in base) >= 4
        for name, value in expected.items():
            value += weight * (merged[name] - base[name])
    combine(parts(first, second), tmp_path / "both")
    combined = with_adapter(tiny_qwen3_moe, tmp_path / "both").merge_and_unload().state_dict()
    merge_into_base(parts(first, second), ModelFiles(tiny_qwen3_moe, "base"), tmp_path / "merged")
    of_files = base_model(tmp_path / "merged").state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(combined[name], value, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(of_files[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.guard
@pytest.mark.slow
def test_an_engine_reads_adapters_of_several_ranks_and_their_combination(tiny_llama: Path, tmp_path: Path) -> None:
    """vLLM's LoRA slots (0.32) read rank_pattern and alpha_pattern as PEFT does."""
    adapter = write_adapter(
        tmp_path / "a", tiny_llama, r=4, lora_alpha=8, use_rslora=True,
        target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"q_proj": 2, "1.mlp.down_proj": 8},
        alpha_pattern={"v_proj": 3},
    )  # fmt: skip
    combine([Weighted(read_peft_config(adapter))], tmp_path / "even")
    wanted = logprobs(with_adapter(tiny_llama, adapter))
    assert float((logprobs(base_model(tiny_llama)) - wanted).abs().max()) > 0.1
    both = [adapter, tmp_path / "even"]
    for directory, found in zip(both, engine_logprobs(tiny_llama, both), strict=True):
        assert float((logprobs(with_adapter(tiny_llama, directory)) - wanted).abs().max()) < LIMIT
        assert float((found - wanted).abs().max()) < LIMIT


def test_a_base_in_bfloat16_is_rounded_once(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", tiny_llama, r=4, lora_alpha=8, target_modules=["q_proj"])
    one = [Weighted(read_peft_config(adapter))]
    merge_into_base(one, ModelFiles(tiny_llama, "base"), tmp_path / "merged", Options(dtype="bfloat16"))
    exact = with_adapter(tiny_llama, adapter).merge_and_unload().state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(load_file(tmp_path / "merged/model.safetensors")[name], exact[name].bfloat16())


def test_adapters_of_two_bases_are_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    path = two[1] / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "me/other"}))
    with pytest.raises(InputError, match=r"and .*b of me/other"):
        combine(parts(*two), tmp_path / "both")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"use_dora": True}, "use_dora = True in adapter_config.json: DoRA"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = pissa_niter_4"),
        ({"bias": "all"}, "bias = all"),
        ({"peft_type": "IA3"}, "peft_type = IA3"),
        ({"r": 0}, "no rank r of at least 1"),
        ({"of_later_versions": 2}, "of_later_versions = 2"),
    ],
)
def test_settings_that_change_the_result_are_refused_by_name(tmp_path: Path, values: dict, said: str) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | values
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=re.escape(said)):
        read_peft_config(tmp_path)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"modules_to_save": ["norm"]}, "norm.weight in adapter_model.safetensors is a whole tensor (modules_to_save)"),
        ({"target_modules": ["embed_tokens"]}, "belongs to an adapter of an embedding"),
    ],
)
def test_tensors_that_are_no_adapters_of_layers_are_refused(
    tiny_llama: Path, tmp_path: Path, lora: dict, said: str
) -> None:
    write_adapter(tmp_path / "a", tiny_llama, **{"r": 2, "target_modules": ["q_proj"]} | lora)
    with pytest.raises(InputError, match=re.escape(said)):
        read_pairs(read_peft_config(tmp_path / "a"))
