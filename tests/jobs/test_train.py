"""`rlctl train grpo` as a user runs it: the installed command, real engines, a tiny model; killed and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlctl.cluster.session_files import family_shared_memory
from rlctl.methods.rl.grpo import Grpo
from rlctl.report.run_comparison import compare_memory, compare_run
from rlctl.telemetry.metrics import read_metrics
from rlctl.telemetry.phases import Phase
from rlctl.training.agreement import LIMITS
from rlctl.training.step_metrics import NAMES_OF_A_STEP
from support.processes import beyond_loopback, family_of, is_alive
from support.runs import (
    LIMIT_S,
    REWARD,
    STEPS,
    TASK,
    command,
    cut_after,
    in_terminal,
    layout,
    results,
    resume,
    same_run,
    started,
    wait_for_step,
    wait_until_gone,
    worker_name,
)

FAILING_REWARD = """
def even(completion, answer, prompt, scored=[], **row):
    scored.append(completion)
    if len(scored) > 2 * 8:
        return {}["a step too far"]
    return float(len(completion) % 2 == 0)
"""


def test_the_policy_gets_its_weights_while_the_engine_starts_and_both_are_there_before_the_refit(uninterrupted):
    run_dir, _ = uninterrupted
    said = (run_dir / "logs" / "driver.log").read_text()
    phases = ["starting Ray", "starting processes", "starting policy", "loading weights", "starting engines",
              "starting reward scorer", "first refit", "stopping the processes"]  # fmt: skip
    places = [said.index(f" {phase}") for phase in phases]
    assert places == sorted(places)


def test_a_run_leaves_every_metric_and_its_directory_complete(uninterrupted):
    run_dir, done = uninterrupted
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert {
            "reward_mean", "reward_std", "response_tokens_mean", "entropy", "clip_fraction", "grad_norm", "lr",
            "tokens_per_s", "padding_fraction", "accuracy",
        } <= set(line)  # fmt: skip
        assert set(line) <= NAMES_OF_A_STEP | {metric.name.split("/")[0] for metric in Grpo.metrics}
        assert set(line["seconds"]) == {phase.value for phase in Phase} | {"total"}
        parts = [value for name, value in line["seconds"].items() if name != "total"]
        assert sum(parts) == pytest.approx(line["seconds"]["total"], abs=1e-6)
        difference = line["logprob_diff"]
        assert 0 < difference["mean"] <= difference["max"] < 1e-4
        assert difference["mean"] < 1e-5
        assert 1 < difference["prob_error"] < 1 + 2e-5
        assert 0 < difference["kl"] < 1e-9
        assert line["weight_version"] == line["step"] - 1
        assert line["grad_norm"] > 0
    summary = json.loads(done.stdout)
    assert summary["steps"] == STEPS
    assert summary["interrupted"] is False
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step_2", "step_4"]
    assert "<svg" in (run_dir / "report.html").read_text()
    assert list((run_dir / "tensorboard").iterdir())
    rollouts = [json.loads(line) for line in (run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert {"prompt", "completion", "reward"} <= set(rollouts[0])
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["config"]["run.steps"] == {"value": STEPS, "origin": "flag --steps"}
    assert manifest["config"]["training.tp"]["origin"] == "planner"


def test_the_plan_is_held_against_what_the_run_took(uninterrupted):
    """By phase and by process; a tiny model's processes are mostly libraries, whose size the planner knows."""
    rows = {row.name: row for row in compare_memory(uninterrupted[0])}
    assert rows.keys() == {"policy", "engine"}
    assert 0.7 < rows["policy"].ratio < 1.3
    assert 0.3 < rows["engine"].ratio < 3
    assert {row.name for row in compare_run(uninterrupted[0])} > {"generation", "training", "total"}


def test_the_policy_trains_on_what_it_was_rewarded_for(uninterrupted):
    """The weights change: the same prompts would be answered with other probabilities after each step."""
    lines = results(uninterrupted[0])
    assert len({line["entropy"] for line in lines}) == STEPS
    assert all(line["groups_without_signal"] < 1 for line in lines)


