"""Every command in the README, in the pages and among the examples is run, or where it takes long, run in a slow test.

A command that begins like none of `COMMANDS` fails the tests: say there how it is run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from rlctl import cli
from rlctl.cli import load_command, run
from rlctl.commands.output import JsonMode
from rlctl.data.prompt_rows import PromptDataset
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.telemetry.metrics import read_metrics
from rlctl.tiny_models.text import write_tiny_family
from support.runs import REWARD, TASK

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").glob("*.md")]
)
LINE = re.compile(r"^\s*(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?((?:rlctl|make) .*?)(?:\s+#.*|\s+\.\.\.)?$")
COMMANDS = {
    "make": "target",
    "rlctl --version": "here",
    "rlctl init": "here",
    "rlctl presets": "here",
    "rlctl config": "here",
    "rlctl plan --run": "needs a run",
    "rlctl plan --calibrate": "needs a run",
    "rlctl plan": "here",
    "rlctl doctor --calibrate": "slow",
    "rlctl doctor --deep": "tested elsewhere",
    "rlctl doctor": "quick",
    "rlctl rehearse": "tested elsewhere",
    "rlctl train grpo --resume": "needs a run",
    "rlctl train grpo": "dry run",
    "rlctl train grpo --model ./my-vlm": "tested elsewhere",
    "rlctl train grpo --preset laptop-vision": "tested elsewhere",
    "rlctl train sft": "dry run",
    "rlctl train dpo": "dry run",
    "rlctl train rm": "dry run",
    "rlctl train kto": "dry run",
    "rlctl train --preset": "dry run",
    "rlctl train distill": "dry run",
    "rlctl train grpo --preset laptop --data questions.jsonl --reward model:./reward-model": "slow",
    "rlctl train --config": "dry run",
    "rlctl train --config vlm_grpo_3B.yaml": "tested elsewhere",
    "rlctl train --resume": "needs a run",
    "rlctl sweep": "tested elsewhere",
    "rlctl train grpo --preset laptop --model runs/sft": "needs a run",
    "rlctl generate --run-dir": "needs a run",
    "rlctl generate": "dry run",
    "rlctl generate --model ./my-vlm": "tested elsewhere",
    "rlctl refit-test": "dry run",
    "rlctl diverge": "tested elsewhere",
    "rlctl eval --run-dir": "needs a run",
    "rlctl eval": "needs the hub",
    "rlctl rollout": "tested elsewhere",
    "rlctl samples": "needs a run",
    "rlctl report": "needs a run",
    "rlctl watch": "tested elsewhere",
    "rlctl convert megatron-to-hf": "needs a run",
    "rlctl convert megatron-to-hf ./ckpt": "slow",
    "rlctl convert inspect": "slow",
    "rlctl convert text-part": "needs the hub",
    "rlctl convert merge-adapters": "tested elsewhere",
    "rlctl convert hf-to-megatron": "slow",
}
"""How the commands that begin so are run. The longest beginning counts."""
RECIPE = """
policy: { model_name: Qwen/Qwen3-1.7B, max_total_sequence_length: 1024 }
grpo: { num_prompts_per_step: 4 }
cluster: { num_nodes: 1, gpus_per_node: 8 }
data: { train: { dataset_name: ResponseDataset, data_path: gsm8k.jsonl, input_key: question, output_key: answer } }
env: { math: { num_workers: 1 } }
"""
LOSSES = "def clipped(batch, options):\n    return -batch.logprobs_R * batch.advantages_R\n"


GAME = (
    "class Game:\n    def reset(self, row, seed):\n        return 'Which number?'\n    def step(self, message): ...\n"
)
SEARCH = '''
def search(query: str) -> str:
    """Search.

    Args:
        query: The words to look for.
    """
    return query
'''
AGENT = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url, json.dumps({"messages": messages}).encode(), headers))
"""
SHORT = "def short(completion, **row):\n    return -len(completion) / 100\n"


def code_lines(page: str) -> Iterator[str]:
    """Yield the lines of a page's indented and fenced blocks; a backslash joins a line with the next."""
    fenced = False
    for line in page.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line


def documented() -> dict[str, str]:
    """Each command, without comments, and the first page that has it."""
    found: dict[str, str] = {}
    for page in PAGES:
        for line in code_lines(page.read_text()):
            if match := LINE.match(line):
                found.setdefault(" ".join(match[1].partition(" > ")[0].split()), page.name)
    return found


def kind(command: str) -> str | None:
    """How a command is run; None where `COMMANDS` does not say."""
    begins = [begin for begin in COMMANDS if f"{command} ".startswith(f"{begin} ")]
    return COMMANDS[max(begins, key=len)] if begins else None


