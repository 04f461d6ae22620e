"""A run that starts from an adapter of PEFT takes its settings, and refuses other ones by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.config.load import Resolved
from rlctl.errors import ConfigError, InputError, RlctlError
from rlctl.methods.configuration import resolve
from rlctl.preparation.start_adapter import with_adapter, with_base
from rlctl.weights.adapter_sites import sites
from support.peft_models import write_adapter

SOME: dict[str, Any] = {
    "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"],
    "exclude_modules": ["1.self_attn.q_proj"], "rank_pattern": {"o_proj": 2},
    "alpha_pattern": {r"layers\.0\..*": 3}, "use_rslora": True,
}  # fmt: skip


def started(adapter: Path, base: Path, *sets: str, told: list[str] | None = None) -> Resolved:
    resolved = resolve(sets=["run.method=sft", f"training.lora.adapter={adapter}", *sets])
    return with_adapter(with_base(resolved), facts_in(base), [].append if told is None else told.append)


def edit(adapter: Path, **values: Any) -> None:
    """Change keys of adapter_config.json."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_settings_of_the_adapter_are_the_runs(tiny_llama: Path, tmp_path: Path) -> None:
    adapter, told = write_adapter(tmp_path / "a", tiny_llama, **SOME, lora_dropout=0.25), list[str]()
    resolved = started(adapter, tiny_llama, told=told)
    lora = resolved.config.training.lora
    assert (lora.rank, lora.alpha, lora.rslora) == (4, 8.0, True)
    assert (lora.rank_pattern, lora.alpha_pattern) == ({"o_proj": 2}, {r"layers\.0\..*": 3.0})
    assert sorted(lora.targets) == ["down_proj", "o_proj", "q_proj"]
    assert resolved.config.model.name == str(tiny_llama)
    assert resolved.origin["training.lora.rank"] == f"adapter_config.json of {adapter}"
    assert (lora.dropout, told) == (0.25, [])
    sampled = resolve(sets=["run.method=grpo", f"training.lora.adapter={adapter}"])
    assert with_adapter(sampled, facts_in(tiny_llama), told.append).config.training.lora.dropout == 0
    assert told == [f"{adapter} was trained with lora_dropout = 0.25; with rollouts, rlctl trains without dropout"]
    same = ("rank=4", "targets=['*q_proj', o_proj, '*.down_proj']", "exclude=['layers.1.self_attn.q_proj']")
    again = started(adapter, tiny_llama, *(f"training.lora.{key}" for key in same))
    found, wanted = (sites(facts_in(tiny_llama), each.config.training.lora) for each in (again, resolved))
    assert [(s.module, s.rank, s.scale) for s in found.all] == [(s.module, s.rank, s.scale) for s in wanted.all]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["training.lora.rank=8"], r"training\.lora\.rank = 8 \(--set\) and r = 4"),
        (["training.lora.alpha=16"], r"training\.lora\.alpha = 16\.0 \(--set\) and lora_alpha = 8"),
        (["training.lora.rslora=false"], r"training\.lora\.rslora = False \(--set\) and use_rslora = True"),
        (["training.lora.rank_pattern={q_proj: 2}"], r"rank_pattern = \{'q_proj': 2\} and rank_pattern = \{'o_proj'"),
        (["training.lora.targets=[q_proj, k_proj, o_proj]"], r"it has none on model\.layers\.0\.self_attn\.k_proj.*and "
         r"it also has model\.layers\.0\.mlp\.down_proj"),
        (["training.lora.rank=8", "training.lora.alpha=16"], r"r = 4; training\.lora\.alpha"),
    ],
)  # fmt: skip
def test_keys_that_differ_from_the_adapter_are_named(
    tiny_llama: Path, tmp_path: Path, sets: list[str], said: str
) -> None:
    adapter = write_adapter(tmp_path / "a", tiny_llama, **SOME)
    with pytest.raises(ConfigError) as caught:
        started(adapter, tiny_llama, *sets)
    assert re.search(said, str(caught.value)), caught.value
    assert caught.value.exit_code == 2