@pytest.mark.slow
def test_a_run_that_replaces_groups_resumes_to_bitwise_the_same_metrics(here, tiny_llama, tmp_path):
    """More prompts were used than its steps have, and the next ones are taken behind all of them."""
    more = ("--algorithm", "dapo", "--generations", "2", "--set", "reward.overlong_buffer=0.5")
    whole = tmp_path / "whole"
    done = here(command(tiny_llama, whole, *more))
    assert done.returncode == 0, done.stderr
    cut = cut_after(2, whole, tmp_path / "cut")
    done = here(resume(cut))
    assert done.returncode == 0, done.stderr
    assert results(cut) == results(whole)
    lines = read_metrics(cut / "metrics.jsonl")
    assert max(line["sampling_rounds"] for line in lines) > 1
    assert any(line["dropped_groups"] for line in lines)
    assert all(line["skipped_rollouts"] == 0 for line in lines)
    assert all(-1 <= line["length_penalty"] < 0 for line in lines)
    config = json.loads((cut / "manifest.json").read_text())["config"]
    assert config["filter.groups"] == {"value": "replace", "origin": "algorithm dapo"}
    assert config["reward.overlong_buffer"] == {"value": 0.5, "origin": "--set"}


@pytest.mark.slow
def test_a_closed_terminal_saves_and_a_dead_worker_is_named_with_how_to_resume(tiny_llama, tmp_path):
    """The terminal takes its output with it, and hangs up on every process that the run has started."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("--steps", "300", "--set", "run.checkpoint_every=0")
    with in_terminal(command(tiny_llama, run_dir, *more), log) as (process, terminal):
        wait_for_step(process, run_dir, 1, log)
        family = process.family()
        terminal.close()
        assert process.wait(LIMIT_S) == 130
        wait_until_gone(family)
    steps = len(read_metrics(run_dir / "metrics.jsonl"))
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step_{steps}"]
    said = (run_dir / "logs" / "driver.log").read_text()
    assert "The terminal was closed (SIGHUP)." in said
    assert "stderr cannot be written" in said
    assert "Traceback" not in said
    (decoded,) = re.findall(r"log-probs are within (\S+) of the policy's", said)
    assert 0 < float(decoded) < 1e-5

    with started(resume(run_dir, "--set", "cluster.engine_restarts=0"), log) as process:
        wait_for_step(process, run_dir, steps + 1, log)
        engine = next(p for p in process.family() if worker_name(p, run_dir) == "engine-0")
        family = process.family()
        engine.kill()
        assert process.wait(LIMIT_S) == 1
        wait_until_gone(family)
    text = log.read_text()
    assert "engine rank 0" in text
    assert "died during `generate`" in text or "died during" in text
    assert f"rlctl train grpo --resume --run-dir {run_dir}" in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("way", ["timeout", "group", "warning"])
def test_a_run_that_a_program_stops_saves_its_step_and_leaves_nothing(tiny_llama, tmp_path, way):
    """Signalled as by `timeout`, which signals the run and then its group, as a group, and as Slurm warns."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = command(tiny_llama, run_dir, "--steps", "300", "--set", "run.checkpoint_every=0")
    before = ["timeout", "-s", "TERM", str(LIMIT_S)] if way == "timeout" else ["setsid"]
    with started([*before, *arguments], log) as process:
        wait_for_step(process, run_dir, 1, log)
        family = process.family()
        if way == "group":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM if way == "timeout" else signal.SIGUSR1)
        assert process.wait(LIMIT_S) == 130, log.read_text()
        wait_until_gone(family)
    steps, said = len(read_metrics(run_dir / "metrics.jsonl")), log.read_text()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step_{steps}"]
    by = "SIGUSR1" if way == "warning" else "SIGTERM"
    assert f"Stopping after this step ({by}), or in 300 s without it (run.stop_within_s)." in said
    assert re.search(rf"stopped by {by} after step {steps} in \d+ s, saved", said)
    assert f"rlctl train grpo --resume --run-dir {run_dir}" in said
    assert "died" not in said


