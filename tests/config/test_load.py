"""Merging of the configuration's sources, where values came from, and what wrong ones are answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlctl.config.load import stored_values
from rlctl.config.presets import preset_names, presets_directory, read_preset
from rlctl.config.schema import Schema
from rlctl.config.sources import GivenFlag, Source, Value
from rlctl.errors import ConfigError
from rlctl.methods.available import BUILT_IN, defaults_of
from rlctl.methods.configuration import from_sources, resolve, schema
from rlctl.settings.config import RolloutConfig
from rlctl.settings.rewards import RewardTerm


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml", "batch: {prompts: 2, generations: 2, optimizer_steps: 2}\nrun: {steps: 2, seed: 2}\n"
    )
    environment = {"RLCTL_BATCH__PROMPTS": "3", "RLCTL_BATCH__GENERATIONS": "3", "RLCTL_BATCH__OPTIMIZER_STEPS": "3"}
    flags = {"batch.generations": GivenFlag("--generations", 4), "batch.optimizer_steps": GivenFlag("--x", 4)}
    resolved = resolve("laptop", [file], flags, ["batch.optimizer_steps=6"], environment)
    batch = resolved.config.batch
    assert (resolved.config.run.steps, batch.prompts, batch.generations, batch.optimizer_steps) == (2, 3, 4, 6)
    assert resolved.config.run.seed == 2
    origin = resolved.origin
    assert origin["optimizer.lr"] == "preset laptop"
    assert origin["run.steps"] == f"file {file}"
    assert origin["batch.prompts"] == "environment RLCTL_BATCH__PROMPTS"
    assert origin["batch.generations"] == "flag --generations"
    assert origin["batch.optimizer_steps"] == "--set"
    assert origin["optimizer.beta1"] == "default"


def test_an_algorithm_sets_values_that_every_other_source_replaces(tmp_path: Path) -> None:
    resolved = resolve("laptop", flags={"run.algorithm": GivenFlag("--algorithm", "dapo")}, environment={})
    assert (resolved.config.loss.clip_high, resolved.origin["loss.clip_high"]) == (0.28, "algorithm dapo")
    assert (resolved.config.filter.groups, resolved.origin["filter.groups"]) == ("replace", "algorithm dapo")
    assert resolved.origin["loss.kl_estimator"] == "default"
    assert resolved.origin["run.algorithm"] == "flag --algorithm"
    weaker = {"preset": write(tmp_path / "p.yaml", "extends: laptop\nloss: {clip_high: 0.3}\n")}
    for source, origin in (
        ({"preset": str(weaker["preset"])}, "preset "),
        ({"files": [write(tmp_path / "c.yaml", "loss: {clip_high: 0.3}\n")]}, "file "),
        ({"environment": {"RLCTL_LOSS__CLIP_HIGH": "0.3"}}, "environment "),
        ({"sets": ["loss.clip_high=0.3"]}, "--set"),
    ):
        given: dict[str, Any] = {"environment": {}, "flags": {"run.algorithm": "dapo"}} | source
        found = resolve(**given)
        assert found.config.loss.clip_high == 0.3
        assert found.origin["loss.clip_high"].startswith(origin)
        assert found.origin["filter.groups"] == "algorithm dapo"


def test_an_algorithm_is_named_by_any_source_and_by_the_strongest_of_them(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "run: {algorithm: gspo}\n")
    assert resolve(files=[file], environment={}).origin["loss.level"] == "algorithm gspo"
    both = resolve(files=[file], sets=["run.algorithm=rloo"], environment={})
    assert both.config.loss.level == "constant"
    assert "algorithm gspo" not in both.origin.values()


def test_grpo_sets_nothing() -> None:
    named, plain = resolve(flags={"run.algorithm": "grpo"}, environment={}), resolve(environment={})
    assert named.config == plain.config


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_an_algorithm_sets_is_valid_and_kept_by_a_manifest(name: str) -> None:
    resolved = resolve(flags={"run.algorithm": name}, environment={}).with_values({"training.tp": 2})
    assert {key for key, origin in resolved.origin.items() if origin.startswith("algorithm ")} == set(defaults_of(name))
    assert from_sources([Source(stored_values(resolved.to_json()))]) == resolved


def test_every_key_has_an_origin() -> None:
    resolved = resolve(environment={})
    assert set(Schema((type(resolved.config),)).keys) <= set(resolved.origin)


def test_values_of_the_planner_keep_the_origins_of_the_others() -> None:
    planned = resolve("laptop", environment={}).with_values({"training.tp": 2})
    assert planned.config.training.tp == 2
    assert planned.origin["training.tp"] == "planner"
    assert planned.origin["optimizer.lr"] == "preset laptop"
    assert planned.origin["data.params.min_terms"] == "preset laptop"


def test_what_the_user_has_set_stays_the_users_after_planning() -> None:
    asked = resolve(sets=["training.tp=2", "training.pp=null", "training.backend=auto"], environment={})
    planned = asked.with_values({"training.tp": 2, "training.pp": 4, "training.backend": "megatron"})
    assert (planned.config.training.tp, planned.origin["training.tp"]) == (2, "--set")
    assert (planned.config.training.pp, planned.origin["training.pp"]) == (4, "planner")
    assert (planned.config.training.backend, planned.origin["training.backend"]) == ("megatron", "planner")
    again = planned.with_values({"training.tp": 8, "training.pp": 8})
    assert (again.config.training.tp, again.origin["training.tp"]) == (2, "--set")
    assert (again.config.training.pp, again.origin["training.pp"]) == (8, "planner")


def test_a_stored_configuration_is_read_back_with_its_origins() -> None:
    planned = resolve("laptop", sets=["training.tp=1"], environment={}).with_values({"training.pp": 1})
    again = from_sources([Source(stored_values(planned.to_json()))])
    assert again == planned
    assert type(again.config).__name__ == "RlConfig"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_names_data_and_reward(name: str) -> None:
    resolved = resolve(name, environment={})
    assert resolved.config.data.name or resolved.config.environment.name
    if isinstance(resolved.config, RolloutConfig):
        assert resolved.config.reward.terms or resolved.config.environment.name
    assert resolved.config.cluster.nodes
    # As many GPUs as the node has, unless one device is the point of the preset.
    on_a_laptop = {"laptop": 0, "laptop-sft": 0, "laptop-dpo": 0, "laptop-tools": 0, "laptop-vision": 0}
    assert resolved.config.cluster.gpus_per_node == {**on_a_laptop, "1gpu": 1}.get(name)
    assert read_preset(name).description.endswith(".")


def test_laptop_preset_needs_nothing_else() -> None:
    config = resolve("laptop", environment={}).config
    assert config.model.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.cluster.gpu == "cpu"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("loss.importance_correction=off", "loss.importance_correction", "off"),
        ("training.packing=false", "training.packing", False),
        ("model.revision=2024", "model.revision", "2024"),
        ("model.revision=null", "model.revision", None),
        ("data.system_prompt=None", "data.system_prompt", None),
        ("data.system_prompt='None'", "data.system_prompt", "None"),
        ("run.dir=true", "run.dir", "true"),
        ("generation.stop=['a=b', \"\\n\"]", "generation.stop", ("a=b", "\n")),
        ("data.params.max_terms=3", "data.params", {"max_terms": 3}),
        ("training.env.A=0", "training.env", {"A": "0"}),
        ("generation.env.A=", "generation.env", {"A": ""}),
        ("data.params={a: 1e-3, b: [1, 2], c: null}", "data.params", {"a": 1e-3, "b": [1, 2], "c": None}),
    ],
)
def test_set_types_its_values(text: str, key: str, value: object) -> None:
    config = resolve(sets=[text], environment={}).config
    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (["run.stpes=3"], ["`run.stpes` (--set)", "`run.steps`"]),
        (["optimzer.lr=3"], ["`optimzer.lr`", "`optimizer.lr`"]),
        (["batch.lr=3"], ["`batch.lr`", "`optimizer.lr`"]),
        (["batch=3"], ["`batch` (--set) is a section"]),
        (["optimizer.learning-rate=1e-5"], ["not a field of Megatron-Core", "did you mean `optimizer.lr`?"]),
        (["training.learning_rate=1e-5"], ["unknown key", "did you mean `optimizer.lr`?"]),
        (["training.lora_r=8"], ["did you mean `training.lora.rank`?"]),
        (["training.lora.use_rslora=true"], ["did you mean `training.lora.rslora`?"]),
        (["training.lora.dropout=0.1"], ["dropout has no effect: training.lora.rank = 0 trains all weights"]),
        (["training.lora.dropout=1.5"], ["`training.lora.dropout` = 1.5", "less than 1"]),
        (["training.lora.lora_dropout=0.1"], ["did you mean `training.lora.dropout`?"]),
        (["training.lora.modules_to_save=[lm_head]"], ["has no effect: training.lora.rank = 0 trains all weights"]),
        (["training.lora.use_dora=true"], ["DoRA trains a magnitude for each row"]),
        (["training.lora.init_lora_weights=pissa"], ["A begins uniform (Kaiming) and B as 0"]),
        (["training.lora.r=8"], ["did you mean `training.lora.rank`?"]),
        (["generation.max-new-tokens=8"], ["did you mean `generation.max_new_tokens`?"]),
        (["run.num_train_epochs=2"], ["did you mean `run.epochs`?"]),
        (["run.steps.x=3"], ["unknown key `run.steps.x`"]),
        (["run.steps"], ["there is no value"]),
        (["run.steps=0"], ["`run.steps` = 0 (--set)", "greater than 0"]),
        (["generation.stop=x"], ["`generation.stop` = 'x'", "a valid list"]),
        (
            ["reward.terms=[{nam: x}]"],
            ["`reward.terms[0].nam` = 'x'", "did you mean `reward.terms[0].name`?"],
        ),
        (
            ["reward.terms=[x]"],
            ["`reward.terms[0]` = 'x' (--set)", "keys with values, such as {name: ...}."],
        ),
        (["reward.terms={name: x}"], ["it should be a valid list, such as [{name: ...}]."]),
        (
            ["reward.terms=[{name: x, weight: y}]"],
            ["`reward.terms[0].weight` = 'y' (--set)", "a valid number"],
        ),
        (
            ["teacher.models=[{model: x, sources: a}]", "run.algorithm=distillation"],
            ["`teacher.models[0].sources` = 'a' (--set): it should be a valid list."],
        ),
        (["batch.optimizer_steps=3"], ["do not split"]),
        (["cluster.step_timeout_s=60", "rollouts.timeout_s=60"], ["rollouts.timeout_s = 60 is not below"]),
        (["generation.discard_weights=true", "refit.sparse=true"], ["does not go with refit.sparse = true"]),
        (["generation.discard_weights=true", "rollouts.mode=async"], ["does not go with rollouts.mode = async"]),
        (["generation.discard_weights=true", "filter.groups=replace"], ["does not go with filter.groups = replace"]),
        (["optimizer.lr=inf"], ["`optimizer.lr`", "finite"]),
        (["training.env={A=B: c}"], ["`training.env.A=B` (--set)", "can have this name"]),
        (["run.steps=true"], ["`run.steps` = True (--set)", "a number"]),
        (["optimizer.clip_grad=false", "training.tp=true"], ["`optimizer.clip_grad`", "`training.tp`"]),
        (["megatron.moe_aux_loss_coeff=true"], ["`megatron.moe_aux_loss_coeff`", "a number"]),
        (["optimizer.lr=-1", "loss.clip_low=2"], ["`optimizer.lr` = -1", "`loss.clip_low` = 2"]),
    ],
)
def test_wrong_keys_and_values_are_named(sets: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(sets=sets, environment={})
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_a_variable_for_processes_keeps_its_name_when_it_comes_from_the_environment() -> None:
    environment = {"RLCTL_TRAINING__ENV__NCCL_DEBUG": "INFO", "RLCTL_TRAINING__ENV__MY__Id": "1"}
    environment |= {"RLCTL_DATA__PARAMS__MAX_TERMS": "3"}
    config = resolve(environment=environment).config
    assert config.training.env == {"NCCL_DEBUG": "INFO", "MY__Id": "1"}
    assert config.data.params == {"max_terms": 3}


@pytest.mark.parametrize("name", ["RLCTL__", "RLCTL___", "RLCTL_RUN__", "RLCTL_TRAINING__ENV__"])
def test_a_variable_without_a_whole_key_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key .* \\(environment {name}\\)"):
        resolve(environment={name: "3"})


def test_unknown_section_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`grop.steps` \(environment RLCTL_GROP__STEPS\); did you mean `run.steps`"):
        resolve(environment={"RLCTL_GROP__STEPS": "3", "RLCTL_DEBUG": "1"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RLCTL_STEPS", "`run.steps` is set by RLCTL_RUN__STEPS"),
        ("RLCTL_TRAINING_TP", "`training.tp` is set by RLCTL_TRAINING__TP"),
        ("RLCTL_LOSS", "RLCTL_LOSS__<KEY>"),
        ("RLCTL_MODEL", "RLCTL_MODEL__<KEY>"),
        ("RLCTL_CACHEDIR", "did you mean RLCTL_CACHE_DIR?"),
        ("RLCTL_ZZZ", "RLCTL_<SECTION>__<KEY>"),
    ],
)
def test_a_variable_that_means_nothing_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(environment={name: "3", "RLCTL_CACHE_DIR": "/tmp"})
    assert f"unknown environment variable {name}" in caught.value.message
    assert hint in caught.value.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run: {steps: 1}\nrun: {steps: 2}\n", "given twice"),
        ("run: {1: 2, true: 3}\n", "line 1: the keys 1 and true are the same key"),
        ("run: [", "not valid YAML"),
        ("- a\n", "sections of keys"),
        ("extend: laptop\n", "unknown key `extend`"),
        ("run: 3\n", "is a section"),
        ("[" * 50_000, "recursion"),
        ("run: {steps: " + "9" * 5000 + "}", "4300 digits"),
    ],
)
def test_wrong_files_are_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", text)
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve(files=[file], environment={})
    assert "c.yaml" in caught.value.message


def test_presets_extend_each_other_and_not_in_a_circle(tmp_path: Path) -> None:
    child = write(tmp_path / "child.yaml", "extends: laptop\nrun: {steps: 5}\n")
    resolved = resolve(str(child), environment={})
    assert resolved.config.run.steps == 5
    assert resolved.origin["optimizer.lr"] == "preset laptop"
    circle = tmp_path / "circle.yaml"
    write(circle, f"extends: {circle}\n")
    with pytest.raises(ConfigError, match="extends itself"):
        resolve(str(circle), environment={})


def test_other_data_does_not_inherit_the_presets_parameters() -> None:
    other = resolve("laptop", flags={"data.name": GivenFlag("--data", "reasoning-gym:countdown")}, environment={})
    assert other.config.data.params == {}
    assert other.config.data.system_prompt == "Answer briefly."  # for any data
    same = resolve("laptop", flags={"data.name": GivenFlag("--data", "reasoning-gym:chain_sum")}, environment={})
    assert same.config.data.params["max_terms"] == 2
    assert (same.config.reward.terms, other.config.reward.terms) == ((RewardTerm(name="task"),), ())
    own = resolve("laptop", sets=["data.params.min_terms=3", "data.name=reasoning-gym:x"], environment={})
    assert own.config.data.params == {"min_terms": 3}
    judged = resolve("2nodes", sets=["data.name=mine.jsonl"], environment={}).config.reward
    assert ([term.name for term in judged.terms], judged.extract) == (["math-verify"], "auto")


@pytest.mark.parametrize("preset", ["laptop", "1gpu", "1node", "2nodes", "moe-large", "laptop-tools"])
def test_an_environment_replaces_a_presets_task(preset: str) -> None:
    resolved = resolve(preset, flags={"environment.name": GivenFlag("--env", "wordle")}, environment={})
    of_task = ("data.", "reward.", "validation.data.", "validation.reward", "validation.holdout", "environment.")
    task = [v for v in resolved.given() if v.key.startswith(of_task)]
    assert [(value.key, value.value) for value in task] == [("environment.name", "wordle")]
    assert resolved.notes == ()


def test_data_and_reward_given_with_an_environment_stay() -> None:
    flags = {"environment.name": "search", "data.name": "q.jsonl", "reward.terms": [{"name": "exact-match"}]}
    config = resolve("2nodes", flags=flags, sets=["data.prompt_field=question"], environment={}).config
    assert (config.data.name, config.data.prompt_field, config.data.prompt_suffix) == ("q.jsonl", "question", None)
    assert ([term.name for term in config.reward.terms], config.reward.extract) == (["exact-match"], "auto")


def test_an_environment_replaces_the_task_of_the_users_preset_with_a_note(tmp_path: Path) -> None:
    text = "extends: laptop\ndata: {name: q.jsonl, shuffle: false}\nreward: {terms: [{name: exact-match}]}\n"
    mine = write(tmp_path / "mine.yaml", text)
    resolved = resolve(str(mine), sets=["environment.name=wordle"], environment={})
    assert (resolved.config.data.name, resolved.config.reward.terms) == (None, ())
    assert not resolved.config.data.shuffle
    assert resolved.notes == (f"note: environment wordle replaces data.name, reward.terms of preset {mine}",)
    both = write(tmp_path / "both.yaml", f"{text}environment: {{name: game.py:Game, turns: 3}}\n")
    kept = resolve(str(both), sets=["environment.name=game.py:Game"], environment={}).config
    assert (kept.data.name, kept.data.params, kept.environment.turns) == ("q.jsonl", {}, 3)


@pytest.mark.parametrize("preset", ["laptop-sft", "laptop-dpo"])
def test_a_presets_validation_needs_rows_of_the_data_that_replace_its_own(preset: str) -> None:
    """A task makes other rows; a file has none unless some are held out or named."""

    def validates(**values: Any) -> tuple[bool, int]:
        found = resolve(preset, sets=[f"{key}={value}" for key, value in values.items()], environment={})
        return found.config.validation.wanted, len(found.notes)

    assert validates() == (True, 0)
    assert validates(**{"data.name": "reasoning-gym:gcd"}) == (True, 0)
    assert validates(**{"data.name": "chats.jsonl"}) == (False, 1)
    assert validates(**{"data.sources": "[{name: a.jsonl}, {name: b.csv}]"}) == (False, 1)
    assert validates(**{"data.name": "chats.jsonl", "validation.holdout": 4}) == (True, 0)
    assert validates(**{"data.name": "chats.jsonl", "validation.data.name": "other.jsonl"}) == (True, 0)
    assert validates(**{"data.name": "chats.jsonl", "validation.every": 5})[0]  # refused when the data is opened


def test_data_replaces_the_environment_of_a_shipped_preset_alone(tmp_path: Path) -> None:
    assert not resolve("laptop-tools", sets=["data.name=q.jsonl"], environment={}).config.environment.wanted
    own = write(tmp_path / "own.yaml", "extends: laptop\nenvironment: {name: game.py:Game, turns: 3}\n")
    config = resolve(str(own), sets=["data.name=q.jsonl"], environment={}).config
    assert (config.data.name, config.environment.name, config.environment.turns) == ("q.jsonl", "game.py:Game", 3)
    assert config.reward.terms == ()


def test_a_name_and_a_list_of_sources_replace_each_other(tmp_path: Path) -> None:
    listed = write(tmp_path / "mix.yaml", "data: {sources: [{name: a.jsonl}, {name: b.jsonl, weight: 2}]}\n")
    mixed = resolve("laptop", files=[listed], environment={})
    assert (mixed.config.data.name, mixed.config.data.params) == (None, {})
    assert [source.weight for source in mixed.config.data.sources] == [None, 2]
    assert mixed.origin["data.sources"] == f"file {listed}"
    one = resolve("laptop", files=[listed], flags={"data.name": GivenFlag("--data", "c.jsonl")}, environment={})
    assert (one.config.data.name, one.config.data.sources) == ("c.jsonl", ())
    both = write(tmp_path / "both.yaml", "data: {name: c.jsonl, sources: [{name: a.jsonl}]}\n")
    with pytest.raises(ConfigError, match="give one of them"):
        resolve(files=[both], environment={})
    meant = r"`data\.sources\[0\]\.wieght` = 2 \(--set\): .* did you mean `data\.sources\[0\]\.weight`\?"
    with pytest.raises(ConfigError, match=meant):
        resolve(sets=["data.sources=[{name: a, wieght: 2}]"], environment={})


def test_a_presets_own_parameters_go_with_the_data_that_it_builds_on(tmp_path: Path) -> None:
    child = write(tmp_path / "child.yaml", "extends: laptop\ndata: {params: {max_terms: 3}}\n")
    assert resolve(str(child), environment={}).config.data.params["max_terms"] == 3
    assert resolve(str(child), sets=["data.name=reasoning-gym:countdown"], environment={}).config.data.params == {}


def test_a_stronger_source_wins_inside_of_a_mapping(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "vllm: {hf_overrides: {a: 1}}\ndata: {params: {a: 1, b: 1}}\n")
    environment = {"RLCTL_VLLM__HF_OVERRIDES__A": "2", "RLCTL_VLLM__HF_OVERRIDES__B": "2"}
    resolved = resolve(files=[file], sets=["vllm.hf_overrides={a: 3}", "data.params.b=3"], environment=environment)
    assert resolved.config.vllm.passed == {"hf_overrides": {"a": 3, "b": 2}}
    assert resolved.config.data.params == {"a": 1, "b": 3}
    assert (resolved.origin["data.params.a"], resolved.origin["data.params.b"]) == (f"file {file}", "--set")


def test_nearest_key() -> None:
    assert schema().nearest("generation.max_tokens") == "generation.max_new_tokens"
    assert schema().nearest("zzz.qqq") is None


def test_presets_are_found_in_a_checkout_and_shipped_in_the_wheel() -> None:
    assert (presets_directory() / "laptop.yaml").is_file()


def test_a_config_file_can_extend_a_preset(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    mine = write(tmp_path / "mine.yaml", "description: Mine.\nextends: 1node\nrun: {steps: 3}\n")
    over = write(tmp_path / "deep" / "over.yaml", "extends: ../mine.yaml\nbatch: {prompts: 4}\n")
    resolved = resolve(files=[over], environment={})
    assert (resolved.config.run.steps, resolved.config.batch.prompts) == (3, 4)
    assert resolved.origin["batch.prompts"] == f"file {over}"
    assert resolved.origin["run.steps"] == f"preset {mine}"
    assert resolved.origin["scheduler.warmup_steps"] == "preset 1node"
    assert resolve(str(over), environment={}).config == resolved.config


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", "extends: two.yaml\n")
    write(tmp_path / "two.yaml", "extends: one.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        resolve(files=[one], environment={})


def test_gpus_asked_for_later_end_a_machine_without_and_the_other_way_round(tmp_path: Path) -> None:
    def cluster(preset: str, **flags: Any) -> tuple[str, int | None]:
        found = resolve(preset=preset, flags={f"cluster.{key}": value for key, value in flags.items()}, environment={})
        return found.config.cluster.gpu, found.config.cluster.gpus_per_node

    assert cluster("laptop", gpu="h100") == ("h100", None)
    assert cluster("laptop", gpus_per_node=8) == ("auto", 8)
    assert cluster("laptop", gpu="cpu") == ("cpu", 0)
    assert cluster("1gpu", gpu="cpu") == ("cpu", None)
    assert cluster("1gpu", gpu="h200") == ("h200", 1)
    with pytest.raises(ConfigError, match=r"cluster\.gpu = cpu, but cluster\.gpus_per_node = 2"):
        cluster("laptop", gpu="cpu", gpus_per_node=2)


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ({"cluster.gpu": "H100"}, ["cluster.gpus_per_node=0"]),
        ({"cluster.gpus_per_node": 8}, ["cluster.gpu=cpu"]),
        ({}, ["cluster.gpu=H100", "cluster.gpus_per_node=0"]),
    ],
)
def test_what_was_typed_is_not_overruled_in_silence(flags: dict[str, Any], sets: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.gpu = .* but cluster\.gpus_per_node = "):
        resolve(preset="1node", flags=flags, sets=sets, environment={})


def test_decided_values_are_those_of_a_merge_of_all_sources() -> None:
    asked = resolve("laptop", sets=["training.tp=2", "model.chat_template_time=2026-01-01"], environment={})
    asked = asked.with_values({"run.seed": 7}, "a stage")
    values = {"training.tp": 4, "training.pp": 2, "run.seed": 8, "run.steps": 3}
    decided = asked.deciding((Value(key, value, "planner") for key, value in values.items()), ["run.steps"])
    below = Source((Value(key, value, "planner") for key, value in values.items()), shared=True)
    given = [value for value in asked.given() if value.key not in ("run.steps",)]
    assert decided.to_json() == from_sources([below, Source(given, shared=True)], type(asked.config)).to_json()
    assert (decided.config.training.tp, decided.config.training.pp, decided.config.run.steps) == (2, 2, 3)
    with pytest.raises(ConfigError, match=r"`training\.pp` = 0 \(planner\)"):
        asked.deciding([Value("training.pp", 0, "planner")])
