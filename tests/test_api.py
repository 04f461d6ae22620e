"""`import rlctl`: the names of the Python API, and that they do what the commands do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import rlctl
from rlctl import api
from rlctl.errors import ConfigError, InputError, MachineError, NoPlanError
from rlctl.methods.configuration import resolve
from rlctl.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]


def a_reward(completion: str, **row: object) -> float:
    return float(len(completion))


def test_every_name_is_there_typed_and_documented() -> None:
    stub = set(re.findall(r"as (\w+)$", Path(rlctl.__file__).with_suffix(".pyi").read_text(), re.MULTILINE))
    assert stub == set(rlctl.API)
    assert all(getattr(rlctl, name) is not None for name in rlctl.API)
    page = (ROOT / "docs" / "python_api.md").read_text()
    assert [name for name in rlctl.API if f"`{name}" not in page] == []
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        rlctl.trian  # noqa: B018


def test_importing_rlctl_imports_nothing_else() -> None:
    # -S: without .pth files, of which `make venv` writes one that imports rlctl.
    place = str(Path(rlctl.__file__).parents[1])
    code = f"import sys; sys.path.append({place!r}); before = set(sys.modules); import rlctl"
    code += "; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names} == {"rlctl"}


def test_a_configuration_from_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("run: { steps: 7, seed: 3 }\n")
    monkeypatch.setenv("RLCTL_BATCH__PROMPTS", "5")
    values = {"run.steps": 9, "optimizer": {"lr": 1e-4}, "reward.terms": [{"name": a_reward, "weight": 2}]}
    made = rlctl.load_config("laptop", [tmp_path / "mine.yaml"], values)
    config = made.config
    assert (config.run.steps, config.run.seed, config.batch.prompts, config.optimizer.lr) == (9, 3, 5, 1e-4)
    assert config.reward.terms[0].name == f"{__file__}:a_reward"
    assert (made.origin["run.steps"], made.origin["run.seed"]) == ("program", f"file {tmp_path / 'mine.yaml'}")


def test_wrong_values_of_a_program_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key `run.stepz` \(program\); did you mean `run.steps`"):
        rlctl.load_config(values={"run.stepz": 1})
    with pytest.raises(InputError, match="<lambda> is not defined at the top of a file"):
        rlctl.load_config(values={"loss.function": lambda batch: batch})

    def inner() -> None: ...

    with pytest.raises(InputError, match="inner is not defined at the top of a file"):
        api.reference(inner)


def test_a_plan_from_a_program() -> None:
    values = {"model.name": "Qwen/Qwen3-8B", "cluster.gpu": "h100"}
    plan = rlctl.plan(rlctl.load_config("1node", values=values))
    layout = plan.config_values()
    assert layout["training.dp"] * layout["training.pp"] == 8
    assert sum(plan.seconds.values()) == plan.total_s
    with pytest.raises(NoPlanError):
        rlctl.plan(rlctl.load_config("1gpu", values=values | {"model.name": "Qwen/Qwen3-32B"}))


def test_an_evaluation_that_cannot_be_is_named_as_on_the_command_line(tmp_path: Path) -> None:
    config = rlctl.load_config(values={"cluster.gpu": "cpu"})
    task = "reasoning-gym:chain_sum"
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "no model to evaluate"),
        ({"models": ["a/b"], "n": 0}, "n=0 leaves nothing to sample"),
        ({"models": ["a/b"], "k": [4]}, "pass@4 needs at least 4 samples"),
        ({"models": ["a/b"], "steps": [4]}, "there is no --run-dir"),
        ({"run_dirs": [tmp_path]}, "is not a run"),
    ]
    for given, message in cases:
        with pytest.raises(InputError, match=message):
            rlctl.evaluate(config, [task], **given)


def test_training_is_for_the_main_thread() -> None:
    caught: list[BaseException] = []

    def train() -> None:
        try:
            rlctl.train(resolve("laptop", environment={}))
        except rlctl.RlctlError as error:
            caught.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert "only the main thread" in str(caught[0])


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, *rest: object) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

    train = rlctl.train
    monkeypatch.setattr("builtins.__import__", absent)
    with pytest.raises(MachineError, match="`torch` is not installed"):
        train(None)  # type: ignore[arg-type]


def test_metrics_of_a_run_and_of_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward_mean": 0.5}\n')
    assert rlctl.read_metrics(tmp_path) == [{"step": 0, "reward_mean": 0.5}]
    with pytest.raises(InputError, match=r"has no metrics\.jsonl"):
        rlctl.read_metrics(tmp_path / "absent")


@pytest.mark.slow
def test_the_example_trains_and_samples(tiny_llama: Path, tmp_path: Path) -> None:
    environment = {
        "RLCTL_MODEL__NAME": str(tiny_llama), "RLCTL_RUN__STEPS": "2", "RLCTL_RUN__DIR": str(tmp_path / "run"),
        "RLCTL_BATCH__PROMPTS": "2", "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "examples" / "python_api.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2
    assert done.stdout.startswith(str([round(line["reward_mean"], 3) for line in lines]))
    assert "best of step 2" in done.stderr


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "python_api.md").read_text()
    assert (ROOT / "examples" / "python_api.py").read_text() in page
