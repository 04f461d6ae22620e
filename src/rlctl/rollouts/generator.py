"""Generation: prompts dealt to the engines, and asked for again where an engine fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlctl.backends.clients import EngineClient
from rlctl.backends.messages import GroupRequest, GroupResult, Sampling
from rlctl.errors import RlctlError


def generate_groups(
    engines: EngineClient,
    requests: Sequence[GroupRequest],
    sampling: Sampling,
    timeout_s: float,
    recover: Callable[[RlctlError], object] | None = None,
) -> list[GroupResult]:
    """Return the results of all requests in the order of their groups, with handles of columns and texts.

    The requests are dealt to the engines in turn. `recover(error)` brings the engines back after the failure of one, or
    raises; the requests that the failed engine had are then asked for again.
    """
    results: list[GroupResult] = []
    left = list(requests)
    while left:
        shares = [left[index :: len(engines)] for index in range(len(engines))]
        left, error = [], None
        for share, outcome in zip(shares, engines.generate(shares, sampling, timeout_s), strict=True):
            if isinstance(outcome, list):
                results += outcome
            else:
                left, error = left + share, error or outcome
        if error is not None:
            if recover is None:
                raise error
            recover(error)
    return sorted(results, key=lambda result: result.group)
