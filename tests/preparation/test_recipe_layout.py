"""A NeMo-RL recipe's own layout is given up where no plan has it; what the user asks for is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.load import Resolved
from rlctl.errors import ConfigError
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.models.facts import ModelFacts
from rlctl.planner.result import Plan
from rlctl.preparation.located import Located
from rlctl.preparation.planned import droppable_layouts, plan_run
from rlctl.preparation.step_plan import step_plan
from support.catalog_models import model

RECIPE = """
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 16, max_num_steps: 10}
policy:
  model_name: MODEL
  precision: bfloat16
  max_total_sequence_length: 4096
  train_global_batch_size: 1024
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 4, moe_router_dtype: fp32}
  generation:
    max_new_tokens: 2048
    vllm_cfg: {tensor_parallel_size: 32}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""


def resolved(folder: Path, name: str, *overrides: str) -> Resolved:
    (folder / "recipe.yaml").write_text(RECIPE.replace("MODEL", name))
    return resolve(files=[folder / "recipe.yaml"], environment={}, overrides=overrides)


def checked(asked: Resolved, facts: ModelFacts, gpu: str) -> tuple[Resolved, Plan]:
    method = method_from_config(asked.config, tries_loss=False)
    planned = plan_run(Located(asked, method, facts, (), gpu))
    return planned.resolved, planned.early


def test_an_engine_that_is_larger_than_the_cluster_is_laid_out_by_the_planner(tmp_path: Path) -> None:
    found, plan = checked(resolved(tmp_path, "Qwen/Qwen3-30B-A3B"), model("Qwen/Qwen3-30B-A3B"), "h100")
    assert plan.generation is not None
    assert plan.generation.replica_gpus <= 8
    assert plan.training is not None
    assert plan.training.parallel.tp == 4  # a plan has it
    told = next(note for note in found.notes if "by itself" in note)
    assert told.startswith("runs differently: rlctl decides generation.tp by itself, because ")


def test_a_value_of_the_command_line_is_refused_as_before(tmp_path: Path) -> None:
    asked = resolved(tmp_path, "Qwen/Qwen3-30B-A3B", "policy.generation.vllm_cfg.tensor_parallel_size=32")
    with pytest.raises(ConfigError, match=r"generation\.tp = 32"):
        checked(asked, model("Qwen/Qwen3-30B-A3B"), "h100")


def test_a_family_that_megatron_does_not_train_goes_to_the_other_backend(tmp_path: Path) -> None:
    """Its fields of Megatron-Core are left out, which is said."""
    facts = model("nvidia/NVIDIA-Nemotron-Nano-9B-v2")
    found, plan = checked(resolved(tmp_path, "nvidia/NVIDIA-Nemotron-Nano-9B-v2"), facts, "h100")
    assert plan.backend == "dtensor"
    assert not found.config.megatron.passed
    assert any("training.backend" in note and "megatron.moe_router_dtype" in note for note in found.notes)


def test_a_configuration_without_a_recipe_is_planned_once_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> Plan:
        plans.append(arguments)
        return step_plan(*arguments, **options)

    monkeypatch.setattr("rlctl.preparation.planned.step_plan", counted)
    cluster = ["cluster.nodes=2", "cluster.gpus_per_node=8", "generation.tp=32"]
    asked = resolve(sets=["model.name=Qwen/Qwen3-30B-A3B", *cluster], environment={})
    with pytest.raises(ConfigError, match=r"generation\.tp = 32"):
        checked(asked, model("Qwen/Qwen3-30B-A3B"), "h100")
    assert len(plans) == 1


def test_the_layout_of_every_model_can_be_dropped(tmp_path: Path) -> None:
    asked = resolved(tmp_path, "Qwen/Qwen3-30B-A3B")
    asked = replace(asked, optional=frozenset({"generation.tp", "training.tp", "reward_model.tp", "run.steps"}))
    facts = model("Qwen/Qwen3-30B-A3B")
    engines, models, both = map(set, droppable_layouts(asked, facts))
    assert (engines, models) == ({"generation.tp"}, {"training.tp", "reward_model.tp"})
    assert both == engines | models
    assert droppable_layouts(replace(asked, optional=frozenset({"generation.tp"})), facts) == [["generation.tp"]]
