"""TRL's YAML files for `trl grpo`, `trl sft` and `trl dpo`."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.config.load import resolve
from rlctl.errors import ConfigError
from rlctl.recipes.trl.mapping import TABLES
from rlctl.recipes.trl.recipe import import_recipe

KEYS = Path(__file__).parent / "keys" / "trl.csv"
"""The fields that GRPOConfig, SFTConfig and DPOConfig of TRL have beyond transformers' TrainingArguments, those of
ModelConfig and of the scripts' arguments, with their defaults (commit f2cd5771 of July 2026)."""


def test_nine_in_ten_keys_of_the_trainers_are_mapped_or_have_a_reason() -> None:
    rows = list(csv.DictReader(KEYS.open()))
    known = Counter(row["trainer"] for row in rows if row["key"] in TABLES[row["trainer"]])
    for trainer, count in Counter(row["trainer"] for row in rows).items():
        absent = [row["key"] for row in rows if row["trainer"] == trainer and row["key"] not in TABLES[trainer]]
        assert known[trainer] >= 0.9 * count, absent


@pytest.mark.parametrize("trainer", ["grpo", "sft", "dpo"])
def test_a_file_of_defaults_runs(trainer: str, tmp_path: Path) -> None:
    """What TRL does without being asked is nothing that stops a run."""
    rows = [row for row in csv.DictReader(KEYS.open()) if row["trainer"] == trainer]
    values = {row["key"]: value for row in rows if (value := json.loads(row["default"])) != ""}
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump(values | {"model_name_or_path": "a/b", "dataset_name": "c/d", "max_steps": 3}))
    result = import_recipe(path, method=trainer)
    assert [(entry.key, entry.note) for entry in result.entries if entry.status == "not yet"] == []


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
    assert (config.scheduler.decay, config.scheduler.decay_steps, config.scheduler.warmup_steps) == ("cosine", 20, 2)
    assert [term.name for term in config.reward.terms] == ["mine.py:brief"]
    with pytest.raises(ConfigError, match=r"`trl grpo` has none\. Did you mean max_completion_length"):
        resolve(files=[path], environment={}, overrides=["max_completion_lenght=3"])


def test_the_command_says_whose_file_it_is(tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-5\nmax_length: 512\n")
    for method, prompts in (("sft", 8), ("dpo", 8)):
        resolved = resolve(files=[path], environment={}, flags={"run.algorithm": method})
        assert (resolved.config.run.algorithm, resolved.config.batch.prompts) == (method, prompts)
    assert resolved.config.preference.beta == 0.1