def of_kind(*kinds: str) -> list[str]:
    return [command for command in documented() if kind(command) in kinds]


def test_every_command_is_of_a_known_kind() -> None:
    found = documented()
    assert len(found) > 50
    assert [f"{page}: {command}" for command, page in found.items() if kind(command) is None] == []


def test_commands_are_found_in_blocks_alone() -> None:
    page = (
        "rlctl prose is none\n\n    rlctl plan --top 2   # a comment\n\n```\n.venv/bin/rlctl doctor \\\n--quick\n```\n"
    )
    assert [match[1] for line in code_lines(page) if (match := LINE.match(line))] == [
        "rlctl plan --top 2", "rlctl doctor  --quick",
    ]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the pages name. Where no command names a model, it is a tiny one."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("recipe.yaml", "grpo_recipe.yaml"):
        (tmp_path / name).write_text(RECIPE)
    (tmp_path / "run_qwen2-7b_math_megatron.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=questions.jsonl "
        "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4 "
        "trainer.n_gpus_per_node=8 trainer.nnodes=1\n"
    )
    (tmp_path / "grpo.yaml").write_text(
        "dataset_name: questions.jsonl\nreward_funcs: [accuracy_reward]\nnum_generations: 8\n"
    )
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "my_reward.py").write_text(SHORT)
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "tools.py").write_text(SEARCH)
    (tmp_path / "agent.py").write_text(AGENT)
    for name in ("questions.jsonl", "gsm8k.jsonl"):
        (tmp_path / name).write_text('{"prompt": "3 + 4?", "question": "3 + 4?", "answer": "7"}\n' * 4)
    (tmp_path / "texts.jsonl").write_text('{"prompt": "3 + 4?", "completion": "7"}\n' * 4)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "3 + 4?", "chosen": "7", "rejected": "8"}\n' * 4)
    labeled = [{"prompt": f"3 + {number}?", "completion": "7", "label": number == 4} for number in (4, 5, 4, 5)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labeled))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Write add.", "tests": ["assert add(2, 3) == 5"]}\n')
    (tmp_path / "passages.jsonl").write_text("Bamboo grows fast.\n")
    (tmp_path / "run.yaml").write_text(
        "extends: laptop\ndata: { name: questions.jsonl }\nreward: { terms: [{ name: exact-match }] }\n"
    )
    (tmp_path / "mine.yaml").write_text("extends: 1node\nrun: { steps: 5 }\n")
    shutil.copytree(tiny_llama, tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLCTL_MODEL__NAME", str(tiny_llama))
    return tmp_path


def run_here(command: str, *more: str) -> int:
    JsonMode.wanted = JsonMode.printed = False
    return run([*shlex.split(command)[1:], *(flag for flag in more if flag not in command.split())])


def test_make_has_every_target() -> None:
    for command in of_kind("target"):
        done = subprocess.run(
            ["make", "--dry-run", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("command", of_kind("here"))
def test_commands_that_only_look(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(command) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", of_kind("quick"))
def test_checks_of_the_machine(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_here(command.replace("HEAD:6379", "127.0.0.1:1"), "--quick")
    # This machine may lack a GPU and has no Ray cluster, which is what exit code 3 says.
    assert code in (0, 3), capsys.readouterr().err


def untried(plan: RewardPlan, source: PromptDataset, completion: str | None = None) -> RewardPlan:
    return plan


ELSEWHERE = re.compile(
    "openai/|own_tokenizer|--config|--env (openenv|verifiers|harbor)|--preset [0-9]nodes|--ray-address|harness/bin"
    "|environment.sandbox"
)
"""Commands whose prompts are on the hub, come from a server, a sandbox or another Python, or have no turns."""
QUESTIONS = {
    "wordle": "Find an English word of five letters in 8 guesses.*",
    "game.py:Game": "Which number[?]",
    "examples/extend/game.py:HigherLower": r"Guess a number from 1 to 20\. Write the number alone\.",
    "examples/cookbook/game.py:HigherLower": r"Right\. A new number: guess\.",
    "textarena": ".*",  # its package's own words
    "laptop-tools": r"What is \d\d \+ \d\d\?",
    "laptop": "State the final answer to the following arithmetic problem.*",
    "laptop-sft": "State the final answer to the following arithmetic problem.*",
    "laptop-dpo": "State the final answer to the following arithmetic problem.*",
    "1gpu": r".*\?.*",
    "1node": r".*\?.*",
}
"""Patterns of the questions of environments and presets."""


def task_of(command: str) -> tuple[str, ...]:
    """The words of a training command that say which prompts it has."""
    words = shlex.split(command)
    flags = [f"{a} {b}" for a, b in pairwise(words) if a in ("--preset", "--data", "--env", "--prompt-field", "--tool")]
    return (*words[2:3], *sorted(flags))


def trained_commands() -> list[str]:
    """One command of `rlctl train` for each task whose prompts are here."""
    found = {task_of(command): command for command in of_kind("dry run")
             if command.startswith("rlctl train") and not ELSEWHERE.search(command)}  # fmt: skip
    return list(found.values())


def dry_runs() -> list[Any]:
    """Return the commands that have a dry run. One of each command, method, preset and recipe is run in every test, but
    for those of `test_first_prompts`; the others are slow tests."""
    commands = {
        command.replace(" --dry-run", ""): None for command in of_kind("dry run") if "harness/bin" not in command
    }  # those start a program of a Python that the reader makes
    seen = {subject_of(command) for command in trained_commands()}
    marks = {command: subject_of(command) in seen or seen.add(subject_of(command)) for command in commands}
    return [pytest.param(command, marks=pytest.mark.slow if known else ()) for command, known in marks.items()]


def subject_of(command: str) -> tuple[str, ...]:
    """Return the words of a command that decide what is prepared: command, method, preset, recipe and algorithm."""
    words = shlex.split(command)
    flags = [
        f"{a} {b}" for a, b in pairwise(words) if a in ("--preset", "--config", "--algorithm", "--env", "--teacher")
    ]
    return (*(word for word in words[1:3] if not word.startswith("-")), *sorted(flags))


def test_every_flag_of_a_dry_run_exists() -> None:
    assert {command: word for command in of_kind("dry run") if (word := unknown_in(command))} == {}


@pytest.mark.parametrize("command", dry_runs())
def test_commands_that_train_or_sample(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As dry runs: keys, files, data and plan are checked. The scoring process is left to the slow test."""
    monkeypatch.setattr("rlctl.rewards.prepare_rewards.tried", untried)
    monkeypatch.setattr("rlctl.training.user_loss.call_in_child", lambda *_, **__: ())
    monkeypatch.setattr(
        "rlctl.preparation.named.wanted_loggers", lambda run, tell, optional: ()
    )  # packages that need not be there
    if not re.search("--preset (laptop|run)", command):  # for GPUs, and planned from the catalog
        monkeypatch.setenv("RLCTL_MODEL__NAME", "Qwen/Qwen3-8B")
    codes = (0, 3) if "--env harbor" in command else (0,)  # this machine may have no container runtime
    assert run_here(command.replace("--ray-address HEAD:6379", ""), "--dry-run") in codes, capsys.readouterr().err


def question_of(command: str) -> str:
    """Return a pattern of what the first prompt of a documented command has to ask."""
    given = dict(pairwise(shlex.split(command)))
    if data := given.get("--data", "questions.jsonl" if "--preset run.yaml" in command else None):
        return re.escape(json.loads(Path(data).read_text().splitlines()[0])[given.get("--prompt-field", "prompt")])
    return QUESTIONS[given.get("--env", given["--preset"])]


@pytest.mark.parametrize("command", trained_commands())
@pytest.mark.slow
@pytest.mark.guard
def test_first_prompts(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first prompt of a command asks what its data or environment asks, and nothing else."""
    monkeypatch.setattr("rlctl.rewards.prepare_rewards.tried", untried)
    monkeypatch.setattr("rlctl.training.user_loss.call_in_child", lambda *_, **__: ())
    monkeypatch.setattr("rlctl.preparation.named.wanted_loggers", lambda run, tell, optional: ())
    write_tiny_family(place / "long-model", max_position_embeddings=40960)
    words = [str(place / "long-model") if re.match("(Qwen|meta-llama|HuggingFaceTB)/", w) else w
             for w in shlex.split(command)]  # fmt: skip
    if "--epochs" not in words:  # all prompts of a run are measured
        words = [word for pair in pairwise(["", *words]) for word in pair[1:] if "--steps" not in pair] + [
            "--steps",
            "4",
        ]
    monkeypatch.setenv("RLCTL_MODEL__NAME", str(place / "long-model"))
    assert run_here(shlex.join(words), "--dry-run", "--json") == 0, capsys.readouterr().err
    (first,) = json.loads(capsys.readouterr().out)["first_look"]["prompts"]
    asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", first["text"], re.DOTALL)
    assert re.fullmatch(question_of(command), asked[-1], re.DOTALL), first["text"]
    examples = {"laptop-tools": 2, "examples/cookbook/game.py": 3}  # messages of the user before the question
    assert len(asked) == 1 + sum(number for name, number in examples.items() if name in command)


@pytest.mark.parametrize("command", of_kind("needs a run", "needs the hub", "slow", "tested elsewhere"))
def test_flags_of_the_commands_that_take_long(command: str) -> None:
    words = shlex.split(command)[1:]
    parsed = load_command(words.pop(0))
    while hasattr(parsed, "list_commands") and words[0] in parsed.list_commands(None):
        parsed = parsed.get_command(None, words.pop(0))
    assert parsed.make_context("rlctl", words).params or words[0] == "--config"  # the recipe names the method


def mentioned() -> dict[str, str]:
    """Each command in the text or a table of a page, such as `rlctl plan --run DIR`, and the first page that has it."""
    found: dict[str, str] = {}
    for page in PAGES:
        for command in re.findall(r"`(rlctl [a-z-][^`]*)`", page.read_text()):
            found.setdefault(" ".join(command.split()), page.name)
    return found


def flags_of(command: Any) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def unknown_in(command: str) -> str | None:
    """The first word of a mentioned command that rlctl does not have: a subcommand or a flag."""
    _, *words = shlex.split(command)
    if words[0].startswith("-"):
        return None if words[0] in flags_of(typer.main.get_command(cli.app)) else words[0]
    if words[0] not in cli.COMMANDS:
        return words[0]
    parsed: Any = load_command(words.pop(0))
    while hasattr(parsed, "list_commands") and words and not words[0].startswith("-"):
        if words[0] not in parsed.list_commands(None):
            return words[0]
        parsed = parsed.get_command(None, words.pop(0))
    names = parsed.list_commands(None) if hasattr(parsed, "list_commands") else ()
    below = [parsed.get_command(None, name) for name in names]
    flags = flags_of(parsed).union(*map(flags_of, below))
    return next((word for word in words if word.startswith("-") and word.partition("=")[0] not in flags), None)


def test_commands_in_the_text_name_what_exists() -> None:
    found = mentioned()
    assert len(found) > 20
    assert {f"{page}: {command}": word for command, page in found.items() if (word := unknown_in(command))} == {}
    assert unknown_in("rlctl plan --no-such-flag") == "--no-such-flag"
    assert unknown_in("rlctl convert nothing") == "nothing"


def smaller(command: str, model: Path) -> list[str]:
    """The words of a command about a run, with the steps of a short run, few prompts and a small model."""
    for long, short in {
        "--steps 200": "--steps 5",
        "--steps 22-29": "--steps 1-2",
        "--step 50 --step 100": "--step 2 --step 5",
        "--step 10": "--step 5",
    }.items():
        command = command.replace(long, short)
    words = [str(model) if word.count("/") == 1 and word[0].isupper() else word for word in shlex.split(command)[1:]]
    return [*words, "--limit", "2"] if words[0] == "eval" else words


@pytest.mark.slow
def test_commands_that_take_long(place: Path, tiny_llama: Path) -> None:
    """One after the other, as they follow from each other: a run, what is done with it, and conversions."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "RLCTL_MACHINE_PROFILE": str(place / "profile.json")}

    def command_line(*words: str) -> None:
        command = [sys.executable, "-m", "rlctl", *words]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
        accepted = (0, 3) if words[0] == "doctor" else (0,)  # 3: this machine lacks something
        assert done.returncode in accepted, f"{words}: {done.stderr[-3000:]}"

    (place / "reward.py").write_text(REWARD)
    data = [*TASK, "--reward", "reward.py:even", "--prompts", "2", "--generations", "2"]
    every = ["--set", "run.checkpoint_every=1", "--set", "run.keep_last=9"]
    command_line("train", "grpo", "--preset", "laptop", *data, *every, "--steps", "2", "--run-dir", "runs/my-run")
    for name in ("longer", "first", "second"):
        shutil.copytree(place / "runs" / "my-run", place / "runs" / name)
    shutil.rmtree(place / "my-model")
    # A resume first, for more steps; conversions last, as each replaces the other's directory.
    for command in sorted(of_kind("needs a run"), key=lambda command: ("convert" in command) - ("--resume" in command)):
        words = smaller(command, tiny_llama)
        if "--resume" in words and "--steps" not in words:  # the newest run, whichever it is
            words += ["--steps", "3"]
        command_line(*words, *(["--force"] if (place / "my-model").exists() and words[0] == "convert" else []))
    assert len(read_metrics(place / "runs" / "my-run" / "metrics.jsonl")) == 5
    command_line("convert", "hf-to-megatron", str(tiny_llama), "./ckpt")
    shutil.rmtree(place / "my-model")
    for command in sorted(of_kind("slow"), key=lambda command: "hf-to-megatron" in command):
        force = ["--force"] if "hf-to-megatron" in command else []
        command_line(*[str(tiny_llama) if "/Llama-3" in word else word for word in shlex.split(command)[1:]], *force)
