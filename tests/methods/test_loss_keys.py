"""Every key of an algorithm's section `loss` changes its loss, its plan or a message, and there are no other keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.user_code import UserCode
from rlctl.errors import ConfigError, InputError
from rlctl.methods.available import ALGORITHMS, METHODS, config_class, defaults_of, method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.distill import DistillConfig
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.methods.rl.distillation import DistillationRlConfig
from rlctl.preparation.teacher_tokens import repeated_teachers
from rlctl.training.method import Method
from rlctl.training.run_loss import RunLoss
from rlctl.training.user_loss import UserLoss
from support.token_batches import token_batch

NAMES = [*ALGORITHMS, *METHODS]
KEYS = {name: {*config_class(name).model_fields["loss"].annotation.model_fields} for name in NAMES}
IN_LOSS = {"kl_coefficient": 0.5, "kl_in": "loss"}
TRUNCATED = {"importance_correction": "truncated", "importance_floor": None}
FUNCTION = "FILE:pushed"
CHANGES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "function": ({}, (FUNCTION,)),
    "params": ({"function": FUNCTION}, ({"power": 3},)),
    "needs": ({}, (("old_logprobs", "reference_logprobs", "teacher_logprobs"),)),
    "clip_low": ({}, (0.01,)),
    "clip_high": ({}, (0.01,)),
    "dual_clip": ({"clip_low": 0.9, "clip_high": 0.9}, (1.001,)),
    "kl_coefficient": ({"kl_in": "loss"}, (0.5,)),
    "kl_estimator": (IN_LOSS, ("k2", "k3")),
    "kl_cap": (IN_LOSS, (0.01,)),
    "kl_in": ({"kl_coefficient": 0.5}, ("loss", "reward")),
    "kl_weight": (IN_LOSS, ("policy",)),
    "kl_score_term": (IN_LOSS, (True,)),
    "entropy_coefficient": ({}, (0.1,)),
    "level": ({}, ("token", "sequence")),
    "length_divisor": ({"level": "constant"}, (3,)),
    "importance_correction": ({}, ("off", "masked")),
    "importance_level": (TRUNCATED, ("sequence",)),
    "importance_cap": (TRUNCATED, (0.5,)),
    "importance_floor": (TRUNCATED, (0.9,)),
    "sequence_mask": ({}, ((0.99, 1.01),)),
    "error_mask": ({}, (1.01,)),
    "off_policy_mask": ({}, (0.000001,)),
    "positive_nll_weight": ({}, (0.3,)),
    "sapo_temperature_positive": ({}, (3.0,)),
    "sapo_temperature_negative": ({}, (3.0,)),
    "divergence": ({"clip_low": 0.01, "clip_high": 0.01}, ("kl",)),
}
"""Keys that give a key something to do, and values for it, of which at least one is no default."""


def configured(name: str, loss: dict[str, Any]) -> Method:
    sections: dict[str, dict[str, Any]] = {"run": {"algorithm": name}}
    for key, value in defaults_of(name).items():
        section, _, last = key.partition(".")
        sections.setdefault(section, {})[last] = value
    if name in ("distillation", "distill"):
        sections["teacher"] = {"model": "some-teacher"}
    sections["loss"] = {**sections.get("loss", {}), **loss}
    return method_from_config(config_class(name).model_validate(sections), tries_loss=False)


def batch() -> TokenBatch:
    """Ten rollouts or texts of four tokens, with every column that a loss may read."""
    generator = torch.Generator().manual_seed(5)
    tokens = 40

    def top() -> torch.Tensor:
        return torch.randn(tokens, 4, generator=generator, dtype=torch.float64).log_softmax(-1)

    rollout_R = torch.arange(tokens) // 4
    return token_batch(
        tokens=tokens, seed=3, rollout_R=rollout_R, advantages_R=(0.8 - 1.6 * (rollout_R % 2)).double(),
        teacher_logprobs_R=-2 - torch.rand(tokens, generator=generator, dtype=torch.float64), teacher_top_RK=top(),
        top_logprobs_RK=top(), extra_R={"label": (rollout_R % 2 == 0).double()},
    )  # fmt: skip


def effect(name: str, **loss: Any) -> list[Any]:
    """Return everything that follows from the section `loss`: loss and gradient, weights, plan, or an error's text."""
    try:
        method = configured(name, loss)
        given = batch()
        if reference := method.config.loss.function:
            method.use(UserLoss(UserCode.read(reference, "Loss"), method.config.loss.params, ()))
        loss = RunLoss(method)(given).loss
        loss.backward()
        assert given.logprobs_R.grad is not None
        weights = method.token_weights(np.array([3, 5]))
        nll_weight = method.nll_weight if isinstance(method, Algorithm) else 0.0
        return [loss.item(), given.logprobs_R.grad.tolist(), weights.tolist(), sorted(method.needs), nll_weight]
    except (ConfigError, InputError, ValueError) as error:
        return [str(error)]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_loss_changes_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text("def pushed(batch, *, power=1):\n    return batch.logprobs_R ** power\n")
    function = f"{tmp_path}/own.py:pushed"
    idle = []
    for key in KEYS[name]:
        context, values = CHANGES[key]
        context = {one: function if value == FUNCTION else value for one, value in context.items()}
        changed = [effect(name, **context | {key: function if one == FUNCTION else one}) for one in values]
        idle += [] if any(one != effect(name, **context) for one in changed) else [key]
    assert idle == []


