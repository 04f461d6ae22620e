"""The loop with parts that only count: which numbers go where, and what an algorithm need not have."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import MinibatchResult, Rounded, TokenBatch, TrainBatch
from rlctl.errors import DivergenceError, InputError, RlctlError
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.rollout_method import FILTERED
from rlctl.methods.rl.rollout_metrics import reward_parts
from rlctl.report.page import page
from rlctl.report.reported_run import ReportedRun
from rlctl.rollouts.source import RolloutBatch
from rlctl.settings.generation import FilterConfig
from rlctl.telemetry.display import step_line
from rlctl.telemetry.phases import Phase, StepTimer
from rlctl.training.agreement import Agreement
from rlctl.training.health import Health
from rlctl.training.loop import Loop, Parts
from rlctl.training.run_loss import RunLoss, declared
from support.groups import group


class Plain(Algorithm):
    """An algorithm with no metrics of its own, which trains on groups with any reward."""

    def keeps(self, rewards_G: np.ndarray) -> bool:
        return bool(rewards_G.any())

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray:
        return rewards_G

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        return -batch.logprobs_R * batch.advantages_R


class Recorder:
    """Stands for every part but the algorithm; remembers what it was asked, in order."""

    def __init__(self, rewards: list[list[float]], difference: float = 1e-6) -> None:
        self.rewards, self.difference = rewards, difference
        self.asked: list[tuple[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.results = [MinibatchResult(0.5, {}, {}, 1.0, False)]
        """How each optimizer step ends; the last one stands for all that follow."""

    # the source
    def next(self, version: int) -> RolloutBatch:
        self.asked.append(("next", version))
        number = len([what for what, _ in self.asked if what == "next"])
        return RolloutBatch((group(100 * number, self.rewards[number - 1], [3, 5]),), {"from_the_source": number})

    def write(self, directory: Path) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"trained": [[0, 1]]}

    # the policy
    def load_batch(self, batch: TrainBatch) -> SimpleNamespace:
        self.asked.append(("load", [row.position for row in batch.minibatches[0]]))
        return SimpleNamespace(padding_fraction=0.0, tokens=8, unshared_tokens=8, micro_batches=1, imbalance=0.0)

    def refresh_teacher(self, step: int) -> None: ...

    def add_logprobs(self, column: str) -> None:
        self.asked.append(("logprobs", column))

    def estimate(self, estimate: object) -> None:
        self.asked.append(("estimate", type(estimate).__name__))

    def train(self, minibatches: int, loss: RunLoss, lr: float, decay: float) -> list[MinibatchResult]:
        self.asked.append(("train", minibatches))
        sums = {"tokens": 8.0, "entropy": 16.0, "logprob_diff/mean": 8 * self.difference}
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        return [replace(result, sums=sums)]

    # weight synchronization
    def refit(self, version: int) -> SimpleNamespace:
        self.asked.append(("refit", version))
        return SimpleNamespace(seconds={}, verified=0, sent_bytes=0)

    def to_policy(self) -> None:
        self.asked.append(("to_policy", None))

    # saves
    def due(self, step: int, ending: bool) -> bool:
        return ending

    def begin(self, step: int, state: dict[str, Any], write: Any) -> None:
        self.saved.append({"step": step, **state})

    def measured(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None: ...

    def finish_if_written(self) -> None: ...

    # the journal
    def doing(self, what: str) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)

    def refitted(self, report: Any) -> None: ...

    def keep_rollouts(self, step: int, batch: RolloutBatch) -> None: ...

    def validated(self, step: int, found: Any) -> None: ...

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.logged.append({"step": step, **metrics})


class Stop:
    """A stop request that nobody makes."""

    requested = False

    def between_steps(self) -> Any:
        return contextlib.nullcontext()


def loop(recorder: Any, steps: int, *, step: int = 0, version: int = 0, **sections: Any) -> Loop:
    config = RlConfig.model_validate({"run": {"steps": steps}, **sections})
    agreement = Agreement.from_config(RlConfig(), "float32", ())
    health = Health(config.checks)
    parts = Parts(
        recorder, Plain(config), recorder, recorder, recorder, health, StepTimer(), sync=recorder, agreement=agreement
    )
    return Loop(config, parts, step=step, version=version)


def run(recorder: Recorder, steps: int, **options: Any) -> bool:
    stop: Any = Stop()
    return loop(recorder, steps, **options).run(stop)


class RecordedCritic:
    """A critic that warms up in the first step."""

    def __init__(self, asked: list[tuple[str, Any]]) -> None:
        self.asked = asked

    def alone(self, step: int) -> bool:
        return step == 0

    def train(self, step: int, minibatches: int) -> dict[str, Any]:
        self.asked.append(("critic", (step, minibatches)))
        return {"critic": {"loss": 0.5, "skipped_steps": int(step == 1)}}


def test_a_critic_is_trained_before_the_policy_and_warms_up_alone() -> None:
    recorder = Recorder([[1.0, 0.0]] * 2)
    one = loop(recorder, 2)
    one.parts = replace(one.parts, critic=cast(Any, RecordedCritic(recorder.asked)))
    one.run(cast(Any, Stop()))
    done = [(what, value) for what, value in recorder.asked if what in ("load", "critic", "train")]
    assert [one for one in done if one[0] != "load"] == [("critic", (0, 1)), ("critic", (1, 1)), ("train", 1)]
    assert [what for what, _ in done] == ["load", "critic", "load", "critic", "train"]
    assert ["loss" in line for line in recorder.logged] == [False, True]
    assert all(line["critic"]["loss"] == 0.5 for line in recorder.logged)
    assert [text for text in recorder.said if "step" in text] == [
        "step 2: 1 optimizer step(s) of the critic skipped, the gradient was not finite"
    ]


def test_a_batch_is_trained_on_several_times_with_the_log_probs_of_before() -> None:
    recorder = Recorder([[1.0, 0.0]])
    run(recorder, 1, batch={"epochs": 3})
    assert [what for what, _ in recorder.asked if what in ("load", "train")] == ["load", "train", "train", "train"]
    assert recorder.logged[0]["optimizer_steps"] == 3
    assert Grpo(RlConfig.model_validate({"batch": {"epochs": 3}})).needs == {"old_logprobs"}


def test_whitened_penalties_are_made_once_before_the_steps_on_a_batch() -> None:
    recorder = Recorder([[1.0, 0.0]])
    options = {"loss": {"kl_coefficient": 0.1, "kl_in": "reward"}, "advantage": {"whiten": True}}
    run(recorder, 1, batch={"epochs": 2}, **options)
    done = [what for what, _ in recorder.asked if what in ("load", "logprobs", "estimate", "train")]
    assert done == ["load", "logprobs", "logprobs", "estimate", "train", "train"]


def test_one_rollout_of_a_prompt_is_no_group_without_a_signal() -> None:
    recorder = Recorder([[1.0]])
    recorder.next = lambda version: RolloutBatch((group(0, [1.0], [3]), group(1, [0.0], [2])), {})  # type: ignore[method-assign]
    run(recorder, 1)
    assert recorder.logged[0]["groups_without_signal"] == 0


def test_tokens_per_second_leave_the_time_of_saving_out() -> None:
    recorder = Recorder([[1.0, 0.0]])
    one = loop(recorder, 1)
    one.parts.timer.seconds = lambda: {**dict.fromkeys(map(str, Phase), 0.0), "checkpoint": 30.0, "total": 34.0}
    one.run(cast(Any, Stop()))
    assert recorder.logged[0]["tokens_per_s"] == recorder.logged[0]["rollout_tokens"] / 4.0


def test_steps_and_versions_are_counted_apart() -> None:
    recorder = Recorder([[1.0, 0.0]] * 2)
    assert not run(recorder, 5, step=3, version=7)
    assert recorder.asked == [
        ("refit", 7),
        ("next", 7), ("load", [100, 100]), ("train", 1), ("refit", 8),
        ("next", 8), ("load", [200, 200]), ("train", 1), ("refit", 9), ("to_policy", None),
    ]  # fmt: skip
    assert [line["step"] for line in recorder.logged] == [4, 5]
    assert [line["from_the_source"] for line in recorder.logged] == [1, 2]
    (saved,) = recorder.saved
    assert (saved["step"], saved["version"], saved["source"]) == (5, 9, {"trained": [[0, 1]]})
    assert saved["metrics"]["reward_mean"] == 0.5


@pytest.mark.parametrize("where", ["the source", "validation"])
def test_what_is_trained_is_saved_where_a_reward_fails_after_some_steps(where: str) -> None:
    class Failing(Recorder):
        fails_at = 3

        def _fail(self, step: int) -> None:
            if step >= self.fails_at:
                raise InputError("Reward function mine.py:score raised ValueError: no key")

        def next(self, version: int) -> RolloutBatch:
            self._fail(version + 1 if where == "the source" else 0)
            return super().next(version)

        # validation
        plateau = None

        def due(self, step: int, ending: bool = False) -> bool:
            return ending or (where == "validation" and step > 0)

        def measure(self, version: int) -> Any:
            self._fail(version + 1)
            return SimpleNamespace(metrics={})

    def failing(recorder: Failing) -> Loop:
        made = loop(recorder, 5)
        return Loop(made.config, replace(made.parts, validation=cast(Any, recorder)))

    recorder = Failing([[1.0, 0.0]] * 5)
    with pytest.raises(RlctlError, match="no key Fix it and continue with --allow-changes") as raised:
        failing(recorder).run(cast(Any, Stop()))
    assert raised.value.exit_code == 1
    assert recorder.saved[-1]["step"] == recorder.saved[-1]["version"] == 2
    assert recorder.saved[-1]["metrics"]["reward_mean"] == 0.5
    recorder = Failing([[1.0, 0.0]])
    recorder.fails_at = 0
    if where == "the source":
        with pytest.raises(InputError):
            failing(recorder).run(cast(Any, Stop()))
        assert recorder.saved == []


def test_a_stop_asked_for_while_a_step_is_logged_saves_that_step() -> None:
    stop: Any = Stop()

    class Interrupted(Recorder):
        def log(self, step: int, metrics: dict[str, Any]) -> None:
            super().log(step, metrics)
            stop.requested = step == 2

    recorder = Interrupted([[1.0, 0.0]] * 5)
    assert loop(recorder, 5).run(stop)
    assert [(saved["step"], saved["version"]) for saved in recorder.saved] == [(2, 2)]
    assert recorder.saved[0]["metrics"]["reward_mean"] == 0.5


def test_log_probs_are_computed_where_the_algorithm_needs_them() -> None:
    recorder = Recorder([[1.0, 0.0]])
    run(recorder, 1, loss={"needs": ["reference_logprobs", "old_logprobs"]})
    assert recorder.asked[2:5] == [
        ("load", [100, 100]), ("logprobs", "old_logprobs"), ("logprobs", "reference_logprobs"),
    ]  # fmt: skip


def test_a_step_whose_groups_are_all_dropped_trains_on_nothing_and_says_so() -> None:
    recorder = Recorder([[0.0, 0.0], [1.0, 0.0]])
    run(recorder, 2)
    assert [what for what, _ in recorder.asked].count("train") == 1
    assert [line["dropped_groups"] for line in recorder.logged] == [1, 0]
    assert any("nothing was trained on" in text for text in recorder.said)
    assert "loss" not in recorder.logged[0]
    for line in recorder.logged:
        assert "reward" in step_line(line["step"], 2, line, declared(Plain(RlConfig())), plain=True)
    assert "mean reward" in page([ReportedRun("run", recorder.logged)])


def test_engines_that_disagree_end_the_run_for_any_algorithm() -> None:
    recorder = Recorder([[1.0, 0.0]], difference=math.nan)
    with pytest.raises(DivergenceError):
        run(recorder, 1)
    assert recorder.logged
    assert not recorder.saved


def result(loss: float, *, skipped: bool = False) -> MinibatchResult:
    return MinibatchResult(loss, {}, {}, math.nan if skipped else 1.0, skipped)


def test_a_policy_without_finite_gradients_stops_the_run_before_it_is_saved_again() -> None:
    recorder = Recorder([[1.0, 0.0]] * 9)
    recorder.results = [result(0.5), result(math.nan, skipped=True), result(0.5), result(math.nan, skipped=True)]
    recorder.due = lambda step, ending: True  # type: ignore[method-assign]
    with pytest.raises(DivergenceError, match=r"after step 5: .* in 2 step\(s\) in a row \(checks.max_skipped_steps\)"):
        run(recorder, 9, checks={"max_skipped_steps": 2})
    assert [saved["step"] for saved in recorder.saved] == [1, 2, 3, 4]
    assert len(recorder.logged) == 5


def test_a_loss_that_is_not_finite_and_changed_the_weights_is_not_saved() -> None:
    recorder = Recorder([[1.0, 0.0]] * 3)
    recorder.results = [result(0.5), result(math.inf)]
    with pytest.raises(DivergenceError, match="after step 2: its loss is inf"):
        run(recorder, 3)
    assert not recorder.saved


def test_a_step_says_how_its_rollouts_ended_and_whose_tokens_they_are() -> None:
    class Cut(Recorder):
        def next(self, version: int) -> RolloutBatch:
            batch = super().next(version)
            (only,) = batch.groups
            slow = replace(only.rollouts[1], stop_reason="timeout", versions=((0, 2), (1, 3)))
            return replace(batch, groups=(replace(only, rollouts=(only.rollouts[0], slow)),))

    recorder = Cut([[1.0, 0.0]])
    run(recorder, 1)
    assert recorder.logged[0]["stop_reasons"] == {"stop": 1, "timeout": 1}
    assert recorder.logged[0]["truncated_fraction"] == 0.5
    assert recorder.logged[0]["tokens_by_version"] == [[0, 5], [1, 3]]
    assert any("step 1: 1 rollout(s) exceeded rollouts.timeout_s" in text for text in recorder.said)


def test_rewards_without_a_difference_are_told_once_and_stop_nothing() -> None:
    recorder = Recorder([[1.0, 0.0], *[[1.0, 1.0]] * 4])
    assert not run(recorder, 5, checks={"max_steps_without_signal": 3})
    told = [text for text in recorder.said if "nothing to learn from" in text]
    assert len(told) == 1
    assert "step 4: in the last 3 step(s) all rollouts" in told[0]


def test_rounding_that_hides_what_is_learned_is_told_once() -> None:
    recorder = Recorder([[1.0, 0.0]] * 4)
    shares = (0.6, 0.4, 0.3, 0.2)
    recorder.results = [MinibatchResult(0.5, {}, {}, 1.0, False, rounded=Rounded(0.01, 0.02, one)) for one in shares]
    run(recorder, 4)
    assert [line["rounding"]["carried"] for line in recorder.logged] == list(shares)
    (told,) = [text for text in recorder.said if "rounding loses the rest" in text]
    assert "step 2: only 40% of the optimizer" in told


def test_a_run_without_rewards_has_none_in_its_metrics_and_is_told_nothing_of_them() -> None:
    class Unscored(Recorder):
        def next(self, version: int) -> RolloutBatch:
            (own,) = super().next(version).groups
            unscored = tuple(replace(rollout, reward=None) for rollout in own.rollouts)
            return RolloutBatch((replace(own, rollouts=unscored),))

    class Learning(Plain):
        def keeps(self, rewards_G: np.ndarray) -> bool:
            return True

    recorder = Unscored([[1.0, 0.0]] * 3)
    made = loop(recorder, 3, checks={"max_steps_without_signal": 1})
    stop: Any = Stop()
    Loop(made.config, replace(made.parts, method=Learning(made.config)), step=0).run(stop)
    assert len(recorder.logged) == 3
    assert not any(name for line in recorder.logged for name in line if "reward" in name or "signal" in name)
    assert not any("reward" in text for text in recorder.said)
    assert "mean reward" not in page([ReportedRun("run", recorder.logged)])


def test_equal_rewards_that_nothing_is_learned_from_are_no_trouble() -> None:
    recorder = Recorder([[1.0, 1.0]] * 3)
    run(recorder, 3, checks={"max_steps_without_signal": 1}, advantage={"baseline": "none", "normalize_std": False})
    assert not any("nothing to learn from" in text for text in recorder.said)
    assert "nothing to learn" not in step_line(1, 3, recorder.logged[0], plain=True)


def test_rollouts_that_are_not_computed_are_counted() -> None:
    class Surrogate(Plain):
        learns_without_advantage = False

    recorder = Recorder([[1.0, 0.0], [1.0, 1.0]])
    parts = loop(recorder, 2).parts
    config = RlConfig.model_validate({"run": {"steps": 2}})
    stop: Any = Stop()
    Loop(config, replace(parts, method=Surrogate(config))).run(stop)
    assert [line["skipped_rollouts"] for line in recorder.logged] == [1, 0]
    assert [line["skipped_fraction"] for line in recorder.logged] == [pytest.approx(10 / 18), 0]
    assert recorder.asked[2] == ("load", [100])


def test_what_a_filter_did_is_told_and_shown(tmp_path: Any) -> None:
    class Replacing(Recorder):
        def next(self, version: int) -> RolloutBatch:
            batch = super().next(version)
            return replace(batch, metrics={"sampling_rounds": 4, "missing_groups": 1})

    recorder = Replacing([[0.0, 0.0]])
    run(recorder, 1, filter={"groups": "replace"}, reward={"overlong_buffer": 0.5}, generation={"max_new_tokens": 5})
    said = "step 1: after 4 round(s) of sampling (filter.max_rounds) 1 group(s) are still missing"
    assert any(text.startswith(said) for text in recorder.said)
    (line,) = recorder.logged
    assert line["length_penalty"] == pytest.approx(-0.6)  # of 3 and 5 tokens, 2.5 of them free
    shown = step_line(0, 1, line, FILTERED["replace"], plain=True)
    assert "dropped 1 rounds 4" in shown
    assert FILTERED[FilterConfig().groups] == ()


class Validated:
    """Stands for a validation that is due after every step and before the first; it ends the run after `last`."""

    def __init__(self, recorder: Recorder, last: int) -> None:
        self.recorder, self.last, self.measured = recorder, last, 0

    def due(self, step: int) -> bool:
        return True

    def measure(self, version: int) -> SimpleNamespace:
        self.recorder.asked.append(("validate", version))
        self.measured += 1
        return SimpleNamespace(metrics={"reward_mean": version / 10}, groups=())

    @property
    def plateau(self) -> str | None:
        return "no better" if self.measured > self.last else None

    def state(self) -> dict[str, Any]:
        return {"since": self.measured}


def validated(recorder: Recorder, steps: int, *, last: int = 99, step: int = 0, version: int = 0) -> None:
    made = loop(recorder, steps, step=step, version=version)
    validation: Any = Validated(recorder, last)
    made.parts = replace(made.parts, validation=validation)
    stop: Any = Stop()
    made.run(stop)


def test_validation_follows_the_refit_and_is_in_the_metrics_and_the_checkpoint() -> None:
    recorder, plain = Recorder([[1.0, 0.0]] * 2), Recorder([[1.0, 0.0]] * 2)
    validated(recorder, 2)
    run(plain, 2)
    assert [what for what, _ in recorder.asked if what in ("refit", "validate", "next", "to_policy")] == [
        "refit", "validate", "next", "refit", "validate", "next", "refit", "validate", "to_policy",
    ]  # fmt: skip
    assert [version for what, version in recorder.asked if what == "validate"] == [0, 1, 2]
    assert recorder.logged[0]["validation_at_start"] == {"reward_mean": 0.0}
    assert [line["validation"] for line in recorder.logged] == [{"reward_mean": 0.1}, {"reward_mean": 0.2}]
    assert "validation_at_start" not in recorder.logged[1]
    (saved,) = recorder.saved
    assert saved["validation"] == {"since": 3}
    assert saved["metrics"]["validation"] == {"reward_mean": 0.2}
    for line, other in zip(recorder.logged, plain.logged, strict=True):
        added = {"validation", "validation_at_start", "seconds", "tokens_per_s"}
        assert {key: value for key, value in line.items() if key not in added} == {
            key: value for key, value in other.items() if key not in added
        }
        assert sum(line["seconds"].values()) == pytest.approx(2 * line["seconds"]["total"])
        step_line(line["step"], 2, line, plain=True)


def test_a_resumed_run_does_not_validate_before_its_first_step() -> None:
    recorder = Recorder([[1.0, 0.0]])
    validated(recorder, 4, step=3, version=3)
    assert [version for what, version in recorder.asked if what == "validate"] == [4]


def test_a_plateau_ends_the_run_with_a_saved_step() -> None:
    recorder = Recorder([[1.0, 0.0]] * 5)
    validated(recorder, 5, last=2)
    assert len(recorder.logged) == 2
    assert [saved["step"] for saved in recorder.saved] == [2]
    assert recorder.said[-1] == "no better"


def test_terms_are_averaged_where_they_apply_and_rewards_by_source() -> None:
    def of(source: str, rewards: list[float], terms: list[dict[str, float | None]]) -> Any:
        made = group(0, rewards, [1] * len(rewards))
        rollouts = tuple(replace(r, terms=own) for r, own in zip(made.rollouts, terms, strict=True))
        return replace(made, rollouts=rollouts, prompt=replace(made.prompt, source=source))

    first = of("a", [1.0, 0.0], [{"x": 1.0, "y": None}, {"x": 0.0, "y": 4.0}])
    second = of("b", [3.0, 5.0], [{"z": None}, {"z": None}])
    assert reward_parts(RolloutBatch((first, second, first))) == {
        "reward_terms": {"x": 0.5, "y": 4.0},
        "reward_by_source": {"a": 0.5, "b": 4.0},
    }
    assert "reward_by_source" not in reward_parts(RolloutBatch((of("", [1.0], [{"x": 1.0}]),)))


def test_fields_of_programs_without_effect_are_told_once() -> None:
    health, name = Health(RlConfig().checks), "gateway/unenforced_tool_choice"
    metrics = {"loss": 0.0, "skipped_steps": 0, "optimizer_steps": 1, "environment": {name: 0.5, "calls": 1.0}}
    (told,) = health.check(1, metrics)
    assert told.startswith("step 1: programs ask for tool_choice without effect")
    assert health.check(2, metrics) == []
    (told,) = health.check(3, metrics | {"environment": {name: 0.5, "gateway/unenforced_response_format": 0.1}})
    assert "programs ask for response_format without effect" in told
