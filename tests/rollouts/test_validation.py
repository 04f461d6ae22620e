"""Validation with parts that only count: what is asked of the engines, what comes of it, and when it ends a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.backends.messages import GroupRequest, Sampling
from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import ConfigError, InputError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rewards.reward_worker import GroupScores, ScoreRequest
from rlctl.rollouts import validation
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.scored_groups import Scorers
from rlctl.rollouts.source import sample_seed
from rlctl.rollouts.validation import FIRST_POSITION, SampledValidation, ValidationSet

ROWS = tuple(PromptRow(index, f"row {index}", f"question {index}", "7") for index in (4, 2, 9))


def config(run: dict[str, Any] | None = None, **wanted: Any) -> RlConfig:
    return RlConfig.model_validate(
        {"validation": {"every": 2, **wanted}, "run": {"seed": 5, "steps": 7, **(run or {})}}
    )


class Engines:
    """Answers every request, and remembers what it was asked; stands for the synchronization of weights too."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[GroupRequest], Sampling]] = []
        self.events: list[str] = []

    @contextlib.contextmanager
    def generating(self) -> Iterator[int]:
        self.events.append("engines' turn")
        yield 0
        self.events.append("policy's turn")

    def forget_prompts(self) -> None:
        self.events.append("forgotten")

    def generate(self, _: object, requests: list[GroupRequest], sampling: Sampling, *__: Any) -> list[SimpleNamespace]:
        self.events.append("sampled")
        self.asked.append((requests, sampling))
        samples = len(requests[0].seeds)
        return [
            SimpleNamespace(
                group=request.group, texts=["7"] * samples, columns=None, prompt_tokens=3, tokens=(5,) * samples,
                response_tokens=(2,) * samples, finish_reasons=("stop",) * samples,
                versions=(((1, 2),),) * samples, episodes=(), images=(),
            )
            for request in requests
        ]  # fmt: skip


class Scorer:
    """Gives each prompt the rewards it was made with; 1 is right."""

    def __init__(self, rewards: Sequence[tuple[float | None, ...]]) -> None:
        self.rewards = list(rewards)

    def within(self, _: float) -> Scorer:
        return self

    def call(self, _: object, requests: Sequence[ScoreRequest], __: object) -> list[list[GroupScores]]:
        found = self.rewards[: len(requests)]
        del self.rewards[: len(requests)]
        return [[self._scores(rewards) for rewards in found]]

    @staticmethod
    def _scores(rewards: tuple[float | None, ...]) -> GroupScores:
        dropped = ("no number",) * rewards.count(None)
        return GroupScores(rewards, tuple(float((r or 0) >= 1) for r in rewards), {}, len(dropped), dropped)


def validating(
    asked: RlConfig, rewards: Sequence[tuple[float | None, ...]], monkeypatch: pytest.MonkeyPatch
) -> tuple[SampledValidation, Engines]:
    engines, plan = Engines(), SimpleNamespace(timeout_s=1.0, terms=())
    monkeypatch.setattr(validation, "generate_groups", engines.generate)
    data = ValidationSet("d", ROWS, ((1, 2), (3,), (4,)), Sampling(8, temperature=0.0), plan, {})  # type: ignore[arg-type]
    return SampledValidation(asked, data, engines, Scorers(Scorer(rewards)), engines), engines  # type: ignore[arg-type]


def test_it_is_due_at_its_interval_and_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(**wanted: Any) -> list[int]:
        part, _ = validating(config(**wanted), [], monkeypatch)
        return [step for step in range(8) if part.due(step)]

    assert steps() == [2, 4, 6]
    assert steps(at_start=True, at_end=True) == [0, 2, 4, 6, 7]
    assert steps(every=0, at_end=True) == [7]


def test_metrics_are_means_over_prompts_and_engines_forget_before_the_policy_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part, engines = validating(config(samples=2), [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)], monkeypatch)
    found = part.measure(3)
    assert engines.events == ["engines' turn", "sampled", "forgotten", "policy's turn"]
    assert found.metrics["reward_mean"] == found.metrics["accuracy"] == pytest.approx(0.5)
    assert found.metrics["pass@2"] == pytest.approx(2 / 3)
    assert found.metrics["accuracy_stderr"] == pytest.approx(0.5 / 3**0.5)
    assert [group.prompt for group in found.groups] == list(ROWS)


