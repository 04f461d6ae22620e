"""What a step's difference between engine and trainer leads to."""

from __future__ import annotations

import math

import pytest

from rlctl.errors import DivergenceError
from rlctl.jobs.refit_test import LOGPROB_LIMITS
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.settings.generation import GenerationConfig
from rlctl.settings.run import RolloutChecksConfig
from rlctl.training.agreement import LIMITS, Agreement, precision_of


def step(mean: float) -> dict:
    return {"logprob_diff": {"mean": mean, "max": 3 * mean, "kl": mean**2, "prob_error": 1 + mean}}


@pytest.mark.parametrize(
    ("dtype", "usual", "strange", "wrong"),
    [("float32", 1e-6, 1e-3, 0.1), ("bfloat16", 0.02, 0.2, 2), ("float8", 0.1, 0.3, 2)],
)
def test_limits_follow_the_precision(dtype: str, usual: float, strange: float, wrong: float) -> None:
    agreement = Agreement.from_config(RlConfig(), dtype, ())
    assert agreement.check(1, step(usual)) is None
    warning = agreement.check(7, step(strange))
    assert warning is not None
    assert "step 7" in warning
    assert dtype in warning
    with pytest.raises(DivergenceError, match=r"step 7.*logprob_diff_error") as error:
        agreement.check(7, step(wrong))
    assert error.value.exit_code == 1
    assert "refit-test" in error.value.hint


def test_a_refit_test_allows_in_each_precision_what_a_step_is_not_warned_of() -> None:
    assert {precision: limit.mean_abs for precision, limit in LOGPROB_LIMITS.items()} == {
        precision: warning for precision, (warning, _) in LIMITS.items()
    }
    float8 = RlConfig.model_validate({"megatron": {"fp8": "hybrid"}})
    assert [precision_of(config, "bfloat16") for config in (float8, RlConfig())] == ["float8", "bfloat16"]


def test_what_is_not_a_number_stops_the_run() -> None:
    with pytest.raises(DivergenceError, match="nan"):
        Agreement.from_config(RlConfig(), "bfloat16", ()).check(1, step(math.nan))


def test_limits_can_be_set_and_a_low_error_limit_lowers_the_warning() -> None:
    limits = RolloutChecksConfig(logprob_diff_warning=0.3, logprob_diff_error=0.4)
    agreement = Agreement.from_config(RlConfig(checks=limits), "float32", ())
    assert agreement.check(1, step(0.25)) is None
    assert agreement.check(1, step(0.35)) is not None
    with pytest.raises(DivergenceError):
        agreement.check(1, step(0.45))
    low = RolloutChecksConfig(logprob_diff_error=1e-9)
    assert Agreement.from_config(RlConfig(checks=low), "float32", ()).warning == 1e-9


@pytest.mark.parametrize("kept", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_truncated_sampling_is_held_to_the_same_limits(kept: dict) -> None:
    agreement = Agreement.from_config(RlConfig(generation=GenerationConfig(**kept)), "float32", ())
    assert (agreement.warning, agreement.error, agreement.note) == (*LIMITS["float32"], "")


def test_without_logprobs_from_before_a_batch_there_is_no_limit_but_ones_own() -> None:
    """A ratio to the engine's log-probs spares the pass that recomputes them (arXiv 2505.24298, section 5.2)."""
    steps = {"batch": {"prompts": 4, "generations": 2, "optimizer_steps": 2}}
    ratio = RlConfig.model_validate({**steps, "loss": {"importance_correction": "ratio"}})
    assert not Grpo(ratio).needs
    assert Grpo(RlConfig.model_validate(steps)).needs == {"old_logprobs"}
    agreement = Agreement.from_config(ratio, "float32", ())
    assert "optimizer steps" in agreement.note
    assert agreement.check(1, step(0.1)) is None
    masked = {"importance_correction": "ratio", "sequence_mask": (0.9, 1.1)}
    assert Grpo(RlConfig.model_validate({**steps, "loss": masked})).needs == {"old_logprobs"}


def test_an_exact_run_stops_at_any_difference() -> None:
    agreement = Agreement.from_config(RlConfig(checks=RolloutChecksConfig(exact=True)), "bfloat16", ())
    assert agreement.check(1, step(0.0)) is None
    with pytest.raises(DivergenceError, match=r"step 2.*checks\.exact"):
        agreement.check(2, step(1e-9))
