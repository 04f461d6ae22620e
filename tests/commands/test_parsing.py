"""Command lines as people type them: flags of every command, other trainers' names, and what is missing or unknown."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest

from rlctl import cli
from rlctl.commands import options
from rlctl.commands.output import message
from rlctl.commands.parsing import ALIASES, PANELS, SIMILAR
from rlctl.methods.available import METHODS
from rlctl.methods.configuration import schema
from rlctl.telemetry import terminal
from support.commands import rlctl

Asked = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Iterator[Asked]:
    """Runs a command line in this process; returns its exit code, stdout and stderr."""

    yield lambda *arguments: rlctl(capsys, *arguments)
    terminal.reset()


@pytest.mark.parametrize("path", [(), ("train",), ("train", "grpo"), ("doctor",), ("config", "show")])
def test_h_is_help_everywhere(path: tuple[str, ...], asked: Asked) -> None:
    assert asked(*path, "-h") == asked(*path, "--help")
    assert asked(*path, "-h")[0] == 0


def test_every_missing_argument_is_named_at_once(asked: Asked) -> None:
    code, _, err = asked("convert", "megatron-to-hf")
    assert (code, err.splitlines()[0]) == (2, "rlctl: `rlctl convert megatron-to-hf` needs SRC and DST.")
    assert "needs DST." in asked("convert", "megatron-to-hf", "./ckpt")[2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tran grpo", ["`tran`", "Did you mean `rlctl train`?", "    doctor "]),
        ("train ppo", ["no command `ppo`", "Did you mean `rlctl train grpo --algorithm ppo`?", "    grpo "]),
        ("train dr-grpo", ["Did you mean `rlctl train grpo --algorithm dr-grpo`?"]),
        ("train distillation", ["Did you mean `rlctl train grpo --algorithm distillation`?"]),
        ("train grop", ["Did you mean `rlctl train grpo`?"]),
        ("report", ["needs RUN.", "Usage: rlctl report [OPTIONS] RUN..."]),
        ("presets", ["`rlctl presets` needs a command", "    ls ", "    cp "]),
        ("train --preset laptop", ["does not know which method to use", "`rlctl train grpo ...`"]),
        ("presets --preset laptop", ["no flag --preset"]),
        ("-q presets ls", ["no flag -q", "`rlctl ... -q`"]),
        ("train grpo --stepz 3", ["no flag --stepz", "Did you mean --steps?"]),
        ("train grpo --max-step 3", ["Did you mean --steps?"]),
        ("train grpo --async --sync", ["--async and --sync contradict each other", "Give one of them"]),
        ("train grpo --split --steps 3 --colocated", ["--colocated and --split contradict each other"]),
        ("train grpo --preset laptop --lora 0 --dry-run", ["--lora 0: adapters have a rank of at least 1"]),
        ("train grpo --beta 0.1", ["loss.kl_coefficient"]),
        ("train grpo --per-device-train-batch-size 4", ["--prompts", "--generations"]),
        ("train grpo --set trainer.n_gpus_per_node=4", ["`cluster.gpus_per_node`"]),
        ("train grpo --set actor_rollout_ref.rollout.n=4", ["`batch.generations`"]),
        ("train grpo --set trainer.total_epochs=3", ["`run."]),
        ("train grpo --set num_generations=3", ["`batch.generations`"]),
        ("train grpo --bogus 3", ["no flag --bogus.", "`rlctl train grpo -h` shows its flags."]),
        ("convert hf-to-megatron", ["needs SRC.", "hf-to-megatron [OPTIONS] SRC [DST]"]),
        (
            "train grpo --preset laptop --algorithm foo",
            ["Unknown algorithm 'foo'", "There are grpo, ", "cispo", "sapo, distillation and path/to/file.py:Class"],
        ),
        (
            "train grpo --preset laptop --algorithm dpo",
            ["`run.algorithm` = 'dpo' (flag --algorithm) is no algorithm", "Write `rlctl train dpo ...`"],
        ),
        (
            "train grpo --preset laptop --set run.algorithm=sft",
            ["(--set) is no algorithm", "Write `rlctl train sft ...`"],
        ),
        ("plan --preset laptop --algorithm dpo", ["'dpo' (flag --algorithm) is a method", "Write --method dpo."]),
        ("rehearse --preset laptop --algorithm kto", ["'kto' (flag --algorithm) is a method", "Write --method kto."]),
        ("plan --preset laptop --method dapo", ["Unknown method 'dapo'", "write --algorithm dapo"]),
        ("plan --preset laptop --method ppp", ["Unknown method 'ppp' (run.method", "There are grpo, sft, dpo"]),
        ("plan --preset laptop --method dpo --algorithm dapo", ["'dapo' (flag --algorithm) is not of the method dpo"]),
        ("config show --set run.method=dpo --set run.algorithm=dapo", ["is not of the method dpo (--set)"]),
        ("train grpo --preset laptop --set run.method=sft", ["is not the method of `train grpo`", "rlctl train sft"]),
        (
            "train sft --preset laptop-sft --set run.algorithm=dapo",
            ["is not the method of `train sft`", "Write `rlctl train grpo --algorithm dapo ...`"],
        ),
        (
            "train grpo --preset laptop --algorithm sapo --set loss.dual_clip=3",
            [
                "`train grpo --algorithm sapo` has no key `dual_clip` in the section `loss`",
                "the algorithms grpo, dr-grpo",
            ],
        ),
        ("train grpo --preset laptop --max-staleness 4", ["--max-staleness applies to --async", "Add --async."]),
        ("plan --preset laptop --max-staleness 4", ["--max-staleness applies to --async"]),
        ("train grpo --preset laptop --async --max-staleness 4 --set rollouts.mode=sync", ["applies to --async"]),
        ("train grpo --preset laptop --prompt-field question", ["--prompt-field has no effect", "has no columns"]),
        ("plan --model Qwen/Qwen3-8B --gpu 4090", ["--gpu 4090", "Did you mean rtx4090?", "h100, "]),
        ("train grpo --steps three", ["--steps", "`rlctl train grpo -h`"]),
    ],
)
def test_what_is_unknown_is_answered_with_what_there_is(line: str, words: list[str], asked: Asked) -> None:
    code, out, err = asked(*line.split())
    assert (code, out) == (2, "")
    assert all(word in err for word in words), err


def test_another_trainers_name_with_our_meaning_works_and_is_in_no_help(asked: Asked) -> None:
    assert asked("config", "show", "--learning-rate", "0.5")[0] == 2  # a command without --lr does not know it
    command = cli.load_command("train").commands["grpo"]
    with command.make_context("grpo", ["--learning-rate", "0.5", "--num-generations=4", "--max-steps", "7"]) as context:
        assert (context.params["lr"], context.params["generations"], context.params["steps"]) == (0.5, 4, 7)
    assert not any(alias in asked("train", "grpo", "-h")[1] for alias in ("--learning-rate", "--num-generations"))


@pytest.mark.parametrize(
    ("typed", "rank", "overrides"),
    [
        ("--lora", 16, ()),
        ("--lora 8", 8, ()),
        ("--lora=4 run.steps=3", 4, ["run.steps=3"]),
        ("--lora run.steps=3", 16, ["run.steps=3"]),
        ("--lora --steps 3", 16, ()),
        ("--lora-rank 2", 2, ()),
        ("--use-peft", 16, ()),
    ],
)
def test_adapters_have_a_rank_where_none_is_given(typed: str, rank: int, overrides: object) -> None:
    command = cli.load_command("train").commands["grpo"]
    with command.make_context("grpo", typed.split()) as context:
        assert (context.params["lora"], context.params["overrides"]) == (rank, overrides)


def test_short_names_of_a_run_set_their_keys() -> None:
    line = ("--val-data held.jsonl --prompt-field question --answer-field reply --temperature 0.5 --wandb "
            "--tensorboard --lora 8")  # fmt: skip
    with cli.load_command("train").commands["grpo"].make_context("grpo", line.split()) as context:
        resolved = options.resolve_config(**context.params)
    config = resolved.config
    assert (config.data.prompt_field, config.data.answer_field) == ("question", "reply")
    assert (config.validation.data.name, config.validation.at_start, config.validation.at_end) == (
        "held.jsonl", True, True,
    )  # fmt: skip
    assert (config.generation.temperature, config.run.loggers) == (0.5, ("wandb", "tensorboard"))
    assert (config.training.lora.rank, resolved.origin["training.lora.rank"]) == (8, "flag --lora")


def test_a_long_help_has_headings_and_each_option_in_one_line_with_its_default(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = asked("train", "grpo", "-h")[1].partition("Examples:")[0]
    headings = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert headings == ["Arguments", *PANELS, "Other options"]
    options = [line for line in text.splitlines() if line.startswith("  -")]
    flags = {name for param in cli.load_command("train").commands["grpo"].params for name in param.opts}
    assert {line.replace(",", " ").split()[0] for line in options} <= {*flags, "-h"}
    below = text.partition("Model, data and reward:")[2].splitlines()
    assert [line for line in below if line.startswith("    ")] == [], "no option takes two lines"
    assert re.search(r"--temperature.*\[default: 1\.0\]", text)
    assert re.search(r"--prompt-field.*\[default: prompt\]", text)
    assert "Other options" not in asked("presets", "cp", "-h")[1]


@pytest.mark.parametrize("command", METHODS)
def test_help_of_a_training_method_shows_the_defaults_that_its_run_has(
    command: str, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = asked("train", command, "-h")[1]
    shown = dict(re.findall(r"^ +(--[a-z-]+).*\[default: (.*)\]$", text, re.MULTILINE))
    config = options.resolve_config(command=command).config
    keys = {options.flag(name): options.key_of(name) for name in options.FLAGS}
    keys = {flag: key for flag, key in keys.items() if key and flag in shown}
    assert {name: str(attrgetter(keys[name])(config)) for name in shown} == shown
    assert float(shown["--lr"]) == {"dpo": 1e-6, "kto": 1e-6}.get(command, 1e-5)


def test_every_name_leads_to_a_flag_or_key_that_exists() -> None:
    grpo = cli.load_command("train").commands["grpo"]
    flags = {name for param in grpo.params for name in param.opts}
    assert set(ALIASES.values()) <= flags
    assert not set(ALIASES) & flags
    assert not set(SIMILAR) & (flags | set(ALIASES))
    words = [word.strip(".,;:()").partition("=")[0] for text in SIMILAR.values() for word in text.split()]
    assert {word for word in words if word.startswith("--")} <= flags
    keys = [word for word in words if "." in word and not word.startswith("-") and word.islower()]
    assert [key for key in keys if schema().field(key) is None] == []


def test_quiet_leaves_errors_and_results(asked: Asked, tmp_path: Any) -> None:
    copied = tmp_path / "mine.yaml"
    assert asked("presets", "cp", "laptop", str(copied), "-q") == (0, "", "")
    code, out, err = asked("presets", "cp", "laptop", str(copied), "-q")
    assert (code, out) == (2, "")
    assert "exists already" in err
    assert asked("presets", "ls", "--quiet")[1]
    assert asked("presets", "ls")[0] == 0
    message("said again")  # what one command line asked for is not the next one's


def test_verbose_says_what_is_read(asked: Asked) -> None:
    assert asked("config", "show", "--preset", "1node")[2] == ""
    err = asked("config", "show", "--preset", "1node", "-v")[2]
    assert "1node.yaml" in err
    assert "1gpu.yaml" not in err
    assert not logging.getLogger("rlctl").isEnabledFor(logging.INFO) or asked("presets", "ls")[2] == ""


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("NO_COLOR", "")  # put back afterwards
    monkeypatch.setenv("TERM", "xterm")
    stream: Any = Terminal()
    assert terminal.colored("ok", "ok", stream) == "\x1b[32mok\x1b[0m"
    with open(os.devnull, "w") as file:
        assert terminal.colored("ok", "ok", file) == "ok"
    terminal.without_color(True)
    assert terminal.colored("ok", "ok", stream) == "ok"


def test_train_without_a_model_names_presets_and_models_that_fit(asked: Asked) -> None:
    for line in (("train",), ("train", "grpo", "--gpu", "cpu")):
        code, out, err = asked(*line)
        assert (code, out) == (2, "")
        assert "rlctl train grpo --preset laptop" in err
        assert len(line) == 1 or "give --model and --data" in err  # all that is missing, at once
        assert "    1node " in err
        assert "SmolLM2-135M" in err
        assert "70B" not in err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("rlctl pl", "plan"),
        ("rlctl train ", "grpo"),
        ("rlctl train grpo --preset lap", "laptop"),
        ("rlctl train grpo --model Qwen/Qwen3-0", "Qwen/Qwen3-0.6B"),
        ("rlctl train grpo --data reasoning-gym:chain", "reasoning-gym:chain_sum"),
        ("rlctl plan --gpu h1", "h100"),
        ("rlctl presets show 1n", "1node"),
    ],
)
def test_the_shell_completes(typed: str, offered: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_RLCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    assert cli.run([]) == 0
    assert offered in capsys.readouterr().out.split()
