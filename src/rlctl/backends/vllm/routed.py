"""From the spans of routing decisions that were recorded to one column a sample. Torch-free.

Suffixes: T tokens, L layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Span = tuple[int, np.ndarray]
"""(position of the first token in its sample, int16 [T, L, K]); -1 in layers without experts."""


def assembled(tokens: Mapping[str, np.ndarray], spans: Mapping[str, Sequence[Span]]) -> dict[str, np.ndarray]:
    """int16 [T, L, K] of each sample; -1 where nothing is known, as of a last token, which no model has seen.

    What begins a sample may have come from another one's cache and was not computed again: it is that one's, whose
    tokens are the same up to there.
    """
    shape = next((rows.shape[1:] for own in spans.values() for _, rows in own), (0, 0))
    routed = {name: np.full((len(own), *shape), -1, np.int16) for name, own in tokens.items()}
    for name, own in spans.items():
        for start, rows in own:  # later ones replace what was computed before weights changed
            routed[name][start : start + len(rows)] = rows[: len(routed[name]) - start]
    missing = {name: _missing(rows_TLK) for name, rows_TLK in routed.items()}
    for name in sorted(missing, key=lambda one: missing[one]):
        if count := missing[name]:
            _borrow(name, count, tokens, routed, missing)
    return routed


def _missing(rows_TLK: np.ndarray) -> int:
    """Tokens at the beginning of which nothing was recorded."""
    known_T = rows_TLK.reshape(len(rows_TLK), -1).max(axis=1, initial=-1) >= 0
    return int(known_T.argmax()) if known_T.any() else 0


def _borrow(
    name: str,
    count: int,
    tokens: Mapping[str, np.ndarray],
    routed: dict[str, np.ndarray],
    missing: dict[str, int],
) -> None:
    """Fill the first `count` tokens of a sample from one that computed the same."""
    prefix = tokens[name][:count]
    for other, rows_TLK in routed.items():
        if missing[other] == 0 and len(rows_TLK) >= count and np.array_equal(tokens[other][:count], prefix):
            routed[name][:count] = rows_TLK[:count]
            missing[name] = 0
            return
