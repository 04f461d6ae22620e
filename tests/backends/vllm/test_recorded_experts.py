"""The record of routing decisions: put together from spans, and from a real engine against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlctl.backends.messages import Sampling
from rlctl.backends.vllm.recorded_experts import assembled, merged
from rlctl.data.rollouts import ROUTED_EXPERTS
from rlctl.tiny_models.text import write_tiny_family
from support.engine_host import FamilyEngine, SwappingEngine
from support.engine_policies import choices, generate


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int16).reshape(-1, 1, 1)


def test_cached_beginnings_are_those_of_the_sample_that_computed_them() -> None:
    tokens = {"a": [1, 2, 3, 4], "b": [1, 2, 9, 9, 9], "c": [1, 2, 9, 9, 7], "d": [5, 6, 7]}
    spans = {
        "a": [(0, rows(10, 20, 30))],
        "b": [(2, rows(31, 41))],
        "c": [(3, rows(42))],
        "d": [(0, rows(50, 60)), (1, rows(61))],  # computed again under other weights
    }
    found = assembled({name: np.array(own) for name, own in tokens.items()}, spans, (1, 1))
    assert {name: own.ravel().tolist() for name, own in found.items()} == {
        "a": [10, 20, 30, -1],
        "b": [10, 20, 31, 41, -1],
        "c": [10, 20, 31, 42, -1],
        "d": [50, 61, -1],
    }


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_samples_without_a_record_have_its_shape(order: str) -> None:
    """vLLM records samples that finish, and not those that end by limit or abort."""
    tokens = {name: np.array([1, 2, 3 + (name == "b")]) for name in order}
    record = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], np.int16)
    found = assembled(tokens, {"a": [(0, record)]}, (2, 2))
    assert {name: own.shape for name, own in found.items()} == {"a": (3, 2, 2), "b": (3, 2, 2)}
    assert (found["b"] == -1).all()
    alone = assembled({"b": tokens["b"]}, {}, (2, 2))
    assert alone["b"].shape == (3, 2, 2)  # a group of such samples alone
    # And what has no record lends none: the beginning comes from the sample that has it.
    later = assembled(tokens | {"c": np.array([1, 9])}, {"a": [(0, record)], "c": [(1, record[:1])]}, (2, 2))
    assert later["c"][0].tolist() == record[0].tolist()


def test_each_stage_adds_the_choices_of_its_own_layers() -> None:
    first = {"a": [(0, np.array([[[3], [-1]], [[4], [-1]]], np.int16))]}
    last = {"a": [(0, np.array([[[-1], [5]], [[-1], [6]]], np.int16))]}
    found = merged([first, {}, last, {}])
    assert [(start, rows.tolist()) for start, rows in found["a"]] == [(0, [[[3], [5]], [[4], [6]]])]
    assert merged([first, {}]).keys() == {"a"}


@pytest.fixture(scope="module")
def host(family_host: Any) -> Iterator[Any]:
    """The process of all engines of this file, one after the other."""
    yield family_host
    family_host.call(SwappingEngine.close)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp", "sizes"),
    [
        pytest.param("qwen3_moe", 1, {}, marks=pytest.mark.guard),
        ("qwen3_moe", 2, {}),
        ("mixtral", 1, {}),
        ("qwen3_moe", 2, {"ep": 2}),
        ("qwen3_moe", 1, {"pp": 2}),
    ],
)
def test_every_token_comes_with_its_experts(
    host: Any, family: str, tp: int, sizes: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_tiny_family(tmp_path_factory.mktemp("models") / family, family)
    engine = FamilyEngine(host, family, model, tp, generation=sizes, training={"router_replay": True})
    for _ in range(2):  # what a call leaves in the prefix cache is not computed again by the next
        for result, columns, _ in generate(engine, Sampling(8)):
            for row in range(columns.rollouts):
                span = columns.slice(row)
                found = columns.extra_T[ROUTED_EXPERTS][span]
                expected = choices(engine.policy.model, columns.tokens_T[span])
                assert len(columns.tokens_T[span]) > result.prompt_tokens
                assert (found[-1] == -1).all()
                assert np.array_equal(np.sort(found[:-1], axis=-1), np.sort(expected[:-1], axis=-1))
