"""Attention that is told where documents begin is attention with the mask that says the same."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardyard.models.attention import (
    Attention,
    attention_by_length,
    document_starts,
    most_documents,
    sample_attention,
)
from tests.models import varlen_on_cpu

assert varlen_on_cpu.__doc__, "gives a CPU the operator"
LENGTH = 24
POSITIONS = torch.tensor(
    [
        [*range(10), *range(1), *range(13)],  # also a document of one token
        [*range(24)],
        [*range(7), *range(8), *range(9)],
    ]
)


def _passes(attention: Attention, given: tuple[Tensor, ...], window: int | None) -> list[Tensor]:
    """Output, and the gradients of queries, keys and values."""
    inputs = [each.clone().requires_grad_() for each in given]
    output = attention(*inputs, scale=0.3, window=window)
    torch.autograd.backward(output, torch.linspace(-1, 1, output.numel()).view_as(output))
    return [output.detach(), *[each.grad for each in inputs if each.grad is not None]]


def _given(kv_heads: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(len(POSITIONS), LENGTH, heads, 8, generator=generator).transpose(1, 2)
        for heads in (4, kv_heads, kv_heads)
    )


@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("places", [None, 16])
def test_values_and_gradients_are_those_with_a_mask(
    window: int | None, kv_heads: int, places: int | None
) -> None:
    given = _given(kv_heads)
    masked = sample_attention(POSITIONS, is_causal=True, attend_across=False, window=window)
    told = attention_by_length(document_starts(POSITIONS, places), LENGTH)
    found, expected = _passes(told, given, window), _passes(masked, given, window)
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 2e-6
    # who sees itself alone sees it wholly, whatever it asks
    assert bool(expected[1].abs().max() < 1e-6) == (window == 1)


def test_one_document_that_is_not_told_of_is_noticed() -> None:
    given = _given(2)
    forgotten = POSITIONS.clone()
    forgotten[0, 11:] = torch.arange(10, 23)
    right, wrong = (
        _passes(attention_by_length(document_starts(each), LENGTH), given, None)[0]
        for each in (POSITIONS, forgotten)
    )
    assert (right - wrong).abs().amax(dim=(1, 3)).nonzero().tolist() == [
        [0, token] for token in range(11, LENGTH)
    ]


def test_places_are_a_power_of_two_and_empty_ones_come_last() -> None:
    starts_BS = document_starts(POSITIONS)
    assert starts_BS.tolist() == [[0, 10, 11, 24], [0, 24, 24, 24], [0, 7, 15, 24]]
    assert starts_BS.dtype == torch.int32 and most_documents(POSITIONS) == 4
    assert document_starts(POSITIONS[1:2]).tolist() == [[0]]
    assert document_starts(POSITIONS[1:2], 2).tolist() == [[0, 24]]
    # a sample that begins within a document: what stands before its first start is one, too
    assert document_starts(torch.tensor([[5, 6, 0, 1]])).tolist() == [[0, 2]]
    assert [most_documents(torch.zeros(1, n, dtype=torch.int64)) for n in (1, 2, 3, 8, 9)] == [
        1, 2, 4, 8, 16,
    ]  # fmt: skip


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_torchs_own_operator_takes_it_in_bf16(kv_heads: int) -> None:
    """By torch's own description of it, which a dry run and a compiler go by."""
    with FakeTensorMode():
        q_BHLE, k_BKLE, v_BKLE = (
            torch.empty(2, LENGTH, heads, 64, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, kv_heads, kv_heads)
        )
        attention = attention_by_length(torch.zeros(2, 4, dtype=torch.int32), LENGTH)
        output = attention(*(x.transpose(1, 2) for x in (q_BHLE, k_BKLE, v_BKLE)), scale=1.0)
        assert output.shape == (2, 4, LENGTH, 64) and output.dtype == torch.bfloat16
        torch.autograd.backward(output.sum())
        assert k_BKLE.grad is not None and k_BKLE.grad.shape == k_BKLE.shape


@pytest.mark.heavy
def test_a_compiler_makes_two_graphs_of_any_numbers_of_documents() -> None:
    from torch._dynamo.utils import counters

    def attend(attention: Attention, *given: Tensor) -> Any:
        return attention(*given, scale=0.3)

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    given = _given(2)
    for places in (4, 8, 16, 4, 32, 8):
        attention = attention_by_length(document_starts(POSITIONS, places), LENGTH)
        assert (compiled(attention, *given) - attend(attention, *given)).abs().max() < 1e-6
    assert counters["stats"]["unique_graphs"] == 2


def test_selective_recompute_keeps_what_it_returns() -> None:
    from torch.utils.checkpoint import checkpoint

    from shardyard.parallel.recompute import selective_contexts

    given = [each.requires_grad_() for each in _given(2)]
    attention = attention_by_length(document_starts(POSITIONS), LENGTH)

    def attend(*given: Tensor) -> Tensor:
        return attention(*given, scale=0.3).sin()

    before = varlen_on_cpu.calls["forward"]
    output = checkpoint(
        attend, *given, use_reentrant=False, context_fn=lambda: selective_contexts(None)
    )
    torch.autograd.backward(output.sum())
    assert varlen_on_cpu.calls["forward"] == before + 1