def test_layers_that_no_short_names_mean_are_named_whole(tiny_llama: Path, tmp_path: Path) -> None:
    """PEFT also chooses layers by number (`layers_to_transform`), which rlctl has no key for."""
    adapter = write_adapter(tmp_path / "a", tiny_llama, r=2, target_modules=["v_proj"], layers_to_transform=[1])
    assert started(adapter, tiny_llama).config.training.lora.targets == ("model.layers.1.self_attn.v_proj",)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"use_dora": True}, "use_dora = True .* DoRA scales each row"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type = PREFIX_TUNING, and rlctl reads LORA alone"),
        ({"peft_type": "IA3"}, "peft_type = IA3"),
        ({"bias": "all"}, "bias = all .* trains biases of the base"),
        ({"lora_bias": True}, "lora_bias = True .* a bias beside each B"),
        ({"new_trick": 3}, "new_trick = 3 .* rlctl does not have it"),
        ({"init_lora_weights": "pissa"}, "PEFT changes the base weights"),
        ({"trainable_token_indices": [1]}, "rows of the embedding"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(
    tiny_llama: Path, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    adapter = write_adapter(tmp_path / "a", tiny_llama, **SOME)
    edit(adapter, **values)
    with pytest.raises(InputError, match=said) as caught:
        started(adapter, tiny_llama)
    assert caught.value.exit_code == 2


def test_adapters_of_other_models_are_refused(tiny_llama: Path, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", tiny_qwen3_moe, r=2, target_modules=["mlp.gate", "q_proj"])
    with pytest.raises(RlctlError, match=r"the model has no layer model\.layers\.0\.mlp\.gate") as caught:
        started(adapter, tiny_llama)
    assert str(tiny_qwen3_moe) in str(caught.value.hint)


def test_tensors_of_other_shapes_are_refused_before_the_run(
    tiny_llama: Path, tiny_llama_tied: Path, tmp_path: Path
) -> None:
    """Another width of the base, another rank in the configuration, and an embedding with further rows."""
    wide = transformers.AutoConfig.from_pretrained(tiny_llama, intermediate_size=192)
    transformers.AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "wide")
    adapter = write_adapter(tmp_path / "a", tmp_path / "wide", r=4, target_modules=["up_proj"])
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj has A \[4, \d+\] and B \[192, 4\]") as caught:
        started(adapter, tiny_llama)
    assert str(caught.value.hint) == f"They are adapters of {tmp_path / 'wide'}."
    adapter = write_adapter(tmp_path / "b", tiny_llama, r=4, target_modules=["q_proj"])
    edit(adapter, r=8)
    with pytest.raises(
        InputError, match=r"q_proj has A \[4, (\d+)\] and B \[\d+, 4\]; the model and rank 8 take \[8, \1\]"
    ):
        started(adapter, tiny_llama)
    whole = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    adapter = write_adapter(tmp_path / "c", tiny_llama_tied, r=4, target_modules=["q_proj"], **whole)
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.embed_tokens.weight"
    rows, hidden = tensors[name].shape
    save_file(tensors | {name: torch.zeros(rows + 2, hidden)}, adapter / "adapter_model.safetensors")
    said = rf"embed_tokens \(modules_to_save\) has shape \[{rows + 2}, {hidden}\], and the model's has \[{rows}, "
    with pytest.raises(InputError, match=said):
        started(adapter, tiny_llama_tied)


def test_files_that_peft_does_not_write_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """A pickle is never loaded; names without PEFT's prefix are no adapters."""
    adapter = write_adapter(tmp_path / "a", tiny_llama, r=4, target_modules=["q_proj"])
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name.removeprefix("base_model.model."): value for name, value in tensors.items()}, weights)
    with pytest.raises(InputError, match=r"q_proj\.lora_A\.weight .* is not named as PEFT saves adapters"):
        started(adapter, tiny_llama)
    weights.unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors") as caught:
        started(adapter, tiny_llama)
    assert "Load it with PEFT and save it again" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("lora", "targets"),
    [
        ({"target_modules": ["q_proj"], "fan_in_fan_out": True}, ("q_proj",)),  # PEFT turns it off for linear layers
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, ("model.layers.0.self_attn.q_proj",)),
        ({}, ("q_proj", "v_proj")),  # PEFT's default
    ],
)
def test_settings_that_only_choose_layers_are_read(
    tiny_llama: Path, tmp_path: Path, lora: dict[str, Any], targets: tuple[str, ...]
) -> None:
    adapter = write_adapter(tmp_path / "a", tiny_llama, dtype=torch.bfloat16, r=2, **lora)
    assert tuple(started(adapter, tiny_llama).config.training.lora.targets) == targets
