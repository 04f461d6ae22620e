"""NeMo-RL's recipes of DTensor, and of quantization, train as they are written, with tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.tiny_models.text import write_tiny_family
from rlctl.training.agreement import LIMITS
from support.runs import REWARD, TASK, results

RECIPES = Path(__file__).parents[1] / "recipes" / "nemo_rl"


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` merged into `values`."""
    both = {key for key in changes if isinstance(values.get(key), dict) and isinstance(changes[key], dict)}
    return values | changes | {key: changed(values[key], changes[key]) for key in both}


TINY = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4},
    "policy": {
        "train_global_batch_size": 8, "max_total_sequence_length": 128,
        "generation": {"max_new_tokens": 6, "stop_token_ids": None, "vllm_cfg": {"tensor_parallel_size": 1}},
    },
    "checkpointing": {"enabled": False},
}  # fmt: skip
SAVING, OFFLOADING = {"activation_checkpointing": True}, {"cpu_offload": True}
HALVED, IN_CONTEXT = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}
ADAPTED = {"lora_cfg": {"enabled": True, "dim": 8, "alpha": 32, "match_all_linear": True, "exclude_modules": []}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys", "layout"),
    [  # every pair of a layout, rows (packed, of like length, one rollout), recomputation and offloaded states
        ("grpo_math_1B", {}, "DP1"),
        ("grpo_math_1B", SAVING, "DP1, full recompute"),
        ("grpo_math_1B", HALVED | OFFLOADING, "TP2 DP1, optimizer in host memory"),
        ("grpo_math_8B", IN_CONTEXT | SAVING, "CP2 DP1, full recompute"),
        ("grpo-gemma3-1b-it-1n8g-fsdp2tp1", {}, "DP1"),
        ("grpo-llama3.2-1b-instruct-1n8g-fsdp2tp1.v3", IN_CONTEXT | OFFLOADING, "CP2 DP1, optimizer in host memory"),
        ("grpo-qwen2.5-7b-instruct-4n8g-fsdp2tp4sp.v3", HALVED, "TP2 DP1"),
        ("grpo-qwen2.5-32b-32n8g-fsdp2tp8sp-actckpt.v3", HALVED, "TP2 DP1, full recompute"),
        ("grpo-deepscaler-1.5b-8K", IN_CONTEXT, "CP2 DP1"),
        ("grpo-deepscaler-1.5b-8K", OFFLOADING, "DP1, optimizer in host memory"),
        ("grpo_math_1B", ADAPTED, "DP1"),
        ("grpo-deepscaler-1.5b-16K", {}, "TP2 DP1, full recompute, optimizer in host memory"),
    ],
)  # fmt: skip
def test_a_recipe_of_dtensor_trains_as_it_is_written(
    here, tmp_path: Path, name: str, keys: dict[str, Any], layout: str
) -> None:
    """But for machine, model and sizes: two steps in bfloat16 with a reference policy."""
    asked = changed(yaml.safe_load((RECIPES / "dtensor_recipes.yaml").read_text())[name], TINY)
    asked = changed(asked, {"policy": {"dtensor_cfg": keys}})
    named = asked["policy"].pop("model_name", "Qwen/Qwen2.5-1.5B").lower()
    family = next((family for family in ("gemma3", "llama") if family[:5] in named), "qwen2")
    model = write_tiny_family(tmp_path / "model", family)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(asked | {"defaults": str(RECIPES / "base.yaml"), "cluster": None}))
    (tmp_path / "reward.py").write_text(REWARD)
    done = here([
        "rlctl", "train", "grpo", "--config", str(recipe), *TASK, "--model", str(model), "--gpu", "cpu", "--steps", "2",
        "--set", "training.dp=1", "--run-dir", str(tmp_path / "run"), "--reward", f"{tmp_path / 'reward.py'}:even",
    ])  # fmt: skip
    assert done.returncode == 0, done.stderr
    adapted = ", LoRA rank 8" if keys == ADAPTED else ""
    assert f"plan: training {layout}, FSDP{adapted};" in " ".join(done.stderr.split())
    lines = results(tmp_path / "run")
    assert len(lines) == 2
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(0 < line["logprob_diff"]["mean"] < LIMITS["bfloat16"][0] for line in lines)


@pytest.mark.slow
def test_a_recipe_of_quantization_trains_as_it_is_written(here, tiny_llama, tmp_path: Path) -> None:
    """But for machine, model and sizes. What engines hold is compared at each refit, and their log-probs with those of
    the policy; its weights are rounded, and the reference's are not."""
    name = "W4A16_NVFP4_CFG"
    policy = {"quant_cfg": name, "generation": {"quant_cfg": name, "real_quant": True}}
    asked = changed(TINY, {"policy": policy, "loss_fn": {"reference_policy_kl_penalty": 0.05}})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(asked | {"defaults": str(RECIPES / "llama_megatron.yaml"), "cluster": None}))
    (tmp_path / "reward.py").write_text(REWARD)
    done = here([
        "rlctl", "train", "grpo", "--config", str(recipe), *TASK, "--model", str(tiny_llama), "--gpu", "cpu",
        "--steps", "3", "--set", "refit.verify_every=1", "--set", "batch.optimizer_steps=1",
        "--run-dir", str(tmp_path / "run"), "--reward", f"{tmp_path / 'reward.py'}:even",
    ])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plan: training TP2" in " ".join(done.stderr.split())
    lines = results(tmp_path / "run")
    assert len(lines) == 3
    assert all(0 < line["logprob_diff"]["mean"] < LIMITS["bfloat16"][0] for line in lines)
    assert lines[0]["kl"] > 1e-5
