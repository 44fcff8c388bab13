"""What values do not show: in which order groups are gathered, and how evenly samples are cut."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardyard.parallel.context import _chunks_of
from shardyard.parallel.fsdp import _set_prefetch


class _Group(nn.Module):
    """A group of parameters that keeps what it is told to gather ahead."""

    backward: list[Any]
    forward_: list[Any]


def _note_backward(self: _Group, modules: Sequence[Any]) -> None:
    self.backward = list(modules)


def _note_forward(self: _Group, modules: Sequence[Any]) -> None:
    self.forward_ = list(modules)


def groups(number: int) -> list[Any]:
    found: list[Any] = [_Group() for _ in range(number)]
    notes = {
        "set_modules_to_backward_prefetch": _note_backward,
        "set_modules_to_forward_prefetch": _note_forward,
    }
    for group in found:  # as fully_shard makes them: their class is changed
        group.__class__ = type("FSDPGroup", (FSDPModule, _Group), notes)
    return found


def test_a_backward_pass_gathers_the_groups_before_nearest_first() -> None:
    a, b, c, d = made = groups(4)
    _set_prefetch(made, 2)
    assert [group.backward for group in made] == [[a], [a], [b, a], [c, b]]
    assert [group.forward_ for group in made] == [[b, c], [c, d], [d], []]


def test_without_prefetch_a_group_names_itself_so_that_fsdp_follows_no_order_of_its_own() -> None:
    made = groups(3)
    _set_prefetch(made, 0)
    assert [group.backward for group in made] == [[group] for group in made]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_of_cp_compute_equally_many_pairs_of_tokens(size: int) -> None:
    """Causal: the queries of a chunk see all chunks up to their own."""
    work = {rank: sum(chunk + 1 for chunk in _chunks_of(rank, size)) for rank in range(size)}
    assert set(work.values()) == {2 * size + 1}
    assert sorted(c for rank in range(size) for c in _chunks_of(rank, size)) == list(
        range(2 * size)
    )
