"""Learning rates by step: tables, and transformers' own schedules."""

import pytest
import torch
from torch import nn

from shardyard.config.schema.recipe import Optim
from shardyard.train.schedule import lr_at

SCHEDULED = {"lr": 1.0, "warmup_steps": 4, "decay_steps": 14, "min_lr_ratio": 0.1}


@pytest.mark.parametrize(
    ("schedule", "step", "lr"),
    [
        ("constant", 1, 0.25),
        ("constant", 4, 1.0),
        ("constant", 99, 1.0),
        ("linear", 4, 1.0),
        ("linear", 9, 0.55),  # half way between 1 and 0.1
        ("linear", 14, 0.1),
        ("linear", 20, 0.1),  # after the decay it stays
        ("cosine", 2, 0.5),
        ("cosine", 9, 0.55),
        ("cosine", 14, 0.1),
        ("poly", 4, 1.0),
        ("poly", 9, 0.1 + 0.9 * 0.5**0.5),  # half of it is left
        ("poly", 11.5, 0.55),  # a quarter is
        ("poly", 20, 0.1),
    ],
)
def test_learning_rate_by_step(schedule: str, step: float, lr: float) -> None:
    optim = Optim.model_validate({**SCHEDULED, "schedule": schedule})
    assert lr_at(step, optim) == pytest.approx(lr)


def test_the_rate_falls_at_once_at_each_milestone() -> None:
    steps = {"schedule": "step", "milestones": [1, 2.5], "milestone_factor": 0.5}
    optim = Optim.model_validate({**SCHEDULED, **steps})
    assert lr_at(2, optim, epoch=1.0) == 0.5  # still warming up
    epochs = (0.5, 0.99, 1.0, 2.49, 2.5, 7.0)
    assert [lr_at(9, optim, epoch=epoch) for epoch in epochs] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("first", "warmup", "rates"),
    [
        (1, 2, [0.5, 1.0, 0.75, 0.5]),
        (0, 2, [0.0, 0.5, 1.0, 0.75]),
        (-1, 2, [0.0, 0.0, 0.5, 1.0]),
        (0, 0, [1.0, 5 / 6, 4 / 6, 3 / 6]),
        (-1, 0, [1.0, 1.0, 5 / 6, 4 / 6]),
    ],
)
def test_the_first_step_has_the_number_that_it_is_given(
    first: int, warmup: int, rates: list[float]
) -> None:
    settings = {"lr": 1.0, "warmup_steps": warmup, "decay_steps": 6, "min_lr_ratio": 0.0}
    optim = Optim.model_validate({**settings, "schedule": "linear", "schedule_from": first})
    assert [lr_at(step, optim) for step in range(1, 5)] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_from_0_a_schedule_is_that_of_transformers(schedule: str, warmup: int) -> None:
    from transformers import get_scheduler

    parameter = nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=0.1)
    scheduler = get_scheduler(schedule, theirs, num_warmup_steps=warmup, num_training_steps=12)
    settings = {"lr": 0.1, "warmup_steps": warmup, "decay_steps": 12, "min_lr_ratio": 0.0}
    optim = Optim.model_validate({**settings, "schedule": schedule, "schedule_from": 0})
    for step in range(1, 13):
        assert lr_at(step, optim) == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-9)
        theirs.step()
        scheduler.step()


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize(("warmup", "decay"), [(0, 4), (3, 5), (4, 8)])
def test_warmup_stable_decay_is_that_of_transformers(shape: str, warmup: int, decay: int) -> None:
    from transformers import get_wsd_schedule

    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = get_wsd_schedule(
        theirs, warmup, decay, num_training_steps=12, decay_type=shape, min_lr_ratio=0.0
    )
    optim = Optim.model_validate(
        {
            "lr": 0.1, "schedule": "wsd", "warmup_steps": warmup, "decay_steps": 12,
            "decay_share": decay / 12, "decay_shape": shape, "min_lr_ratio": 0.0,
            "schedule_from": 0,
        }
    )  # fmt: skip
    for step in range(1, 16):
        assert lr_at(step, optim) == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-9), step
        theirs.step()
        scheduler.step()


@pytest.mark.parametrize("warmup", [0, 3])
def test_inverse_sqrt_is_that_of_transformers(warmup: int) -> None:
    from transformers import get_inverse_sqrt_schedule

    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = get_inverse_sqrt_schedule(theirs, warmup)
    settings = {"lr": 0.1, "warmup_steps": warmup, "decay_steps": 5, "schedule_from": 0}
    optim = Optim.model_validate({**settings, "schedule": "inverse_sqrt"})
    for step in range(1, 16):
        assert lr_at(step, optim) == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-9), step
        theirs.step()
        scheduler.step()


def test_a_wsd_decay_ends_at_its_least_rate() -> None:
    optim = Optim.model_validate({**SCHEDULED, "schedule": "wsd", "decay_share": 0.5})
    rates = [lr_at(step, optim) for step in (4, 7, 10.5, 14, 30)]
    assert rates == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])


def test_a_power_of_one_is_the_linear_schedule() -> None:
    poly = Optim.model_validate({**SCHEDULED, "schedule": "poly", "poly_power": 1.0})
    linear = Optim.model_validate({**SCHEDULED, "schedule": "linear"})
    assert [lr_at(step, poly) for step in range(1, 16)] == [
        lr_at(step, linear) for step in range(1, 16)
    ]


def test_without_warm_up_the_first_step_has_nearly_the_peak() -> None:
    optim = Optim(lr=1.0, warmup_steps=0, decay_steps=10, schedule="linear", min_lr_ratio=0.0)
    assert lr_at(1, optim) == pytest.approx(0.9)


def test_a_schedule_without_a_case_falls_through_nowhere() -> None:
    unknown = Optim(lr=1.0, warmup_steps=0, decay_steps=2).model_copy(update={"schedule": "stair"})
    with pytest.raises(AssertionError, match="stair"):
        lr_at(1, unknown)
