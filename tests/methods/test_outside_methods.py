"""A package outside the tree brings a training method, with a section, a row type, a loss and a metric of its own, and
an RL algorithm with nested settings. Both go through `train`, its dry run, a resume, the report and `plan`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from rlctl.telemetry.metrics import read_metrics
from support.commands import rlctl_with

ENTRY_POINTS = """
[rlctl.methods]
weighted = toy_methods:Weighted

[rlctl.algorithms]
tempered = toy_methods:Tempered
"""
CODE = '''
from typing import Annotated

from rlctl.config.facts import FREE, PLANNED, Decided, Flag
from rlctl.config.section import Section
from rlctl.data.row_types import TextRows
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.policy_gradient import PolicyGradient
from rlctl.methods.rl.sections import LossConfig
from rlctl.methods.sft import SftConfig
from rlctl.methods.text_method import TextMethod
from rlctl.settings.run import GroupBatchConfig
from rlctl.telemetry.metrics import Metric


class Weighting(Section):
    """How rows are weighted."""

    power: float = 1.0
    """Exponent of the probability of a token."""
    by_kind: dict[str, float] = {"sum": 1.0}
    """Weights of rows by their kind."""
    block: Annotated[
        int | None, PLANNED | FREE, Decided(lambda plan: plan.micro_batches + 1), Flag("block", "Texts in a block.")
    ] = None
    """Texts in a block."""


class WeightedConfig(SftConfig):
    """The configuration of `rlctl train weighted`."""

    weighting: Weighting = Weighting()


class Scored(TextRows):
    """Rows with `question`, `reply`, and a mapping `meta` with the `quality` of the reply."""

    numbers = ("quality",)

    def read(self, record, index, where, data):
        given = {"prompt": record["question"], "completion": record["reply"], **record["meta"]}
        return super().read(given, index, where, data)


class Weighted(TextMethod):
    """Cross entropy with tokens weighted by their probability."""

    Config = WeightedConfig
    defaults = {"optimizer.lr": 1e-3}
    command = "weighted"
    rows = Scored()
    metrics = (
        Metric("mean_weight", "mean", curve="mean weight of a token"),
        Metric("mean_quality", "mean"),
    )

    def _weights(self, batch):
        return (self.config.weighting.power * batch.logprobs_R.detach()).exp()

    def token_loss(self, batch):
        return -self._weights(batch) * batch.extra_R["quality"] * batch.logprobs_R

    def measure(self, batch):
        return {"mean_weight": self._weights(batch), "mean_quality": batch.extra_R["quality"]}


class Softness(Section):
    """The gate."""

    scale: float = 2.0
    """Scale of the ratio."""
    hard: bool = False
    """Whether the gate is a step."""


class TemperedLoss(LossConfig):
    """The loss of `tempered`."""

    softness: Softness = Softness(scale=4.0)


class TemperedConfig(RlConfig):
    """The configuration of `--algorithm tempered`."""

    loss: TemperedLoss = TemperedLoss()
    batch: GroupBatchConfig = GroupBatchConfig(generations=2)


class Tempered(PolicyGradient):
    """A surrogate with a scaled ratio."""

    Config = TemperedConfig

    def surrogate(self, ratio_R, batch):
        return -(self.config.loss.softness.scale * (ratio_R - 1)).tanh() * batch.advantages_R

    def is_bounded(self, ratio_R, batch):
        return batch.counted_R & False
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "toy_methods.py").write_text(dedent(CODE))
    info = folder / "toy_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: toy-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    rows = [
        {"question": f"What is {a} + 3?", "reply": f"It is {a + 3}.", "meta": {"quality": 0.5, "kind": "sum"}}
        for a in range(9)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rlctl(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return rlctl_with(package, list(words))[0]


def method_words(package: Path, model: Path) -> list[str]:
    return ["--model", str(model), "--data", str(package / "rows.jsonl"), "--gpu", "cpu", "--max-length", "96"]


@pytest.mark.long
def test_its_section_is_known_and_no_other(package: Path, tiny_llama: Path) -> None:
    grpo = ["train", "grpo", "--dry-run", "--set"]
    shown, helped, foreign, nested, misplaced, misspelt = rlctl_with(
        package,
        ["config", "schema", "weighted", "weighting"],
        ["train", "weighted", "--help"],
        ["train", "weighted", *method_words(package, tiny_llama), "--set", "reward.x=1", "--dry-run"],
        ["config", "schema", "tempered", "loss"],
        [*grpo, "loss.softness.scale=1"],
        [*grpo, "loss.softness.scal=1", "--algorithm", "tempered"],
    )
    assert "power: number = 1.0" in shown.stdout, shown.stderr
    assert "[default: 0.001]" in helped.stdout
    assert foreign.returncode == 2
    assert "`train weighted` has no section `reward`" in foreign.stderr
    assert "scale: number = 4.0" in nested.stdout, nested.stderr
    assert "`train grpo` has no key `softness.scale` in the section `loss`" in misplaced.stderr
    assert "did you mean `loss.softness.scale`?" in misspelt.stderr


def test_an_argument_of_a_section_is_a_default_when_its_neighbor_is_set(package: Path) -> None:
    sets = ["run.algorithm=tempered", "loss.softness.hard=true", "batch.prompts=4"]
    shown = rlctl(package, "config", "show", "--json", *(word for one in sets for word in ("--set", one)))
    config = json.loads(shown.stdout)
    assert config["loss"]["softness"] == {"scale": 4.0, "hard": True}, shown.stderr
    assert config["batch"]["generations"] == 2


@pytest.mark.guard
@pytest.mark.slow
def test_both_are_planned_and_shown_without_being_started(package: Path, tiny_llama: Path) -> None:
    weighted = ["train", "weighted", *method_words(package, tiny_llama), "--dry-run", "--json"]
    model = ["--model", str(tiny_llama), "--gpu", "cpu", "--json"]
    shown, given, planned, tempered = rlctl_with(
        package,
        [*weighted, "--set", "weighting.power=0.5"],
        [*weighted, "--block", "7"],
        ["plan", *model, "--set", "run.algorithm=weighted"],
        ["train", "grpo", *model, "--data", "reasoning-gym:chain_sum", "--algorithm", "tempered", "--set",
         "loss.softness.scale=3", "--dry-run"],
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    config = json.loads(shown.stdout)["config"]
    assert config["weighting.power"]["value"] == 0.5
    assert config["weighting.block"]["origin"] == "planner"
    assert config["weighting.block"]["value"] >= 2
    assert json.loads(given.stdout)["config"]["weighting.block"] == {"value": 7, "origin": "flag --block"}, given.stderr
    assert json.loads(planned.stdout)["generation"] is None, planned.stderr
    assert tempered.returncode == 0, tempered.stderr
    assert json.loads(tempered.stdout)["config"]["loss.softness.scale"]["value"] == 3


@pytest.mark.slow
def test_both_train_and_resume(package: Path, tiny_llama: Path, tmp_path: Path) -> None:
    run, words = str(tmp_path / "run"), method_words(package, tiny_llama)
    common = ["--set", "training.threads=1", "--set", "model.convert=false", "--run-dir", run]
    done = rlctl(package, "train", "weighted", *words, *common, "--steps", "2", "--batch-size", "4")
    assert done.returncode == 0, done.stderr
    again = rlctl(package, "train", "weighted", "--resume", "--run-dir", run, "--steps", "4", "--block", "9")
    assert again.returncode == 0, again.stderr
    lines = read_metrics(Path(run) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(0 < line["mean_weight"] <= 1 for line in lines)
    assert lines[-1]["mean_weight"] > lines[0]["mean_weight"]
    assert all(line["mean_quality"] == 0.5 for line in lines)
    assert "mean weight of a token" in (Path(run) / "report.html").read_text()
    rl = str(tmp_path / "rl")
    sampled = rlctl(
        package, "train", "grpo", "--model", str(tiny_llama), "--data", "reasoning-gym:chain_sum", "--gpu", "cpu",
        "--algorithm", "tempered", "--set", "loss.softness.scale=3", "--steps", "1", "--prompts", "2", "--generations",
        "4", "--max-new-tokens", "6", "--run-dir", rl, "--set", "training.threads=1",
    )  # fmt: skip
    assert sampled.returncode == 0, sampled.stderr
    assert json.loads((Path(rl) / "manifest.json").read_text())["config"]["loss.softness.scale"]["value"] == 3
