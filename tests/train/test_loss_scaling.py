"""The loss scale moves as torch's own scaler moves it."""

import random

import pytest
import torch
from torch import nn

from shardyard.config.schema.recipe import Recipe
from shardyard.models.grad_scale import LossScale
from shardyard.train import loss_scaling
from shardyard.train.loss_scaling import FIRST, GROWTH_INTERVAL, LossScaling

CPU = torch.device("cpu")


def test_it_begins_grows_and_halves_as_torch_does() -> None:
    theirs = torch.amp.GradScaler("cpu")
    assert (theirs.get_scale(), theirs.get_growth_interval()) == (FIRST, GROWTH_INTERVAL)
    assert (theirs.get_growth_factor(), theirs.get_backoff_factor()) == (2.0, 0.5)


def test_it_moves_as_torch_moves_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 3)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScaling(fixed=None, losses=48, device=CPU)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    draws, scales = random.Random(0), []
    for _ in range(200):
        overflowed = draws.random() < 0.25
        theirs.scale(weight * 1.0).backward()  # type: ignore[no-untyped-call]
        if overflowed:
            weight.grad = torch.tensor(torch.inf)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(overflowed=torch.tensor(overflowed))
        assert ours.scale.item() == theirs.get_scale()
        assert ours.good_steps.item() == theirs.state_dict()["_growth_tracker"]
        assert ours.factor.item() == ours.scale.item() / 64  # the next power of two
        scales.append(ours.scale.item())
    assert len(set(scales)) > 3
    assert min(scales) < FIRST < max(scales)


def test_it_stays_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 1)
    ours = LossScaling(fixed=None, losses=1, device=CPU)
    for _ in range(200):
        ours.update(overflowed=torch.tensor(False))
    assert ours.scale.item() == 2.0**127


def test_a_fixed_one_stays() -> None:
    ours = LossScaling(fixed=1024.0, losses=4, device=CPU)
    ours.update(overflowed=torch.tensor(True))
    ours.load({"scale": 8.0, "good_steps": 1.0})
    assert (ours.scale.item(), ours.factor.item()) == (1024.0, 256.0)


def test_it_goes_on_from_what_was_saved() -> None:
    ours = LossScaling(fixed=None, losses=4, device=CPU)
    ours.update(overflowed=torch.tensor(True))
    ours.update(overflowed=torch.tensor(False))
    assert ours.values() == {"scale": FIRST / 2, "good_steps": 1.0}
    others = LossScaling(fixed=None, losses=8, device=CPU)
    others.load(ours.values())
    assert others.values() == ours.values()
    assert others.factor.item() == FIRST / 16


def test_only_fp16_has_one() -> None:
    def of(compute: str) -> LossScaling | None:
        asked = {"optim": {"micro_batch": 3}, "data": {"seq_len": 10}}
        recipe = Recipe.model_validate({**asked, "precision": {"compute": compute}})
        return LossScaling.of(recipe, device=CPU)

    assert of("bf16") is of("fp32") is None
    scaling = of("fp16")
    assert scaling is not None
    assert scaling.factor.item() == FIRST / 32


def test_a_loss_stays_and_its_gradient_begins_with_the_factor() -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    scale = LossScale()
    assert scale.on(weight) is weight
    LossScaling(fixed=8.0, losses=2, device=CPU).hand_to(scale)
    loss = scale.on(2.0 * weight)
    loss.backward()  # type: ignore[no-untyped-call]
    assert (loss.item(), weight.grad) == (6.0, torch.tensor(8.0))
