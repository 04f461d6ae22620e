"""Runs that compute the same as one that nothing interrupts: killed or damaged and resumed, laid out otherwise,
from other files, on the other backend."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlctl import cli
from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron, megatron_to_hf
from rlctl.tiny_models.text import write_tiny_family
from support.runs import (
    ROLLOUTS,
    STEPS,
    command,
    layout,
    results,
    resume,
    same_run,
    started,
    wait_for,
    wait_for_step,
    wait_until_gone,
    worker_name,
)

pytestmark = pytest.mark.slow


def test_a_run_killed_without_warning_resumes_to_bitwise_the_same_metrics(
    uninterrupted, here, tiny_llama, tmp_path, monkeypatch
):
    """In its fourth step, as soon as the checkpoint of the third is complete: nothing but its writing is waited for."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    monkeypatch.setenv("HOLD_AFTER", str(3 * ROLLOUTS))
    with started(command(tiny_llama, run_dir, "--set", "run.checkpoint_every=1"), log) as process:
        wait_for_step(process, run_dir, 1, log)
        family = process.family()
        workers = [p for p in family if worker_name(p, run_dir)]
        tp = json.loads((run_dir / "manifest.json").read_text())["config"]["training.tp"]["value"]
        ranks = {f"policy-{rank}" for rank in range(tp)}
        assert {worker_name(p, run_dir) for p in workers} == {*ranks, "engine-0", "reward-0"}
        wait_for_step(process, run_dir, 3, log)
        wait_for(lambda: (run_dir / "checkpoints" / "step_3").exists(), process, log)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        wait_until_gone(workers, family)  # Ray's own agents take a minute more to notice
    monkeypatch.delenv("HOLD_AFTER")
    done = here(resume(run_dir))
    assert done.returncode == 0, done.stderr
    assert "resuming after step 3" in done.stderr
    assert results(run_dir) == results(uninterrupted[0])


@pytest.mark.parametrize(("engines", "tp"), [pytest.param(1, 1, marks=pytest.mark.guard), (2, 1), (1, 2)])
def test_an_engine_that_dies_is_replaced_and_the_run_computes_the_same(
    here, uninterrupted, tiny_llama, tmp_path, engines, tp
):
    """With tp 2 it is one of the two processes that an engine computes with that dies first."""
    run_dir, name = tmp_path / "run", f"engine-{engines - 1}"
    sizes = ("--set", f"generation.engines={engines}", "--set", f"generation.tp={tp}")
    more = ("--steps", "400", "--set", "run.checkpoint_every=0", *sizes)
    killed: list[psutil.Process] = []

    def kill_twice() -> None:
        for steps in (1, STEPS + 4):
            while not (run_dir / "metrics.jsonl").exists() or len(results(run_dir)) < steps:
                time.sleep(0.05)
            found = [p for p in psutil.process_iter() if worker_name(p, run_dir) == name and p not in killed]
            (found[0] if tp == 1 else next(p for p in found if "Worker" in " ".join(p.cmdline()))).kill()
            killed.extend(found)

    killer = threading.Thread(target=kill_twice, daemon=True)
    killer.start()
    done = here(command(tiny_llama, run_dir, *more, "--set", "cluster.engine_restarts=1"))
    assert done.returncode == 1, done.stderr
    text = done.stderr
    assert f"engine {engines - 1} is lost" in text
    assert f"{engines} engine(s) hold version" in text
    assert "2 engines were lost in this run, more than cluster.engine_restarts = 1" in text
    assert "died during" in text
    assert "(raylet)" not in text
    assert str(run_dir / "logs" / f"{name}.log") in text
    assert "Traceback" not in text
    same_run(results(run_dir)[:STEPS], results(uninterrupted[0]))


