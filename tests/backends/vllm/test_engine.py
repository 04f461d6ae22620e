"""The vLLM engine: what it samples, how it stops, and that its weights are exactly those it was given."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlctl.backends.base import EngineWorker, EpisodeWorker
from rlctl.backends.messages import GroupRequest, Sampling, attached
from rlctl.errors import InputError, WaitTimeoutError, WorkerError
from rlctl.refit.verify import compare
from support.engine_policies import PROMPTS, WholeTensorPolicy, generate, largest_logprob_error, requests
from support.engines import HostedEngine, start_engine

TOLERANCE = 1e-4  # fp32 on both sides; observed 2e-6


@pytest.fixture(scope="module")
def policy(tiny_llama: Path) -> WholeTensorPolicy:
    return WholeTensorPolicy(tiny_llama)


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(24),
        Sampling(24, temperature=0.7, top_k=20),
        Sampling(24, temperature=0.0),
    ],
    ids=["plain", "temperature and top-k", "greedy"],
)
def test_logprobs_are_of_the_distribution_sampled_from(
    engine: HostedEngine, policy: WholeTensorPolicy, sampling: Sampling
) -> None:
    policy.refit(engine, 1)
    groups = generate(engine, sampling)
    assert largest_logprob_error(groups, policy, sampling) < TOLERANCE


@pytest.mark.slow
@pytest.mark.guard
def test_columns_describe_the_group(engine: HostedEngine, policy: WholeTensorPolicy) -> None:
    policy.refit(engine, 7)
    for result, columns, texts in generate(engine, Sampling(8)):
        prompt = PROMPTS[result.group]
        assert len(texts) == columns.rollouts == 4
        assert result.tokens == tuple(len(prompt) + count for count in result.response_tokens)
        for row in range(4):
            part = columns.slice(row)
            assert tuple(columns.tokens_T[part][: len(prompt)]) == prompt
            chosen = columns.loss_mask_T[part]
            assert not chosen[: len(prompt)].any()
            assert chosen[len(prompt) :].all()
            assert chosen.sum() == result.response_tokens[row] > 0
            assert (columns.weight_version_T[part][chosen] == 7).all()
            assert (columns.weight_version_T[part][~chosen] == -1).all()
            assert (columns.logprobs_T[part][chosen] < 0).all()


def test_end_token_belongs_to_the_response(engine: HostedEngine) -> None:
    groups = generate(engine, Sampling(100), requests(samples=16))
    ends = 0
    for result, columns, _ in groups:
        for row in range(columns.rollouts):
            tokens = columns.tokens_T[columns.slice(row)][result.prompt_tokens :]
            stopped = result.finish_reasons[row] == "stop"
            ends += stopped
            assert stopped == (tokens[-1] == 2)
            assert (result.finish_reasons[row] == "length") == (not stopped)
            assert 2 not in tokens[:-1]
            assert stopped or len(tokens) == 100
    assert ends > 0


def decoded(model: Path, sampling: Sampling, groups: list[Any]) -> list[tuple[list[int], str, str, str]]:
    """Return the tokens of each completion, their text by transformers without the end token, the engine's text, and
    what ended it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for result, columns, texts in groups:
        for row in range(columns.rollouts):
            tokens = columns.tokens_T[columns.slice(row)][result.prompt_tokens :].tolist()
            kept = tokens[:-1] if tokens[-1] == tokenizer.eos_token_id else tokens
            text = tokenizer.decode(kept, skip_special_tokens=False)
            found.append((tokens, text, texts[row], result.finish_reasons[row]))
    return found


def test_a_text_has_the_special_tokens_that_the_model_writes(engine: HostedEngine, tiny_llama: Path) -> None:
    sampling = Sampling(60)
    completions = decoded(tiny_llama, sampling, generate(engine, sampling, requests(samples=16)))
    special = AutoTokenizer.from_pretrained(tiny_llama).all_special_tokens
    assert any(token in expected for _, expected, _, _ in completions for token in special)
    for _, expected, text, _ in completions:  # vLLM leaves out a character whose end is not there
        assert text.rstrip("\ufffd") == expected.rstrip("\ufffd")


@pytest.mark.parametrize("ends_turn", [False, True])
def test_a_stop_text_is_part_of_the_text_unless_it_ends_a_turn(
    engine: HostedEngine, tiny_llama: Path, ends_turn: bool
) -> None:
    sampling = Sampling(60, stop=("e",), turn_ends=("e",) if ends_turn else ())
    completions = decoded(tiny_llama, sampling, generate(engine, sampling, requests(samples=8)))
    stopped = [
        (expected, text) for tokens, expected, text, reason in completions if reason == "stop" and tokens[-1] != 2
    ]
    assert stopped
    for expected, text in stopped:
        assert text == expected.partition("e")[0] + ("" if ends_turn else "e")


