"""NeMo-RL recipes: read as NeMo-RL reads them, and no key dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.config.load import from_sources, resolve, stored_values
from rlctl.config.nemo_rl.mapping_rules import Import
from rlctl.config.nemo_rl.recipe import import_recipe, is_nemo_rl, read_recipe
from rlctl.config.sources import Source
from rlctl.errors import ConfigError

RECIPES = Path(__file__).parent / "nemo_rl"
DDP = "policy.megatron_cfg.distributed_data_parallel_config"


def recipe(tmp_path: Path, **changes: Any) -> Import:
    """The Megatron recipe with `changes` merged in by dotted key (`__` for a dot)."""
    values: dict[str, Any] = {"defaults": str(RECIPES / "llama_megatron.yaml")}
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return import_recipe(path)


def status(result: Import, key: str) -> str:
    return next(entry.status for entry in result.entries if entry.key == key)


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        found += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
    return found


def test_every_key_is_accounted_for() -> None:
    result = import_recipe(RECIPES / "llama_megatron.yaml")
    told = {entry.key for entry in result.entries}
    assert set(leaves(read_recipe(RECIPES / "llama_megatron.yaml"))) <= told
    assert all(entry.note for entry in result.entries)


def test_a_colocated_synchronous_megatron_recipe_runs() -> None:
    resolved = resolve(files=[RECIPES / "llama_megatron.yaml"], environment={})
    resolved.require_supported()
    config = resolved.config
    assert (config.training.backend, config.training.tp, config.training.recompute) == ("megatron", 2, "full")
    assert (config.batch.prompts, config.batch.generations, config.batch.optimizer_steps) == (32, 16, 1)
    assert config.training.micro_batch_tokens == 4096
    assert config.optimizer.lr == 5e-6
    assert config.scheduler.warmup_steps == 13
    assert config.advantage.baseline == "leave-one-out"
    assert config.generation.memory_fraction == 0.6
    assert config.reward.terms[0].name == "math-verify"
    assert resolved.origin["training.tp"].endswith("policy.megatron_cfg.tensor_model_parallel_size")


def test_a_completion_leaves_room_for_its_prompt() -> None:
    config = resolve(files=[RECIPES / "llama_megatron.yaml"], environment={}).config
    assert config.model.max_length == 1024
    assert config.generation.max_new_tokens < 1024


def test_defaults_are_merged_and_arithmetic_is_done_after_the_merge() -> None:
    values = read_recipe(RECIPES / "llama_megatron.yaml")
    assert values["policy"]["sequence_packing"]["train_mb_tokens"] == 1024 * 4
    assert values["policy"]["tokenizer"]["name"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert values["policy"]["make_sequence_length_divisible_by"] == 2
    assert values["grpo"]["num_prompts_per_step"] == 32


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${mul:3, 4}", 12),
        ("${div:${a}, 4}", 2),
        ("${add:1, ${mul:2, ${a}}}", 17),
        ("${max:2, 5}", 5),
        ("x-${a}-y", "x-8-y"),
        ("${.b}", 7),
        ("${oc.env:RLCTL_NO_SUCH_NAME, fallback}", "fallback"),
    ],
)
def test_references_and_resolvers(tmp_path: Path, text: str, value: Any) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({"a": 8, "policy": {"b": 7, "c": text}}))
    assert read_recipe(path)["policy"]["c"] == value


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"policy": {"a": "${policy.nothing}"}}, "policy.nothing"),
        ({"policy": {"a": "${pow:2, 3}"}}, "unknown resolver `pow`"),
        ({"policy": {"a": "${policy.b}", "b": "${policy.a}"}}, "back to itself"),
        ({"policy": {"a": "${mul:2"}}, "never closed"),
        ({"defaults": "absent.yaml"}, "absent.yaml"),
        ({"defaults": "r.yaml"}, "comes back to itself"),
    ],
)
def test_what_cannot_be_resolved_is_named(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=said.replace("`", ".")):
        read_recipe(path)


def test_an_override_replaces_a_section_instead_of_merging_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"policy": {"x": {"a": 1, "b": 2}}}))
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({"defaults": "base.yaml", "policy": {"x": {"_override_": True, "c": 3}}}))
    assert read_recipe(path)["policy"]["x"] == {"c": 3}


def test_megatron_wins_when_both_are_on(tmp_path: Path) -> None:
    result = recipe(tmp_path, policy__dtensor_cfg__enabled=True, policy__dtensor_cfg__tensor_parallel_size=8)
    assert result.unsupported == []
    assert result.values["training.tp"] == 2
    assert status(result, "policy.dtensor_cfg.tensor_parallel_size") == "not applicable"


def test_dtensor_alone_is_imported_and_says_that_it_cannot_run() -> None:
    result = import_recipe(RECIPES / "base.yaml")
    assert result.values["training.tp"] == 1
    assert result.values["optimizer.beta2"] == 0.999
    assert result.values["training.backend"] == "dtensor"
    assert any("policy.dtensor_cfg.enabled" in line for line in result.unsupported)
    resolved = resolve(files=[RECIPES / "base.yaml"], environment={})
    with pytest.raises(ConfigError, match="dtensor_cfg"):
        resolved.require_supported()
    assert resolved.with_values({"training.dp": 2}).refusals == resolved.refusals


def test_the_other_spelling_of_the_dtensor_section_is_read(tmp_path: Path) -> None:
    result = recipe(tmp_path, policy__dtensor_config={"enabled": True})
    assert status(result, "policy.dtensor_config.enabled") == "mapped"


def test_deprecated_names_go_through_the_table(tmp_path: Path) -> None:
    result = recipe(tmp_path, **{f"{DDP}.use_custom_fsdp".replace(".", "__"): True})
    assert any("use_megatron_fsdp" in line for line in result.unsupported)
    assert status(result, f"{DDP}.use_custom_fsdp") == "mapped"


def test_pairs_that_megatron_refuses_are_resolved_and_shown() -> None:
    result = import_recipe(RECIPES / "llama_megatron.yaml")
    assert status(result, f"{DDP}.average_in_collective") == "changed"
    assert any("average_in_collective" in line for line in result.changed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grpo__async_grpo__enabled", True),
        ("grpo__max_rollout_turns", 5),
        ("grpo__use_dynamic_sampling", True),
        ("loss_fn__sequence_level_importance_ratios", True),
        ("policy__generation__backend", "sglang"),
        ("policy__generation__vllm_cfg__precision", "fp8"),
        ("policy__generation__vllm_kwargs__worker_extension_cls", "a.B"),
        ("policy__megatron_cfg__distributed_data_parallel_config__bucket_size", "many"),
        ("policy__generation__colocated__resources__num_nodes", 2),
        ("policy__megatron_cfg__fp8_cfg", {"enabled": True}),
        ("policy__megatron_cfg__fp8_cfg", {"enabled": True, "fp8": "e5m2"}),
        ("policy__megatron_cfg__fp8_cfg", {"enabled": True, "fp8": "e4m3", "fp8_param": True}),
        ("policy__megatron_cfg__fp8_cfg", {"enabled": True, "fp8": "e4m3", "fp8_multi_head_attention": True}),
        ("policy__megatron_cfg__peft", {"enabled": True, "dim": 8, "target_modules": ["linear_qkv"]}),
        ("policy__megatron_cfg__peft", {"enabled": True, "dim": 8, "dropout": 0.1}),
        ("policy__precision", "float16"),
        ("data__dataset_name", "clevr"),
        ("env__sliding_puzzle_game__cfg", {"size": 4}),
        ("sft__max_num_steps", 10),
    ],
)
def test_what_cannot_run_is_imported_and_named(tmp_path: Path, key: str, value: Any) -> None:
    result = recipe(tmp_path, **{key: value})
    assert any(line.startswith(key.replace("__", ".")) for line in result.unsupported), result.unsupported


def test_adapters_are_those_of_the_recipe(tmp_path: Path) -> None:
    peft = {"enabled": True, "dim": 8, "alpha": 16, "target_modules": ["linear_qkv", "linear_proj"], "dropout": 0.0}
    result = recipe(tmp_path, policy__megatron_cfg__peft=peft)
    lora = resolve(files=[result.path], environment={}).config.training.lora
    assert (lora.rank, lora.alpha, lora.targets) == (8, 16.0, ("attention",))
    assert not any("peft" in line for line in result.unsupported)
    result = recipe(tmp_path, policy__megatron_cfg__peft=peft | {"enabled": False})
    assert resolve(files=[result.path], environment={}).config.training.lora.rank == 0


def test_float8_training_is_that_of_the_recipe(tmp_path: Path) -> None:
    fp8 = {"enabled": True, "fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param": False, "fp8_amax_history_len": 4}
    result = recipe(tmp_path, policy__megatron_cfg__fp8_cfg=fp8)
    assert not any("fp8" in line for line in result.unsupported)
    passed = resolve(files=[result.path], environment={}).config.megatron.passed
    assert (passed["fp8"], passed["fp8_recipe"], passed["fp8_amax_history_len"]) == ("hybrid", "blockwise", 4)
    result = recipe(tmp_path, policy__megatron_cfg__fp8_cfg=fp8 | {"enabled": False, "fp8_param": True})
    assert not any("fp8" in line for line in result.unsupported)
    assert "fp8" not in resolve(files=[result.path], environment={}).config.megatron.passed


@pytest.mark.parametrize(
    ("offload", "fraction", "expected", "said"),
    [(True, 1.0, True, False), (True, 0.0, False, False), (True, 0.5, True, True), (False, 0.5, False, False)],
)
def test_optimizer_states_are_all_in_host_memory_or_none(
    tmp_path: Path, offload: bool, fraction: float, expected: bool, said: bool
) -> None:
    optimizer = {"optimizer_cpu_offload": offload, "optimizer_offload_fraction": fraction, "pin_cpu_grads": True}
    result = recipe(tmp_path, **{f"policy__megatron_cfg__optimizer__{key}": value for key, value in optimizer.items()})
    assert result.values["training.optimizer_offload"] is expected
    assert any("optimizer_offload_fraction" in line for line in result.changed) == said
    assert sum(entry.key.endswith("optimizer_offload_fraction") for entry in result.entries) == 1
    assert not any("pin_cpu_grads" in line for line in result.unsupported)


def test_a_frozen_router_stays_frozen(tmp_path: Path) -> None:
    result = recipe(tmp_path, policy__megatron_cfg__expert_model_parallel_size=8)
    assert result.values["training.ep"] == 8
    assert result.values["training.freeze_router"] is True
    assert not any("freeze_moe_router" in line for line in result.unsupported)
    assert not any("moe_router_dtype" in line for line in result.unsupported)


def test_fields_of_the_engines_are_passed_through(tmp_path: Path) -> None:
    result = recipe(
        tmp_path,
        policy__megatron_cfg__moe_z_loss_coeff=0.001,
        policy__megatron_cfg__optimizer__decoupled_weight_decay=False,
        policy__generation__vllm_cfg__kv_cache_dtype="fp8",
        policy__generation__vllm_kwargs={"speculative_config": {"method": "ngram"}, "max_num_seqs": 64},
    )
    values = result.values
    assert (values["megatron.moe_router_dtype"], values["megatron.moe_z_loss_coeff"]) == ("fp64", 0.001)
    assert (values["ddp.grad_reduce_in_fp32"], values["ddp.overlap_grad_reduce"]) == (False, True)
    assert values["optimizer.decoupled_weight_decay"] is False
    assert values["vllm.kv_cache_dtype"] == "fp8"
    assert values["vllm.speculative_config.method"] == "ngram"
    assert values["generation.max_concurrent"] == 64
    config = resolve(files=[result.path], environment={}).config
    assert config.vllm.passed["speculative_config"] == {"method": "ngram"}
    assert config.megatron.passed["moe_router_dtype"] == "fp64"


def test_a_recipes_fields_may_have_no_effect_also_when_it_is_resumed() -> None:
    asked = resolve(files=[RECIPES / "llama_megatron.yaml"], sets=["megatron.moe_z_loss_coeff=0.1"], environment={})
    planned = asked.with_values({"training.pp": 1})
    again = from_sources([Source(stored_values(planned.to_json()))])
    for resolved in (asked, planned, again):
        assert "megatron.moe_router_dtype" in resolved.optional
        assert "megatron.moe_z_loss_coeff" not in resolved.optional
    assert all(line.startswith("runs differently: ") for line in planned.notes)
    assert planned.notes == asked.notes != ()


def test_what_is_neither_nemo_rls_nor_a_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy.megatron_cfg.moe_router_dtyp`: neither NeMo-RL's nor a field"):
        recipe(tmp_path, policy__megatron_cfg__moe_router_dtyp="fp32")


def test_unknown_keys_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key `grpo.num_prompt_per_step`; did you mean `grpo.num_prompts_per_step`"
    ):
        recipe(tmp_path, grpo__num_prompt_per_step=3)


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="512 rollouts"):
        recipe(tmp_path, policy__train_global_batch_size=500)


def test_optimizer_steps_follow_from_the_global_batch(tmp_path: Path) -> None:
    assert recipe(tmp_path, policy__train_global_batch_size=128).values["batch.optimizer_steps"] == 4


def test_a_prompt_template_is_put_behind_the_question(tmp_path: Path) -> None:
    (tmp_path / "think.txt").write_text("Think, and answer inside \\boxed{{}}.\n{}\n\nGo on.")
    result = recipe(tmp_path, data__prompt_file="think.txt")
    assert result.values["data.prompt_suffix"] == "\n\nThink, and answer inside \\boxed{}. Go on."


def test_a_file_dataset_keeps_its_fields(tmp_path: Path) -> None:
    data = {"dataset_name": "ResponseDataset", "train_data_path": "x.jsonl", "input_key": "q", "output_key": "a"}
    result = recipe(tmp_path, data=data)
    assert (result.values["data.name"], result.values["data.prompt_field"]) == ("x.jsonl", "q")


def test_other_yaml_is_not_taken_for_a_recipe(tmp_path: Path) -> None:
    assert not is_nemo_rl({"run": {"steps": 3}, "training": {"tp": 2}})
    path = tmp_path / "mine.yaml"
    path.write_text("run: { steps: 3 }\n")
    assert resolve(files=[path], environment={}).config.run.steps == 3


def test_flags_and_set_win_over_a_recipe() -> None:
    resolved = resolve(files=[RECIPES / "llama_megatron.yaml"], sets=["training.tp=1", "run.steps=2"], environment={})
    assert (resolved.config.training.tp, resolved.config.run.steps) == (1, 2)


def test_dynamic_batching_is_dynamic_batching(tmp_path: Path) -> None:
    alone = {"policy__dynamic_batching": {"enabled": True}, "policy__sequence_packing": {"enabled": False}}
    result = recipe(tmp_path, **alone)
    assert result.values["training.dynamic_batching"] is True
    assert result.values["training.packing"] is False
    assert result.values["training.micro_batch_tokens"] == 4096
    assert resolve(files=[tmp_path / "recipe.yaml"], environment={}).config.training.dynamic_batching


def test_packing_wins_over_dynamic_batching_and_that_is_said(tmp_path: Path) -> None:
    result = recipe(tmp_path, policy__dynamic_batching={"enabled": True})
    assert result.values["training.packing"] is True
    assert "training.dynamic_batching" not in result.values
    assert status(result, "policy.dynamic_batching.enabled") == "changed"


def test_datasets_take_what_they_do_not_say_from_the_defaults_of_all(tmp_path: Path) -> None:
    default = {"dataset_name": "ResponseDataset", "input_key": "q", "output_key": "a", "prompt_file": "think.txt"}
    data = {"_override_": True, "default": default, "train": {"data_path": "x.jsonl", "input_key": "question"}}
    values = recipe(tmp_path, data=data).values
    assert [values[f"data.{key}"] for key in ("name", "prompt_field", "answer_field")] == ["x.jsonl", "question", "a"]
    own = {**data, "train": {"dataset_name": "DeepScaler", "prompt_file": None}}
    values = recipe(tmp_path, data=own).values
    assert "DeepScaleR" in values["data.name"]
    assert "data.prompt_suffix" not in values


def test_several_datasets_are_imported_and_named(tmp_path: Path) -> None:
    data = {"_override_": True, "train": [{"dataset_name": "DeepScaler"}, {"dataset_name": "DAPOMath17K"}]}
    assert status(recipe(tmp_path, data=data), "data.train") == "not yet"


def test_the_best_checkpoints_are_kept_where_the_recipe_names_a_metric(tmp_path: Path) -> None:
    assert recipe(tmp_path).values["run.keep_best"] == 3
    assert recipe(tmp_path, checkpointing={"metric_name": None}).values["run.keep_last"] == 3
