"""`rlctl eval`, and validation in a run, as a user runs them: real engines and a tiny model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlctl
from rlctl.cli import run as cli
from rlctl.config.load import Resolved
from rlctl.data.prompts import open_prompts
from rlctl.errors import InputError
from rlctl.jobs.candidates import candidates
from rlctl.jobs.encoded_tasks import Encoded, Evaluation
from rlctl.jobs.evaluate import evaluation
from rlctl.jobs.tasks import open_task
from rlctl.methods.configuration import resolve
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.metrics import read_metrics
from rlctl.telemetry.phases import Phase
from rlctl.tiny_models.text import write_tiny_family
from support.commands import Run
from support.metric_lines import without_timing
from support.runs import command, resume


def resolver(**flags: object) -> Callable[[str | None], Resolved]:
    keys = {name.replace("__", "."): value for name, value in flags.items()}
    return lambda model: resolve(flags=keys | ({"model.name": model} if model else {}), environment={})


def one_of(resolved: Callable[[str | None], Resolved], *tasks: str, n: int = 1, limit: int | None = 3) -> Evaluation:
    return evaluation(candidates(["some/model"], [], resolved, n), tasks, n, [1], limit)


def greedy(model: Path, questions: list[str], tokens: int) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompt = len(ids)
        for _ in range(tokens):
            with torch.no_grad():
                ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
        texts.append(tokenizer.decode(ids[prompt:], skip_special_tokens=True))
    return texts


@pytest.mark.long
def test_answers_are_judged_and_samples_that_the_file_has_are_not_sampled_again(
    run_here: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, file = ["Name a color.", "What is 3 + 4?", "Say hello."], tmp_path / "samples.jsonl"
    right = greedy(tiny_llama, questions[:1], 6)[0]
    task = tmp_path / "questions.jsonl"
    answers = [right, "7", "something else"]
    rows = [{"prompt": question, "answer": answer} for question, answer in zip(questions, answers, strict=True)]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["eval", "--model", str(tiny_llama), "--task", str(task), "--max-new-tokens", "6", "--gpu", "cpu",
             "--set", "reward.extract=full", "--output", str(file), "--json"]  # fmt: skip
    done = run_here(*asked)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["tasks"]
    assert (result["task"], result["model"], result["samples"]) == (str(task), tiny_llama.name, 3)
    assert set(result["metrics"]) == {"mean@1", "pass@1"}
    assert result["metrics"]["mean@1"] == {"value": pytest.approx(1 / 3), "stderr": pytest.approx(1 / 3)}
    samples = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert {sample["prompt"]: sample["right"] for sample in samples} == dict.fromkeys(questions, False) | {
        questions[0]: True
    }

    def started_engines(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("rlctl.jobs.evaluate.started_engines", started_engines)
    again = run_here(*asked)
    assert json.loads(again.stdout)["tasks"] == [result]
    assert "3 of 3 samples are in" in again.stderr
    values = {"generation.max_new_tokens": 6, "cluster.gpu": "cpu", "reward.extract": "full"}
    config = rlctl.load_config(values=values)
    assert rlctl.evaluate(config, [str(task)], models=[tiny_llama], output=file) == [result]
    for more, key in (
        (["--temperature", "0.5"], "temperature"),
        (["--seed", "1"], "seed"),
        (["--reward", "math-verify"], "scorers"),
    ):
        other = run_here(*asked, *more)
        assert other.returncode == 2
        assert f"with another `{key}`" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "gsm8"], "Did you mean gsm8k"),
        (["--task", "reasoning-gym:chain_som"], "Did you mean chain_sum"),
        (["--task", "absent.jsonl"], "absent.jsonl does not exist"),
        (["--task", "gsm8k:absent.jsonl"], "--task gsm8k:absent.jsonl: Data file absent.jsonl does not exist"),
        ([], "There is no task."),
        (
            ["--task", "reasoning-gym:chain_sum", "--reward", "exact-match"],
            "no effect on --task reasoning-gym:chain_sum",
        ),
        (["--task", "reasoning-gym:chain_sum", "--k", "4"], "pass@4 needs at least 4 samples"),
        (["--task", "reasoning-gym:chain_sum", "--step", "4"], "there is no --run-dir"),
        (["--task", "reasoning-gym:chain_sum", "--set", "run.steps=4"], "has no effect on an evaluation"),
        (["--task", "reasoning-gym:chain_sum", "--run-dir", "absent"], "absent is not a run"),
        (["--task", "reasoning-gym:chain_sum", "--task", "reasoning-gym:chain_sum"], "is given twice"),
    ],
)
def test_bad_input_is_named(run_here: Run, tiny_llama: Path, arguments: list[str], message: str) -> None:
    done = run_here("eval", "--model", str(tiny_llama), "--gpu", "cpu", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_of_an_environment_that_gives_the_reward_need_no_answers(tmp_path: Path) -> None:
    rows = tmp_path / "tasks.jsonl"
    rows.write_text('{"prompt": "Do it."}\n')
    played = one_of(resolver(environment__name="guess-number"), str(rows))
    assert [task.rewards for task in played.tasks] == [None]
    with pytest.raises(InputError, match="compares with a reference answer"):
        one_of(resolver(), str(rows))
    code = tmp_path / "mine.py"
    code.write_text("def short(completion, **_):\n    return float(len(completion) < 9)\n")
    scored = one_of(resolver(environment__name="guess-number", reward__terms=[{"name": f"{code}:short"}]), str(rows))
    assert [task.rewards and [*task.rewards.scorers] for task in scored.tasks] == [[f"{code}:short"]]


@pytest.mark.usefixtures("untried")
def test_a_dry_run_shows_tasks_and_engines_of_each_model(run_here: Run, tiny_llama: Path, tmp_path: Path) -> None:
    other = write_tiny_family(tmp_path / "other", seed=1)
    asked = ["eval", "--model", str(tiny_llama), "-m", str(other), "--task", "reasoning-gym:chain_sum",
             "-n", "4", "--limit", "5", "--gpu", "cpu", "--dry-run"]  # fmt: skip
    shown = run_here(*asked).stdout
    assert "reasoning-gym:chain_sum: 5 prompts x 4 samples" in shown
    assert "other" in shown
    models = json.loads(run_here(*asked, "--json").stdout)["models"]
    assert [model["model"] for model in models] == [tiny_llama.name, "other"]
    assert all(model["config"]["generation.temperature"]["value"] == 1.0 for model in models)
    done = run_here(*asked, "--output", str(tmp_path / "absent" / "samples.jsonl"))
    assert done.returncode == 2
    assert f"there is no directory {tmp_path / 'absent'}" in " ".join(done.stderr.split())
    assert run_here(*asked, "--output", str(tmp_path / "samples.jsonl")).returncode == 0
    assert not (tmp_path / "samples.jsonl").exists()


def test_models_and_runs_keep_the_order_of_the_command_line(
    tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run says how prompts are put and sampled, wherever it stands."""
    run, other = RunDirectory(tmp_path / "run"), write_tiny_family(tmp_path / "other", seed=1)
    run.path.mkdir()
    stored = {"model.name": str(tiny_llama), "generation.max_new_tokens": 7}
    run.write_manifest({"config": {key: {"value": value, "origin": "--set"} for key, value in stored.items()}})
    checkpoint = run.new_checkpoint(2)
    checkpoint.begin()
    checkpoint.commit({"version": 2, "source": {}, "metrics": {}, "files": {"shard": "0"}})
    named = {"run step 2": ["--run-dir", str(run.path)], "other": ["-m", str(other)],
             tiny_llama.name: [f"--model={tiny_llama}"]}  # fmt: skip
    for order in (("run step 2", "other", tiny_llama.name), ("other", tiny_llama.name, "run step 2")):
        flags = [flag for name in order for flag in named[name]]
        task = ["--task", "reasoning-gym:chain_sum", "--limit", "2", "--gpu", "cpu", "--dry-run", "--json"]
        assert cli(["eval", *flags, *task]) == 0
        models = json.loads(capfd.readouterr().out)["models"]
        assert tuple(one["model"] for one in models) == order
        assert {one["config"]["generation.max_new_tokens"]["value"] for one in models} == {7}


