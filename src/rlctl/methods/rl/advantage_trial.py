"""The advantages of an algorithm from outside rlctl, tried on made-up groups before a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.errors import InputError, RlctlError

LEAST_ROLLOUTS = 4
ADVICE = "Return one finite number for each rollout of the group: a float64 array of the shape of `rewards_G`."


class HasAdvantages(Protocol):
    """What a trial needs of an algorithm."""

    made_by: Callable[[Any], Any]

    def keeps(self, rewards_G: np.ndarray) -> bool: ...

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray: ...

    def batch_advantages(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]: ...


def require_advantages(algorithm: HasAdvantages, generations: int, description: str) -> None:
    """Raise InputError where `advantages` or `batch_advantages` fails on groups of different or equal rewards, or
    returns something else than a finite number for each rollout."""
    count = max(LEAST_ROLLOUTS, generations)
    rewards = [np.arange(count) % 2.0, np.linspace(-1.0, 1.0, count), np.ones(count)]
    kept = [rewards_G for rewards_G in rewards if algorithm.keeps(rewards_G)]
    doing = f"computing the advantages of made-up groups of {count} rollouts"

    def require_numbers(name: str, values: list[Any]) -> None:
        for advantages_G, rewards_G in zip(values, kept, strict=True):
            if (wrong := _wrong(advantages_G, count)) is not None:
                raise InputError(
                    f"{name} of the {description} returned {wrong} for {count} rollouts with the rewards "
                    f"{_shown(rewards_G)}.",
                    ADVICE,
                )

    try:
        with np.errstate(all="ignore"):
            require_numbers("advantages", [algorithm.advantages(rewards_G.copy()) for rewards_G in kept])
            batch = list(algorithm.batch_advantages([_group(place, of_G) for place, of_G in enumerate(kept)]))
    except RlctlError:
        raise
    except Exception as error:
        code = getattr(algorithm.made_by, "code", None)
        if code is not None:
            raise code.error(error, doing) from error
        raise InputError(f"The {description} raised {type(error).__name__}: {error} ({doing}).") from error
    if len(batch) != len(kept):
        raise InputError(
            f"batch_advantages of the {description} returned {len(batch)} arrays for {len(kept)} groups.", ADVICE
        )
    require_numbers("batch_advantages", batch)


def _wrong(advantages_G: Any, count: int) -> str | None:
    """Return a description of a result that is no array of `count` finite numbers; None: it is one."""
    try:
        values_G = np.asarray(advantages_G, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        return repr(advantages_G)[:80]
    if values_G.ndim == 0:
        return f"the scalar {values_G}"
    if values_G.shape != (count,):
        return f"an array of shape {values_G.shape}"
    return None if np.isfinite(values_G).all() else f"{_shown(values_G)}, which is not finite"


def _shown(values_G: np.ndarray) -> str:
    more = ", ..." if len(values_G) > LEAST_ROLLOUTS else ""
    return f"[{', '.join(f'{value:g}' for value in values_G[:LEAST_ROLLOUTS])}{more}]"


def _group(position: int, rewards_G: np.ndarray) -> RolloutGroup:
    rollouts = tuple(
        Rollout(position, sample, sample, ((0, 4),), "stop", 1, 5, 4, float(reward), {}, None)
        for sample, reward in enumerate(rewards_G)
    )
    return RolloutGroup(position, PromptRow(position, "a made-up row", "?", None), rollouts, None, None)
