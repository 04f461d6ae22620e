"""Rehearsals: what they make of a configuration, what they see in its data, and whole ones."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.config.parallel import ParallelSpec
from rlctl.data.prompts import open_prompts
from rlctl.data.row_types import PROMPTS, PairRows, RowType, TextRows
from rlctl.errors import InputError
from rlctl.methods.configuration import resolve
from rlctl.methods.kto import LabelRows
from rlctl.models.catalog import entries
from rlctl.models.constraints import fsdp_problems, policy_problems
from rlctl.models.families import FAMILIES as OWN_FAMILIES
from rlctl.models.families import facts_from_hf_config
from rlctl.planner.choice import GenerationChoice
from rlctl.preparation.job import Job, prepare_job
from rlctl.processes.child import call_in_child
from rlctl.rehearsal.row_checks import look_at_rows, look_at_run
from rlctl.rehearsal.shrink import MOST_PROCESSES, StandIns, small_engine, small_parallel, small_values, usual_letter
from rlctl.rehearsal.stand_ins import generated_rows, write_model
from rlctl.runs.directory import RunDirectory
from rlctl.settings.data import DataConfig
from rlctl.settings.other_models import TextTeacherConfig
from rlctl.settings.rewards import RewardConfig
from rlctl.tiny_models.text import FAMILIES, tiny_config, write_tiny_family
from support.commands import Run, rlctl
from support.engines import tiny_facts
from support.forked_workers import with_servers
from support.image_recipes import write_image_recipe
from support.plans import plan_of

RECIPES = Path(__file__).parents[1] / "recipes" / "nemo_rl"


@pytest.mark.parametrize("fsdp", [False, True])
def test_layouts_are_kept_as_far_as_four_processes_go(fsdp: bool) -> None:
    """Every layout that a model with experts may have becomes one that it may have, of the same kinds."""
    published = next(e.facts for e in entries() if e.facts and e.facts.family == "qwen3_moe")
    facts = facts_from_hf_config(tiny_config(published))
    sizes = itertools.product((1, 4), (1,) if fsdp else (1, 8), (1, 2), (1, 8), (1, 4, 16))
    for tp, pp, cp, ep, dp in sizes:
        asked = ParallelSpec(tp=tp, pp=pp, vpp=1, cp=cp, ep=ep, etp=tp if fsdp else 1, dp=max(dp, ep))
        small = small_parallel(asked, fsdp=fsdp)
        assert small.world_size <= MOST_PROCESSES
        assert (small.pp, small.cp, small.ep) == (min(2, pp), min(2, cp), min(2, ep)), asked
        assert max(small.tp, small.dp) <= 2
        assert (fsdp_problems if fsdp else policy_problems)(facts, small) == [], asked


def test_a_tiny_model_is_of_the_kind_of_the_published_one() -> None:
    """Attention, experts, norms and rotary embeddings are those of every model of the catalog whose family trains."""
    kinds = set()
    for entry in (entry for entry in entries() if entry.facts and entry.facts.family in FAMILIES):
        facts = entry.facts
        assert facts is not None
        tiny = facts_from_hf_config(tiny_config(facts))
        factors = ("embedding_scale", "residual_scale", "logits_scale") if facts.family == "granite" else ()
        for name in (*factors, "tied_embeddings", "qkv_bias", "qk_norm", "wide_qk_norm", "activation", "rope",
                     "window_rope", "norm_eps"):  # fmt: skip
            assert getattr(tiny, name) == getattr(facts, name), (entry.names[0], name)
        assert (tiny.kv_heads == tiny.heads) == (facts.kv_heads == facts.heads)
        assert (tiny.mla is None, tiny.sliding_window is None) == (facts.mla is None, facts.sliding_window is None)
        if facts.moe is not None and tiny.moe is not None:
            assert (tiny.moe.score, tiny.moe.groups > 1) == (facts.moe.score, facts.moe.groups > 1)
            assert bool(tiny.moe.shared_expert_intermediate) == bool(facts.moe.shared_expert_intermediate)
            assert bool(tiny.moe.dense_layers) == bool(facts.moe.dense_layers)
        assert (tiny.moe is None) == (facts.moe is None)
        kinds.add(facts.family)
    assert kinds == {*OWN_FAMILIES} - {"phi3"}  # the catalog has configurations of these


@pytest.mark.parametrize("rows", [PROMPTS, TextRows(), PairRows(), LabelRows()])
def test_generated_rows_have_the_columns_that_are_asked_for(tmp_path: Path, rows: RowType) -> None:
    data = DataConfig(name="somebody/data", prompt_field="problem", prompt_template="{problem} ({level})")
    generated_rows(tmp_path / "rows.jsonl", data, RewardConfig(), rows)
    source = open_prompts(data.model_copy(update={"name": str(tmp_path / "rows.jsonl")}), rows=rows)
    assert len(source) > 8
    assert source[3].fields["level"] == "level 3"
    assert source[3].answer


def test_plain_texts_are_generated_for_a_teacher_with_another_tokenizer(tmp_path: Path) -> None:
    generated_rows(tmp_path / "rows.jsonl", DataConfig(name="somebody/data"), RewardConfig(), TextRows(), plain=True)
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0]).keys() == {"text"}


def test_several_teachers_stay_several_in_a_rehearsal(tmp_path: Path) -> None:
    """One stand-in has the weights and tokenizers of all, and each has all rows."""
    model = write_tiny_family(tmp_path / "model", "llama")
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "one and two"}) + "\n")
    sources = [{"name": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")]
    listed = [{"model": str(model), "own_tokenizer": True, "sources": [sources[0]["name"]]},
              {"model": str(model), "weight": 3.0}]  # fmt: skip
    flags = {"model.name": str(model), "cluster.gpu": "cpu", "run.algorithm": "distill", "data.sources": sources,
             "teacher.models": listed, "teacher.mix": "divergences", "batch.prompts": 2, "run.steps": 1}  # fmt: skip
    job = prepare_job(resolve(flags=flags, environment={}))
    values = small_values(job.config, job.plan, StandIns(tmp_path, model, tmp_path / "teacher"))
    teacher, stand_in = resolve(flags=flags | values, environment={}).config.teacher_section, tmp_path / "teacher"
    assert isinstance(teacher, TextTeacherConfig)
    assert [(entry.model, entry.own_tokenizer, entry.weight, entry.sources) for entry in teacher.models] == [
        (str(stand_in), True, 1.0, ()), (str(stand_in), False, 3.0, ()),
    ]  # fmt: skip
    assert teacher.mix == "divergences"


@pytest.mark.parametrize(("cores", "colocated", "ranks"), [(2, False, 1), (3, False, 2), (2, True, 2)])
def test_separate_engines_leave_the_policy_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, colocated: bool, ranks: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    engine = small_engine(GenerationChoice(8, tp=4, pp=1, dp=1, ep=1, memory_fraction=0.5), colocated)
    assert (engine["tp"], engine["devices"]) == (ranks, None if colocated else ranks)


def test_completions_end_at_a_letter_of_a_tenth_of_the_tokens() -> None:
    assert usual_letter(["tt", "tx", "tv", "te", "x", "y", "z", "q", "w", "v"]) == "e"


REFUSING = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
)


def test_rows_that_fail_or_are_too_long_are_counted(tmp_path: Path) -> None:
    model = write_tiny_family(tmp_path / "model", "llama")
    asked = {"role": "user", "content": "How many?"}
    rows = [{"prompt": [asked], "answer": "1"}] * 5
    rows += [{"prompt": [{"role": "system", "content": "Be brief."}, asked], "answer": "1"}] * 2
    rows += [{"prompt": "x y " * 200, "answer": "1"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"model.name": str(model), "data.name": str(tmp_path / "rows.jsonl"), "cluster.gpu": "cpu",
             "reward.terms": [{"name": "exact-match"}], "batch.prompts": 1, "run.steps": 1, "data.shuffle": False,
             "model.chat_template": REFUSING, "generation.max_new_tokens": 64, "data.size": 5}  # fmt: skip
    job = prepare_job(resolve(flags=flags, environment={}))
    whole = resolve(flags=flags | {"data.size": None, "model.max_length": 96}, environment={}).config
    job.prompts.datasets = [replace(job.prompts.datasets[0], prompts=open_prompts(whole.data))]
    failing, long = look_at_rows(job, whole, job.facts, generated=())
    assert failing.startswith("2 of the first 8 rows of")
    assert "no system message" in failing
    assert long.startswith("1 of the first 8 rows of")
    assert "more than 96 tokens" in long


def test_stop_texts_are_looked_for_in_every_turn(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    run.metrics.write_text('{"step": 1, "grad_norm": 1.0}\n')
    turns = [{"role": "assistant", "content": "<action>up</action>"}, {"role": "tool", "content": "moved"}]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl").write_text(json.dumps({"messages": turns, "reward": 1.0}) + "\n")
    config = resolve(flags={"generation.stop": ["</action>", "</answer>"]}, environment={}).config
    prompts = SimpleNamespace(datasets=[SimpleNamespace(prompts=[], label="")])
    [told] = look_at_run(cast(Job, SimpleNamespace(prompts=prompts, rewards=None)), run, config, "")
    assert "'</answer>'" in told


def test_a_reward_that_fails_is_told_in_its_own_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Before any process starts, with the exit code of wrong input and one object of JSON."""
    (tmp_path / "mine.py").write_text("def reward(completion, answer, **row):\n    return row['hardness']\n")
    code, out, err = rlctl(
        capsys, "rehearse", "--preset", "1node", "--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--json", "--reward",
        f"{tmp_path / 'mine.py'}:reward",
    )  # fmt: skip
    found = json.loads(out)
    assert code == found["error"]["exit_code"] == 2, err
    assert "hardness" in found["error"]["message"]
    assert "return row['hardness']" in found["error"]["message"]
    assert "Qwen/Qwen3-8B" in found["stand_ins"]["model"]
    assert {change["key"]: change["now"] for change in found["shrunk"]}["batch.generations"] == 4
    assert "memory" in found["not_rehearsed"]