def test_one_sample_is_greedy_unless_a_temperature_is_set() -> None:
    def temperature(n: int, **flags: object) -> float:
        return candidates(["a/b"], [], resolver(**flags), n)[0].resolved.config.generation.temperature

    assert (temperature(1), temperature(8)) == (0.0, 1.0)
    assert temperature(1, generation__temperature=0.7) == 0.7
    assert temperature(8, generation__temperature=0.0) == 0.0


def test_all_models_are_sampled_as_the_first_one_is() -> None:
    def resolved(model: str | None) -> Resolved:
        own = {"model.name": model, "generation.temperature": 0.7, "data.system_prompt": "s", "model.max_length": 64}
        return resolve(flags=own if model == "a/b" else {"model.name": model} if model else {}, environment={})

    first, second = (one.resolved.config for one in candidates(["a/b", "c/d"], [], resolved, 4))
    assert (first.generation.temperature, second.generation.temperature) == (1.0, 1.0)  # no rollouts' temperature
    assert (first.data.system_prompt, second.data.system_prompt) == ("s", "s")
    assert first.model.max_length is None  # as the rollouts' own had room for


def test_the_same_model_cannot_be_given_twice() -> None:
    with pytest.raises(InputError, match="a/b is given twice"):
        candidates(["a/b", "a/b"], [], resolver(), 1)
    with pytest.raises(InputError, match="no model to evaluate"):
        candidates([], [], resolver(), 1)


