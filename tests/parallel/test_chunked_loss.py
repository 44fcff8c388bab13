"""A head and its losses in chunks are those of all tokens at once, value and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.data.loader import IGNORED
from shardyard.parallel.loss import VocabLoss, compute_in_chunks, loss_in_chunks
from shardyard.torch_private import TorchDispatchMode
from tests.distributed.ranks import run_on_ranks

VOCABULARY = 7  # two ranks hold four entries and three
WIDTH = 6


def _case(dtype: torch.dtype, *, bias: bool) -> tuple[list[Tensor], Tensor]:
    """A hidden state (3, 5, D), a head, perhaps a bias, and targets of which some do not count."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, WIDTH, generator=draw)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw)
    targets = torch.randint(0, VOCABULARY, (3, 5), generator=draw)
    targets[0, 1] = targets[2, 4] = IGNORED
    tensors = [x, weight, torch.randn(VOCABULARY, generator=draw)][: 2 + bias]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], targets


def _gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(3.0 * loss, tensors)]


def _at_once(dtype: torch.dtype, *, bias: bool) -> list[Tensor]:
    tensors, targets = _case(dtype, bias=bias)
    logits = F.linear(*tensors).float().flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return _gradients(loss, tensors)


def _in_chunks(dtype: torch.dtype, tokens: int, *, bias: bool) -> list[Tensor]:
    tensors, targets = _case(dtype, bias=bias)
    x, weight, bias_v = [*tensors, None][:3]
    assert x is not None and weight is not None
    loss = loss_in_chunks(x, weight, bias_v, targets, losses=VocabLoss(), tokens=tokens)
    return _gradients(loss, tensors)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 5, 15, 100])
