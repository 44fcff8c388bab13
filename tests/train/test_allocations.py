"""The log against allocations that can be counted by hand."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardyard.train.allocations import (
    ACTIVATIONS,
    GATHERED,
    LOGITS,
    PARAMETERS,
    SET_UP,
    TEMPORARY,
    AllocationLog,
    MemoryPeak,
)

KIB = 1024


@pytest.fixture
def log() -> Iterator[AllocationLog]:
    log = AllocationLog(vocab_size=1000, tokens=4, micro_batches=1)
    with FakeTensorMode(), log:
        yield log


def peak_of(log: AllocationLog, phase: str) -> MemoryPeak:
    return next(peak for peak in log.peaks() if peak.phase == phase)


def test_a_tensor_counts_while_it_lives_and_in_blocks_of_512_bytes(log: AllocationLog) -> None:
    first = torch.empty(100)  # 400 bytes
    del first
    second = torch.empty(1025, dtype=torch.uint8)
    peak = peak_of(log, SET_UP)
    assert second.numel() == 1025
    assert (peak.bytes, peak.operator) == (1536, "aten::empty")


def test_a_view_keeps_its_storage_alive_and_counts_nothing(log: AllocationLog) -> None:
    part = torch.empty(KIB, dtype=torch.uint8)[:10]
    other = torch.empty(KIB, dtype=torch.uint8)
    assert peak_of(log, SET_UP).bytes == 2 * KIB
    assert len(part) + len(other) == 10 + KIB


def test_a_storage_that_is_resized_holds_gathered_parameters(log: AllocationLog) -> None:
    whole = torch.empty(KIB, dtype=torch.uint8)
    whole.untyped_storage().resize_(0)
    other = torch.empty(KIB, dtype=torch.uint8)
    assert peak_of(log, SET_UP).bytes == KIB
    whole.untyped_storage().resize_(KIB)
    peak = peak_of(log, SET_UP)
    assert peak.bytes == 2 * len(other)
    assert peak.terms[GATHERED] == KIB


def test_leaving_the_log_gives_back_resize() -> None:
    original = torch.UntypedStorage.resize_
    with AllocationLog(vocab_size=1, tokens=1, micro_batches=1):
        assert torch.UntypedStorage.resize_ is not original
    assert torch.UntypedStorage.resize_ is original


def test_what_a_backward_pass_needs_is_an_activation_and_the_rest_is_temporary(
    log: AllocationLog,
) -> None:
    weight = torch.empty(KIB, requires_grad=True)
    log.mark([weight], PARAMETERS)
    log.begin_step()
    kept = (weight + 1).exp()  # exp keeps its result, the sum is dropped at once
    loss = kept.sum()
    del kept
    loss.backward()  # type: ignore[no-untyped-call]
    terms = peak_of(log, "forward").terms
    assert (terms[PARAMETERS], terms[ACTIVATIONS], terms[TEMPORARY]) == (4096, 4096, 4096)


def test_logits_are_known_by_their_shape(log: AllocationLog) -> None:
    logits = torch.empty(2, 2, 1000)
    assert peak_of(log, SET_UP).terms[LOGITS] == 16 * KIB > logits.numel() * 4


def test_the_loss_begins_with_the_first_logits(log: AllocationLog) -> None:
    log.begin_step()
    block = torch.empty(KIB)
    logits = torch.empty(4, 1000)
    assert [(peak.phase, peak.micro_batch) for peak in log.peaks()] == [("forward", 1), ("loss", 1)]
    assert peak_of(log, "forward").bytes == 4 * len(block)
    assert peak_of(log, "loss").terms[LOGITS] == 16 * KIB > logits.numel() * 4


def test_a_tensor_on_the_meta_device_takes_no_memory(log: AllocationLog) -> None:
    torch.empty(KIB, device="meta")
    assert log.peaks() == []


def test_a_fake_number_that_the_host_asks_for_is_one(log: AllocationLog) -> None:
    assert int((torch.zeros(5, dtype=torch.int64) != 3).sum()) == 1
    assert log.operators
