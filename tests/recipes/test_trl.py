"""TRL's YAML files for `trl grpo`, `trl sft` and `trl dpo`."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.errors import ConfigError
from rlctl.methods.configuration import resolve
from rlctl.recipes.trl.mapping import TABLES
from rlctl.recipes.trl.recipe import import_recipe

KEYS = Path(__file__).parent / "keys" / "trl.csv"
"""The fields that the six Config classes of TRL's trainers have beyond transformers' TrainingArguments, those of
ModelConfig and of the scripts' arguments, with their defaults (commit f2cd5771 of July 2026)."""


def test_nine_in_ten_keys_of_the_trainers_are_mapped_or_have_a_reason() -> None:
    rows = list(csv.DictReader(KEYS.open()))
    known = Counter(row["trainer"] for row in rows if row["key"] in TABLES[row["trainer"]])
    for trainer, count in Counter(row["trainer"] for row in rows).items():
        absent = [row["key"] for row in rows if row["trainer"] == trainer and row["key"] not in TABLES[trainer]]
        assert known[trainer] >= 0.9 * count, absent


@pytest.mark.parametrize("trainer", list(TABLES))
def test_a_file_of_defaults_runs(trainer: str, tmp_path: Path) -> None:
    """What TRL does without being asked is nothing that stops a run."""
    rows = [row for row in csv.DictReader(KEYS.open()) if row["trainer"] == trainer]
    values = {row["key"]: value for row in rows if (value := json.loads(row["default"])) != ""}
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump(values | {"model_name_or_path": "a/b", "dataset_name": "c/d", "max_steps": 3}))
    result = import_recipe(path, method=trainer)
    assert [(entry.key, entry.note) for entry in result.entries if entry.status == "not yet"] == []


def test_the_batch_of_one_process_is_told(tmp_path: Path) -> None:
    """TRL's default of 8 rows for each process, in groups of 8: one prompt."""
    path = tmp_path / "three.yaml"
    path.write_text("model_name_or_path: a/b\ndataset_name: c/d\nnum_generations: 8\n")
    result = import_recipe(path)
    assert result.values["batch.prompts"] == 1
    (line,) = [note for note in result.notes if note.startswith("batch.prompts is 1")]
    assert "no per_device_train_batch_size, which is 8 by default" in line
    assert "TRL on N GPUs has N times as many" in line
    path.write_text("model_name_or_path: a/b\ndataset_name: c/d\nper_device_train_batch_size: 4\n")
    assert any("batch.prompts is 4" in note for note in import_recipe(path, method="sft").notes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("train.py", "a Python script"), ("train.ipynb", "a notebook"), ("train.sh", "a shell script that starts no")],
)
def test_code_is_not_read_as_configuration(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("from trl import GRPOTrainer\n\ntrainer = GRPOTrainer(model='a/b', args=None): 1\n")
    with pytest.raises(ConfigError, match=rf"{name} is {kind}.*which is not read") as caught:
        resolve(files=[tmp_path / name], environment={})
    assert "recipe of verl, NeMo-RL, TRL" in str(caught.value.hint)
    assert "--reward FILE.py:FUNCTION" in str(caught.value.hint)


def test_keys_become_those_that_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text("""
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/tldr
reward_funcs: [mine.py:brief]
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
num_generations: 8
num_iterations: 2
max_completion_length: 128
beta: 0.04
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: none
use_vllm: true
max_steps: 20
lr_scheduler_type: cosine
warmup_ratio: 0.1
env: {TOKENIZERS_PARALLELISM: false}
""")
    config: Any = resolve(files=[path], environment={}, overrides=["beta=0.1"]).config
    assert (config.run.algorithm, config.run.steps, config.batch.prompts, config.batch.epochs) == ("grpo", 20, 8, 2)
    assert (config.loss.kl_coefficient, config.loss.clip_high, config.loss.level) == (0.1, 0.28, "constant")
    assert (config.advantage.normalize_std, config.generation.max_new_tokens) == (False, 128)
    assert (config.scheduler.decay, config.scheduler.decay_steps, config.scheduler.warmup_steps) == ("cosine", None, 2)
    assert [term.name for term in config.reward.terms] == ["mine.py:brief"]
    with pytest.raises(ConfigError, match=r"`trl grpo` has none\. Did you mean max_completion_length"):
        resolve(files=[path], environment={}, overrides=["max_completion_lenght=3"])


PEFT = "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: [mine.py:brief]\nuse_peft: true\n"


@pytest.mark.parametrize(
    ("method", "more", "rank", "targets", "dropout"),
    [
        ("sft", "", 16, "peft-default", 0.05),
        ("dpo", "lora_r: 8\nlora_dropout: 0.1\nlora_target_modules: [q_proj, v_proj]\n", 8, ("q_proj", "v_proj"), 0.1),
        ("kto", "lora_dropout: 0.0\nlora_target_modules: all-linear\n", 16, "all-linear", 0.0),
        ("grpo", "lora_dropout: 0.1\n", 16, "peft-default", 0.0),
        ("sft", "lora_target_parameters: [experts.down_proj]\n", 16, ("peft-default", "experts.down_proj"), 0.05),
        (
            "sft",
            "lora_target_modules: [k_proj]\nlora_target_parameters: [mlp.gate.weight]\n",
            16,
            ("k_proj", "mlp.gate.weight"),
            0.05,
        ),
        ("sft", "use_peft: false\nlora_dropout: 0.1\n", 0, ("attention", "mlp"), 0.0),
    ],
)
def test_adapters_have_the_defaults_of_trls_model_config(
    method: str, more: str, rank: int, targets: Any, dropout: float, tmp_path: Path
) -> None:
    """Rank 16, alpha 32, dropout 0.05 (TRL's ModelConfig). Rollouts are trained on without dropout."""
    path = tmp_path / "any.yaml"
    path.write_text(PEFT.replace("use_peft: true\n", "" if "use_peft" in more else "use_peft: true\n") + more)
    lora = resolve(files=[path], environment={}, flags={"run.algorithm": method}).config.training.lora
    assert (lora.rank, lora.alpha, lora.targets, lora.dropout) == (rank, 32, targets, dropout)


def test_the_command_says_whose_file_it_is(tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-5\nmax_length: 512\n")
    for method, prompts in (("sft", 8), ("dpo", 8)):
        resolved = resolve(files=[path], environment={}, flags={"run.algorithm": method})
        assert (resolved.config.run.algorithm, resolved.config.batch.prompts) == (method, prompts)
    assert resolved.config.preference.beta == 0.1


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("kto", {"optimizer.lr": 1e-6, "preference.beta": 0.1, "preference.good_weight": 1.0,
                 "preference.bad_weight": 1.0, "model.max_length": 1024, "data.shuffle": False}),
        ("rm", {"optimizer.lr": 1e-4, "model.max_length": 1024, "batch.prompts": 8, "run.epochs": 3}),
        ("rloo", {"optimizer.lr": 1e-6, "batch.generations": 2, "loss.kl_coefficient": 0.05, "loss.kl_in": "reward",
                  "loss.kl_estimator": "k1", "advantage.baseline": "leave-one-out", "batch.prompts": 4,
                  "generation.max_new_tokens": 512, "loss.importance_correction": "off"}),
        ("sft", {"optimizer.lr": 2e-5, "data.shuffle": True, "scheduler.decay": "linear", "run.epochs": 3}),
        ("dpo", {"optimizer.lr": 1e-6, "preference.beta": 0.1, "scheduler.decay": "linear"}),
    ],
)  # fmt: skip
def test_keys_that_a_file_lacks_have_the_defaults_that_trl_documents(
    method: str, values: dict[str, Any], tmp_path: Path
) -> None:
    """By TRL's KTOConfig, RewardConfig, RLOOConfig, SFTConfig and DPOConfig (v1, July 2026), and by transformers:
    three epochs, a linear schedule, 8 rows a process, and a random sampler except for KTO."""
    path = tmp_path / "any.yaml"
    path.write_text("model_name_or_path: a/b\ndataset_name: c/d\n")
    config = resolve(files=[path], environment={}, flags={"run.algorithm": method}).config.model_dump()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        found: Any = config
        for part in (*section.split("."), name):
            found = found[part]
        assert found == value, key