@pytest.mark.parametrize("ends_turn", [False, True])
def test_a_stop_token_is_part_of_the_text_unless_it_ends_a_turn(
    engine: HostedEngine, tiny_llama: Path, ends_turn: bool
) -> None:
    plain = decoded(tiny_llama, Sampling(60), generate(engine, Sampling(60), requests(samples=8)))
    decode = AutoTokenizer.from_pretrained(tiny_llama).decode
    token = next(one for tokens, *_ in plain for one in tokens if decode([one]).isalpha())
    sampling = Sampling(60, stop_token_ids=(token,), turn_ends=(token,) if ends_turn else ())
    completions = decoded(tiny_llama, sampling, generate(engine, sampling, requests(samples=8)))
    stopped = [(tokens, text) for tokens, _, text, _ in completions if tokens[-1] == token]
    assert stopped
    for tokens, text in stopped:
        expected = decode(tokens[:-1] if ends_turn else tokens, skip_special_tokens=False)
        assert text.replace("\ufffd", "") == expected.replace("\ufffd", "")  # where a character is not complete


def test_a_sample_depends_on_its_own_seed_alone(engine: HostedEngine) -> None:
    together = generate(engine, Sampling(16))
    alone = generate(engine, Sampling(16), [GroupRequest(2, PROMPTS[2], (203, 201))])
    rows = together[2][1]
    for mine, theirs in ((0, 3), (1, 1)):
        columns = alone[0][1]
        assert np.array_equal(columns.tokens_T[columns.slice(mine)], rows.tokens_T[rows.slice(theirs)])
    assert len({tuple(rows.tokens_T[rows.slice(g)]) for g in range(4)}) == 4


def test_prompts_that_are_computed_in_parts_change_no_sample(engine: HostedEngine) -> None:
    prompts = [tuple(3 + (29 * i + 7 * j) % 500 for j in range(150 + i)) for i in range(6)]
    wanted = [GroupRequest(i, prompt, (10 * i,)) for i, prompt in enumerate(prompts)]
    together = generate(engine, Sampling(8, stop_token_ids=()), wanted)
    alone = [generate(engine, Sampling(8, stop_token_ids=()), [one])[0] for one in wanted]
    for (_, mine, _), (_, theirs, _) in zip(together, alone, strict=True):
        assert np.array_equal(mine.tokens_T, theirs.tokens_T)


def test_a_completion_ends_where_the_length_does(engine: HostedEngine) -> None:
    """The engine takes 256 tokens in all."""
    long = GroupRequest(0, tuple(PROMPTS[0][0] for _ in range(250)), (1, 2))
    ((result, columns, _),) = generate(engine, Sampling(24, stop_token_ids=()), [long])
    for row in range(columns.rollouts):
        assert result.response_tokens[row] <= 6
        assert (result.finish_reasons[row] == "length") == (result.response_tokens[row] == 6)
    assert 6 in result.response_tokens


def test_prompt_too_long_is_refused(engine: HostedEngine) -> None:
    with pytest.raises(InputError, match="300 tokens"):
        engine.call(EpisodeWorker.generate, [GroupRequest(0, (5,) * 300, (1,))], Sampling(4), 60.0)


def test_timeout_names_the_engine_and_leaves_it_usable(engine: HostedEngine) -> None:
    with pytest.raises(WaitTimeoutError, match="Engine 0 completed"):
        engine.call(EpisodeWorker.generate, requests(), Sampling(200), 0.05)
    assert len(generate(engine, Sampling(4))) == 4


def test_a_sample_that_takes_too_long_ends_with_what_it_has(engine: HostedEngine, policy: WholeTensorPolicy) -> None:
    """The clock runs from the first token on: with hardly any time, the second one is the last."""
    policy.refit(engine, 3)
    sampling = Sampling(200, stop_token_ids=(), timeout_s=1e-9)
    groups = generate(engine, sampling)
    ends = [
        (result.finish_reasons[row], result.response_tokens[row], result.versions[row])
        for result, columns, _ in groups
        for row in range(columns.rollouts)
    ]
    late = [end for end in ends if end[0] != "stop"]  # some end by themselves at once
    assert set(late) == {("timeout", 2, ((3, 2),))}
    assert len(late) > len(ends) / 2
    assert largest_logprob_error(groups, policy, sampling) < TOLERANCE
    in_time = generate(engine, Sampling(4, timeout_s=60.0))
    assert "timeout" not in {reason for result, _, _ in in_time for reason in result.finish_reasons}


