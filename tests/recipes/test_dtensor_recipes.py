"""NeMo-RL's recipes that train with DTensor: imported and planned, and what becomes of each key of `dtensor_cfg`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.config.load import Resolved
from rlctl.config.recipes import Import
from rlctl.methods.configuration import resolve
from rlctl.models.catalog import lookup
from rlctl.recipes.nemo_rl.recipe import import_recipe
from support.plans import plan_of, workload_of
from support.yaml_files import read_yaml

RECIPES = Path(__file__).parent / "nemo_rl"
PUBLISHED: dict[str, dict[str, Any]] = read_yaml(RECIPES / "dtensor_recipes.yaml")


def written(tmp_path: Path, values: dict[str, Any]) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"defaults": str(RECIPES / "base.yaml")} | values))
    return path


def dtensor(tmp_path: Path, **keys: Any) -> Import:
    return import_recipe(written(tmp_path, {"policy": {"dtensor_cfg": keys}}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_of_dtensor_is_imported_and_planned(name: str, tmp_path: Path) -> None:
    asked = PUBLISHED[name]
    result = import_recipe(written(tmp_path, asked))
    assert not result.of("not known")
    resolved: Resolved = resolve(files=[result.path], environment={})
    runs = not name.startswith("dpo")  # its base's data have no pairs
    assert bool(resolved.refusals) != runs, resolved.refusals
    config, policy = resolved.config, asked.get("policy", {})
    facts = lookup(config.model.name or "")
    assert facts is not None
    workload = replace(workload_of(config, facts), rollouts=name.startswith("grpo"))
    plan = plan_of(config, facts, assume="h100", workload=workload)
    assert plan.training is not None
    cluster, wanted = asked.get("cluster", {}), policy.get("dtensor_cfg", {})
    parallel, world = plan.training.parallel, cluster.get("num_nodes", 1) * cluster.get("gpus_per_node", 1)
    tp = wanted.get("tensor_parallel_size", 1)
    assert (plan.backend, parallel.tp, parallel.cp, parallel.pp, parallel.dp) == ("dtensor", tp, 1, 1, world // tp)
    assert plan.training.recompute == ("full" if wanted.get("activation_checkpointing") else "none")
    assert plan.training.optimizer_offload is wanted.get("cpu_offload", False)
    pair = 2 if name.startswith("dpo") else 1  # both texts of a pair are in one micro-batch
    assert plan.workload.max_length == pair * policy.get("max_total_sequence_length", 512)
    packed = policy.get("sequence_packing", {}).get("enabled", True)
    dynamic = policy.get("dynamic_batching", {}).get("enabled", False)
    assert (plan.workload.packing, plan.workload.dynamic) == (packed, dynamic)
    assert plan.runnable


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"tensor_parallel_size": 2, "context_parallel_size": 4}, {"training.tp": 2, "training.cp": 4}),
        ({"expert_parallel_size": 8}, {"training.ep": 8}),
        ({"dp_replicate_size": 2}, {"training.replicate": 2}),
        ({"activation_checkpointing": True}, {"training.recompute": "full"}),
        ({"cpu_offload": True}, {"training.optimizer_offload": True}),
        ({"lora_cfg": {"enabled": True, "dim": 8, "alpha": 32, "match_all_linear": True, "exclude_modules": []}},
         {"training.lora.rank": 8, "training.lora.alpha": 32}),
        ({"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
         {"training.env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ],
)  # fmt: skip
def test_keys_of_dtensor_are_rlctls(tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    result = dtensor(tmp_path, **keys)
    assert {key: result.values[key] for key in expected} == expected
    assert not result.unsupported


@pytest.mark.parametrize(
    ("keys", "status", "said"),
    [
        ({"_v2": False}, "not applicable", "both of NeMo-RL's workers"),
        ({"sequence_parallel": False}, "not applicable", "share tokens out"),
        ({"dp_replicate_size": 1}, "not applicable", "stays at its default"),
        ({"custom_parallel_plan": "my.plan"}, "changed", "rlctl's own plan"),
        ({"cpu_offload": True}, "changed", "no weights"),
        ({"clear_cache_every_n_steps": 50}, "not applicable", "results are the same"),
        ({"automodel_kwargs": {"force_hf": True}}, "not applicable", "results are the same"),
        ({"automodel_kwargs": {"backend": {"attn": "te"}}}, "not applicable", "results are the same"),
        ({"automodel_kwargs": {"backend": {"gate_precision": "float64"}}}, "changed", "float32"),
        ({"moe_parallelizer": {"ignore_router_for_ac": True}}, "not applicable", "results are the same"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "match_all_linear": False}}, "not yet", "no layers"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "target_modules": ["q_proj"]}}, "mapped", "targets: ['q_proj']"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "dropout": 0.1}}, "not yet", "dropout"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "dropout": 0.1, "dropout_position": "post"}}, "changed",
         "input of A"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "dropout": 0.1, "dropout_position": "pre"}}, "not applicable",
         "what rlctl does"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "dropout_position": "post"}}, "not applicable", "dropout is off"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "lora_A_init": "xavier"}}, "changed", "Kaiming"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "restore_from": "sft/policy"}}, "changed",
         "training.lora.adapter: sft/policy; the reference policy is the base"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "restore_from": None}}, "not applicable", "stays at its default"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "use_dora": True}}, "not yet", "no DoRA"),
        ({"lora_cfg": {"enabled": True, "dim": 8, "target_module": ["q_proj"]}}, "not known", "target_modules"),
        ({"tensor_paralel_size": 2}, "not known", "tensor_parallel_size"),
    ],
)  # fmt: skip
def test_what_of_dtensor_is_no_key_of_rlctls_says_why(
    tmp_path: Path, keys: dict[str, Any], status: str, said: str
) -> None:
    entries = [one for one in dtensor(tmp_path, **keys).entries if one.key.startswith("policy.dtensor_cfg.")]
    assert [one for one in entries if one.status == status and said in one.note], entries