@pytest.mark.parametrize("name", NAMES)
def test_a_key_of_other_losses_is_refused_with_the_algorithms_that_have_it(name: str) -> None:
    foreign = [key for key in ("dual_clip", "clip_low", "divergence", "level") if key not in KEYS[name]]
    if name in ALGORITHMS:
        foreign += [key for key in ("sapo_temperature_positive",) if key not in KEYS[name]]
    sets = [f"loss.{key}={CHANGES[key][1][0]}" for key in foreign]
    with pytest.raises(ConfigError) as raised:
        resolve(flags={"run.algorithm": name}, sets=sets, environment={})
    lines = str(raised.value).splitlines()
    for key in foreign:
        (line,) = (line for line in lines if f"`loss.{key}`" in line)
        having = [one for one in ALGORITHMS if key in KEYS[one]]
        assert (f"{', '.join(having)} ha" in line) if name in ALGORITHMS else ("`train grpo`" in line), line


def test_losses_have_the_keys_that_their_formulas_read() -> None:
    """A few by hand: SAPO has a gate in place of bounds (2511.20347), CISPO (2506.13585) and DPPO (2602.04879) bound no
    negative advantage apart, and losses of pairs are means over pairs."""
    bounds = {"clip_low", "clip_high", "dual_clip"}
    assert not bounds & KEYS["sapo"]
    assert bounds & KEYS["cispo"] == bounds & KEYS["dppo"] == {"clip_low", "clip_high"}
    assert all(bounds <= KEYS[name] for name in ALGORITHMS if name not in ("sapo", "cispo", "dppo"))
    assert [name for name in METHODS if "level" in KEYS[name]] == ["sft", "distill"]
    assert KEYS["dpo"] == KEYS["kto"] == KEYS["rm"] == {"function", "params", "needs"}


TWO = ({"model": "x", "sources": ["a"]}, {"model": "y", "sources": ["b"]})


