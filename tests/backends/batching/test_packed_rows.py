"""What the routers of a row are told, from the record that came with the rollouts."""

from __future__ import annotations

import numpy as np
import torch

from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.batching.packed_rows import build_row, row_routing
from rlctl.data.rollouts import ROUTED_EXPERTS, RolloutColumns

CPU = torch.device("cpu")


def test_a_row_without_rollouts_leaves_routers_their_own_choice() -> None:
    """Of data-parallel ranks that have fewer rollouts than others some rows are empty."""
    row = build_row((), {}, share=True, multiple=8, device=CPU)
    assert row_routing((), {}, True, row) is None


def test_the_record_stands_where_the_tokens_do() -> None:
    routed = np.arange(8, dtype=np.int16).reshape(8, 1, 1)
    tokens, mask = np.arange(8, dtype=np.int32), np.array([False, False, True, True] * 2)
    tokens[4:6] = tokens[:2]  # the same prompt
    columns = {7: RolloutColumns(tokens, np.array([0, 4, 8], np.int32), mask, np.zeros(8, np.float32),
                                 np.zeros(8, np.int32), {ROUTED_EXPERTS: routed})}  # fmt: skip
    micro = tuple(WeightedSequence(7, index, 2, 4, 1.0, 0.25) for index in range(2))
    row = build_row(micro, columns, share=True, multiple=8, device=CPU)
    found = row_routing(micro, columns, True, row)
    assert found is not None
    assert found.flatten().tolist() == [0, 1, 2, 3, 6, 7, -1, -1]


def test_a_row_has_the_weight_of_the_likelihood_of_its_rollouts_where_one_has_any() -> None:
    tokens, mask = np.arange(8, dtype=np.int32), np.array([False, False, True, True] * 2)
    columns = {7: RolloutColumns(tokens, np.array([0, 4, 8], np.int32), mask, np.zeros(8, np.float32),
                                 np.zeros(8, np.int32))}  # fmt: skip
    for weights, expected in (((0.0, 0.5), [0.0, 0.0, 0.5, 0.5]), ((0.0, 0.0), None)):
        micro = tuple(WeightedSequence(7, index, 2, 4, 1.0, 0.25, 0, weight) for index, weight in enumerate(weights))
        row = build_row(micro, columns, share=False, multiple=8, device=CPU)
        found = row.token_batch(torch.zeros(2, 4)).nll_weights_R
        assert (found if found is None else found.tolist()) == expected
