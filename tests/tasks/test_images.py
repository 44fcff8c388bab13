"""Losses of images: of mixed ones by both labels, each smoothed where that is asked."""

import pytest
import torch
import torch.nn.functional as F

from shardyard.data.images.mixup import Mixing
from shardyard.data.loader import MicroBatch
from shardyard.tasks.images import _losses

MIXING = Mixing(seed=3, size=8, mixup=0.3, cutmix=1.0)


def _batch(rows: int, mixing: Mixing | None) -> MicroBatch:
    batch = MicroBatch({"label": torch.arange(rows) % 4}, torch.arange(rows), work=rows)
    return batch if mixing is None else mixing(batch, torch.ones(rows))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixing", [None, MIXING])
def test_a_loss_is_the_cross_entropy_with_the_shares_of_all_classes(
    mixing: Mixing | None, smoothing: float
) -> None:
    batch = _batch(7, mixing)
    logits_BC = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    shares_BC = F.one_hot(batch["label"], 4).float()
    if mixing is not None:
        own_B1 = batch["label_share"][:, None]
        shares_BC = own_B1 * shares_BC + (1 - own_B1) * shares_BC[batch["other"]]
    shares_BC = (1 - smoothing) * shares_BC + smoothing / 4
    expected = -(shares_BC * logits_BC.log_softmax(dim=1)).sum(dim=1)
    torch.testing.assert_close(_losses(logits_BC, batch, smoothing), expected)