@pytest.mark.slow
@pytest.mark.parametrize("end", ["normal", "interrupt", "engine killed"])
def test_a_run_opens_nothing_to_others_and_leaves_nothing(tiny_llama, tmp_path, monkeypatch, end):
    """With an engine on two processes, which talk through shared memory and sockets of vLLM's."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # the path of a socket must be short
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    more = ("--steps", "2" if end == "normal" else "300", "--set", "generation.tp=2", "--set", "refit.mover=collective")
    arguments = command(tiny_llama, run_dir, *more, "--set", "cluster.engine_restarts=0")
    with started(arguments, log) as process:
        wait_for_step(process, run_dir, 1, log)
        family = process.family()
        shared = family_shared_memory(process)
        assert shared
        assert beyond_loopback(family_of(process)) == []
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        if end == "engine killed":
            next(p for p in family if worker_name(p, run_dir) == "engine-0").kill()
        assert process.wait(LIMIT_S) == {"normal": 0, "interrupt": 130, "engine killed": 1}[end], log.read_text()
        assert not [one for one in family if is_alive(one)]
    assert [path for path in shared if path.exists()] == []
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    shutil.rmtree(temporary)
    assert bool(list((run_dir / "logs").glob("ray/raylet.*"))) == (end == "engine killed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "said"),
    [("gcs_server", "Ray's control process (gcs_server) died."), ("raylet", "The raylet of this node died.")],
)
def test_a_run_whose_ray_dies_ends_in_its_own_words(tiny_llama, tmp_path, killed, said):
    """Without Ray's control process the step is finished and saved; without the raylet there are no workers left."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(command(tiny_llama, run_dir, "--steps", "300"), log) as process:
        wait_for_step(process, run_dir, 3, log)
        family = process.family()
        next(p for p in family if p.name() == killed).kill()
        assert process.wait(LIMIT_S) == 1, log.read_text()
        assert not [one for one in family if is_alive(one)]
    text, steps = log.read_text(), len(read_metrics(run_dir / "metrics.jsonl"))
    assert said in text
    assert "died during" not in text
    assert "Traceback" not in text
    saved = steps if killed == "gcs_server" else steps - steps % 2
    assert f"Resume from step {saved} with: rlctl train grpo --resume --run-dir {run_dir}" in text
    assert (run_dir / "report.html").exists()


