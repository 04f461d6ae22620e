"""Sources with environments of their own: their settings, their episodes, and what their failures cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.data.mixing import ChangedMixing, Mixing, source_settings
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import EpisodeFacts, EpisodeFailure, Rollout, RolloutGroup
from rlctl.environments.environment_plan import LoadedEnvironment, plan_environment
from rlctl.environments.interface import Failure
from rlctl.environments.running_episode import RunningEpisode
from rlctl.errors import ConfigError, InputError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.rollout_metrics import rollout_metrics, source_metrics
from rlctl.methods.sft import SftConfig
from rlctl.preparation.places import require_places
from rlctl.rewards.reward_plan import MixedRewards
from rlctl.rollouts.ledger import Ledger
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.scored_groups import GroupMaker, Scorers
from rlctl.rollouts.source import RolloutBatch
from rlctl.rollouts.validation import ValidationSet, source_metrics_of
from rlctl.settings.config import OBSERVED_TOKENS
from rlctl.settings.rewards import EnvironmentConfig

TOYS = Path(__file__).parents[1] / "support" / "toy_environments.py"
COUNTING, EVEN = f"{TOYS}:Counting", f"{TOYS}:Even"


def config(sources: Sequence[dict[str, Any]], **sections: Any) -> RlConfig:
    return RlConfig.model_validate({"data": {"sources": sources}, **sections})


def test_a_source_changes_keys_of_the_environment() -> None:
    made = config(
        [
            {"name": "a.jsonl"},
            {"name": "a.jsonl", "environment": {"turns": 3}},
            {"name": "b.jsonl", "environment": {"name": "calculator", "tools": [], "turn_timeout_s": 5}},
            {"name": "c.jsonl", "environment": {"name": None, "tools": []}},
            {"environment": {"name": "calculator"}, "size": 7},
        ],
        environment={"name": "wordle", "params": {"guesses": 4}, "tools": ["t.py:f"], "turns": 8},
        generation={"max_new_tokens": 10},
    )
    found = made.environments
    assert [*found] == ["a.jsonl #1", "a.jsonl #2", "b.jsonl", "c.jsonl", "calculator"]
    assert [(one.name, one.params, one.tools, one.turns, one.turn_timeout_s) for one in found.values()] == [
        ("wordle", {"guesses": 4}, ("t.py:f",), 8, 60.0),
        ("wordle", {"guesses": 4}, ("t.py:f",), 3, 60.0),
        ("calculator", {}, (), 8, 5.0),
        (None, {}, (), 8, 60.0),
        ("calculator", {}, ("t.py:f",), 8, 60.0),
    ]
    assert len(made.plays) == 4
    assert made.new_tokens == 8 * (10 + OBSERVED_TOKENS)
    turns, mean = [8, 3, 8, 8], 5 + OBSERVED_TOKENS
    assert made.mean_new_tokens == pytest.approx((sum((n + 1) / 2 * mean for n in turns) + 5) / 5)
    assert RlConfig.model_validate_json(made.model_dump_json()).environments == found
    last = source_settings(made)[-1]
    assert (last.makes_tasks, last.data.name, last.data.size) == (True, None, 7)


@pytest.mark.parametrize(
    ("source", "sections", "said"),
    [
        ({"weight": 2}, {}, r"give `name`, or `environment\.name`"),
        ({"name": "a", "environment": {"turn": 2}}, {}, r"environment\.turn\n"),
        ({"name": "a", "environment": {"name": "wordle"}}, {"too_long": "cut"}, "an environment of a, which writes"),
        ({"name": "a", "environment": {"append": "raw"}}, {}, "thinking=template of a needs a template"),
    ],
)
def test_what_a_source_cannot_be_is_refused_by_name(source: dict[str, Any], sections: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RlConfig.model_validate({"data": {"sources": [source], **sections}, "environment": {"thinking": "template"}})


def test_texts_are_not_played() -> None:
    made = SftConfig.model_validate({"data": {"sources": [{"name": "a.jsonl", "environment": {"turns": 2}}]}})
    with pytest.raises(ConfigError, match=r"data\.sources: a\.jsonl has an environment"):
        source_settings(made)


def test_an_unknown_environment_is_named_with_its_source() -> None:
    with pytest.raises(InputError, match=r"^data\.sources, wordl #2: Unknown environment 'wordl'") as caught:
        require_places(config([{"environment": {"name": "wordle"}}, {"name": "wordl", "environment": {"name": None}},
                               {"environment": {"name": "wordl"}}]))  # fmt: skip
    assert "wordle" in (caught.value.hint or "")


# Prompts


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}", "answer": str(n)}) + "\n" for n in range(4)))
    return str(path)


def test_each_source_opens_as_its_environment_says(tiny_llama: Path, rows: str) -> None:
    sources = [
        {"name": rows},
        {"name": rows, "environment": {"name": COUNTING}},
        {"environment": {"name": COUNTING, "turns": 2}, "size": 9},
    ]
    prompts = PromptStream.open_rollouts(config(sources, batch={"prompts": 3}, run={"steps": 4}), tiny_llama)
    assert prompts.environment is not None
    assert len(prompts.environment.every) == 2
    played = [prompts.prompt_at(position) for position in range(17)]
    assert [sum(row.source == label for row in played) for label in prompts.failing_shares()] == [4, 4, 9]
    requests = [prompts.group_request(place, row, (1, 2), 0) for place, row in enumerate(played)]
    for row, request in zip(played, requests, strict=True):
        text = prompts.text(row)
        assert ("Begin with" in text, "Say" in text) == (row.source != f"{rows} #1", row.source != COUNTING)
        assert (request.row is None) == (row.source == f"{rows} #1") == bool(request.prompt_tokens)
    assert prompts.describe()[2] == f"data: {COUNTING} (9 prompts, 52.9% of the prompts)"
    assert prompts.environment.describe() == [
        f"{rows} #2: environment: {COUNTING}, at most 10 turns",
        f"{COUNTING}: environment: {COUNTING}, at most 2 turns",
    ]
    assert prompts.environment.manifest().keys() == {f"{rows} #2", COUNTING}


def test_an_environment_that_fails_before_the_run_is_named_with_its_source(tiny_llama: Path, rows: str) -> None:
    sources = [{"name": rows}, {"name": rows, "environment": {"name": COUNTING, "params": {"turn": 2}}}]
    with pytest.raises(InputError, match=r"data\.sources, .*rows\.jsonl #2: .*does not take these parameters"):
        PromptStream.open_rollouts(config(sources), tiny_llama)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=5), position=st.integers(0, 40), data=st.data())
def test_the_others_take_the_turns_of_a_paused_source(weights: list[int], position: int, data: Any) -> None:
    """Each source has its rows one after the other, without gap or repetition, and the others keep their shares."""
    paused = data.draw(st.integers(0, len(weights) - 1))
    before = Mixing(weights)
    mixing, counts = ChangedMixing(before, paused, 0, position), [0] * len(weights)
    for place in range(position + 3 * sum(weights)):
        source, turn = mixing.at(place)
        assert turn == counts[source]
        counts[source] += 1
        assert mixing.turns(place + 1) == counts
        assert place >= position or (source, turn) == before.at(place)
        assert place < position or source != paused
    left = sum(weights) - weights[paused]
    for source, (total, first) in enumerate(zip(counts, before.turns(position), strict=True)):
        if source != paused:
            assert abs((total - first) - 3 * sum(weights) * weights[source] / left) < 1
    end = position + 3 * sum(weights)
    again = ChangedMixing(mixing, paused, before.parts[paused], end)
    for place in range(end, end + sum(before.parts)):
        source, turn = again.at(place)
        assert turn == counts[source]
        counts[source] += 1
    assert [count - turns for count, turns in zip(counts, mixing.turns(end), strict=True)] == before.parts


# Failures


def failure(source: str, position: int, sample: int) -> EpisodeFailure:
    cause = "Environment e: step raised KeyError: 'x'"
    return EpisodeFailure("raised", cause, f"{cause} (row {position} of {source}, {sample}).")


def group(position: int, source: str, failing: int, size: int = 4) -> RolloutGroup:
    """A group of episodes whose last `failing` are dropped; the others have their number of turns as their reward."""
    failed = tuple(failure(source, position, sample) for sample in range(size - failing, size))
    rollouts = tuple(
        Rollout(
            position, sample, sample, ((0, 5 + sample),), "done", 3, 8 + sample, 5 + sample, 1.0 + sample, {}, None,
            episode=EpisodeFacts(1 + sample, {}, model_s=2.0 * position, environment_s=position + sample)
            if source != "plain"
            else None,
        )
        for sample in range(size - failing)
    )  # fmt: skip
    dropped = tuple(one.message for one in failed)
    return RolloutGroup(
        position, PromptRow(0, "row", "", None, source=source), rollouts, None, None, None, dropped, failed
    )


class Prompts:
    encoder = SimpleNamespace(stop=(), stop_token_ids=(), never_sampled=())
    environment = "some"

    def __init__(self, shares: dict[str, float]) -> None:
        self.shares, self.paused, self.digests = shares, list[tuple[Any, ...]](), dict.fromkeys(shares, "1")

    def failing_shares(self) -> dict[str, float]:
        return self.shares

    def environment_digests(self) -> dict[str, str]:
        return self.digests

    def pause(self, label: str, position: int, *, ends: bool = False) -> None:
        self.paused.append((label, position, ends))

    def state(self, since: int = 0) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        pass


def maker(shares: dict[str, float], prompts: int = 2, digest: str = "1") -> tuple[GroupMaker, Prompts, Ledger]:
    made, stream, ledger = (
        RlConfig.model_validate({"batch": {"prompts": prompts, "generations": 4}}),
        Prompts(shares),
        Ledger(),
    )
    stream.digests = dict.fromkeys(shares, digest)
    return GroupMaker(made, cast(PromptStream, stream), cast(Scorers, None)), stream, ledger


def test_a_source_is_paused_above_its_share_of_failures_and_stays_so_after_a_resume() -> None:
    """Of 8 rollouts a batch, a quarter may fail by `a` in ten batches: 0.025 x 80 = 2 of them."""
    groups, prompts, ledger = maker({"a": 0.025, "plain": 0.0})
    ledger.take(6)
    first = groups.lost([group(0, "a", 1), group(1, "plain", 0)], ledger)
    assert (first["dropped_rollouts"], first["failed_episodes"]) == (1, {"raised": 1})
    assert "KeyError" in first["reward_error"]
    assert "paused_sources" not in groups.lost([group(2, "a", 1), group(3, "plain", 0)], ledger)
    state = json.loads(json.dumps(groups.state(ledger)))
    again, resumed, _ = maker({"a": 0.025, "plain": 0.0})
    restored = again.restored(state)
    for one, stream, kept in ((groups, prompts, ledger), (again, resumed, restored)):
        kept.take(6 - kept.first_untaken)
        found = one.lost([group(4, "a", 1), group(5, "plain", 0)], kept)
        assert found["paused"].keys() == {"a"}
        assert "3 episodes of a failed in the last 3 batches (environment.failing)" in found["paused"]["a"]
        assert stream.paused == [("a", 6, False)]
        assert "paused" not in one.lost([group(6, "a", 4), group(7, "plain", 0)], kept)  # it was under way
    third, later, _ = maker({"a": 0.025, "plain": 0.0})
    third.restored(json.loads(json.dumps(again.state(restored))))
    assert later.paused == [("a", 6, False)]


def test_a_pause_ends_at_a_resume_with_another_environment() -> None:
    groups, _, ledger = maker({"a": 0.025, "plain": 0.0})
    ledger.take(4)
    assert "paused" in groups.lost([group(4, "a", 4), group(5, "plain", 0)], ledger)
    ledger.take(2)
    state = json.loads(json.dumps(groups.state(ledger)))
    fixed, stream, _ = maker({"a": 0.025, "plain": 0.0}, digest="2")
    kept = fixed.restored(state)
    assert stream.paused == [("a", 4, False), ("a", 6, True)]
    assert "paused_sources" not in fixed.lost([group(6, "a", 1), group(7, "plain", 0)], kept)
    again, stream, _ = maker({"a": 0.025, "plain": 0.0}, digest="2")
    again.restored(json.loads(json.dumps(fixed.state(kept))))
    assert stream.paused == [("a", 4, False), ("a", 6, True)]
    assert fixed.lost([group(8, "a", 4), group(9, "plain", 0)], kept)["paused_sources"] == ["a"]


def test_failures_of_the_only_source_end_the_run() -> None:
    groups, prompts, ledger = maker({"": 0.05})
    groups.lost([group(0, "", 2), group(1, "", 2)], ledger)
    with pytest.raises(InputError, match=r"5 episodes failed in the last 2 batches .*raised KeyError"):
        groups.lost([group(2, "", 1), group(3, "", 0)], ledger)
    assert prompts.paused == []
    groups, _, _ = maker({"a": 0.02, "b": 0.02})
    groups.lost([group(0, "a", 0), group(1, "b", 2)], ledger)
    with pytest.raises(InputError, match=r"episodes of a failed"):
        groups.lost([group(2, "a", 4), group(3, "b", 0)], ledger)


def test_a_first_batch_without_a_whole_episode_ends_the_run_with_its_cause() -> None:
    groups, _, ledger = maker({"a": 0.9, "b": 0.9})
    with pytest.raises(InputError, match="No episode of the first batch was whole: all 8 episodes failed") as caught:
        groups.lost([group(0, "a", 4), group(1, "b", 4)], ledger)
    assert caught.value.message.count("KeyError") == 2  # the cause once, and the first message
    assert caught.value.exit_code == 2


def test_metrics_of_sources_are_counted_from_their_rollouts() -> None:
    found = source_metrics([group(0, "a", 1), group(1, "plain", 0), group(2, "a", 4)])
    assert found == {
        "a": {
            "rollouts": 3, "failed_episodes": 5, "reward_mean": 2.0, "response_tokens_mean": 6.0, "turns_mean": 2.0
        },
        "plain": {"rollouts": 4, "failed_episodes": 0, "reward_mean": 2.5, "response_tokens_mean": 6.5},
    }  # fmt: skip


def test_a_batch_of_failed_episodes_alone_has_metrics() -> None:
    found = rollout_metrics(RolloutBatch((group(3, "a", 4), group(5, "a", 4)), {}), 1, compares=True)
    assert found == {
        "tokens": 0,
        "positions": [[3, 3], [5, 5]],
        "sources": {"a": {"rollouts": 0, "failed_episodes": 8}},
    }


def test_a_tool_says_that_a_failure_is_not_the_model_s(tmp_path: Path) -> None:
    """Another exception is for the model to read."""
    plan = plan_environment(EnvironmentConfig(name=f"{TOYS}:Down"))
    loaded = plan.load()
    loaded = LoadedEnvironment(replace(plan, schemas=loaded.schemas()), loaded.kind, {})

    async def answered(words: str) -> Any:
        episode = RunningEpisode(loaded, tmp_path)
        await episode.reset(PromptRow(0, "row", "", None), 1)
        call = json.dumps({"name": "ask", "arguments": {"words": words}})
        return await episode.step({"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"})

    assert asyncio.run(answered("later")).messages[0]["content"] == "Error: ValueError: later is no question"
    with pytest.raises(Failure, match="no answer to now"):
        asyncio.run(answered("now"))


# Validation


@pytest.mark.usefixtures("untried")
def test_rows_are_held_out_of_each_source_and_validated_in_its_environment(tiny_llama: Path, rows: str) -> None:
    sources = [
        {"name": rows, "reward": {"terms": [{"name": "exact-match"}]}},
        {"name": rows, "environment": {"name": COUNTING}},
        {"environment": {"name": EVEN, "turns": 2}, "size": 9},
    ]
    made = config(sources, validation={"every": 1, "holdout": 2, "samples": 2}, batch={"prompts": 3})
    prompts = PromptStream.open_rollouts(made, tiny_llama)
    held = ValidationSet.open(made, prompts, tiny_llama)
    assert held is not None
    labels = [f"{rows} #1", f"{rows} #2", EVEN]
    assert [row.source for row in held.rows] == [label for label in labels for _ in range(2)]
    assert held.played == {f"{rows} #2", EVEN}
    assert isinstance(held.rewards, MixedRewards)
    assert held.rewards.plans.keys() == {f"{rows} #1"}
    trained = {(row.source, row.where) for row in map(prompts.prompt_at, range(22))}
    assert len(trained) == 2 + 2 + 7
    assert trained.isdisjoint((row.source, row.where) for row in held.rows)
    assert held.describe(made) == "validation: every step: 6 prompts held out of each source, 2 samples each, greedy"
    by = RlConfig.model_validate(
        {**made.model_dump(), "run": {"keep_best_by": "validation/accuracy", "checkpoint_every": 1}}
    )
    with pytest.raises(ConfigError, match="no such metric"):
        ValidationSet.open(by, prompts, tiny_llama)


def test_a_step_has_the_seconds_of_engine_and_environment_by_source() -> None:
    found = rollout_metrics(
        RolloutBatch((group(1, "a", 2), group(2, "plain", 0), group(5, "b", 3), group(6, "a", 4)), {}), 9, compares=True
    )
    assert found["episode_seconds"] == {
        "model": pytest.approx((2 + 2 + 10) / 3), "environment": pytest.approx((1 + 2 + 5) / 3),
        "sources": {"a": {"model": 2.0, "environment": 1.5}, "b": {"model": 10.0, "environment": 5.0}},
    }  # fmt: skip


def test_validation_has_the_metrics_of_each_source() -> None:
    found = source_metrics_of([group(0, "a", 1), group(1, "plain", 0), group(2, "a", 4), group(3, "a", 2)])
    assert found == {
        "sources/a/reward_mean": (2.0 + 1.5) / 2, "sources/a/response_tokens_mean": (6.0 + 5.5) / 2,
        "sources/a/dropped_rollouts": 3.0,
        "sources/plain/reward_mean": 2.5, "sources/plain/response_tokens_mean": 6.5,
    }  # fmt: skip
