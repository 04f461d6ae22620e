"""Algorithms and losses from outside of the package: by name, by file, and in another process."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.commands import options
from rlctl.config.schema import Schema
from rlctl.config.user_code import UserCode
from rlctl.errors import ConfigError, InputError
from rlctl.methods import available
from rlctl.methods.available import (
    ALGORITHMS,
    BUILT_IN,
    METHODS,
    commands,
    config_class,
    defaults_of,
    method_class,
    method_from_config,
    register,
)
from rlctl.methods.configuration import resolve, schema
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.policy_gradient import PolicyGradient
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.training.method import Feeds, Learns, Method
from rlctl.training.run_loss import RunLoss
from rlctl.training.user_loss import UserLoss
from support.token_batches import token_batch

LOSS = """
import torch
calls = []
def own(batch, options):
    calls.append(batch)
    ratio_R = (batch.logprobs_R - batch.rollout_logprobs_R).exp()
    return -ratio_R * batch.advantages_R * options.clip_low, {"own/ratio": ratio_R}

def plain(batch):
    return -batch.logprobs_R * batch.advantages_R

def scalar(batch):
    return -(batch.logprobs_R * batch.advantages_R).sum()

def detached(batch):
    return -batch.logprobs_R.detach() * batch.advantages_R

def reference(batch):
    return batch.logprobs_R - batch.reference_logprobs_R

def exits(batch):
    raise SystemExit(3)

def pairs(batch):
    return plain(batch), [("mine", plain(batch))]

def tokens(batch):
    return plain(batch), {"tokens": batch.entropy_R}

def part_of_another(batch):
    return plain(batch), {"mine": batch.entropy_R, "mine/half": batch.entropy_R / 2}

def seldom(batch):
    return plain(batch), {"mine" if len(batch.logprobs_R) == 7 else "other": batch.entropy_R}
"""
ALGORITHM = """
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.telemetry.metrics import Metric

class Reinforce(Algorithm):
    metrics = (Metric("surprise", "mean", column="surprise"),)

    def advantages(self, rewards_G):
        return rewards_G

    def token_loss(self, batch):
        return -batch.logprobs_R * batch.advantages_R

    def measure(self, batch):
        return {"surprise": -batch.logprobs_R}

class Half(Algorithm):
    def advantages(self, rewards_G):
        return rewards_G

class Broken(Reinforce):
    def __init__(self, config):
        raise ValueError("no such option")

class Scalar(Reinforce):
    def advantages(self, rewards_G):
        return rewards_G.mean()

class Short(Reinforce):
    def advantages(self, rewards_G):
        return rewards_G[1:] - rewards_G[:-1]

class Unbounded(Reinforce):
    def advantages(self, rewards_G):
        return (rewards_G - rewards_G.mean()) / rewards_G.std()

class Beyond(Reinforce):
    def advantages(self, rewards_G):
        return rewards_G[[len(rewards_G)]]

class Undeclared(Algorithm):
    def advantages(self, rewards_G):
        return rewards_G

    def token_loss(self, batch):
        return -batch.logprobs_R * batch.advantages_R

    def measure(self, batch):
        return {"spread": batch.advantages_R}

class Unmeasured(Undeclared):
    metrics = (Metric("focus", "mean"),)

    def measure(self, batch):
        return {}

class Failing(Undeclared):
    def measure(self, batch):
        return {"spread": batch.no_such_column}

class Batch(Reinforce):
    def batch_advantages(self, groups):
        return [group.rewards_G for group in groups[1:]]

def function(config):
    return None