@pytest.mark.parametrize(
    ("loss", "missing"), [("sapo", ["clip_low", "clip_high", "dual_clip"]), ("cispo", ["dual_clip"])]
)
def test_bounds_that_a_loss_lacks_are_not_handed_to_it(tmp_path: Path, loss: str, missing: list[str]) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(f"model_name_or_path: a/b\nloss_type: {loss}\nepsilon: 0.3\nepsilon_high: 4\ndelta: 3\n")
    loss_keys = {key for key in import_recipe(path, method="grpo").values if key.startswith("loss.")}
    assert [key for key in ("clip_low", "clip_high", "dual_clip") if f"loss.{key}" not in loss_keys] == missing
    assert resolve(files=[path], environment={}, flags={}).config.run.algorithm == loss


def test_settings_of_kto_rloo_and_reward_models_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("model_name_or_path: a/b\ndataset_name: c/d\nbeta: 0.2\ndesirable_weight: 2.0\n"
                    "undesirable_weight: 0.5\nloss_type: apo_zero_unpaired\n")  # fmt: skip
    found = import_recipe(path, method="kto")
    assert {key: found.values[f"preference.{key}"] for key in ("beta", "good_weight", "bad_weight")} == {
        "beta": 0.2, "good_weight": 2.0, "bad_weight": 0.5,
    }  # fmt: skip
    assert found.unsupported == ["loss_type = apo_zero_unpaired: the loss is KTO's"]
    path.write_text("model_name_or_path: a/b\nnum_generations: 4\nbeta: 0.0\nnormalize_advantages: true\n"
                    "reward_clip_range: [-1, 1]\n")  # fmt: skip
    found = import_recipe(path, method="rloo")
    assert (found.values["loss.kl_coefficient"], found.values["advantage.whiten_over"]) == (0.0, "rollouts")
    assert [line.partition(":")[0] for line in found.unsupported] == ["reward_clip_range = [-1, 1]"]
    path.write_text("model_name_or_path: a/b\ncenter_rewards_coefficient: 0.01\nlearning_rate: 1e-5\n")
    assert "center_rewards_coefficient" in import_recipe(path, method="rm").unsupported[0]


def test_a_key_that_no_trainer_has_names_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("model_name_or_path: a/b\nlearning_rate: 1e-5\nnum_generatons: 4\n")
    (entry,) = import_recipe(path).of("not known")
    assert entry.note.startswith("`trl sft` has no such key. Did you mean num_generations")


@pytest.mark.parametrize(
    ("line", "algorithm"),
    [
        ("undesirable_weight: 1.5", "kto"), ("center_rewards_coefficient: null", "rm"), ("ld_alpha: 0.5", "dpo"),
        ("normalize_advantages: false\nnum_generations: 2", "rloo"), ("num_generations: 2", "grpo"), ("", "sft"),
    ],
)  # fmt: skip
def test_keys_tell_the_trainer_of_a_file(line: str, algorithm: str, tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(f"model_name_or_path: a/b\nlearning_rate: 1e-5\n{line}\n")
    assert import_recipe(path).values["run.algorithm"] == algorithm