def test_submitted_groups_are_given_back_one_by_one_as_if_they_were_generated(
    engine: HostedEngine, policy: WholeTensorPolicy
) -> None:
    policy.refit(engine, 5)
    sampling, wanted = Sampling(8), requests()
    engine.call(EpisodeWorker.submit, wanted[:3], sampling)
    engine.call(EpisodeWorker.submit, wanted[3:], sampling)
    found = [attached(*engine.call(EpisodeWorker.collect_by_handle, 60.0)) for _ in wanted]
    assert [len(results) for results in found] == [1] * 4
    given = {results[0].group: results[0] for results in found}
    for result, columns, texts in generate(engine, sampling):
        one = given.pop(result.group)
        assert (one.columns.tokens_T == columns.tokens_T).all()
        assert (one.texts, one.versions) == (texts, result.versions)
    assert not given
    with pytest.raises(WaitTimeoutError, match="nothing to sample"):
        engine.call(EpisodeWorker.collect_by_handle, 0.01)


def readings_differ(engine: HostedEngine, policy: WholeTensorPolicy) -> set[str]:
    """Tensors of which the engine holds something else than the policy, read back from what it computes with."""
    found = compare(policy.fingerprints(), engine.call(EngineWorker.readings))
    assert found.missing == found.extra == found.unread == ()
    assert found.buffers > 0
    return set(found.mismatched)


@pytest.mark.parametrize("receive", ["loader", "direct"])
@pytest.mark.parametrize("which", ["engine", "tied_engine"])
def test_refit_replaces_every_tensor(which: str, receive: str, request: pytest.FixtureRequest) -> None:
    engine: HostedEngine = request.getfixturevalue(which)
    policy = WholeTensorPolicy(engine.model)
    sampling = Sampling(16)
    policy.refit(engine, 1, receive)
    for version in (2, 3):
        policy.perturb(version)
        before = generate(engine, sampling)
        assert largest_logprob_error(before, policy, sampling) > 100 * TOLERANCE
        assert readings_differ(engine, policy) == set(policy.tensors())
        policy.refit(engine, version, receive)
        assert readings_differ(engine, policy) == set()
        assert engine.call(EngineWorker.weight_version) == version
        assert engine.call(EngineWorker.received)[0].path == receive
        # The same prompts again: what the prefix cache kept of the old weights would show.
        assert largest_logprob_error(generate(engine, sampling), policy, sampling) < TOLERANCE


def interrupt(engine: HostedEngine, policy: WholeTensorPolicy, version: int) -> None:
    """A refit that breaks off in its second round."""
    policy.open(engine, "loader", staging_bytes=300_000)
    engine.call(EngineWorker.refit_begin, version)
    policy.fail_in_round = 1
    with pytest.raises(WorkerError, match=r"policy rank 0 failed before it could pack round 2"):
        policy.transfer(engine, version)
    policy.fail_in_round = None


def test_paths_may_alternate(engine: HostedEngine) -> None:
    """Also after a reload that was begun and given up."""
    policy = WholeTensorPolicy(engine.model)
    for version, receive in enumerate(("direct", "loader", "direct", "loader"), 1):
        policy.perturb(version)
        interrupt(engine, policy, 99)
        policy.refit(engine, version, receive)
        assert readings_differ(engine, policy) == set()


def test_interrupted_refit_refuses_to_generate_until_a_full_one(
    engine: HostedEngine, policy: WholeTensorPolicy
) -> None:
    policy.perturb(11)
    interrupt(engine, policy, 5)
    for _ in range(2):
        with pytest.raises(WorkerError, match="half-updated weights: the refit to version 5"):
            engine.call(EpisodeWorker.generate, requests(), Sampling(4), 60.0)
    with pytest.raises(WorkerError, match="half-updated"):
        engine.call(EngineWorker.weight_version)
    policy.refit(engine, 6)
    assert readings_differ(engine, policy) == set()
    sampling = Sampling(8)
    assert largest_logprob_error(generate(engine, sampling), policy, sampling) < TOLERANCE


def test_refit_that_fails_in_the_engine_refuses_too(engine: HostedEngine, policy: WholeTensorPolicy) -> None:
    right = policy.table
    row = right[3]._replace(shape=(right[3].shape[0] // 2, right[3].shape[1] * 2))
    policy.table = (*right[:3], row, *right[4:])
    policy.open(engine)
    policy.table = right
    engine.call(EngineWorker.refit_begin, 8)
    with pytest.raises(WorkerError, match="receive_update"):
        policy.transfer(engine, 8)
    with pytest.raises(WorkerError, match="half-updated"):
        engine.call(EpisodeWorker.generate, requests(), Sampling(4), 60.0)
    policy.refit(engine, 9)
    assert readings_differ(engine, policy) == set()


@pytest.mark.slow
@pytest.mark.guard
def test_killed_engine_is_reported_not_waited_for(placement: Any, tiny_llama: Path, tmp_path: Path) -> None:
    hosted = start_engine(placement, tiny_llama, tmp_path, name="victim")
    policy = WholeTensorPolicy(tiny_llama)
    policy.open(hosted)
    hosted.call(EngineWorker.refit_begin, 1)
    os.kill(hosted.group.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"victim rank 0 .*died during `refit_receive`"):
        policy.transfer(hosted, 1)
    hosted.group.kill()
