"""The loss of a method from outside rlctl, tried on made-up rollouts before a run."""

from __future__ import annotations

from functools import partial

from rlctl.data.row_types import PROMPTS
from rlctl.errors import InputError
from rlctl.processes.child import call_in_child
from rlctl.training.capabilities import ScalarHead
from rlctl.training.method import Method
from rlctl.training.run_loss import RunLoss
from rlctl.training.user_loss import TRIAL_TIMEOUT_S, made_up_batch


def require_loss(method: Method, description: str) -> None:
    """Raise InputError if the loss of `method`, called `what` in messages, fails on made-up rollouts. A child process
    computes it, since a driver does not import torch."""
    if getattr(method.made_by, "code", None) or getattr(method.made_by, "package", None):  # a child can import it
        call_in_child(
            f"the trial of the {description}", partial(_try_loss, method, description), limit_s=TRIAL_TIMEOUT_S
        )


def _try_loss(method: Method, description: str) -> None:
    try:
        RunLoss(method)(made_up_batch(method.needs, method.teacher_top))
    except InputError:
        raise
    except Exception as error:
        if method.rows is not PROMPTS or isinstance(method, ScalarHead):
            return  # rows of other types may have columns that made-up rollouts lack
        code = getattr(method.made_by, "code", None)
        if code is not None:
            raise code.error(error, "computing the loss of made-up rollouts") from error
        raise InputError(f"The {description} raised {type(error).__name__}: {error} (computing a loss).") from error