def test_it_is_torchs_own_loss(tokens: int, bias: bool) -> None:
    found = _in_chunks(torch.float32, tokens, bias=bias)
    torch.testing.assert_close(found, _at_once(torch.float32, bias=bias), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("tokens", [4, 100])
def test_logits_with_a_soft_cap(tokens: int) -> None:
    tensors, targets = _case(torch.float32, bias=False)
    logits = 3.0 * torch.tanh(F.linear(*tensors).flatten(0, 1) / 3.0)
    expected = _gradients(
        F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"), tensors
    )
    x, weight = tensors
    given: dict[str, Any] = {"losses": VocabLoss(), "tokens": tokens, "softcap": 3.0}
    loss = loss_in_chunks(x, weight, None, targets, **given)
    torch.testing.assert_close(_gradients(loss, tensors), expected, rtol=1e-5, atol=2e-6)
    with torch.no_grad():
        torch.testing.assert_close(loss_in_chunks(x, weight, None, targets, **given), expected[0])


def test_in_bf16_chunks_round_the_heads_gradient_once() -> None:
    exact = _at_once(torch.float32, bias=True)
    at_once, in_chunks = (
        _in_chunks(torch.bfloat16, tokens, bias=True) for tokens in (15, 2)
    )  # fmt: skip
    assert [each.dtype for each in in_chunks] == [torch.float32, *[torch.bfloat16] * 3]
    for one, other, truth in zip(at_once, in_chunks, exact, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(other.float(), truth, rtol=5e-2, atol=8e-2)


def test_small_chunks_in_bf16_are_no_further_from_the_truth() -> None:
    """Added up in bf16, 256 summands would lose more than three quarters of their last digits."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 16, generator=draw).bfloat16()
    weight = (torch.randn(64, 16, generator=draw) / 4).bfloat16()
    targets = torch.randint(0, 64, (1024,), generator=draw)

    def head_gradient(tokens: int, dtype: torch.dtype) -> Tensor:
        head = weight.to(dtype).requires_grad_()
        loss = loss_in_chunks(
            x.to(dtype), head, None, targets, losses=VocabLoss(), tokens=tokens
        )  # fmt: skip
        (grad,) = torch.autograd.grad(loss, head)
        return grad.float()

    truth = head_gradient(1024, torch.float32)
    whole, chunked = (
        float((head_gradient(tokens, torch.bfloat16) - truth).norm() / truth.norm())
        for tokens in (1024, 4)
    )
    assert chunked < 1.5 * whole


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    tensors, targets = _case(torch.float32, bias=False)
    tensors[frozen].requires_grad_(False)
    x, weight = tensors
    loss = loss_in_chunks(x, weight, None, targets, losses=VocabLoss(), tokens=4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert tensors[frozen].grad is None
    expected = _at_once(torch.float32, bias=False)[1 + (1 - frozen)] / 3
    torch.testing.assert_close(tensors[1 - frozen].grad, expected, rtol=1e-5, atol=1e-6)


def test_without_a_backward_pass_nothing_is_made_for_one() -> None:
    tensors, targets = _case(torch.float32, bias=True)
    x, weight, bias = tensors
    with torch.no_grad():
        loss = loss_in_chunks(x, weight, bias, targets, losses=VocabLoss(), tokens=4)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, _at_once(torch.float32, bias=True)[0])


def test_a_backward_pass_in_two_halves_as_zero_bubble_makes_it() -> None:
    """Each half is asked for once, and lets go of what it held."""
    tensors, targets = _case(torch.float32, bias=False)
    x, weight = tensors
    loss = loss_in_chunks(x, weight, None, targets, losses=VocabLoss(), tokens=4)
    (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    (of_weight,) = torch.autograd.grad(loss, weight)
    _, *expected = _at_once(torch.float32, bias=False)
    torch.testing.assert_close([3 * of_x, 3 * of_weight], expected, rtol=1e-5, atol=2e-6)


def test_a_head_without_targets_returns_logits() -> None:
    head = nn.Linear(WIDTH, VOCABULARY)
    x = torch.randn(2, 3, WIDTH)
    expected = head(x)
    compute_in_chunks(head, VocabLoss(), tokens=4)
    assert torch.equal(head(x), expected)
    targets = torch.zeros(2, 3, dtype=torch.int64)
    torch.testing.assert_close(head(x, targets), VocabLoss()(expected, targets))


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of a tensor that any operator returned."""

    elements: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def _largest(compute: Callable[[], Tensor]) -> int:
    with _Largest() as seen:  # type: ignore[no-untyped-call]
        compute().backward()  # type: ignore[no-untyped-call]
    found: int = seen.elements
    return found


def test_logits_of_all_tokens_never_exist() -> None:
    x = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(100, 4, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64)
    assert _largest(lambda: VocabLoss()(F.linear(x, weight), targets)) == 64 * 100
    chunked = _largest(
        lambda: loss_in_chunks(x, weight, None, targets, losses=VocabLoss(), tokens=8)
    )
    assert chunked == 8 * 100


def _on_a_rank() -> list[Tensor]:
    tensors, targets = _case(torch.float32, bias=True)
    first = 4 * dist.get_rank()
    mine = [
        tensors[0],
        *(each.detach()[first : first + 4].requires_grad_() for each in tensors[1:]),
    ]
    losses = VocabLoss(group=dist.group.WORLD, first=first)
    loss = loss_in_chunks(mine[0], mine[1], mine[2], targets, losses=losses, tokens=4)
    return _gradients(loss, mine)


@pytest.mark.heavy
def test_a_vocabulary_that_two_ranks_split_unevenly() -> None:
    loss, of_x, of_weight, of_bias = _at_once(torch.float32, bias=True)
    one, other = run_on_ranks(_on_a_rank, 2)
    for found in (one, other):
        torch.testing.assert_close(found[0], loss)
    torch.testing.assert_close(one[1] + other[1], of_x, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(torch.cat([one[2], other[2]]), of_weight, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(torch.cat([one[3], other[3]]), of_bias, rtol=1e-5, atol=2e-6)
