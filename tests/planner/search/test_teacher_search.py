"""The teacher of a plan: its layout, its memory next to the policy's, and its seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlctl.cli import run
from rlctl.errors import NoPlanError
from rlctl.planner.costs.parameters import count
from rlctl.planner.inputs.cluster import GIB, ClusterFacts, cpu_device, make_cluster
from rlctl.planner.inputs.constants import DEFAULTS
from rlctl.planner.inputs.request import Workload
from rlctl.planner.result import Plan
from rlctl.planner.views.explain import explain
from rlctl.planner.views.render import plan_json, plan_text
from rlctl.telemetry.phases import Phase
from support.catalog_models import make_plan, model

WORK = {"prompts": 64, "generations": 16, "old_logprobs": False}


def distilling(teacher: str | None, student: str = "Qwen3-1.7B", nodes: int = 1, **pins: object) -> Plan:
    facts = model(teacher) if teacher else None
    named = {key.replace("_", "."): value for key, value in pins.items()}
    return make_plan(model(student), make_cluster("h100", nodes), Workload(**WORK), named, teacher=facts)


def test_a_small_teacher_is_computed_data_parallel_and_costs_a_forward_pass() -> None:
    plan, alone = distilling("Qwen3-8B"), distilling(None)
    assert plan.teacher is not None
    assert plan.teacher.choice.parallel.name() == "DP8"
    assert alone.seconds[Phase.LOGPROBS] == 0
    assert plan.seconds[Phase.LOGPROBS] == pytest.approx(plan.teacher.seconds)
    # A forward pass is a third of a training pass, and the teacher has 4.5 times the parameters.
    ratio = plan.seconds[Phase.LOGPROBS] / alone.seconds[Phase.TRAINING]
    assert 0.5 < ratio < 3
    weights = plan.teacher.memory.parts["teacher weights"]
    assert weights == pytest.approx(2 * count(model("Qwen3-8B")).total, rel=1e-6)
    assert plan.host_memory - alone.host_memory == pytest.approx(8 * weights, rel=0.2)


def test_a_teacher_that_does_not_fit_a_device_is_split() -> None:
    plan = distilling("Qwen3-32B", "Qwen3-4B")
    assert plan.teacher is not None
    assert plan.teacher.choice.parallel.model_size > 1
    assert plan.memory["teacher"].total <= 0.95 * 80 * GIB
    assert plan.memory["teacher"].parts["teacher weights"] > 0
    asleep = [plan.memory[phase].parts["teacher asleep"] for phase in ("training", "logprobs", "refit")]
    assert asleep == [plan.teacher.asleep] * 3
    assert plan.config_values()["teacher.tp"] == plan.teacher.choice.parallel.tp


def test_a_teacher_is_laid_out_by_the_rules_of_the_policys_backend() -> None:
    plan = distilling("Qwen3-32B", training_backend="dtensor")
    assert plan.teacher is not None
    assert plan.teacher.choice.sharding == "full"
    assert plan.teacher.choice.parallel.pp == 1
    with pytest.raises(NoPlanError, match=r"teacher.*FSDP2 has no pipeline stages"):
        distilling("Qwen3-4B", training_backend="dtensor", teacher_pp=2)


def test_sizes_of_the_teacher_can_be_pinned() -> None:
    plan = distilling("Qwen3-32B", "Qwen3-4B", teacher_tp=2, teacher_pp=2)
    assert plan.teacher is not None
    assert plan.teacher.choice.parallel.name() == "TP2 PP2 DP2"
    rules = {reason.value: reason.rule for reason in plan.reasons}
    assert rules["teacher.tp=2"] == "Pinned: teacher.tp=2."
    assert "TP x PP x CP = 4" in rules["teacher.dp=2"]


def test_a_reward_model_costs_a_forward_pass_of_scoring_and_stays_where_rollouts_are_scored_meanwhile() -> None:
    def scored(staleness: int | None) -> Plan:
        work = Workload(**WORK, staleness=staleness)
        facts = model("Qwen3-8B")
        return make_plan(
            model("Qwen3-1.7B"),
            make_cluster("h100", 1),
            work,
            {"reward_model.tp": 2},
            teacher=facts,
            role="reward_model",
        )

    plan = scored(None)
    assert plan.teacher is not None
    assert plan.seconds[Phase.LOGPROBS] == 0
    assert plan.seconds[Phase.REWARD] > plan.teacher.seconds > 0
    assert plan.config_values()["reward_model.tp"] == 2
    assert "logits" not in " ".join(plan.memory["scores"].parts).replace("reward model logits", "")
    weights = plan.teacher.weights
    assert 0 < plan.memory["training"].parts["reward model asleep"] < weights
    assert scored(2).memory["training"].parts["reward model asleep"] > weights
    assert "scores      8.2B parameters, TP2 DP4" in plan_text(plan, "m")
    assert plan_json(plan)["reward_model"]["tp"] == 2


def test_the_most_likely_tokens_of_a_teacher_take_memory_on_both_sides() -> None:
    few, many = (
        make_plan(
            model("Qwen3-1.7B"),
            make_cluster("h100", 1),
            Workload(**WORK, teacher_top=top),
            {},
            teacher=model("Qwen3-8B"),
        )
        for top in (0, 64)
    )
    assert few.teacher is not None
    assert many.teacher is not None
    work = Workload(**WORK)
    tokens = work.tokens(0.6) / many.training.parallel.dp  # type: ignore[union-attr]
    assert many.memory["training"].parts["likely tokens"] > 12 * 64 * 0.8 * tokens
    assert many.teacher.memory.total > few.teacher.memory.total
    assert "likely tokens" not in few.memory["training"].parts


def test_a_teacher_that_fits_in_no_way_is_named() -> None:
    with pytest.raises(NoPlanError, match="the teacher needs"):
        distilling("DeepSeek-V3")


def test_on_a_cpu_the_teacher_has_a_process_of_its_own() -> None:
    cluster = ClusterFacts(cpu_device(2, 96 * GIB), 1, 0)
    plan = make_plan(model("Qwen3-0.6B"), cluster, Workload(4, 4, 256), teacher=model("Qwen3-0.6B"))
    assert plan.teacher is not None
    assert plan.teacher.choice.parallel.world_size == 1
    assert "teacher asleep" not in plan.memory["training"].parts


def test_the_plan_tells_of_its_teacher() -> None:
    plan = distilling("Qwen3-8B")
    assert "teacher     8.2B parameters, DP8, bf16, next to the policy" in plan_text(plan, "m")
    assert plan_json(plan)["teacher"]["dp"] == 8
    assert plan_json(distilling(None))["teacher"] is None
    assert "no gradients and no optimizer" in explain(plan)


def test_the_command_plans_a_teacher_and_refuses_sizes_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "Qwen/Qwen3-1.7B", "--gpu", "h100", "--json"]
    assert run([*arguments, "--algorithm", "distillation", "--teacher", "Qwen/Qwen3-8B"]) == 0
    assert json.loads(capsys.readouterr().out)["teacher"]["world_size"] == 8
    assert run([*arguments, "--set", "teacher.tp=2"]) == 2
    assert "teacher.tp = 2 has no effect: there is no teacher" in capsys.readouterr().err


def test_a_size_that_the_teacher_does_not_take_is_refused() -> None:
    with pytest.raises(NoPlanError, match=r"the teacher as TP7 .*heads"):
        distilling("Qwen3-8B", teacher_tp=7)
    with pytest.raises(NoPlanError, match="the teacher's sizes"):
        distilling("Qwen3-8B", teacher_tp=2, teacher_pp=9)


def test_teachers_of_other_architectures_stay_on_the_device_where_they_fit(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(gpus: int, *names: str) -> tuple[dict[str, Any], str]:
        listed = ", ".join(f"{{model: {name}}}" for name in names)
        arguments = ["plan", "--model", "Qwen/Qwen3-1.7B", "--gpu", "h100", "--algorithm", "distillation"]
        arguments += ["--backend", "megatron", "--set", f"teacher.models=[{listed}]", "--gpus-per-node", str(gpus)]
        assert run([*arguments, "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert run([*arguments, "--explain"]) == 0
        return made, " ".join(capsys.readouterr().out.split())

    def ranks(plan: dict[str, Any]) -> int:
        return plan["teacher"]["tp"] * plan["teacher"]["pp"]

    small, said = planned(8, "Qwen/Qwen3-8B", "Qwen/Qwen3-1.7B")
    both = 2 * sum(count(model(name)).total for name in ("Qwen3-8B", "Qwen3-1.7B")) / GIB
    assert small["memory_gib"]["teacher"]["teacher weights"] == pytest.approx(both / ranks(small), rel=0.05)
    assert "2 teachers of 2 architectures in turn, all in memory" in said
    assert "They fit next to each other and the policy." in said
    large, said = planned(2, "Qwen/Qwen3-32B", "Qwen/Qwen2.5-32B-Instruct")
    one = 2 * count(model("Qwen3-32B")).total / GIB / ranks(large)
    assert large["memory_gib"]["teacher"]["teacher weights"] == pytest.approx(one, rel=0.05)
    assert large["host_memory_gib"] > 2 * 1.9 * one
    assert "2 teachers of 2 architectures in turn, one in memory" in said
    assert "the others wait in host memory" in said


def test_a_policy_as_its_own_teacher_costs_its_weights_and_a_forward_pass(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*sets: str) -> dict[str, Any]:
        arguments = ["plan", "--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--json", "--algorithm", "distillation"]
        arguments += ["--backend", "megatron", "--set", "training.tp=2"]
        assert run([*arguments, *(part for key in sets for part in ("--set", key))]) == 0
        return json.loads(capsys.readouterr().out)

    own, larger = planned("teacher.policy=true"), planned("teacher.model=Qwen/Qwen3-8B")
    assert own["teacher"] is None
    weights = own["memory_gib"]["training"]["own teacher"]
    assert weights == pytest.approx(2 * count(model("Qwen3-8B")).total / 2 / GIB, rel=0.01)
    assert "own teacher" not in larger["memory_gib"]["training"]
    assert 0 < own["seconds"]["logprobs"] < 2 * larger["seconds"]["logprobs"]
    average = planned("teacher.policy=true", "teacher.update_every=1", "teacher.update_rate=0.1")
    more = average["host_memory_gib"] - own["host_memory_gib"]
    of_eight_ranks = 8 * 4 * count(model("Qwen3-8B")).total / 2 / GIB  # float32, TP2
    assert more == pytest.approx(of_eight_ranks, rel=0.02)


def test_teachers_of_the_same_rows_take_passes_and_reads_of_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """f for a forward pass, m for the moves between host and device, w for reading weights: one teacher takes f + m,
    two of the same rows 2 f + w + m, and two that are asked for each other's most likely tokens 4 f + 2 w + m."""

    def seconds(models: int, form: str) -> float:
        listed = ", ".join("{model: Qwen/Qwen3-8B}" for _ in range(models))
        arguments = ["plan", "--model", "Qwen/Qwen3-1.7B", "--gpu", "h100", "--json", "--algorithm", "distillation"]
        arguments += ["--set", f"teacher.models=[{listed}]", "--set", f"distillation.loss={form}"]
        assert run(arguments) == 0
        return json.loads(capsys.readouterr().out)["teacher"]["seconds"]

    one, two, again = seconds(1, "sampled"), seconds(2, "sampled"), seconds(2, "top-k")
    read = 2 * count(model("Qwen3-8B")).total / DEFAULTS.disk_bytes_per_s
    assert 3 * two - 2 * one - again == pytest.approx(read, rel=0.02)
    assert again > 2 * two - one > two > one