@pytest.mark.guard
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(here, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run_dir)
    shard = next((run_dir / "checkpoints" / "step_4" / "policy").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = here(resume(run_dir, "--steps", "5"))
    assert done.returncode == 0, done.stderr
    assert f"checkpoint step_4 is damaged: {shard.name} is not what was written" in done.stderr
    assert "resuming after step 2" in done.stderr
    assert results(run_dir)[:STEPS] == results(uninterrupted[0])


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(("dp=2",), id="dp2"),
        pytest.param(("tp=2",), id="tp2"),
        pytest.param(("pp=2",), id="pp2", marks=pytest.mark.guard),
        pytest.param(("cp=2", "recompute=selective"), id="cp2"),
        pytest.param(("tp=2", "pp=2"), id="tp2-pp2"),
    ],
)
def test_other_layouts_compute_the_same_run(here, uninterrupted, tiny_llama, tmp_path, sizes):
    run_dir = tmp_path / "run"
    done = here(command(tiny_llama, run_dir, *layout(*sizes)))
    assert done.returncode == 0, done.stderr
    same_run(results(uninterrupted[0]), results(run_dir))


def test_published_files_train_as_their_conversion_does(here, uninterrupted, tiny_llama, converted_models, tmp_path):
    """Every other run of these tests starts from a conversion, which the first of them made."""
    assert list(converted_models.glob(f"rlctl/{tiny_llama.name}-*-float32/release/metadata.json"))
    done = here(command(tiny_llama, tmp_path / "run", "--set", "model.convert=false"))
    assert done.returncode == 0, done.stderr
    assert "convert" not in done.stderr
    assert results(tmp_path / "run") == results(uninterrupted[0])


def test_a_megatron_checkpoint_trains_as_the_model_it_was_converted_from(here, uninterrupted, tiny_llama, tmp_path):
    converted, run_dir = tiny_llama.with_name("tiny-llama-in-megatron"), tmp_path / "run"
    hf_to_megatron(tiny_llama, converted)
    done = here(command(converted, run_dir))
    assert done.returncode == 0, done.stderr
    assert results(run_dir) == results(uninterrupted[0])
    megatron_to_hf(run_dir, tmp_path / "trained")  # what the run leaves is a model again
    assert (tmp_path / "trained" / "tokenizer.json").exists()


def test_a_run_resumed_under_other_layouts_computes_the_same_run(here, uninterrupted, tiny_llama, tmp_path):
    """Two steps on TP 2, one on PP 2, one on DP 2, against four of one process that nothing interrupted."""
    run_dir = tmp_path / "run"
    done = here(command(tiny_llama, run_dir, "--steps", "2", *layout("tp=2")))
    assert done.returncode == 0, done.stderr
    for steps, sizes, before, after in (
        (3, ("tp=1", "pp=2"), "TP2 DP1", "PP2 DP1"),
        (4, ("pp=1", "dp=2"), "PP2 DP1", "DP2"),
    ):
        done = here(resume(run_dir, "--steps", str(steps), *layout(*sizes)))
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stderr.split())
        assert f"training was laid out as {before} and continues as {after}" in said
        assert f"resuming after step {steps - 1}" in said
    same_run(results(uninterrupted[0]), results(run_dir))


def test_states_in_host_memory_train_the_same_run_and_either_goes_on_with_the_other(
    here, uninterrupted, tiny_llama, tmp_path
):
    run_dir = tmp_path / "run"
    done = here(command(tiny_llama, run_dir, "--steps", "2", *layout("optimizer_offload=true")))
    assert done.returncode == 0, done.stderr
    for steps, offload in ((3, "false"), (4, "true")):
        done = here(resume(run_dir, "--steps", str(steps), *layout(f"optimizer_offload={offload}")))
        assert done.returncode == 0, done.stderr
    same_run(results(uninterrupted[0]), results(run_dir))


