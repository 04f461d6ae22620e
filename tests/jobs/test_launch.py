"""What ends a run before any process is started: one sentence, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import run
from rlctl.cluster.ray_session import BesideSession
from rlctl.config.files import write_json
from rlctl.errors import ConfigError, InputError
from rlctl.jobs.resume import continued, resumed_job
from rlctl.jobs.shown_run import about
from rlctl.jobs.train import unused_place
from rlctl.methods.configuration import resolve
from rlctl.preparation.job import Job, prepare_job
from rlctl.preparation.manifest import manifest_of
from rlctl.runs.directory import MANIFEST, RunDirectory
from rlctl.telemetry.metrics import read_metrics

BROKEN = """
def raises(completion, **row):
    return 1 / 0

def words(completion, **row):
    return "good"
"""


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def files(tmp_path) -> Path:
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "questions.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "noconfig").mkdir()
    return tmp_path


def train(model: Path, *more: str) -> list[str]:
    data = [] if "--data" in more else ["--data", "sums.jsonl"]
    return [
        "train", "grpo", "--model", str(model), "--gpu", "cpu", *data, "--reward", "exact-match",
        "--steps", "4", "--prompts", "2", "--generations", "2", "--max-new-tokens", "4", "--run-dir", "run", *more,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--data", "absent.jsonl"], 2, "absent.jsonl does not exist"),
        (["--data", "questions.jsonl"], 2, "questions.jsonl, line 1: no field 'prompt'"),
        (["--data", "empty.jsonl"], 2, "empty.jsonl has no rows"),
        (["--reward", "broken.py:raises"], 2, "division by zero"),
        (["--reward", "broken.py:words"], 2, "broken.py:words"),
        (["--reward", "broken.py:absent"], 2, "no function 'absent'"),
        (["--model", "noconfig"], 2, "noconfig has no config.json"),
        (["--max-length", "4"], 2, "--max-new-tokens 4 leaves no room"),
        (["--set", "generation.stop_token_ids=[128009]"], 2, "stop_token_ids names 128009, and the model has 512"),
        (["--max-length", "5"], 2, "tokens, and 4 leave room for a completion"),
        (["--lr", "0"], 2, "`optimizer.lr` = 0.0 (flag --lr)"),
        (["--preset", "1gpu"], 3, "cluster.gpus_per_node = 1 asks for GPUs, and this machine has none"),
        (["--gpu", "h100", "--gpus-per-node", "8"], 3, "this machine has none"),
        (["--run-dir", "sums.jsonl"], 2, "sums.jsonl is a file"),
        (["--run-dir", "noconfig/../sums.jsonl/run"], 2, "--run-dir"),
        (["--resume"], 2, "run holds no run"),
        (["--set", "run.stepz=3"], 2, "run.steps"),
        (["--data", "reasoning-gym:chain_sun"], 2, "chain_sum"),
        (["--model", "./no-such-model"], 2, "no-such-model"),
        (["--set", "generation.temperature=0"], 2, "generation.temperature"),
        (["--max-length", "100000"], 2, "--max-length"),
        (["--set", "generation.top_k=1"], 2, "generation.top_k = 1 cannot be used in training"),
        (["--set", "generation.min_p=1"], 2, "generation.min_p = 1 cannot be used in training"),
        (
            ["--set", "generation.min_p=0.1", "--set", "vllm.speculative_config={method: ngram}"],
            2,
            "generation.min_p = 0.1 does not go with vllm.speculative_config",
        ),
        (["--set", "validation.every=2"], 2, "`validation` has no prompts"),
        (["--set", "validation.holdout=8"], 2, "validation.holdout = 8 leaves nothing to train on: sums.jsonl has 8"),
        (["--set", "run.keep_best_by=validation/accuracy"], 2, "needs validations: set validation.every"),
        (["--set", "validation.every=2", "--set", "validation.reward=[{name: tusk}]"], 2, "Unknown reward 'tusk'"),
        (["--set", "refit.directory=there"], 2, "refit.directory = there has no effect"),
        (["--set", "refit.mover=disk", "--set", "refit.directory=sums.jsonl"], 2, "sums.jsonl cannot be written to"),
    ],
)
def test_a_mistake_is_a_sentence(files, tiny_llama, capsys, monkeypatch, more, code, said):
    monkeypatch.setattr("rlctl.planner.from_config.local_gpus", list)
    monkeypatch.setattr("rlctl.preparation.planned.local_gpus", list)
    if "--preset" in more:
        more = [*more, "--gpu", "auto"]
    assert run(train(tiny_llama, *more)) == code
    shown = capsys.readouterr()
    assert said in shown.err.replace("\n", " ")
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not (files / "run").exists()


@pytest.mark.parametrize(
    ("more", "begun"),
    [
        (["--data", "absent.jsonl"], True),
        (["--reward", "broken.py:raises"], True),
        (["--max-length", "100000"], False),
        (["--model", "noconfig"], False),
        (["--gpu", "h100", "--gpus-per-node", "8"], False),
        (["--dry-run"], False),
    ],
)
def test_ray_begins_to_start_once_the_plan_is_checked_and_before_data_is_read(
    files, tiny_llama, monkeypatch, more, begun
):
    """What Ray has begun to start ends with the error, and a dry run starts nothing. The processes that import vLLM and
    torch begin with it, the one that takes longest first."""
    asked: list[Any] = []
    monkeypatch.setattr("rlctl.planner.from_config.local_gpus", list)
    monkeypatch.setattr("rlctl.preparation.planned.local_gpus", list)
    monkeypatch.setattr(
        BesideSession,
        "begin",
        lambda self, address, *, gpus, hosts: asked.append((address, gpus, [one.name for one in hosts])),
    )
    assert run(train(tiny_llama, *more)) == (0 if more == ["--dry-run"] else 3 if "--gpu" in more else 2)
    assert asked == [(None, 0, ["engine", "policy"])] * begun


def test_a_long_prompt_of_a_late_step_is_named_before_the_first_one(files, tiny_llama, capsys, monkeypatch):
    monkeypatch.setattr("rlctl.rollouts.prompt_order.SCANNED_PROMPTS", 2)
    prompts = ["1 + 1 ="] * 7 + ["1 + " * 100]
    rows = [json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts]
    (files / "late.jsonl").write_text("".join(rows))
    late = ["--data", "late.jsonl", "--set", "data.shuffle=false", "--max-length", "80", "--dry-run"]
    assert run(train(tiny_llama, *late)) == 2
    assert "late.jsonl, line 8: the prompt has" in capsys.readouterr().err
    assert run(train(tiny_llama, *late, "--steps", "3")) == 0, "its step is not reached"


def test_a_dry_run_of_several_sources_shows_each_with_its_share_and_reward(files, tiny_llama, capsys):
    (files / "words.jsonl").write_text('{"question": "Say b.", "answer": "b"}\n')
    mix = "data.sources=[{name: sums.jsonl, weight: 3}, {name: words.jsonl, prompt_field: question, order: difficulty}]"
    assert run(train(tiny_llama, "--set", mix, "--dry-run")) == 2
    assert "give one of them" not in capsys.readouterr().err  # --set is stronger than --data
    reward = "reward: {extract: full, terms: [{name: math-verify}]}"
    mix = f"data.sources=[{{name: sums.jsonl, weight: 3}}, {{name: words.jsonl, prompt_field: question, {reward}}}]"
    assert run(train(tiny_llama, "--set", mix, "--dry-run", "--json")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["notes"][1:9] == [
        "data: sums.jsonl (8 prompts, 75.0% of the prompts)",
        "data: words.jsonl (1 prompt, 25.0% of the prompts)",
        "sums.jsonl: reward: exact-match",
        "sums.jsonl: answer: the last number of the completion (the reference answers are numbers)",
        "sums.jsonl: accuracy: exact-match",
        "words.jsonl: reward: math-verify",
        "words.jsonl: answer: the whole completion without thoughts (reward.extract)",
        "words.jsonl: accuracy: math-verify",
    ]
    assert shown["config"]["data.sources"]["value"][0] == {"name": "sums.jsonl", "weight": 3.0}
    assert shown["config"]["data.name"]["value"] is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", "data.sources=[{name: sums.jsonl, reward: {terms: [{name: no-such}]}}]"], "no-such"),
        (["--reward", "exact-mach"], "exact-mach"),
        (["--reward", "absent.py:score"], "absent.py"),
        (["--tokenizer", "./absent"], "--tokenizer ./absent"),
        (["--chat-template", "absent.jinja"], "absent.jinja"),
        (["--set", "refit.mover=disk"], "refit.directory"),
        (["--set", "training.tp=3"], "training.tp"),
        (["--run-dir", "sums.jsonl"], "sums.jsonl is a file"),
    ],
)
def test_names_and_plan_are_looked_at_before_data_and_tokenizer(files, tiny_llama, capsys, monkeypatch, more, said):
    monkeypatch.setattr("rlctl.rollouts.prompt_order.PromptStream.open", lambda *_: pytest.fail("the data was opened"))
    assert run(train(tiny_llama, *more)) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_shows_the_first_prompt_and_what_the_rewards_give(files, tiny_llama, capsys):
    template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    dry = train(tiny_llama, "--chat-template", template, "--dry-run")
    assert run([*dry, "--completion", "perhaps 1", "--json"]) == 0
    look = json.loads(capsys.readouterr().out)["first_look"]
    [prompt] = look["prompts"]
    assert prompt["text"] == "<s>0 + 1 =</s>"
    assert prompt["tokens"] in look["prompt_tokens"]
    assert [(trial["completion"], trial["scores"], trial["reward"]) for trial in prompt["trials"]] == [
        ("1", {"exact-match": 1.0}, 1.0), ("perhaps 1", {"exact-match": 1.0}, 1.0),
    ]  # fmt: skip
    assert run([*dry, "--completion", "2"]) == 0
    shown = capsys.readouterr().out
    for line in ("    | <s>0 + 1 =</s>", "1 for '1' (exact-match 1)", "0 for '2' (exact-match 0)", "longest"):
        assert line in shown
    assert run(train(tiny_llama, "--completion", "2")) == 2
    assert "--completion applies to --dry-run" in capsys.readouterr().err


CATALOG = ["train", "grpo", "--preset", "1node", "--model", "Qwen/Qwen3-8B", "--dry-run"]
"""A model that is not on this machine, and whose plan is made from the catalog."""


def test_a_dry_run_without_the_model_says_first_what_it_did_not_check(files, capsys):
    mine = ["--data", "sums.jsonl", "--reward", "exact-match", "--completion", "5"]
    assert run([*CATALOG, *mine]) == 0
    shown = capsys.readouterr().out
    first = " ".join(shown.split())  # the terminal's width decides where the line breaks
    assert first.startswith("not checked: tokenizer, chat template and lengths of prompts: model Qwen/Qwen3-8B: no")
    assert "data: sums.jsonl (8 rows)" in shown
    assert "reward        1 for '1' (exact-match 1)\n  reward        0 for '5' (exact-match 0)" in shown
    assert run([*CATALOG, "--data", "some/where", "--reward", "exact-match", "--json"]) == 0
    unchecked = json.loads(capsys.readouterr().out)["unchecked"]
    fetched = "the dataset is not on this machine; `hf download some/where --repo-type dataset` fetches it"
    assert unchecked[1] == f"rows of some/where and their rewards: {fetched}"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--data", "nowhere.jsonl", "--reward", "exact-match"], "nowhere.jsonl does not exist"),
        (["--data", "empty.jsonl", "--reward", "exact-match"], "empty.jsonl has no rows"),
        (["--data", "questions.jsonl", "--reward", "exact-match"], "prompt"),
        (["--data", "sums.jsonl", "--reward", "exact-match", "--val-data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--set", "data.sources=[{name: some/where}, {name: nowhere.jsonl}]", "--reward", "exact-match"], "nowhere"),
        (["--data", "sums.jsonl", "--reward", "broken.py:raises"], "raised ZeroDivisionError"),
        (["--data", "sums.jsonl", "--reward", "broken.py:words"], "'good'"),
        (["--data", "sums.jsonl", "--reward", "ifeval"], "instruction_id_list"),
        (["--data", "some/where", "--reward", "broken.py:other"], "has no function 'other'"),
        (["--data", "some/where", "--reward", "task"], "some/where is none"),
        (["--data", "some/where"], "No reward"),
        (["--env", "broken.py:other"], "has no class 'other'"),
        (["--env", "broken.py:words"], "is not a class"),
    ],
)
def test_a_dry_run_without_the_model_refuses_what_needs_no_hub(files, capsys, more, said):
    assert run([*CATALOG, *more]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err


def test_a_dry_run_imports_no_engine_and_starts_only_the_process_that_makes_questions(files, tiny_llama):
    looks = [
        *train(tiny_llama, "--data", "reasoning-gym:chain_sum", "--dry-run"),
        "--set",
        "reward.terms=[{name: task}]",
    ]
    program = (
        "import subprocess, sys\nstarts = subprocess.Popen\nclass Popen(starts):  # the server of questions alone\n"
        "    def __init__(self, args, **more):\n"
        "        assert 'rlctl.processes.child' in str(args) and args[-1] == 'serve', args\n"
        "        super().__init__(args, **more)\nsubprocess.Popen = Popen\nfrom rlctl import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit as end:\n    print(end.code)\n"
        "print({'torch', 'vllm', 'ray', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, *looks], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-2:] == ["0", "set()"], done.stderr
    assert done.stderr == ""


def test_a_dry_run_looks_at_the_place_of_the_run(files, tiny_llama, capsys):
    assert run(train(tiny_llama, "--run-dir", "sums.jsonl", "--dry-run")) == 2
    assert "sums.jsonl is a file" in capsys.readouterr().err


def test_a_dry_resume_shows_what_the_run_goes_on_with(files, tiny_llama, capsys):
    begun(train(tiny_llama), files / "run")
    again = ["train", "grpo", "--resume", "--run-dir", "run", "--dry-run", "--json"]
    assert run([*again, "--steps", "9"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert [config[key]["value"] for key in ("run.steps", "batch.prompts", "data.name")] == [9, 2, "sums.jsonl"]
    assert run([*again, "--prompts", "4"]) == 2
    assert "`batch.prompts` = 4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.guard
def test_a_run_that_fails_to_start_can_be_started_again_at_the_same_place(files, tiny_llama):
    rlctl = str(Path(sys.executable).with_name("rlctl"))  # a process of its own: this one may be part of a Ray session
    for _ in range(2):
        command = [rlctl, *train(tiny_llama, "--ray-address", "127.0.0.1:1")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 3, done.stderr
        assert "--ray-address 127.0.0.1:1" in done.stderr
        assert not (files / "run").exists()


def test_runs_without_a_name_that_begin_at_the_same_time_each_have_a_directory(tmp_path):
    assert [unused_place(tmp_path / "runs" / "sums").name for _ in range(3)] == ["sums", "sums-2", "sums-3"]
    (tmp_path / "file").touch()
    assert unused_place(tmp_path / "file" / "sums") == tmp_path / "file" / "sums"  # which nobody can make


def begun(arguments: list[str], path: Path, data: str | list[str] = "sums.jsonl", **more: Any) -> None:
    """The directory of a run that was begun with `arguments` and finished two steps; `more`: further flags."""
    from rlctl.commands import options

    flags = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    own = {
        "model": flags["--model"], "gpu": "cpu", "data": data, "reward": ["exact-match"], "steps": 4, "prompts": 2,
        "generations": 2, "max_new_tokens": 4, "run_dir": flags["--run-dir"],
    }  # fmt: skip
    resolved = options.resolve_config(**own | more)
    directory = RunDirectory(path)
    directory.create()
    directory.write_manifest(manifest_of(prepare_job(resolved)))
    checkpoint = directory.new_checkpoint(2)
    checkpoint.begin()
    checkpoint.commit({"version": 2, "source": {}, "metrics": {}, "files": {"shard": "0"}})
    directory.release()


def go_on(path: Path, *, allow_changes: bool = False, **flags: Any) -> tuple[Job, list[str]]:
    """What a run would be resumed with, and what was said about it."""
    from rlctl.commands import options

    said: list[str] = []
    resolved = options.resolve_config(run_dir=str(path), resume=True, **flags)
    begun: list[Any] = []
    job = resumed_job(
        RunDirectory(path), resolved, said.append, allow_changes=allow_changes, starts=lambda *one: begun.append(one)
    )
    assert len(begun) == 1
    return job, said


def test_a_resume_takes_what_may_change_and_refuses_what_may_not(files, tiny_llama, capsys):
    begun(train(tiny_llama), files / "run")
    job, _ = go_on(files / "run", steps=6)
    assert (job.config.run.steps, job.config.batch.prompts, job.config.generation.max_new_tokens) == (6, 2, 4)
    validating = [*train(tiny_llama), "--resume", "--set", "validation.every=2", "--dry-run"]
    assert run([*validating, "--set", "validation.data.name=questions.jsonl", "--set",
                "validation.data.prompt_field=question"]) == 0  # fmt: skip
    assert "validation: every 2 steps: 1 prompt of questions.jsonl" in capsys.readouterr().out
    resume = ["train", "grpo", "--resume", "--run-dir", "run"]
    for more, said in (
        (["--lr", "0.5"], "`optimizer.lr` = 0.5 (flag --lr), but the run was begun with 1e-06"),
        (["--seed", "7"], "`run.seed` = 7"),
        (["--prompts", "4"], "`batch.prompts` = 4 (flag --prompts), but the run was begun with 2"),
        (["--steps", "2"], "has finished 2 steps"),
        (["--set", "loss.clip_low=0.3"], "`loss.clip_low` = 0.3 (--set)"),
        (["--set", "validation.holdout=2"], "`validation.holdout` = 2 (--set), but"),
    ):
        assert run([*resume, *more]) == 2
        assert said in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(files / "run" / "metrics.jsonl")] == [2]  # as if it was killed then
    assert run(train(tiny_llama, "--allow-changes")) == 2
    assert "--allow-changes applies to --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "steps", "said", "kept"),
    [
        # Cosine over 4 steps: 0.5 (1 + cos(pi / 4)) of the rate at step 2. Over 6: 0.5 (1 + cos(pi 2 / 6)) at step 3.
        (["scheduler.decay=cosine"], 6, "the learning rate was 8.54e-07 in step 2 and is 7.5e-07 in step 3",
         "scheduler.decay_steps=4"),
        (["scheduler.decay=linear"], 3, "was 7.5e-07 in step 2 and is 3.33e-07 in step 3: its schedule ends with the "
         "run, which has 3 steps instead of 4", "scheduler.decay_steps=4"),
        (["scheduler.start_weight_decay=0.1", "scheduler.end_weight_decay=0.5"], 8,
         "the weight decay was 0.2 in step 2 and is 0.2 in step 3", "scheduler.weight_decay_steps=4"),
        (["run.algorithm=ppo", "critic.scheduler.decay=linear"], 8,
         "the critic's learning rate was 7.5e-06 in step 2 and is 7.5e-06 in step 3",
         "critic.scheduler.decay_steps=4"),
        (["scheduler.decay=cosine", "scheduler.decay_steps=4"], 6, "", ""),
        (["scheduler.decay=cosine"], 4, "", ""),
        ([], 6, "", ""),
    ],
)  # fmt: skip
def test_a_resume_that_moves_a_schedule_says_so_and_how_to_keep_it(files, tiny_llama, schedule, steps, said, kept):
    begun(train(tiny_llama), files / "run", set_=schedule)
    told = "\n".join(go_on(files / "run", steps=steps)[1])
    assert (said in told) if said else "schedule" not in told
    if kept:
        assert f"--set {kept} keeps" in told
        job, lines = go_on(files / "run", steps=steps, set_=[kept])
        assert "schedule" not in "\n".join(lines)
        section, _, key = kept.partition("=")[0].rpartition(".")
        at = job.config.critic.scheduler if section.startswith("critic") else job.config.scheduler
        assert getattr(at, key) == 4
        with pytest.raises(InputError, match=re.escape(f"`{section}.{key}` = 5")):
            go_on(files / "run", steps=steps, set_=[kept.replace("=4", "=5")])


def test_flags_of_a_resume_are_read_on_top_of_what_the_run_has(files, tiny_llama, capsys):
    validating = ["validation.every=1", "validation.data.name=sums.jsonl", "run.checkpoint_every=2"]
    begun(train(tiny_llama), files / "run", set_=validating)
    stop = "validation.stop_after=3"
    job, _ = go_on(files / "run", set_=[stop, "run.keep_best_by=validation/accuracy"])
    assert (job.config.validation.stop_after, job.config.run.keep_best_by) == (3, "validation/accuracy")
    stored, origin = RunDirectory(files / "run").manifest()["config"], job.resolved.origin
    changed = {key for key, entry in stored.items() if entry["origin"] != origin[key]}
    assert changed == {"validation.stop_after", "run.keep_best_by"}
    (files / "runs").mkdir()
    moved = shutil.move(files / "run", files / "runs" / "moved")
    assert run(["train", "grpo", "--resume", "--set", stop, "--dry-run", "--json"]) == 0, "the newest is found"
    assert json.loads(capsys.readouterr().out)["config"]["run.checkpoint_every"] == {"value": 2, "origin": "--set"}
    assert run(["train", "grpo", "--resume", "--run-dir", str(moved), "--set", "validation.stop_after=0"]) == 2
    assert "`validation.stop_after` = 0 (--set)" in capsys.readouterr().err


def test_a_resume_knows_model_and_data_by_content(files, tiny_llama, tiny_llama_tied):
    begun(train(tiny_llama), files / "run")
    os.symlink(tiny_llama, files / "moved")
    assert go_on(files / "run", model="moved")[0].config.model.name == "moved"
    with pytest.raises(InputError, match="does not hold the model that the run began with"):
        go_on(files / "run", model=str(tiny_llama_tied))
    everywhere = str(files / "sums.jsonl")
    assert go_on(files / "run", data=everywhere)[0].config.data.name == everywhere
    (files / "other.jsonl").write_text((files / "sums.jsonl").read_text())
    with pytest.raises(InputError, match=r"`data\.name` = 'other\.jsonl'"):
        go_on(files / "run", data="other.jsonl")
    (files / "sums.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    with pytest.raises(InputError, match=r"--data differs from the start of the run \(rows, sha256 changed\)"):
        go_on(files / "run", model=str(tiny_llama))


def test_a_resume_of_several_sources_compares_each(files, tiny_llama):
    (files / "more.jsonl").write_text('{"prompt": "2 + 2 =", "answer": "4"}\n')
    begun(train(tiny_llama), files / "run", data=["sums.jsonl", "more.jsonl"])
    job, said = go_on(files / "run", steps=6)
    assert [source.label for source in job.prompts.datasets] == ["sums.jsonl", "more.jsonl"]
    assert said == []
    with pytest.raises(InputError, match=r"`data\.sources` = "):
        go_on(files / "run", data=["sums.jsonl", "sums.jsonl"])
    (files / "more.jsonl").write_text('{"prompt": "2 + 3 =", "answer": "5"}\n')
    with pytest.raises(InputError, match=r"--data differs from the start of the run \(more\.jsonl changed\)"):
        go_on(files / "run")


def test_a_resume_may_lay_the_run_out_anew(files, tiny_llama):
    begun(train(tiny_llama), files / "run")
    before, unchanged = go_on(files / "run")
    assert (before.plan.training.parallel.pp, before.resolved.origin["training.pp"]) == (1, "planner")
    assert not [line for line in unchanged if "laid out" in line]
    after, said = go_on(files / "run", allow_changes=False, set_=["training.pp=2"])
    assert [f"continues as {after.plan.training.name()}" in line for line in said if "laid out" in line] == [True]
    assert (after.plan.training.parallel.pp, after.resolved.origin["training.dp"]) == (2, "planner")
    assert not [line for line in said if "although" in line]
    threads = before.config.training.threads
    _, said = go_on(files / "run", set_=[f"training.threads={threads + 1}"])
    told = f"training.threads = {threads} and continues with {threads + 1}: equal within rounding, not bitwise"
    assert [told in line for line in said if "training computed" in line] == [True]


def test_a_users_layout_survives_a_resume_that_changes_another_key():
    begun_with = resolve(sets=["training.tp=2"], environment={}).with_values({"training.tp": 2, "training.pp": 1})
    stored = {"config": begun_with.to_json()}
    merged, changes = continued(stored, resolve(sets=["training.cp=2"], environment={}))
    assert (merged.config.training.tp, merged.origin["training.tp"]) == (2, "--set")
    assert (merged.config.training.cp, merged.config.training.pp) == (2, None)
    assert not changes
    merged, _ = continued(stored, resolve(sets=["run.steps=7"], environment={}))
    assert (merged.config.training.pp, merged.origin["training.pp"]) == (1, "planner")


def test_a_long_template_that_another_replaces_at_a_resume_is_a_change():
    before, now = ("Question: {prompt} " + letter * 5000 for letter in "ab")  # longer than the name of a file may be
    stored = {"config": resolve(sets=[f"data.prompt_template={before!r}"], environment={}).to_json()}
    _, changes = continued(stored, resolve(sets=[f"data.prompt_template={now!r}"], environment={}))
    assert [change.partition(" = ")[0] for change in changes.values()] == ["`data.prompt_template`"]


def test_a_size_that_the_planner_chose_becomes_the_users_when_it_is_set():
    stored = {"config": resolve(environment={}).with_values({"training.tp": 2, "training.pp": 1}).to_json()}
    merged, changes = continued(stored, resolve(sets=["training.tp=2", "training.pp=2"], environment={}))
    assert (merged.config.training.tp, merged.origin["training.tp"]) == (2, "--set")
    assert (merged.config.training.pp, merged.origin["training.pp"]) == (2, "--set")
    assert not changes


def test_a_backend_that_the_planner_chose_goes_on_unless_another_is_asked_for(files, tiny_llama):
    stored = {"config": resolve(environment={}).with_values({"training.backend": "dtensor"}).to_json()}
    for given, expected in ((["training.dp=2"], "dtensor"), (["training.backend=megatron"], "megatron")):
        merged, changes = continued(stored, resolve(sets=given, environment={}))
        assert (merged.config.training.backend, changes) == (expected, {})
    begun(train(tiny_llama), files / "run")
    stored = RunDirectory(files / "run").manifest()
    assert stored["config"]["training.backend"] == {"value": "megatron", "origin": "planner"}
    reason = stored["plan"]["reasons"][0]
    assert (reason["value"], "both backends take about as long" in reason["rule"]) == (
        "training.backend=megatron",
        True,
    )
    after, said = go_on(files / "run", set_=["training.dp=2"], backend="dtensor")
    assert after.plan.backend == "dtensor"
    assert any("continues as DP2 by dtensor" in line for line in said)
    again, _ = go_on(files / "run", set_=["training.replicate=2", "training.dp=2"], backend="auto")
    assert again.plan.backend == "dtensor", "megatron has no copies of sharded weights"
    assert [
        line for line in about(again) if line.startswith("backend: dtensor; megatron cannot: training.replicate")
    ], about(again)


def test_another_algorithm_brings_its_own_settings_and_leaves_the_users():
    begun_with = resolve(flags={"run.algorithm": "dapo"}, sets=["loss.clip_low=0.1"], environment={})
    stored = {"config": begun_with.to_json()}
    merged, changes = continued(stored, resolve(sets=["run.steps=7"], environment={}))
    assert (merged.config.loss.clip_high, merged.origin["loss.clip_high"]) == (0.28, "algorithm dapo")
    assert not changes
    merged, changes = continued(stored, resolve(flags={"run.algorithm": "gspo"}, environment={}))
    assert "`run.algorithm` = 'gspo'" in " ".join(changes.values())
    assert (merged.config.loss.clip_high, merged.origin["loss.clip_high"]) == (4e-4, "algorithm gspo")
    assert (merged.config.loss.clip_low, merged.origin["loss.clip_low"]) == (0.1, "--set")
    assert (merged.config.filter.groups, merged.origin["filter.groups"]) == ("keep", "default")


def test_a_run_of_ppo_that_goes_on_without_a_critic_is_told_which_of_its_keys_to_set_back():
    critic = ["critic.warmup_steps=2", "critic.scheduler.decay=linear"]
    stored = {"config": resolve(flags={"run.algorithm": "ppo"}, sets=critic, environment={}).to_json()}
    with pytest.raises(ConfigError) as told:
        continued(stored, resolve(flags={"run.algorithm": "grpo"}, environment={}))
    back = ["critic.scheduler.decay=constant", "critic.warmup_steps=0"]
    assert "--set " + " --set ".join(back) in str(told.value)
    merged, _ = continued(stored, resolve(flags={"run.algorithm": "grpo"}, sets=back, environment={}))
    assert not merged.config.has_critic


@pytest.mark.parametrize(
    ("begun_with", "change", "said"),
    [
        (["training.lora.rank=4"], {"set_": ["training.lora.rank=8"]}, "`training.lora.rank` = 8 .* begun with 4"),
        ([], {"algorithm": "ppo"}, "`advantage.baseline` = 'critic' .*algorithm ppo.* begun with 'mean'"),
    ],
)
def test_a_change_that_no_checkpoint_can_be_loaded_with_is_refused_whatever_is_allowed(
    files, tiny_llama, begun_with, change, said
):
    begun(train(tiny_llama), files / "run", set_=begun_with)
    assert go_on(files / "run", allow_changes=True, prompts=4)[0].config.batch.prompts == 4
    for allowed in (True, False):
        with pytest.raises(InputError, match=f"{said}, and no checkpoint of the run can be loaded with that"):
            go_on(files / "run", allow_changes=allowed, **change)


def test_changes_can_be_allowed_and_are_told(files, tiny_llama, tiny_llama_tied):
    begun(train(tiny_llama), files / "run")
    job, said = go_on(files / "run", allow_changes=True, model=str(tiny_llama_tied), prompts=4)
    assert job.config.batch.prompts == 4
    assert sum("continuing although" in line for line in said) == 2
    assert any("`batch.prompts` = 4" in line for line in said)


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize(
    ("edited", "said"),
    [("reward.py", r"the file of the reward .*reward\.py:right is not"), ("chat.jinja", "the text of --chat-template")],
)
def test_a_reward_function_or_a_chat_template_that_was_edited_is_a_change(files, tiny_llama, edited, said):
    (files / "reward.py").write_text("def right(completion):\n    return 1.0\n")
    (files / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    begun(train(tiny_llama), files / "run", reward=["reward.py:right"], chat_template="chat.jinja")
    assert go_on(files / "run")[0].config.run.steps == 4
    with (files / edited).open("a") as file:
        file.write("\n\n\n")
    with pytest.raises(InputError, match=said):
        go_on(files / "run")
    _, told = go_on(files / "run", allow_changes=True)
    assert sum("continuing although" in line for line in told) == 1


def test_a_damaged_run_directory_is_a_sentence(files, capsys):
    (files / "run").mkdir()
    write_json(files / "run" / MANIFEST, {"config": {"run.stps": {"value": 1, "origin": "--set"}}})
    for content, said in ((None, "unknown key `run.stps`"), ("{", "cannot be read"), ("[]", "cannot be read")):
        if content is not None:
            (files / "run" / MANIFEST).write_text(content)
        assert run(["train", "grpo", "--resume", "--run-dir", "run"]) == 2
        assert said in capsys.readouterr().err


def packages_then(path: Path, **versions: str | None) -> None:
    """Let the run have been started with other versions."""
    directory = RunDirectory(path)
    manifest = directory.manifest()
    manifest["packages"] |= {name.replace("_", "-"): version for name, version in versions.items()}
    directory.write_manifest(manifest)


def test_a_resume_with_other_engines_is_refused_and_with_other_packages_told(files, tiny_llama, capsys):
    begun(train(tiny_llama), files / "run")
    packages_then(files / "run", ray="2.0")
    told = [line for line in go_on(files / "run")[1] if "ray" in line]
    assert told == [f"note: when the run was last started, ray 2.0 was installed, and {metadata.version('ray')} is now"]
    packages_then(files / "run", torch="1.13", megatron_core="0.1")
    assert run(["train", "grpo", "--resume", "--run-dir", "run"]) == 2
    shown = capsys.readouterr().err
    assert f"torch 1.13 was installed, and {metadata.version('torch')} is now" in shown
    assert "--allow-changes" in shown
    _, said = go_on(files / "run", allow_changes=True)
    assert sum("continuing although when the run was last started" in line for line in said) == 2


def test_a_manifest_that_was_edited_is_told(files, tiny_llama):
    begun(train(tiny_llama), files / "run")
    path = files / "run" / MANIFEST
    path.write_text(
        path.read_text().replace('"batch.prompts": {\n      "value": 2', '"batch.prompts": {\n      "value": 3')
    )
    with pytest.raises(InputError, match=r"manifest\.json was edited since rlctl wrote it\. .*--allow-changes"):
        go_on(files / "run")
    job, said = go_on(files / "run", allow_changes=True)
    assert job.config.batch.prompts == 3
    assert "continuing although manifest.json was edited since rlctl wrote it" in said


def test_broken_metrics_are_named_and_an_empty_checkpoint_ignored_before_anything_starts(files, tiny_llama):
    begun(train(tiny_llama), files / "run")
    (files / "run" / "checkpoints" / "step_9999").mkdir()
    (files / "run" / "metrics.jsonl").write_text('{"step": 0}\n{"st')
    assert go_on(files / "run")[0].config.run.steps == 4
    (files / "run" / "metrics.jsonl").write_text('{"st\n{"step": 1}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1 .* remove the line"):
        go_on(files / "run")