def test_a_reward_model_of_a_family_without_a_file_is_refused(tmp_path: Path) -> None:
    config = resolve(preset="laptop", environment={}).config
    plan = plan_of(config, tiny_facts(tied=False))
    with pytest.raises(
        InputError, match=r"A tiny reward model of GPT2LMHeadModel cannot be made .* no file of this family"
    ):
        write_model(tmp_path / "tiny", config.model, plan, replace(plan.facts, family="GPT2LMHeadModel"), scores=True)
    assert not (tmp_path / "tiny").exists()


@pytest.fixture
def rehearsing(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run_here`; rehearsed runs have sessions of their own, with workers from the servers of the tests."""

    def call(doing: str, function: Callable[[], Any], **limits: Any) -> Any:
        return call_in_child(doing, partial(with_servers, function), **limits)

    monkeypatch.setattr("rlctl.rehearsal.rehearsed_run.call_in_child", call)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    return run_here


def rehearsed(run_here: Run, *arguments: str) -> dict:
    done = run_here("rehearse", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = found["rehearsed"]
    assert parts["kill and resume"] == "killed after step 1, resumed, and finished step 2"
    assert parts["save"].startswith("the checkpoint of step 1")
    assert "transformers loads them as" in parts["export"]
    assert parts.keys() >= {"plan", "step 1", "step 2"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vlm_grpo_3B", "vlm_grpo_3B_megatron", "sft_vlm_3B"])
def test_a_recipe_with_images_is_rehearsed(run_here: Run, tmp_path: Path, name: str) -> None:
    """A tiny model of the same type, with its tower and processor, reads drawn images."""
    found = rehearsed(run_here, "--config", str(write_image_recipe(tmp_path, name)), "--gpu", "h100")
    assert "Qwen/Qwen2.5-VL-3B-Instruct" in found["stand_ins"]["model"]
    assert "Qwen2_5_VLForConditionalGeneration" in found["rehearsed"]["export"]
    assert "dtensor" in found["rehearsed"]["plan"].lower() or "fsdp" in found["rehearsed"]["plan"].lower()


@pytest.mark.slow
def test_a_preset_is_rehearsed_from_start_to_export(run_here: Run) -> None:
    found = rehearsed(run_here, "--preset", "laptop-sft")
    assert "validated: loss" in found["rehearsed"]["step 2"]
    assert "generated one of 512 tokens" in found["stand_ins"]["tokenizer"]
    assert {change["key"]: change["now"] for change in found["shrunk"]}["run.steps"] == 2
    assert found["notices"] == []


MODEL_OF_PRESET = {
    "laptop": None, "1gpu": "Qwen/Qwen3-1.7B", "1node": "meta-llama/Llama-3.1-8B-Instruct", "2nodes": "Qwen/Qwen3-32B",
    "8nodes": "Qwen/Qwen2.5-72B-Instruct", "long-context": "Qwen/Qwen3-8B", "moe-large": "Qwen/Qwen3-235B-A22B",
}  # fmt: skip
PAIRS = ["--data", "trl-lib/ultrafeedback_binarized"]
SMALL = ["--preset", "1node", "--model", "Qwen/Qwen3-1.7B"]
COVERING = {
    **{f"preset {name}": ["--preset", name, *(["--model", model] if model else [])]
       for name, model in MODEL_OF_PRESET.items()},
    "recipe of distillation": ["--config", str(RECIPES / "distillation_megatron.yaml")],
    "recipe of GRPO, Megatron TP2": ["--config", str(RECIPES / "llama_megatron.yaml")],
    "dapo, Moonlight, PP2 EP2": [*SMALL, "--model", "moonshotai/Moonlight-16B-A3B", "--algorithm", "dapo",
                                 "--set", "training.pp=2", "--set", "training.ep=4"],
    "ppo, TP2 CP2": [*SMALL, "--algorithm", "ppo", "--set", "training.tp=2", "--set", "training.cp=2"],
    "gspo, gpt-oss, VPP2": [*SMALL, "--model", "openai/gpt-oss-20b", "--algorithm", "gspo", "--set", "training.pp=2",
                            "--set", "training.vpp=2"],
    "grpo, ERNIE 4.5 without a file": [*SMALL, "--model", "baidu/ERNIE-4.5-21B-A3B-PT", "--nodes", "8"],
    "rloo, gemma, FSDP2": [*SMALL, "--model", "google/gemma-3-1b-it", "--algorithm", "rloo", "--backend", "dtensor"],
    "cispo, Mixtral, float16": [*SMALL, "--model", "mistralai/Mixtral-8x7B-Instruct-v0.1", "--algorithm", "cispo",
                                "--set", "model.dtype=float16", "--lora"],
    "sft, Mistral, LoRA": [*SMALL, "--model", "mistralai/Mistral-7B-Instruct-v0.3", "--method", "sft", "--lora",
                           "--data", "somebody/texts"],
    "dpo, TP2 PP2": [*SMALL, *PAIRS, "--method", "dpo", "--set", "training.tp=2",
                     "--set", "training.pp=2"],
    "rm, FSDP2 CP2": [*SMALL, *PAIRS, "--method", "rm", "--backend", "dtensor",
                      "--set", "training.cp=2"],
    "sapo, engines apart and ahead": [*SMALL, "--algorithm", "sapo", "--async", "--split"],
    "several turns": ["--preset", "laptop-tools"],
    "dppo, float8": [*SMALL, "--algorithm", "dppo", "--set", "megatron.fp8=e4m3", "--gpu", "h100"],
}  # fmt: skip
"""Each kind of run, algorithm, family, backend, number format and dimension at least once, and every preset."""
GUARDED = ("preset laptop",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.guard if name in GUARDED else ()) for name in COVERING
])  # fmt: skip
def test_the_covering_set_is_rehearsed(rehearsing: Run, name: str) -> None:
    arguments = COVERING[name]
    own = ["--gpu", "h100"] if "--gpu" not in arguments and "laptop" not in " ".join(arguments) else []
    rehearsed(rehearsing, *arguments, *own)
