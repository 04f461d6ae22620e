"""The learning rate over the steps of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.settings.training import SchedulerConfig
from rlctl.training.schedule import learning_rate, weight_decay


def rates(steps: int, **scheduler) -> list[float]:
    return [learning_rate(step, steps, 2e-5, SchedulerConfig(**scheduler)) for step in range(steps)]


def test_warm_up_rises_linearly_to_the_peak_and_wastes_no_step() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.5e-5, 1e-5, 1.5e-5, 2e-5, 2e-5, 2e-5])


def test_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    assert rates(3, warmup_steps=10, decay="cosine") == pytest.approx([2e-6, 4e-6, 6e-6])


def megatrons(steps: int, **changes: Any) -> Any:
    """Megatron's scheduler over an optimizer that is one parameter group."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    values = {
        "init_lr": 0.0, "max_lr": 2e-5, "min_lr": 1e-6, "lr_warmup_steps": 0, "lr_decay_steps": steps,
        "lr_decay_style": "linear", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": steps, "wd_incr_style": "constant",
    }  # fmt: skip
    holder = SimpleNamespace(param_groups=[{"params": []}])
    return OptimizerParamScheduler(holder, **(values | changes))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"lr_decay_style": "constant"}, {}),
        ({"lr_decay_style": "linear", "lr_decay_steps": 15}, {"decay": "linear", "decay_steps": 15}),
        ({"lr_decay_style": "cosine", "lr_warmup_steps": 4}, {"decay": "cosine", "warmup_steps": 4}),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 4},
         {"decay": "inverse-square-root", "warmup_steps": 4}),
        *(
            ({"lr_decay_style": "WSD", "wsd_decay_steps": 7, "lr_wsd_decay_style": style},
             {"decay": "wsd", "wsd_steps": 7, "wsd_decay": style.replace("_", "-")})
            for style in ("linear", "cosine", "exponential", "minus_sqrt")
        ),
    ],
    ids=str,
)  # fmt: skip
def test_decays_are_megatrons(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    real = megatrons(20, **theirs)
    scheduler = SchedulerConfig(min_lr=1e-6, **ours)
    for step in range(scheduler.warmup_steps, 25):
        real.num_steps = step
        assert learning_rate(step, 20, 2e-5, scheduler) == pytest.approx(real.get_lr({}), rel=1e-12), step


def test_the_warm_up_is_megatrons_a_step_earlier() -> None:
    real = megatrons(20, lr_warmup_steps=5, init_lr=1e-6)
    scheduler = SchedulerConfig(warmup_steps=5, init_lr=1e-6, decay="linear", min_lr=1e-6)
    for step in range(5):
        real.num_steps = step + 1
        assert learning_rate(step, 20, 2e-5, scheduler) == pytest.approx(real.get_lr({}), rel=1e-12)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_weight_decay_is_megatrons(style: str) -> None:
    real = megatrons(20, start_wd=0.0, end_wd=0.3, wd_incr_steps=10, wd_incr_style=style)
    scheduler = SchedulerConfig(
        start_weight_decay=0.0, end_weight_decay=0.3, weight_decay_steps=10, weight_decay_style=style
    )
    for step in range(15):
        real.num_steps = step
        assert weight_decay(step, 20, 0.7, scheduler) == pytest.approx(real.get_wd(), abs=1e-15)
    assert weight_decay(3, 20, 0.7, SchedulerConfig()) == 0.7