@pytest.mark.parametrize(
    ("teacher", "sources", "reason"),
    [
        ({"models": TWO[:1]}, "ab", "no teacher has the data source b"),
        ({"models": TWO}, "a", r"models\[1\].sources: data.sources has no 'b'"),
        ({"models": [{**TWO[0], "weight": 2}, TWO[1]]}, "ab", r"models\[0\].weight = 2 has no effect"),
        ({"models": TWO, "mix": "log-probs"}, "ab", "teacher.mix = log-probs has no effect"),
        (
            {"model": "x", "policy": True},
            "",
            "the policy as its own teacher, and teacher.model names",
        ),
        ({"models": TWO, "policy": True}, "ab", "and teacher.models names another"),
        ({"model": "x", "update_every": 2}, "", "teacher.update_every = 2 has no effect without teacher.policy"),
        (
            {"policy": True, "update_rate": 0.5},
            "",
            "update_rate = 0.5 has no effect without teacher.update_every",
        ),
        ({"models": [{"model": "x"}], "field": "kind"}, "", "teacher.field = kind has no effect"),
        (
            {
                "models": [{"model": "x", "weight": 2, "sources": ["a"]}, {"model": "y", "sources": ["*"]}],
                "field": "kind",
            },
            "",
            "weight = 2 has no effect",
        ),
        ({"models": [{"weight": 2}]}, "", r"models\[0\] names neither a model nor an endpoint"),
        ({"models": [{"endpoint": "host:8000"}]}, "", "endpoint = host:8000 is no address"),
        ({"models": [{"endpoint": "http://h", "revision": "r"}]}, "", r"models\[0\].revision = r has no effect"),
        (
            {"models": [{"model": "x", "retries": 1}]},
            "",
            r"models\[0\].retries = 1 has no effect",
        ),
        ({"model": "x", "mix": "log-probs"}, "", "teacher.mix = log-probs has no effect"),
        ({"models": [{"model": "x", "sources": ["a", "a"]}, TWO[1]]}, "ab", r"models\[0\].sources names 'a' twice"),
        ({"models": TWO, "model": "z"}, "ab", "teacher.model names one teacher and teacher.models lists several"),
        ({"models": TWO}, "", r"teacher.models\[0\].sources needs data.sources"),
    ],
)
@pytest.mark.parametrize("config", [DistillationRlConfig, DistillConfig])
def test_every_source_has_a_teacher(config: type, teacher: dict, sources: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        config.model_validate({"teacher": teacher, "data": {"sources": [{"name": name} for name in sources]}})


def test_a_model_that_teaches_the_same_rows_twice_is_named() -> None:
    """Entries of one model may divide the sources among them, each with a weight."""
    listed = [{"model": "x", "sources": ["a"], "weight": 2}, {"model": "y"}, {"model": "x"}, {"model": "y"},
              {"model": "x", "sources": ["b"], "weight": 3}]  # fmt: skip
    data = {"sources": [{"name": "a"}, {"name": "b"}]}
    found = repeated_teachers(DistillConfig.model_validate({"teacher": {"models": listed}, "data": data}))
    assert [line.partition(" again")[0] for line in found] == [
        "teacher.models[2] is teacher.models[0]", "teacher.models[3] is teacher.models[1]",
        "teacher.models[4] is teacher.models[2]",
    ]  # fmt: skip
    divided = {"models": [listed[0], listed[1], listed[4]]}
    assert repeated_teachers(DistillConfig.model_validate({"teacher": divided, "data": data})) == []


@pytest.mark.parametrize("config", [DistillationRlConfig, DistillConfig])
def test_means_of_log_probs_have_no_tail(config: type) -> None:
    several = {"models": [{"model": "x", "weight": 2}, {"model": "y"}], "mix": "log-probs"}
    config.model_validate({"teacher": several})
    with pytest.raises(ValueError, match=r"outside = tail does not go with teacher\.mix = log-probs"):
        config.model_validate({"teacher": several, "distillation": {"outside": "tail"}})


def test_servers_give_log_probs_at_the_temperature_1() -> None:
    teacher = {"models": [{"endpoint": "http://host:8000"}]}
    with pytest.raises(ValueError, match=r"generation.temperature = 0.7 does not go with teacher.models\[\].endpoint"):
        DistillationRlConfig.model_validate({"teacher": teacher, "generation": {"temperature": 0.7}})
