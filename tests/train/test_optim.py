"""Schedules as tables, and the optimizer's groups and state."""

import pytest
import torch
from torch import nn

from shardyard.config.schema import Optim
from shardyard.train.optim import build_optimizer, lr_at

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
    ],
)
def test_learning_rate_by_step(schedule: str, step: int, lr: float) -> None:
    optim = Optim.model_validate({**SCHEDULED, "schedule": schedule})
    assert lr_at(step, optim) == pytest.approx(lr)


def test_without_warm_up_the_first_step_has_nearly_the_peak() -> None:
    optim = Optim(lr=1.0, warmup_steps=0, decay_steps=10, schedule="linear", min_lr_ratio=0.0)
    assert lr_at(1, optim) == pytest.approx(0.9)


def test_only_matrices_decay_and_state_exists_from_the_start() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(model, Optim(lr=0.1, weight_decay=0.5))
    decays = {
        id(param): group["weight_decay"]
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert decays[id(model[0].weight)] == 0.5
    assert decays[id(model[0].bias)] == decays[id(model[1].weight)] == 0.0
    assert set(optimizer.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_sgd_with_zero_momentum_buffers_steps_as_torch_does() -> None:
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    settings = Optim(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
    optimizers = (
        build_optimizer(ours, settings),
        torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9),
    )
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
