"""Episodes of several turns on a real engine: token in, token out, and every token knows who wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.backends.base import EngineSpec, EpisodeWorker
from rlctl.backends.messages import Sampling, joined
from rlctl.errors import WorkerError
from rlctl.rollouts.source import sample_seed
from support.engine_host import SwappingEngine, hosted
from support.engine_policies import PROMPTS, WholeTensorPolicy, requests
from support.engines import START_TIMEOUT_S, tiny_facts
from support.toy_episodes import REPLY, TOKENS_A_TURN, TURNS

TOLERANCE = 1e-4
SAMPLING = Sampling(40)


@pytest.fixture(scope="module")
def host(placement: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with hosted(placement, tmp_path_factory.mktemp("episodes")) as group:
        yield group


def spec(model: Path) -> EngineSpec:
    from rlctl.backends.vllm.args import engine_spec
    from rlctl.config.schema import RlctlConfig

    generation = {"max_concurrent": 16, "kv_cache_bytes": 32 << 20}
    config = RlctlConfig.model_validate({"generation": generation})
    return engine_spec(config, tiny_facts(tied=False), model, device="cpu", max_length=256, threads=1)


def call(host: Any, method: Any, *args: Any) -> Any:
    return host.call(SwappingEngine.call, method, *args)[0]


def test_an_episode_is_put_together_from_answers_and_what_others_wrote(host: Any, tiny_llama: Path) -> None:
    policy = WholeTensorPolicy(tiny_llama)
    host.within(START_TIMEOUT_S).call(SwappingEngine.swap, spec(tiny_llama), "support.toy_episodes:echo")
    results = call(host, EpisodeWorker.generate, requests(samples=2), SAMPLING, 60.0)
    assert [result.group for result in results] == [0, 1, 2, 3]
    for result, prompt in zip(results, PROMPTS, strict=True):
        columns = result.columns
        for row in range(2):
            part = columns.slice(row)
            tokens, mask = columns.tokens_T[part].tolist(), columns.loss_mask_T[part]
            others = [(at, token) for at, (token, chosen) in enumerate(zip(tokens, mask, strict=True)) if not chosen]
            assert tuple(token for _, token in others[: len(prompt)]) == prompt
            assert tuple(token for _, token in others[len(prompt) :]) == REPLY * (TURNS - 1)
            expected = policy.logprobs(tuple(tokens[:1]), tokens[1:], SAMPLING).numpy()
            got = columns.logprobs_T[part]
            assert np.abs(got[1:] - expected)[mask[1:]].max() < TOLERANCE
            assert set(columns.weight_version_T[part][mask]) == {0}
            assert result.response_tokens[row] == mask.sum() <= TURNS * TOKENS_A_TURN
            assert result.rewards[row] == (TURNS if mask.sum() == TURNS * TOKENS_A_TURN else result.rewards[row])
        assert result.finish_reasons == ("done",) * 2
    assert any(result.rewards == (float(TURNS),) * 2 for result in results)


def test_episodes_that_go_on_by_themselves_are_the_same(host: Any, tiny_llama: Path) -> None:
    host.within(START_TIMEOUT_S).call(SwappingEngine.swap, spec(tiny_llama), "support.toy_episodes:echo")
    together = {one.group: one for one in call(host, EpisodeWorker.generate, requests(2), SAMPLING, 60.0)}
    call(host, EpisodeWorker.submit, requests(samples=2), SAMPLING)
    for _ in PROMPTS:
        (one,) = joined(*call(host, EpisodeWorker.collect_apart, 60.0))
        other = together.pop(one.group)
        assert (one.columns.tokens_T == other.columns.tokens_T).all()
        assert (one.rewards, one.texts) == (other.rewards, other.texts)
    assert not together


def test_an_environment_that_fails_ends_its_call_and_not_the_engine(host: Any, tiny_llama: Path) -> None:
    host.within(START_TIMEOUT_S).call(SwappingEngine.swap, spec(tiny_llama), "support.toy_episodes:broken")
    for _ in range(2):
        with pytest.raises(WorkerError, match="the environment is broken"):
            call(host, EpisodeWorker.generate, requests(samples=2), SAMPLING, 60.0)


def test_each_turn_has_a_seed_of_its_own() -> None:
    assert len({sample_seed(seed, turn) for seed in range(10) for turn in range(1, 10)}) == 90


def test_an_engine_of_one_turn_is_the_default(host: Any, tiny_llama: Path) -> None:
    own = replace(spec(tiny_llama), in_flight="wait")
    host.within(START_TIMEOUT_S).call(SwappingEngine.swap, own)
    (result, *_) = call(host, EpisodeWorker.generate, requests(samples=2), Sampling(4), 60.0)
    mask = result.columns.loss_mask_T[result.columns.slice(0)]
    assert (np.diff(mask.astype(int)) >= 0).all()  # a prompt and one answer
    assert result.rewards == (None, None)
