"""Averaged weights follow the steps that were taken, by the published formula."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardyard.train.ema import WeightEma


def test_averages_equal_torchs_over_the_steps_that_were_taken() -> None:
    torch.manual_seed(0)
    model, decay = nn.Linear(3, 2), 0.1  # below (1 + 1) / (10 + 1), where the ramp begins
    averages = WeightEma(model, decay=decay)
    averages.begin()
    multi_avg_fn = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    torchs = AveragedModel(model, multi_avg_fn=multi_avg_fn)
    torchs.update_parameters(model)  # the first call copies
    for skip in (False, True, False, True):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        averages.follow(skip=torch.tensor(skip))
        if not skip:
            torchs.update_parameters(model)
    found = averages.tensors()
    expected = dict(torchs.module.named_parameters())["weight"].detach()
    torch.testing.assert_close(found["average.model.weight"], expected)
    assert found["average.steps"] == 2