def test_both_backends_run_the_same_steps(uninterrupted, here, tiny_llama: Path, tmp_path: Path) -> None:
    """Megatron on one rank; FSDP2 on two, whose run goes on with Megatron in the middle."""
    theirs, ours = uninterrupted[0], tmp_path / "dtensor"
    begun = command(tiny_llama, ours, "--backend", "dtensor", "--steps", str(STEPS // 2), "--set", "training.dp=2")
    done = here(begun)
    assert done.returncode == 0, done.stderr
    assert megatron_to_hf(ours, tmp_path / "exported").verified
    more = ("--steps", str(STEPS), "--backend", "megatron", "--set", "training.dp=1")
    done = here(resume(ours, *more))
    assert done.returncode == 0, done.stderr
    assert [line.keys() for line in results(ours)] == [line.keys() for line in results(theirs)]
    half = STEPS // 2
    same_run(results(theirs)[:half], results(ours)[:half])
    # The weights move to the other backend, and the optimizer's moments do not: the next step begins as it would have.
    for name in ("reward_mean", "response_tokens_mean", "entropy"):
        assert results(ours)[half][name] == pytest.approx(results(theirs)[half][name], rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def experts_on_one_rank(placement, tiny_qwen3_moe, tmp_path_factory) -> list[dict]:
    """Metrics of two steps that train a mixture of experts on one rank."""
    run_dir = tmp_path_factory.mktemp("experts") / "run"
    assert cli.run(command(tiny_qwen3_moe, run_dir, "--steps", "2")[1:]) == 0
    return results(run_dir)


def test_experts_on_two_ranks_compute_the_same_run_as_on_one(here, experts_on_one_rank, tiny_qwen3_moe, tmp_path):
    done = here(command(tiny_qwen3_moe, tmp_path / "run", "--steps", "2", *layout("dp=2", "ep=2")))
    assert done.returncode == 0, done.stderr
    same_run(experts_on_one_rank, results(tmp_path / "run"))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(("tp=2", "ep=2"), id="tp2-ep2"),
        pytest.param(("pp=2",), id="pp2"),
        pytest.param(("dp=2", "ep=2"), id="dp2-ep2"),
    ],
)
def test_engines_that_divide_experts_or_layers_compute_the_same_run(
    here, experts_on_one_rank, tiny_qwen3_moe, tmp_path, sizes
):
    more = [word for size in sizes for word in ("--set", f"generation.{size}")]
    done = here(command(tiny_qwen3_moe, tmp_path / "run", "--steps", "2", *more))
    assert done.returncode == 0, done.stderr
    same_run(experts_on_one_rank, results(tmp_path / "run"))


def test_an_engine_on_two_ranks_computes_the_same_run_and_generates(here, uninterrupted, tiny_llama, tmp_path):
    run_dir, two = tmp_path / "run", ("--set", "generation.tp=2")
    done = here(command(tiny_llama, run_dir, *two))
    assert done.returncode == 0, done.stderr
    same_run(results(uninterrupted[0]), results(run_dir))
    rlctl, answers = str(Path(sys.executable).with_name("rlctl")), []
    for more in ((), two):
        asked = [rlctl, "generate", "--run-dir", str(run_dir), "--prompt", "2 + 3", "--max-new-tokens", "8", "--json"]
        done = here([*asked, "--set", "generation.tp=1", *more])
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["completions"][0])
    alone, together = answers
    assert alone["token_ids"] == together["token_ids"]
    assert alone["logprobs"] == pytest.approx(together["logprobs"], abs=1e-5)


def test_router_replay_leaves_a_run_as_it_is_where_both_sides_choose_alike(
    here, experts_on_one_rank, tiny_qwen3_moe, tmp_path
):
    done = here(command(tiny_qwen3_moe, tmp_path / "run", "--steps", "2", "--set", "training.router_replay=true"))
    assert done.returncode == 0, done.stderr
    same_run(experts_on_one_rank, results(tmp_path / "run"))


def test_uneven_stages_and_mini_batches_with_a_reference_compute_the_same_run(here, tmp_path):
    """Three layers on two stages, two optimizer steps a batch, the last stage's log-probs under two sets of weights."""
    model = write_tiny_family(tmp_path / "three-layers", "llama-tied", num_hidden_layers=3)
    more = ("--steps", "2", "--set", "batch.optimizer_steps=2", "--set", "loss.kl_coefficient=0.01")
    runs = {}
    for name, sizes in {"one": (), "even": ("pp=2",), "named": ("pp=2", "first_stage_layers=1")}.items():
        done = here(command(model, tmp_path / name, *more, *layout(*sizes)))
        assert done.returncode == 0, done.stderr
        runs[name] = results(tmp_path / name)
    same_run(runs["one"], runs["even"])
    same_run(runs["one"], runs["named"])