def test_completions_on_which_a_reward_function_fails_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first validation, and where it fails on more than one in twenty, the run ends."""
    good, bad = (1.0,) * 4 + (0.0,) * 4, (None,) + (0.0,) * 7
    part, _ = validating(config(samples=8), [good, good, good, bad, good, good, bad, bad, good], monkeypatch)
    part.measure(1)
    found = part.measure(2).metrics
    assert (found["dropped_rollouts"], found["scorer_failures"]) == (1, 1)
    assert found["reward_mean"] == pytest.approx(1 / 3)
    with pytest.raises(InputError, match=r"failed on 2 of 24 completions. no number"):
        part.measure(3)
    first, _ = validating(config(samples=8), [good, bad, good], monkeypatch)
    with pytest.raises(InputError, match="failed on 1 of 24 completions"):
        first.measure(1)


def test_seeds_follow_from_the_prompt_and_are_none_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    part, engines = validating(config(samples=2), [(1.0, 0.0)] * 6, monkeypatch)
    part.measure(3)
    part.measure(4)
    (first, _), (again, _) = engines.asked
    assert first == again
    assert first[0].seeds == (sample_seed(5, FIRST_POSITION + 4, 0), sample_seed(5, FIRST_POSITION + 4, 1))


def test_a_plateau_ends_the_run_and_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [(value,) for value in (0.2, 0.5, 0.5, 0.4, 0.6) for _ in ROWS]
    part, _ = validating(config(stop_after=2), rewards, monkeypatch)
    said = []
    for _ in range(3):
        part.measure(1)
        said.append(part.plateau)
    assert said == [None, None, None]
    resumed, _ = validating(config(stop_after=2), rewards[9:], monkeypatch)
    resumed.restore(part.state())
    resumed.measure(1)
    assert "has not been better than 0.5 for 2 validations in a row (validation.stop_after)" in (resumed.plateau or "")
    resumed.measure(1)
    assert resumed.plateau is None


def test_checkpoints_from_before_validation_was_wanted_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    part, _ = validating(config(stop_after=1), [], monkeypatch)
    part.restore({})
    state = part.state()
    assert (state["best"], state["since"]) == (None, 0)


def test_a_resume_that_measures_something_else_looks_for_the_best_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    part, _ = validating(config(stop_after=1), [(9.0,)] * 3, monkeypatch)
    part.measure(1)
    for samples, ends in ((1, True), (2, False)):
        resumed, _ = validating(config(stop_after=1, samples=samples), [(0.5,) * samples] * 3, monkeypatch)
        resumed.restore(part.state())
        resumed.measure(2)
        assert (resumed.plateau is not None) == ends


def test_the_metric_of_the_best_ends_the_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewards rise, and no answer gets right."""
    by = {"keep_best_by": "validation/accuracy", "checkpoint_every": 2}
    part, _ = validating(config(by, stop_after=1), [(0.1,)] * 3 + [(0.9,)] * 3, monkeypatch)
    part.measure(1)
    part.measure(2)
    assert "validation/accuracy has not been better than 0" in (part.plateau or "")


@pytest.mark.parametrize(
    ("run", "wanted", "said"),
    [
        ({"keep_best_by": "accuracy"}, {}, "neither reward_mean nor validation/<name>"),
        ({"keep_best_by": "validation/accuracy"}, {"every": 0}, "needs validations: set validation.every"),
        ({"keep_best_by": "validation/accuracy", "checkpoint_every": 3}, {}, "no multiple of validation.every = 2"),
        ({}, {"every": 0, "stop_after": 2}, "validation.stop_after needs validations"),
    ],
)
def test_what_needs_validations_says_so(run: dict[str, Any], wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(run, **wanted)


def opened(tiny_llama: Path, tmp_path: Path, **sections: Any) -> tuple[PromptStream, ValidationSet | None, RlConfig]:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n}?", "answer": str(n)}) + "\n" for n in range(30)))
    data, reward = {"name": str(path), "prompt_suffix": " Now."}, {"terms": [{"name": "exact-match"}]}
    made = RlConfig.model_validate({"data": data, "reward": reward, **sections})
    prompts = PromptStream.open_rollouts(made, tiny_llama)
    return prompts, ValidationSet.open(made, prompts, tiny_llama), made


@pytest.mark.usefixtures("untried")
def test_held_out_prompts_are_never_trained_on(tiny_llama: Path, tmp_path: Path) -> None:
    wanted = {"every": 5, "holdout": 8, "max_prompts": 6, "samples": 2}
    prompts, data, made = opened(tiny_llama, tmp_path, validation=wanted)
    assert data is not None
    trained = {prompts.prompt_at(position).prompt for position in range(100)}
    held = {row.prompt for row in data.rows}
    assert (len(trained), len(held)) == (22, 6)
    assert not trained & held
    assert prompts.encoder.tokenizer.decode(data.tokens[0]).count("Now.") == 1
    assert data.describe(made) == ("validation: every 5 steps: 6 prompts held out of the data, 2 samples each, greedy")
    with pytest.raises(InputError, match=r"validation: the prompt of .*q.jsonl, line \d+ has"):
        data.fitted(3, 2)
    limit = min(map(len, data.tokens))
    long = sum(len(tokens) > limit for tokens in data.tokens)
    assert 0 < long < 6
    dropped, cut = (replace(data, too_long=way).fitted(limit, 5) for way in ("drop", "cut"))
    assert ({len(tokens) for tokens in dropped.tokens}, len(dropped.rows)) == ({limit}, 6 - long)
    assert cut.tokens == tuple(tokens[-5:] if len(tokens) > limit else tokens for tokens in data.tokens)
    assert dropped.describe(made).endswith(f"greedy, {long} longer ones left out")


@pytest.mark.usefixtures("untried")
def test_other_prompts_have_scorers_of_their_own(tiny_llama: Path, tmp_path: Path) -> None:
    other = {"data": {"name": "reasoning-gym:gcd"}, "at_end": True, "reward": [{"name": "task"}], "temperature": 0.7}
    prompts, data, _ = opened(tiny_llama, tmp_path, validation=other, generation={"top_p": 0.9})
    assert data is not None
    assert (data.label, len(data.rows), data.rewards.scorers) == ("reasoning-gym:gcd", 256, ("task",))
    assert (data.sampling.temperature, data.sampling.top_p) == (0.7, 0.9)
    assert len(prompts.datasets[0].prompts) == 30


@pytest.mark.usefixtures("untried")
def test_a_run_that_does_not_validate_opens_nothing_for_it(tiny_llama: Path, tmp_path: Path) -> None:
    assert opened(tiny_llama, tmp_path)[1] is None


@pytest.mark.usefixtures("untried")
def test_a_metric_that_says_nothing_of_the_best_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    by = {"keep_best_by": "validation/response_tokens_mean"}
    with pytest.raises(ConfigError, match="no such metric says which validation is better") as caught:
        opened(tiny_llama, tmp_path, validation={"every": 1, "holdout": 2}, run=by)
    assert "validation/reward_mean, validation/accuracy, validation/pass@1" in (caught.value.hint or "")