@pytest.mark.usefixtures("untried")
def test_questions_of_a_gym_task_are_none_that_training_sees() -> None:
    config = resolver(data__name="reasoning-gym:chain_sum", data__params={"max_terms": 2, "seed": 7})(None).config
    task = open_task("reasoning-gym:chain_sum", config, 50)
    assert task.rewards.accuracy_by == "task"
    assert task.dataset.fingerprint()["params"]["max_terms"] == 2  # as the run's data has it
    trained = open_prompts(config.data, seed=config.run.seed).fingerprint()["params"]
    asked = task.dataset.fingerprint()["params"]
    assert asked["seed"] >= trained["seed"] + trained["size"]
    assert "max_terms" not in open_task("reasoning-gym:gcd", config, 5).dataset.fingerprint()["params"]


@pytest.mark.usefixtures("untried")
def test_a_part_of_a_file_is_not_its_beginning_and_grows(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {n}", "answer": str(n)}) + "\n" for n in range(50)))
    small, large = (one_of(resolver(), str(file), limit=limit).tasks[0].rows for limit in (5, 20))
    assert large[:5] == small
    assert list(small) != list(range(5))
    assert len(one_of(resolver(), str(file), limit=None).tasks[0].rows) == 50


@pytest.mark.usefixtures("untried")
def test_a_file_is_not_judged_by_the_scorer_of_a_run_s_own_task(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"prompt": "3 + 4?", "answer": "7"}\n')
    terms = [{"name": "task", "weight": 2.0}, {"name": "math-verify"}]
    task = one_of(resolver(reward__terms=terms), str(file)).tasks[0]
    assert [(term.name, term.weight) for term in task.rewards.terms] == [("exact-match", 2.0), ("math-verify", 1.0)]


@pytest.mark.usefixtures("untried")
def test_samples_are_bound_to_the_text_of_a_reward_function_and_of_a_chat_template(
    tiny_llama: Path, tmp_path: Path
) -> None:
    reward, template, task = tmp_path / "reward.py", tmp_path / "chat.jinja", tmp_path / "q.jsonl"
    task.write_text('{"prompt": "3 + 4?", "answer": "7"}\n')
    own = {"model__chat_template": str(template), "reward__terms": [{"name": f"{reward}:right"}]}

    def settings(returned: int, end: str) -> dict[str, Any]:
        reward.write_text(f"def right(completion):\n    return {returned}\n")
        template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}" + end)
        asked = resolver(generation__max_new_tokens=4, cluster__gpu="cpu", **own)
        job = evaluation(candidates([str(tiny_llama)], [], asked, 1), [str(task)], 1, [1], 1)
        return Encoded.of(job, job.candidates[0], lambda _: None).settings(job.tasks[0])

    first, again, scored, written = settings(0, ":"), settings(0, ":"), settings(1, ":"), settings(0, "?")
    assert first == again
    assert {key for key in first if first[key] != scored[key]} == {"scorers"}
    assert {key for key in first if first[key] != written[key]} == {"chat_template"}


def without_validation(path: Path) -> list[dict]:
    lines = [without_timing(line) for line in read_metrics(path / "metrics.jsonl")]
    return [{key: value for key, value in line.items() if not key.startswith("validation")} for line in lines]


@pytest.mark.slow
def test_validation_leaves_a_run_bitwise_as_it_is_and_its_checkpoint_is_evaluated(
    run_here: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    """Also where the run that validates is resumed."""

    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        done = run_here(*arguments[1:])
        assert done.returncode == 0, done.stderr
        return done

    run(command(tiny_llama, tmp_path / "plain", "--steps", "2"))
    validating = ["--set", "validation.every=1", "--set", "validation.at_start=true", "--set", "validation.samples=2",
                  "--set", "validation.max_prompts=3", "--set", "validation.temperature=1",
                  "--set", "run.keep_best=1", "--set", "run.keep_best_by=validation/accuracy"]  # fmt: skip
    said = run(command(tiny_llama, tmp_path / "run", *validating, "--steps", "1", "--set", "run.checkpoint_every=1"))
    assert "validation before step 1: reward_mean" in said.stderr
    run(resume(tmp_path / "run", "--steps", "2", "--set", "run.checkpoint_every=2"))
    assert without_validation(tmp_path / "run") == without_validation(tmp_path / "plain")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [sorted(key for key in line if key.startswith("validation")) for line in lines] == [
        ["validation", "validation_at_start"],
        ["validation"],
    ]
    assert {"reward_mean", "reward_stderr", "accuracy", "pass@2"} <= lines[0]["validation"].keys()
    for line in lines:
        assert line["seconds"][Phase.VALIDATION] > 0
        assert sum(line["seconds"].values()) == pytest.approx(2 * line["seconds"]["total"], abs=1e-6)
    kept = (tmp_path / "run" / "validation" / "step_2.jsonl").read_text().splitlines()
    assert {"prompt", "completion", "reward"} <= json.loads(kept[0]).keys()
    done = run_here(
        "eval", "--run-dir", str(tmp_path / "run"), "--task", "reasoning-gym:chain_sum", "--limit", "4", "-n", "2",
        "--gpu", "cpu", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["tasks"]
    assert (result["model"], result["samples"]) == ("run step 2", 8)
    assert {"mean@2", "pass@1", "pass@2", "majority@2"} <= result["metrics"].keys()
