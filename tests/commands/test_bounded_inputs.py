"""Whatever a flag, a file or a value holds, a command ends soon, with a sentence that names it and exit code 2."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlctl.cli import run
from rlctl.commands.output import JsonMode

MEMORY_BYTES = 8 << 30
"""Far more than any command here takes, and far less than what the inputs stand for."""


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    JsonMode.wanted = JsonMode.printed = False
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in `tmp_path`, and returns what it says after refusing it."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> str:
        assert run(list(arguments)) == 2, capsys.readouterr().err
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run_command


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("#" * 300_000, "it is larger than 262,144 bytes"),
        ("run: {steps: !!bool 3}", "--config mine.yaml is not valid YAML: '3'"),
        ("run: {steps: !!timestamp x}", "could not determine a constructor for the tag"),
        ("\n".join(f"k{i}: {i}" for i in range(4000)), "and 3,980 more problems."),
        (f"run: {{steps: {'x' * 200_000}}}", "it should be a valid integer"),
    ],
    ids=lambda value: None if len(value) > 60 else value,
)
def test_a_configuration_file_out_of_bounds(
    tmp_path: Path, refused: Callable[..., str], content: str, words: str
) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    said = refused("config", "show", "--config", "mine.yaml")
    assert words in said
    assert len(said) < 15_000


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("grpo: {seed: '${div:1,0}'}", "grpo.seed = ${div:1,0}: division by zero"),
        pytest.param(
            "grpo: {seed: '${sub:}'}", "grpo.seed = ${sub:}: Unsupported interpolation type sub", marks=pytest.mark.slow
        ),
        ("\n".join(f"k{i}: {i}" for i in range(4000)), "more lines, which --all shows"),
    ],
    ids=["div", "sub", "unknown"],
)
def test_a_value_of_a_recipe_that_leads_nowhere_is_a_line_of_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"policy: {{model_name: x}}\n{line}\n")
    assert run(["config", "import", "recipe.yaml"]) == 0
    said = capsys.readouterr().err
    assert words in said
    assert len(said) < 15_000


@pytest.mark.parametrize(
    ("name", "content", "arguments", "words"),
    [
        ("p.jsonl", '{"prompt": ' + "[" * 100_000, [], "p.jsonl, line 1: not JSON"),
        ("p.jsonl", '{"prompt": 3}', [], "p.jsonl, line 1: field 'prompt' is of type int"),
        ("p.txt", "q\n" + "x" * 3_000_000, [], "p.txt, line 2: field 'prompt' holds 3,000,000 characters"),
        ("p.txt", "q\n", ["--n", "100000000"], "exceeds the limit of 1,000,000 completions"),
    ],
    ids=["deep", "number", "long", "many"],
)
def test_prompts_out_of_bounds(
    tmp_path: Path, refused: Callable[..., str], name: str, content: str, arguments: list[str], words: str
) -> None:
    (tmp_path / name).write_text(content)
    assert words in refused("generate", "--model", "m", "--dry-run", "--prompts-file", name, *arguments)


TRAIN = ("train", "grpo", "--dry-run", "--preset", "laptop", "--model", "meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "100000000"], "400,000,000 rollouts; a step has at most 1,000,000"),
        (["--generations", "100000000"], "800,000,000 rollouts; a step has at most 1,000,000"),
        (["--prompts", "9" * 30], "`batch.prompts`"),
        (["--steps", "9" * 20], "`run.steps`"),
        (["--seed", "-1"], "`run.seed` = -1 (flag --seed)"),
        (["--seed", str(2**64)], "`run.seed`"),
        (["--seed", str(2**32)], "`run.seed`"),
        (["--nodes", "100000000"], "`cluster.nodes`"),
        (["--set", "reward.timeout_s=1e300"], "`reward.timeout_s` = 1e+300 (--set)"),
        (["--set", "refit.timeout_s=1e7"], "`refit.timeout_s`"),
        (["--set", "cluster.start_timeout_s=1e30"], "`cluster.start_timeout_s`"),
        (["--set", "cluster.step_timeout_s=1e30"], "`cluster.step_timeout_s`"),
        (["--set", "training.threads=1000000"], "`training.threads`"),
        (["--set", "generation.kv_cache_bytes=99999999999999999999"], "`generation.kv_cache_bytes`"),
        (["--set", "generation.top_k=99999999999"], "`generation.top_k`"),
        (["--set", "generation.stop=['']"], "`generation.stop[0]` = ''"),
        (["--set", "training.lora.targets=[]"], "the list should have at least 1 item"),
        (["--set", f"run.steps={'[' * 100_000}"], "`run.steps`"),
        (["--set", f"run.steps={'x' * 100_000}"], "`run.steps`"),
        (["--set", f"{'x' * 100_000}=1"], "unknown key"),
        (["--set", "data.params=" + "{a: &a [x,x], b: &b [*a,*a]" + ", c: [*b]" * 9 + "}"], "`data.params`"),
    ],
    ids=lambda value: None if len(str(value)) > 60 else str(value),
)
def test_a_value_out_of_bounds(refused: Callable[..., str], arguments: list[str], words: str) -> None:
    said = refused(*TRAIN, *arguments)
    assert words in said
    assert len(said) < 3000


def test_a_parallel_size_out_of_bounds_is_answered_with_the_nearest(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model", str(tiny_llama), "--gpu", "h100", "--gpus-per-node", "8", "--nodes", "1"]
    assert run([*arguments, "--set", "training.tp=1000000000"]) == 2
    assert "The nearest value that works is training.tp=" in capsys.readouterr().err


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    for name in ("random", "json", "numpy", "yaml", "typer", "pydantic", "tempfile", "socket", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open('marker', 'a').write({name!r})\n")
    done = subprocess.run(
        [sys.executable, "-m", "rlctl", "config", "show", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
    )  # fmt: skip
    assert json.loads(done.stdout)["run"]
    assert not (tmp_path / "marker").exists()