@pytest.mark.slow
@pytest.mark.guard
def test_a_run_interrupted_while_it_starts_leaves_nothing(tiny_llama, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(command(tiny_llama, run_dir), log) as process:
        deadline = time.monotonic() + LIMIT_S
        while not (run_dir / "manifest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130, log.read_text()
    assert not run_dir.exists()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_nemo_rl_recipe_trains_as_it_is_written(here, tiny_llama, tmp_path):
    """But for machine and model: TP 2 with sequence parallelism, recomputation, bfloat16 and an engine on two ranks."""
    recipe = Path(__file__).parents[1] / "recipes" / "nemo_rl" / "llama_megatron.yaml"
    (tmp_path / "reward.py").write_text(REWARD)
    done = here([
        str(Path(sys.executable).with_name("rlctl")), "train", "grpo", "--config", str(recipe), *TASK,
        "--model", str(tiny_llama), "--gpu", "cpu", "--steps", "2", "--prompts", "2", "--generations", "4",
        "--max-new-tokens", "6", "--set", "generation.stop_token_ids=[]",
        "--run-dir", str(tmp_path / "run"), "--reward", f"{tmp_path / 'reward.py'}:even",
    ])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plan: training TP2 DP1, full recompute; generation 1 engine TP2" in " ".join(done.stderr.split())
    lines = results(tmp_path / "run")
    assert len(lines) == 2
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(0 < line["logprob_diff"]["mean"] < LIMITS["bfloat16"][0] for line in lines)  # the recipe's precision


@pytest.mark.slow
def test_adapters_train_refit_resume_generate_and_are_exported(here, tiny_llama, tmp_path):
    """The engine holds merged weights: its log-probs agree with the adapters' at every step, also after a resume, and
    so does a model directory that they are exported to."""
    lora = ("--set", "training.lora.rank=4", "--set", "loss.kl_coefficient=0.05")
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    done = here(command(tiny_llama, whole, *lora, *layout("tp=1")))
    assert done.returncode == 0, done.stderr
    lines = results(whole)
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-9)  # B is 0: the policy is the reference
    assert lines[-1]["kl"] > 1e-6
    assert all(0 < line["logprob_diff"]["max"] < 1e-4 for line in lines)

    assert here(command(tiny_llama, run_dir, *lora, *layout("tp=2"), "--steps", "2")).returncode == 0
    size = sum(path.stat().st_size for path in (run_dir / "checkpoints" / "step_2" / "policy").iterdir())
    assert size < 0.5 * (tiny_llama / "model.safetensors").stat().st_size  # with Adam's two states: adapters alone
    done = here(resume(run_dir, "--steps", str(STEPS)))
    assert done.returncode == 0, done.stderr
    same_run(lines, results(run_dir))
    rlctl = str(Path(sys.executable).with_name("rlctl"))
    done = here([rlctl, "convert", "megatron-to-hf", str(run_dir), str(tmp_path / "merged"), "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verified"]
    shown = []
    for model in (["--run-dir", str(run_dir)], ["--model", str(tmp_path / "merged"), "--gpu", "cpu"]):
        asked = ["--prompt", "2 + 3", "--max-new-tokens", "4", "--temperature", "0", "--json"]
        done = here([rlctl, "generate", *model, *asked])
        assert done.returncode == 0, done.stderr
        shown.append(json.loads(done.stdout)["completions"][0])
    assert shown[0]["token_ids"] == shown[1]["token_ids"]
    assert shown[0]["logprobs"] == pytest.approx(shown[1]["logprobs"], abs=1e-4)


@pytest.mark.slow
def test_adapters_of_routers_are_sent_alone(here, tiny_qwen3_moe, tmp_path):
    """The engine adds them to the base with the trainer's bits: the run equals one that sends merged weights."""
    keys = ("backend=dtensor", "lora.rank=4", "lora.targets=[attention, mlp.gate]")
    sets = [word for key in (*(f"training.{key}" for key in keys), "refit.verify_every=1") for word in ("--set", key)]
    lines = {}
    for way in ("delta", "merged"):
        done = here(
            command(tiny_qwen3_moe, tmp_path / way, *sets, "--set", f"training.lora.refit={way}", "--steps", "2")
        )
        assert done.returncode == 0, done.stderr
        lines[way] = results(tmp_path / way)
    same_run(lines["merged"], lines["delta"])
    assert all(line["refit_verified"] > 0 for line in lines["delta"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_adapters_of_routed_experts_are_sent_merged_and_resumed(here, tiny_qwen3_moe, tmp_path, backend):
    keys = ("lora.rank=4", "lora.targets=all-linear", f"backend={backend}")
    sets = [word for key in (*(f"training.{key}" for key in keys), "refit.verify_every=1") for word in ("--set", key)]
    for directory, steps in (("whole", 3), ("run", 2)):
        done = here(command(tiny_qwen3_moe, tmp_path / directory, *sets, "--steps", str(steps)))
        assert done.returncode == 0, done.stderr
    done = here(resume(tmp_path / "run", "--steps", "3"))
    assert done.returncode == 0, done.stderr
    lines = results(tmp_path / "whole")
    assert results(tmp_path / "run") == lines
    assert all(line["grad_norm"] > 0 and line["refit_verified"] > 0 for line in lines)
    assert all(0 < line["logprob_diff"]["max"] < 1e-4 for line in lines)


@pytest.mark.slow
def test_modules_trained_whole_are_sent_and_resumed(here, tiny_llama, tmp_path):
    """The engine has the new embedding and head at each step, and the reference has the base's."""
    keys = ("backend=dtensor", "lora.rank=4", "lora.modules_to_save=[embed_tokens, lm_head]", "lora.targets=[q_proj]")
    sets = [word for key in (*(f"training.{key}" for key in keys), "loss.kl_coefficient=0.05", "optimizer.lr=1e-3")
            for word in ("--set", key)]  # fmt: skip
    whole, run = tmp_path / "whole", tmp_path / "run"
    for directory, steps in ((whole, 3), (run, 2)):
        done = here(command(tiny_llama, directory, *sets, "--steps", str(steps)))
        assert done.returncode == 0, done.stderr
    done = here(resume(run, "--steps", "3"))
    assert done.returncode == 0, done.stderr
    lines = results(whole)
    same_run(lines, results(run))
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert lines[-1]["kl"] > 1e-6
    assert all(0 < line["logprob_diff"]["max"] < 1e-4 for line in lines)


SOME_LAYERS = (
    "training.lora.targets=[q_proj, v_proj, o_proj, up_proj, down_proj]",
    "training.lora.rank_pattern={o_proj: 2}",
    "training.lora.alpha_pattern={v_proj: 9}",
    "training.lora.rslora=true",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "more"),
    [
        ("delta", ("training.tp=2", "generation.tp=2", *SOME_LAYERS)),
        ("delta", ("training.backend=dtensor", "rollouts.mode=async", "refit.in_flight=keep")),
        ("adapters", ("training.backend=dtensor", "training.tp=2", *SOME_LAYERS)),
        ("adapters", ("generation.tp=2", "rollouts.mode=async")),
    ],
)
def test_adapters_alone_train_as_merged_weights_do(here, tiny_llama, tmp_path, way, more):
    """The base goes to the engine once. In `delta` the engine's sums have the trainer's bits, so that a run equals one
    that sends merged weights; a resume has adapters that count from its first refit on."""
    sets = [word for value in ("training.lora.rank=4", "refit.verify_every=1", *more) for word in ("--set", value)]
    chosen = ("--set", f"training.lora.refit={way}")
    done = here(command(tiny_llama, tmp_path / "run", *sets, *chosen, "--steps", "2"))
    assert done.returncode == 0, done.stderr
    done = here(resume(tmp_path / "run", "--steps", "4"))
    assert done.returncode == 0, done.stderr
    lines = results(tmp_path / "run")
    current = [line for line in lines if line["staleness"]["max"] == 0]
    assert len(current) >= 2
    assert all(0 < line["logprob_diff"]["max"] < 1e-4 for line in current)
    assert all(line["grad_norm"] > 0 and line["refit_verified"] > 0 for line in lines)
    if "rollouts.mode=async" in more:
        return  # which tokens are sampled before a refit depends on time
    done = here(command(tiny_llama, tmp_path / "merged", *sets, "--set", "training.lora.refit=merged"))
    assert done.returncode == 0, done.stderr
    merged = results(tmp_path / "merged")
    if way == "delta":
        same_run(merged, lines)
    for ours, theirs in zip(lines, merged, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets", [("backend=megatron", "tp=1"), ("backend=dtensor", "tp=2")], ids=["megatron", "dtensor"]
)
def test_adapters_alone_in_bfloat16_have_the_bits_of_merged_weights(here, tiny_llama, tmp_path, sets):
    """The engine rounds base + scale B A to bfloat16 as the trainer does: each refit is compared, and the
    log-probs are those of a run that sends merged weights."""
    keys = (
        "model.dtype=bfloat16",
        "training.lora.rank=4",
        "refit.verify_every=1",
        *(f"training.{key}" for key in sets),
    )
    lines = {}
    for way in ("delta", "merged"):
        chosen = [word for key in (*keys, f"training.lora.refit={way}") for word in ("--set", key)]
        done = here(command(tiny_llama, tmp_path / way, *chosen, "--steps", "3"))
        assert done.returncode == 0, done.stderr
        lines[way] = results(tmp_path / way)
    assert all(line["refit_verified"] > 0 for line in lines["delta"])
    assert all(0 < line["logprob_diff"]["mean"] < LIMITS["bfloat16"][0] for line in lines["delta"])
    assert lines["delta"][-1]["refit_bytes"] < lines["merged"][-1]["refit_bytes"] / 4
    for name in ("logprob_diff", "loss", "grad_norm", "reward_mean", "entropy"):
        assert [line[name] for line in lines["delta"]] == [line[name] for line in lines["merged"]], name


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets",
    [
        ("training.backend=megatron", "training.tp=2"),
        ("training.backend=dtensor", "generation.tp=2"),
        ("training.backend=dtensor", "training.tp=2"),
    ],
    ids=["megatron-tp2", "dtensor-engine-tp2", "dtensor-tp2"],
)
def test_adapters_are_added_in_bfloat16_as_engines_add_them(here, tiny_llama, tmp_path, sets):
    """Log-probs of engine and trainer differ as little as with merged weights. A resume has the same bits."""
    keys = (
        "model.dtype=bfloat16",
        "training.lora.rank=4",
        "refit.verify_every=1",
        *sets,
    )
    lines = {}
    for way in ("adapters", "merged"):
        chosen = [word for key in (*keys, f"training.lora.refit={way}") for word in ("--set", key)]
        done = here(command(tiny_llama, tmp_path / way, *chosen, "--steps", "3"))
        assert done.returncode == 0, done.stderr
        lines[way] = results(tmp_path / way)
    ours, merged = (max(line["logprob_diff"]["mean"] for line in lines[way]) for way in ("adapters", "merged"))
    assert 0 < ours < LIMITS["bfloat16"][0]
    assert ours < 1.5 * merged
    assert all(line["refit_verified"] > 0 for line in lines["adapters"])
    assert lines["adapters"][-1]["refit_bytes"] < lines["merged"][-1]["refit_bytes"] / 4
    chosen = [word for key in (*keys, "training.lora.refit=adapters") for word in ("--set", key)]
    assert here(command(tiny_llama, tmp_path / "resumed", *chosen, "--steps", "2")).returncode == 0
    assert here(resume(tmp_path / "resumed", "--steps", "3")).returncode == 0
    for name in ("logprob_diff", "loss", "grad_norm", "reward_mean", "entropy"):
        assert [line[name] for line in results(tmp_path / "resumed")] == [line[name] for line in lines["adapters"]], (
            name
        )


@pytest.mark.slow
def test_a_run_whose_engines_disagree_too_much_stops_and_shows_it(here, tiny_llama, tmp_path):
    """The limit is set below what rounding makes of it, so that a right pair of engines exceeds it."""
    run_dir = tmp_path / "run"
    done = here(command(tiny_llama, run_dir, "--set", "checks.logprob_diff_error=1e-9"))
    assert done.returncode == 1, done.stderr
    assert "checks.logprob_diff_error" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(results(run_dir)) == 1
    assert not list((run_dir / "checkpoints").glob("*"))
    assert "probability error" in (run_dir / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.guard
def test_a_reward_that_fails_leaves_the_save_of_the_step_before_and_says_so(here, tiny_llama, tmp_path):
    """The save is under way when the run ends; nothing has waited for it."""
    failing = tmp_path / "failing.py"
    failing.write_text(FAILING_REWARD)
    more = ("--set", "run.checkpoint_every=2", "--reward", f"{failing}:even")
    done = here(command(tiny_llama, tmp_path / "run", *more))
    assert done.returncode == 1, done.stderr
    assert "KeyError" in done.stderr
    assert "Resume from step 2 with: rlctl train grpo --resume" in done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_2"]
    assert "KeyError" in (tmp_path / "run" / "logs" / "driver.log").read_text()


@pytest.mark.long
def test_a_reward_function_that_raises_ends_the_run_in_its_own_words(here, tiny_llama, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def half(completion, answer, prompt, **row):\n    return 1 / 0\n")
    done = here(command(tiny_llama, tmp_path / "run", "--reward", f"{broken}:half"))
    assert done.returncode == 2, done.stderr
    assert "division by zero" in done.stderr
    assert "Traceback" not in done.stderr


def test_llama_8b_on_a_node_needs_no_further_flag_to_be_planned(here):
    rlctl = str(Path(sys.executable).with_name("rlctl"))
    done = here(
        [rlctl, "train", "grpo", "--model", "meta-llama/Llama-3.1-8B", "--preset", "1node", "--dry-run", "--json"],
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["plan"]["fits"] is True
    assert shown["config"]["data.name"]["origin"] == "preset 1node"


@pytest.mark.slow
def test_a_run_of_several_sources_is_resumed_to_bitwise_the_same(here, tiny_llama, tmp_path):
    """By an order that follows from pass rates, cut inside its second epoch; each source with a reward of its own."""
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"q": "{i} + 1 =", "answer": "{i + 1}"}}\n' for i in range(3)))
    (tmp_path / "words.jsonl").write_text("".join(f'{{"prompt": "Say {word}"}}\n' for word in "abc"))
    (tmp_path / "mine.py").write_text(
        "def even(completions, **_):\n    return [float(len(text) % 2 == 0) for text in completions]\n"
    )
    (tmp_path / "mix.yaml").write_text(
        "data:\n  sources:\n"
        f"  - {{name: {tmp_path}/sums.jsonl, prompt_field: q, prompt_template: 'Add: {{q}}', order: as-written}}\n"
        f"  - {{name: {tmp_path}/words.jsonl, weight: 2, order: pass-rate,\n"
        f"     reward: {{terms: [{{name: '{tmp_path}/mine.py:even'}}]}}}}\n"
        "reward: {terms: [{name: exact-match}]}\n"
    )

    done = here([
        "rlctl", "train", "grpo", "--model", str(tiny_llama), "--config", str(tmp_path / "mix.yaml"),
        "--gpu", "cpu", "--steps", "5", "--prompts", "3", "--generations", "2", "--max-new-tokens", "6",
        "--lr", "1e-3", "--run-dir", str(tmp_path / "whole"), "--set", "training.dp=1", "--set", "training.threads=1",
        "--set", "generation.threads=1", "--set", "run.checkpoint_every=2",
    ])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert here(resume(cut_after(2, tmp_path / "whole", tmp_path / "cut"))).returncode == 0
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    names = {str(tmp_path / "sums.jsonl"), str(tmp_path / "words.jsonl")}
    assert all(line["reward_by_source"].keys() == names for line in results(tmp_path / "cut"))
