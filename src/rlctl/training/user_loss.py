"""A loss function in a user's file: how it is called, and tried before a run.

It is tried in a separate process: its file imports torch, and the driver must not.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.section import Section
from rlctl.config.user_code import UserCode
from rlctl.errors import InputError, suggest
from rlctl.processes.child import call_in_child

if TYPE_CHECKING:
    import torch

FORM = "Its form is `def loss(batch)` or `def loss(batch, options)`: see docs/training.md."
TRIAL_TIMEOUT_S = 300.0
TRIAL_TOKENS = 7


@dataclass(frozen=True)
class UserLoss:
    """A user's loss function, which replaces an algorithm's loss and metrics."""

    code: UserCode
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values of the function's keyword-only parameters (`loss.params`)."""
    names: tuple[str, ...] | None = None
    """Names of the metrics that it returns; None: it has not been tried yet."""

    @classmethod
    def tried(
        cls, reference: str, params: Mapping[str, Any], options: Section, needs: frozenset[str], teacher_top: int
    ) -> UserLoss:
        """Return the function that a reference names, after a trial in another process. Raises InputError."""
        untried = cls(UserCode.read(reference, "Loss"), params)
        doing = f"the trial of loss function {untried.code.reference}"
        return replace(
            untried,
            names=call_in_child(doing, partial(trial, untried, options, needs, teacher_top), limit_s=TRIAL_TIMEOUT_S),
        )

    def __call__(self, batch: TokenBatch, options: Section) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the function's loss [R] and its metrics [R]. Raises InputError naming the line where it fails."""
        import torch

        function, who = self.code.load(), f"Loss function {self.code.reference}"
        parameters = inspect.signature(function).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        params = self._checked_params(list(parameters))
        try:
            result = function(batch, options, **params) if len(positional) > 1 else function(batch, **params)
        except Exception as error:
            raise self.code.error(error, "computing a loss") from error
        answer: tuple[Any, Any] = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        loss_R, values = answer
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise InputError(
                f"{who} returned {repr(values)[:80]} as its metrics.",
                'Return the loss, or (loss, {"name": values}).',
            )
        if self.names is not None and values.keys() != set(self.names):
            raise InputError(
                f"{who} returned the metrics {', '.join(values) or '(none)'}, and "
                f"{', '.join(self.names) or '(none)'} when it was tried.",
                "It returns the same ones for every batch.",
            )
        shape = batch.logprobs_R.shape
        for label, value in (("the loss", loss_R), *((f"metric {name}", value) for name, value in values.items())):
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                description = (
                    f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                )
                raise InputError(
                    f"{who} returned {description[:80]} as {label} of {shape[0]} tokens.",
                    "It returns one number for each response token.",
                )
        return loss_R, values

    def _checked_params(self, parameters: list[inspect.Parameter]) -> Mapping[str, Any]:
        """Return `loss.params`. Raises InputError for a name that is no keyword-only parameter of the function."""
        keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return self.params
        if unknown := [name for name in self.params if name not in keywords]:
            hint = suggest(unknown[0], keywords) or f"Declare it: `def {self.code.name}(batch, *, {unknown[0]}=...)`."
            raise InputError(f"Loss function {self.code.reference} has no setting {unknown[0]!r} (loss.params).", hint)
        return self.params


def made_up_batch(needs: frozenset[str] = frozenset(), teacher_top: int = 0) -> TokenBatch:
    """Return two made-up rollouts with a run's columns."""
    import torch

    generator, tokens, top = torch.Generator().manual_seed(0), TRIAL_TOKENS, teacher_top

    def near(values_R: torch.Tensor) -> torch.Tensor:
        return (values_R + 0.1 * torch.randn(tokens, generator=generator)).clamp(max=-0.01)

    logprobs_R = near(torch.full((tokens,), -2.0))
    trained_R, old_R = logprobs_R.clone().requires_grad_(), near(logprobs_R)
    return TokenBatch(
        logprobs_R=trained_R,
        entropy_R=torch.ones(tokens),
        rollout_logprobs_R=near(logprobs_R),
        advantages_R=torch.tensor([1.0] * 4 + [-1.0] * 3),
        token_weights_R=torch.full((tokens,), 1 / tokens),
        counted_R=torch.ones(tokens, dtype=torch.bool),
        rollout_R=torch.tensor([0] * 4 + [1] * 3),
        old_logprobs_R=old_R if "old_logprobs" in needs else None,
        reference_logprobs_R=near(logprobs_R) if "reference_logprobs" in needs else None,
        teacher_logprobs_R=near(logprobs_R) if "teacher_logprobs" in needs else None,
        teacher_top_RK=torch.full((tokens, top), -math.log(top + 1)) if top else None,
        top_logprobs_RK=torch.full((tokens, top), -math.log(top + 2)).requires_grad_() if top else None,
        full_logprobs_R=trained_R,
        old_full_logprobs_R=old_R if "old_logprobs" in needs else None,
    )


def trial(
    loss: UserLoss, options: Section, needs: frozenset[str] = frozenset(), teacher_top: int = 0
) -> tuple[str, ...]:
    """Call the function once on two made-up rollouts with a run's columns; return the names of its metrics."""
    import torch

    batch = made_up_batch(needs, teacher_top)
    try:
        loss_R, values = loss(batch, options)
        if not loss_R.requires_grad:
            raise InputError(
                f"Loss function {loss.code.reference} returned a loss that does not depend on batch.logprobs_R.",
                "Without that nothing is learned: compute it from batch.logprobs_R, and do not detach it.",
            )
        loss_R.sum().backward()
        gradient = batch.logprobs_R.grad
        if gradient is None or not (torch.isfinite(loss_R).all() and torch.isfinite(gradient).all()):
            raise InputError(f"Loss function {loss.code.reference} returned a loss or gradient that is not finite.")
        return tuple(values)
    except InputError as error:
        raise InputError(error.message, error.hint or FORM) from error
