"""The loss is torch's own cross-entropy, value and gradient, also of a vocabulary that is split."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardyard.data.loader import IGNORED
from shardyard.parallel.loss import VocabLoss
from tests.distributed.ranks import run_on_ranks

VOCABULARY = 7  # two ranks hold four entries and three


def _case(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 5, VOCABULARY, generator=draw)
    targets = torch.randint(0, VOCABULARY, (3, 5), generator=draw)
    targets[0, 1] = targets[2, 4] = IGNORED
    return logits.to(dtype), targets


def _value_and_gradient(loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(3.0 * loss, logits)
    return loss.detach(), gradient


def _torchs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits, targets = _case(dtype)
    logits.requires_grad_()
    flat = logits.float().flatten(0, 1)
    loss = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return _value_and_gradient(loss, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_vocabulary(dtype: torch.dtype) -> None:
    logits, targets = _case(dtype)
    before = logits.clone()
    logits.requires_grad_()
    torch.testing.assert_close(
        _value_and_gradient(VocabLoss()(logits, targets), logits), _torchs(dtype)
    )
    assert torch.equal(logits.detach(), before)  # what is changed in place is a copy


def test_nothing_to_predict_makes_no_loss() -> None:
    logits, targets = _case(torch.float32)
    logits.requires_grad_()
    loss, gradient = _value_and_gradient(
        VocabLoss()(logits, torch.full_like(targets, IGNORED)), logits
    )
    assert loss == 0 and not gradient.any()


def _on_a_rank() -> tuple[Tensor, Tensor]:
    logits, targets = _case(torch.float32)
    first = 4 * dist.get_rank()
    mine = logits[..., first : first + 4].clone().requires_grad_()
    group = dist.group.WORLD
    return _value_and_gradient(VocabLoss(group=group, first=first)(mine, targets), mine)


@pytest.mark.heavy
def test_a_vocabulary_that_two_ranks_split_unevenly() -> None:
    loss, gradient = _torchs(torch.float32)
    found = run_on_ranks(_on_a_rank, 2)
    for rank_loss, _ in found:
        torch.testing.assert_close(rank_loss, loss)
    torch.testing.assert_close(torch.cat([part for _, part in found], dim=-1), gradient)


def _ties() -> tuple[Tensor, Tensor, int]:
    """Small whole numbers, so that many logits are equally large; two thirds are their argmax."""
    logits = torch.randint(0, 3, (3, 40, VOCABULARY), generator=torch.Generator().manual_seed(0))
    targets = logits.argmax(dim=-1)
    targets[0] = (targets[0] + 1) % VOCABULARY
    targets[1, ::4] = IGNORED
    return logits.float(), targets, 30 + 40


def _right_on_a_rank() -> float:
    logits, targets, _ = _ties()
    first = 4 * dist.get_rank()
    loss = VocabLoss(group=dist.group.WORLD, first=first)
    return float(loss.right(logits[..., first : first + 4], targets))


def test_right_is_a_target_that_argmax_names() -> None:
    logits, targets, expected = _ties()
    assert int((logits == logits.amax(dim=-1, keepdim=True)).sum()) > 2 * 120, "ties"
    assert float(VocabLoss().right(logits, targets)) == expected


@pytest.mark.heavy
def test_right_is_the_same_where_two_ranks_split_the_vocabulary() -> None:
    assert run_on_ranks(_right_on_a_rank, 2) == [_ties()[2]] * 2
