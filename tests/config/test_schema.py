"""Keys that do not go together are refused in a sentence that names them."""

from __future__ import annotations

import re

import pytest

from rlctl.errors import ConfigError
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve


def resolved(*sets: str, algorithm: str = "ppo") -> object:
    return resolve(flags={"run.algorithm": algorithm}, sets=sets, environment={}).config


def test_ppo_needs_no_group_and_only_the_log_probs_that_its_returns_hold() -> None:
    config = resolve(flags={"run.algorithm": "ppo"}, sets=["batch.generations=1"], environment={}).config
    assert config.has_critic
    assert method_from_config(config, tries_loss=False).needs == frozenset()
    config = resolve(flags={"run.algorithm": "ppo"}, sets=["loss.kl_coefficient=0.1"], environment={}).config
    assert method_from_config(config, tries_loss=False).needs == {"old_logprobs", "reference_logprobs"}
    config = resolve(flags={"run.algorithm": "reinforce++"}, sets=["loss.kl_coefficient=0.1"], environment={}).config
    assert method_from_config(config, tries_loss=False).needs == {
        "old_logprobs",
        "reference_logprobs",
    }  # they are whitened with the rewards


@pytest.mark.parametrize(
    ("algorithm", "sets", "said"),
    [
        ("ppo", ["advantage.normalize_std=true"], "advantage.normalize_std = true compares the rollouts of a prompt"),
        ("ppo", ["advantage.per_term=true"], "advantage.per_term = true"),
        ("grpo", ["advantage.malformed_thinking=-5"], "is for the turns of an environment"),
        (
            "ppo",
            ["advantage.invalid_tool_call=-5", "environment.name=guess-number", "loss.kl_coefficient=0.1"],
            "advantage.invalid_tool_call leaves no place for loss.kl_in = reward",
        ),
        ("ppo", ["advantage.whiten_over=rollouts"], "advantage.whiten_over = rollouts"),
        ("ppo", ["training.lora.rank=8"], "training.lora.rank > 0"),
        ("ppo", ["loss.kl_coefficient=0.1", "loss.needs=[reference_logprobs]"], "add it to loss.needs"),
        ("ppo", ["batch.generations=1", "filter.groups=drop"], "but filter.groups = drop compares the rollouts"),
        ("grpo", ["batch.generations=1"], "but advantage.baseline = mean compares the rollouts"),
        ("reinforce++", ["batch.generations=1", "advantage.normalize_std=true"], "normalize_std = true compares"),
        ("grpo", ["critic.warmup_steps=2"], "critic.warmup_steps has no effect: advantage.baseline = mean"),
        ("ppo", ["critic.gae_lambda=1.5"], "critic.gae_lambda"),
    ],
)
def test_what_does_not_go_with_a_critic_or_without_one_is_named(algorithm: str, sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(*sets, algorithm=algorithm)
    assert said in f"{error.value.message} {error.value.hint}"


def test_reinforce_plus_plus_compares_over_the_batch_and_needs_no_group() -> None:
    resolved("batch.generations=1", algorithm="reinforce++")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["optimizer.lr=1e-6", "scheduler.decay=cosine", "scheduler.min_lr=1e-5"],
         "scheduler.min_lr = 1e-05 is above optimizer.lr = 1e-06"),
        (["optimizer.lr=1e-6", "scheduler.warmup_steps=2", "scheduler.init_lr=1e-5"],
         "scheduler.init_lr = 1e-05 is above optimizer.lr = 1e-06"),
        (["scheduler.decay=linear", "scheduler.warmup_steps=5", "scheduler.decay_steps=5"],
         "scheduler.decay_steps = 5 is not above scheduler.warmup_steps = 5"),
        (["critic.scheduler.decay=linear", "critic.scheduler.min_lr=1"],
         "critic.scheduler.min_lr = 1 is above critic.lr = 1e-05"),
    ],
)  # fmt: skip
def test_a_schedule_that_does_not_fall_from_the_learning_rate_is_refused(sets: list[str], said: str) -> None:
    """The rate would rise instead, or be `min_lr` from the end of the warm-up on."""
    with pytest.raises(ConfigError) as error:
        resolved(*sets)
    assert said in f"{error.value.message} {error.value.hint}"


def test_a_bound_of_a_schedule_that_is_not_used_may_be_any() -> None:
    resolved("scheduler.min_lr=1", "scheduler.init_lr=1", "scheduler.decay_steps=1")


@pytest.mark.parametrize(
    ("algorithm", "sets", "said"),
    [
        ("grpo", ["data.train_on=all"], "`train grpo` has no key `train_on` in the section `data`"),
        ("dpo", ["data.train_on=last"], "`train dpo` has no key `train_on` in the section `data`"),
        ("grpo", ["data.too_long=cut", "environment.name=wordle"], "too_long = cut does not go with an environment"),
        ("sft", ["preference.beta=0.3"], "`train sft` has no section `preference`"),
        ("sft", ["rollouts.mode=async"], "`train sft` has no section `rollouts`"),
        ("dpo", ["filter.groups=drop"], "`train dpo` has no section `filter`"),
        ("dpo", ["run.keep_best=1"], "run.keep_best = 1 needs run.keep_best_by = validation/loss"),
    ],
)
def test_what_does_not_go_with_texts_is_named(algorithm: str, sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(flags={"run.algorithm": algorithm}, sets=sets, environment={})


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["training.quantization.block=32"], "training.quantization.block has no effect"),
        (
            ["training.quantization.format=nvfp4", "training.lora.rank=8"],
            "training.lora.rank > 0 trains adapters",
        ),
        (["training.quantization.format=nvfp4", "vllm.quantization=fp8_per_block"], "round the weights again"),
    ],
)
def test_what_does_not_go_with_quantization_is_named(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(*sets, algorithm="grpo")
    assert said in f"{error.value.message} {error.value.hint}"
