"""The mixture of several teachers' log-probs against the formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest

from rlctl.backends.batching.batch import RolloutLogprobs
from rlctl.backends.batching.mixtures import Mixture, mixed

WEIGHTS, VOCAB, TOP = (0.5, 2.0, 1.5), 12, 4


def tables() -> list[np.ndarray]:
    """Log-probs [R, V] of three teachers; the last is nearly certain."""
    logits = np.random.default_rng(1).normal(size=(3, 6, VOCAB)) * np.array([1, 2, 30])[:, None, None]
    return [each - np.log(np.exp(each - each.max(1, keepdims=True)).sum(1, keepdims=True)) - each.max(1, keepdims=True)
            for each in logits]  # fmt: skip


def expected(mix: str) -> np.ndarray:
    weights = np.array(WEIGHTS)[:, None, None] / sum(WEIGHTS)
    stacked = np.stack(tables())
    return np.log((weights * np.exp(stacked)).sum(0)) if mix == "probabilities" else (weights * stacked).sum(0)


def given(ids_RM: list[np.ndarray]) -> list[tuple[float, RolloutLogprobs]]:
    return [
        (weight, RolloutLogprobs(*(each.astype(np.float32) for each in (table[:, 3],)), ids.astype(np.int32),
                                 np.take_along_axis(table, ids, 1).astype(np.float32)))
        for weight, table, ids in zip(WEIGHTS, tables(), ids_RM, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("mix", ["probabilities", "log-probs"])
def test_the_whole_vocabulary_of_teachers_is_mixed_token_by_token(mix: str) -> None:
    each_best_first = [np.argsort(-table, 1) for table in tables()]
    found = mixed(given(each_best_first), Mixture(mix, VOCAB, whole=True))  # type: ignore[arg-type]
    assert found.logprobs_R == pytest.approx(expected(mix)[:, 3], rel=1e-5)
    assert (np.diff(found.top_logprobs_RK) <= 0).all()
    assert found.top_logprobs_RK == pytest.approx(np.take_along_axis(expected(mix), found.top_ids_RK, 1), rel=1e-5)
    assert (np.sort(found.top_ids_RK, 1) == np.arange(VOCAB)).all()


@pytest.mark.parametrize("mix", ["probabilities", "log-probs"])
def test_the_most_likely_tokens_of_a_mixture_are_among_those_of_its_teachers(mix: str) -> None:
    """Tokens that two teachers name are there twice in what each was asked for, and count once."""
    named = np.concatenate([np.argsort(-table, 1)[:, :TOP] for table in tables()], 1)
    found = mixed(given([named] * 3), Mixture(mix, TOP))  # type: ignore[arg-type]
    for row, table in enumerate(expected(mix)):
        among = sorted(set(named[row].tolist()), key=lambda token: -table[token])[:TOP]
        assert found.top_ids_RK[row].tolist() == among
        assert found.top_logprobs_RK[row] == pytest.approx(table[among], rel=1e-5)


def test_one_teacher_and_chosen_tokens_alone_are_taken_as_they_are() -> None:
    none = [np.zeros((6, 0), np.int64)] * 3
    [first, *_] = given(none)
    assert mixed([first], Mixture()) is first[1]
    assert mixed(given(none), Mixture()).logprobs_R == pytest.approx(expected("probabilities")[:, 3], rel=1e-5)