"""


GUARDED = (pytest.mark.slow, pytest.mark.guard)


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    (tmp_path / "losses.py").write_text(LOSS)
    return tmp_path / "losses.py"


def configured(**sections: dict) -> Algorithm:
    config = config_class(sections.get("run", {}).get("algorithm", "grpo"))
    method = method_from_config(config.model_validate(sections))
    assert isinstance(method, Algorithm)
    return method


def test_grpo_is_the_default_and_an_unknown_name_is_told_the_known_ones() -> None:
    assert type(configured()) is Grpo
    with pytest.raises(ConfigError, match="Unknown algorithm 'grpp'") as error:
        configured(run={"algorithm": "grpp"})
    assert "grpo" in str(error.value.hint)
    with pytest.raises(ConfigError) as error:
        configured(run={"algorithm": "nothing-like-it"})
    assert "path/to/file.py:Class" in str(error.value.hint)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_is_made_by_its_name_and_arrives_in_another_process(name: str) -> None:
    algorithm = configured(run={"algorithm": name}, teacher={"model": "m"} if name == "distillation" else {})
    assert isinstance(algorithm, PolicyGradient)
    assert type(pickle.loads(pickle.dumps(algorithm))) is type(algorithm)
    assert algorithm.manifest() == {"name": name}


def test_what_sets_values_is_an_algorithm_and_the_flag_counts_them() -> None:
    assert set(commands()) == {"grpo", *METHODS}
    assert all(Schema((config_class(name),)).field(key) for name in BUILT_IN for key in defaults_of(name))
    option = options.FLAGS["algorithm"]
    named = option.help.split(" and ")[0].split(", ")
    assert set(named) < set(ALGORITHMS)
    assert f"and {('five', 'six', 'seven')[len(ALGORITHMS) - len(named) - 5]} more" in option.help


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("drgrpo", "dr-grpo"), ("dr_grpo", "dr-grpo"), ("Dr.GRPO", "dr-grpo"), ("GRPO", "grpo"),
        ("reinforce_plus_plus", "reinforce++"), ("reinforce-pp", "reinforce++"), ("rpp", "reinforce++"),
        ("reinforce_plus_plus_baseline", "reinforce++-baseline"), ("gpso", "gspo"), ("rlo", "rloo"),
    ],
)  # fmt: skip
def test_a_name_that_is_spelled_in_another_way_is_understood_and_told(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        method_from_config(RlConfig.model_validate({"run": {"algorithm": typed}}))
    assert f"Did you mean {meant}" in str(error.value.hint)


PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def test_the_table_of_the_documentation_has_every_algorithm_and_what_it_sets() -> None:
    rows = {
        cells[1].strip(" `"): cells[4] for cells in (line.split("|") for line in PAGE.splitlines()) if len(cells) == 9
    }
    assert set(rows) - {"name", "---"} == set(ALGORITHMS)
    for name in ALGORITHMS:
        sets = [text.partition("=") for text in re.findall("`([^`]+)`", rows[name])]
        of_name = [f"run.algorithm={name}"]
        found = resolve(sets=[*of_name, *(f"{key}={value}" for key, _, value in sets)], environment={})
        assert {key for key, _, _ in sets} == defaults_of(name).keys(), name
        assert found.config == resolve(sets=of_name, environment={}).config


def test_every_key_that_the_documentation_names_exists() -> None:
    sections = {key.partition(".")[0] for key in schema().keys}
    written = re.findall(r"\b([a-z]+\.[a-z_]+)\b", " ".join(re.findall("`([^`]+)`", PAGE)))
    named = {key for key in written if key.partition(".")[0] in sections}
    assert len(named) > 25
    assert {key for key in named if schema().field(key) is None} == set()


def test_every_key_of_the_algorithms_is_in_the_documentation() -> None:
    keys = [key for key in schema().keys if key.startswith(("advantage.", "filter."))]
    keys += [
        key
        for key in schema().keys
        if key.startswith("loss.") and key not in ("loss.function", "loss.params", "loss.needs")
    ]
    assert {key for key in keys if key not in PAGE} <= {"loss.dual_clip"}


class FromOutside(Grpo):
    """An algorithm of another package."""

    requires = frozenset({"reference_logprobs"})

    def keeps(self, rewards_G: np.ndarray) -> bool:
        return np.ptp(rewards_G) > 0


def test_an_algorithm_is_registered_from_outside_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "_registered", {})
    register("outside", FromOutside)
    with pytest.raises(ConfigError, match="outside needs reference_logprobs") as error:
        configured(run={"algorithm": "outside"})
    assert "loss.needs=[reference_logprobs]" in str(error.value.hint)
    algorithm = configured(run={"algorithm": "outside"}, loss={"needs": ["reference_logprobs"]})
    assert algorithm.needs == {"reference_logprobs"}
    assert not algorithm.keeps(np.ones(4))
    assert type(pickle.loads(pickle.dumps(algorithm))) is FromOutside
    with pytest.raises(ValueError, match="already"):
        register("outside", Grpo)
    with pytest.raises(ValueError, match="already"):
        register("grpo", FromOutside)


def in_another_process(loss: RunLoss, tmp_path: Path) -> dict[str, float]:
    """Sums of the loss on a batch, in a process that never saw the file."""
    (tmp_path / "pickled").write_bytes(pickle.dumps((loss, token_batch())))
    code = (
        "import pickle, sys; loss, batch = pickle.load(open(sys.argv[1], 'rb')); out = loss(batch)\n"
        "print({'loss': out.loss.item(), **{name: value.item() for name, value in out.sums.items()}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pickled")], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


@pytest.mark.slow
@pytest.mark.guard
def test_an_algorithm_from_a_file_works_in_another_process_after_the_file_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(ALGORITHM)
    algorithm = configured(run={"algorithm": f"{file}:Reinforce"})
    assert algorithm.manifest()["file"]
    batch = token_batch()
    file.unlink()
    sums = in_another_process(RunLoss(pickle.loads(pickle.dumps(algorithm))), tmp_path)
    expected = -(batch.token_weights_R * batch.logprobs_R * batch.advantages_R).sum()
    assert sums["loss"] == pytest.approx(expected.item())
    assert sums["surprise"] == pytest.approx(-batch.logprobs_R.sum().item())


@pytest.mark.slow
@pytest.mark.guard
def test_a_file_that_holds_no_algorithm_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(ALGORITHM)
    for name, said in (
        ("function", "not a class of an algorithm"),
        ("Absent", "no class 'Absent'"),
        ("Half", "does not define token_loss"),
        ("Broken", r"raised ValueError: no such option \(being made; .*own.py"),
        ("Scalar", r"advantages of the .*Scalar returned the scalar 0.5 for 8 rollouts"),
        ("Short", r"returned an array of shape \(7,\) for 8 rollouts with the rewards \[0, 1, 0, 1, ...\]"),
        ("Unbounded", r"returned \[nan, .* not finite for 8 rollouts with the rewards \[1, 1"),
        ("Beyond", r"raised IndexError: .*own.py, line .*, in advantages"),
        ("Batch", "batch_advantages of the .* returned 2 arrays for 3 groups"),
        ("Undeclared", "own.py:Undeclared measures 'spread', which its `metrics` do not declare"),
        ("Unmeasured", "declares the metric 'focus' in `metrics`, and its `measure` does not return it"),
        ("Failing", "raised AttributeError: .*no_such_column.*own.py, line .*, in measure"),
    ):
        with pytest.raises(InputError, match=said):
            configured(run={"algorithm": f"{file}:{name}"})


def test_advantages_of_equal_rewards_are_asked_only_where_such_groups_are_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(ALGORITHM)
    configured(run={"algorithm": f"{file}:Unbounded"}, filter={"groups": "drop"})


@pytest.mark.slow
@pytest.mark.guard
def test_a_users_loss_replaces_the_algorithms_with_its_options_and_metrics(losses: Path, tmp_path: Path) -> None:
    algorithm = configured(loss={"function": f"{losses}:own", "clip_low": 0.5}, advantage={"normalize_std": False})
    assert [metric.name for metric in algorithm.metrics] == ["own/ratio"]
    np.testing.assert_allclose(algorithm.advantages(np.array([1.0, 0.0])), [0.5, -0.5])
    batch = token_batch()
    ratio_R = (batch.logprobs_R - batch.rollout_logprobs_R).exp()
    expected = -(batch.token_weights_R * ratio_R * batch.advantages_R * 0.5).sum()
    losses.unlink()
    sums = in_another_process(RunLoss(algorithm), tmp_path)
    assert sums["loss"] == pytest.approx(expected.item())
    assert sums["own/ratio"] == pytest.approx(ratio_R.sum().item())
    assert {"entropy", "logprob_diff/mean", "tokens"} <= sums.keys()
    assert "clip_fraction" not in sums


@pytest.mark.slow
@pytest.mark.guard
def test_the_manifest_follows_the_text_of_the_loss(losses: Path) -> None:
    before = configured(loss={"function": f"{losses}:plain"}).manifest()
    losses.write_text(LOSS + "\n# changed\n")
    assert configured(loss={"function": f"{losses}:plain"}).manifest() != before


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("scalar", "a tensor of shape () as the loss of 7 tokens"),
        pytest.param("detached", "does not depend on batch.logprobs_R", marks=GUARDED),
        ("exits", "ended with exit code 3"),
        pytest.param(
            "tokens",
            "The metric 'tokens' of the loss function .*losses.py:tokens has the name of another one",
            marks=GUARDED,
        ),
        pytest.param("reference", "TypeError.*losses.py, line 19", marks=pytest.mark.slow),
        pytest.param("absent", "no function 'absent'", marks=pytest.mark.slow),
        pytest.param("pairs", "returned [('mine', tensor", marks=pytest.mark.slow),
        pytest.param("part_of_another", "The metric 'mine/half' of", marks=pytest.mark.slow),
    ],
)
def test_what_is_wrong_with_a_loss_is_said_before_a_run(losses: Path, function: str, said: str) -> None:
    with pytest.raises(Exception, match=re.sub(r"([()\[])", r"\\\1", said)):
        configured(loss={"function": f"{losses}:{function}"})


def test_a_loss_whose_metrics_change_their_names_is_named(losses: Path) -> None:
    algorithm = configured(loss={"function": f"{losses}:seldom"})
    with pytest.raises(InputError, match=r"losses\.py:seldom returned the metrics other, and mine when it was tried"):
        RunLoss(algorithm)(token_batch())


def test_a_loss_gets_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "huber.py"
    file.write_text("def huber(batch, *, delta=1.0):\n    return -delta * batch.logprobs_R * batch.advantages_R\n")
    code, batch = UserCode.read(f"{file}:huber", "Loss"), token_batch()

    def found(**params: float) -> torch.Tensor:
        return UserLoss(code, params)(batch, RlConfig().loss)[0]

    expected = -0.25 * batch.logprobs_R * batch.advantages_R
    torch.testing.assert_close(found(delta=0.25), expected)
    torch.testing.assert_close(found(), 4 * expected)
    with pytest.raises(InputError, match=r"huber has no setting 'delt' \(loss.params\). Did you mean delta\?"):
        found(delt=0.25)


@pytest.mark.parametrize(
    ("name", "said"), [("Smooth", "class 'Smooth'. It has First, Second"), ("Frist", "mean First")]
)
def test_a_missing_class_is_answered_with_those_of_the_file(tmp_path: Path, name: str, said: str) -> None:
    file = tmp_path / "own.py"
    file.write_text("import rlctl\nclass First(rlctl.Algorithm): pass\nclass Second(First): pass\ndef helper(): pass\n")
    with pytest.raises(InputError, match=said):
        UserCode.read(f"{file}:{name}", "Algorithm").load()


def test_a_loss_gets_the_log_probs_that_are_asked_for(losses: Path) -> None:
    algorithm = configured(loss={"function": f"{losses}:reference", "needs": ["reference_logprobs"]})
    assert algorithm.needs == {"reference_logprobs"}


@pytest.mark.parametrize(("name", "said"), [("absent.py:f", "no file absent.py"), ("own", "does not name a function")])
def test_a_loss_that_is_not_there_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        configured(loss={"function": name})


def test_a_users_loss_is_called_once_for_its_loss_and_its_metrics(losses: Path) -> None:
    algorithm = configured(loss={"function": f"{losses}:own"})
    batch = token_batch()
    RunLoss(algorithm)(batch).loss.backward()
    assert len(algorithm.user_loss.code.load().__globals__["calls"]) == 1
    assert batch.logprobs_R.grad is not None
    assert torch.isfinite(batch.logprobs_R.grad).all()


def test_members_of_the_bases_are_used_by_two_methods_each() -> None:
    """What one method alone needs is a capability (`training/capabilities.py`)."""
    classes = {method_class(name) for name in BUILT_IN}
    families = {base for made in classes if made for base in made.__mro__ if issubclass(base, Method)} - {Method}
    members = [name for base in (Learns, Feeds) for name in {*vars(base), *vars(base).get("__annotations__", {})}]
    members = [name for name in members if not name.startswith("_") and name != "config"]  # each instance has its own
    assert len(members) + 1 <= 25
    set_here = {name: sum(name in vars(family) for family in families) for name in members}
    assert {name: count for name, count in set_here.items() if count < 2} == {}
    assert len([name for name in vars(Method) if not name.startswith("_")]) <= 3


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("run: {method: dpo}", "dpo"),
        ("run: {method: grpo, algorithm: dapo}", "dapo"),
        ("run: {algorithm: dpo}", "dpo"),  # as files wrote it before `run.method`
        ("run: {method: sft, algorithm: grpo}", None),
    ],
)
def test_a_file_names_its_method(tmp_path: Path, text: str, name: str | None) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    if name is None:
        with pytest.raises(ConfigError, match="is not of the method sft"):
            resolve(files=[file], environment={})
        return
    config = resolve(files=[file], environment={}).config
    assert (config.run.algorithm, type(config)) == (name, config_class(name))


def test_a_method_replaces_the_algorithm_of_a_weaker_source(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {algorithm: dapo}")
    resolved = resolve(files=[file], sets=["run.method=sft"], environment={})
    assert resolved.config.run.algorithm == "sft"
    assert resolved.origin["run.algorithm"] == "--set"
