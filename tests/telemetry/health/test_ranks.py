"""Who is slow is told, with what: compute, samples or a link; and what passes is not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardyard.telemetry.health.ranks import (
    BLOCK_STEPS,
    BLOCKS_OF_MEANS,
    RankBlock,
    Slowness,
    StragglerDetector,
    group_name,
    ranks_of,
)

Says = Callable[[int, int], dict[str, Any]]
"""(rank, block) -> seconds of each step that differ from the usual ones; or a list, by step."""


def judged(says: Says, *, blocks: int, ranks: int = 8, stage: int = 8) -> list[Slowness]:
    draw, judge, found = np.random.default_rng(0), StragglerDetector(stage), []
    for block in range(blocks):
        told = []
        for rank in range(ranks):
            said = {"compute_s": 0.1, "data_s": 0.001, "exchange_s": {}, **says(rank, block)}
            noise = draw.normal(1.0, 0.003, BLOCK_STEPS)
            told.append(
                RankBlock(
                    rank=rank,
                    node="n",
                    block=block,
                    compute_s=(noise * said["compute_s"]).tolist(),
                    data_s=[said["data_s"]] * BLOCK_STEPS,
                    exchange_s={
                        name: [took_s] * BLOCK_STEPS for name, took_s in said["exchange_s"].items()
                    },
                )
            )
        found += judge.evaluate(told)
    return found


def test_a_rank_that_becomes_slow_is_told_within_two_blocks_and_when_it_is_well() -> None:
    def said(rank: int, block: int) -> dict[str, Any]:
        return {"compute_s": 0.112} if rank == 2 and 20 <= block < 30 else {}

    named, well = judged(said, blocks=36)
    assert (named.what, named.ranks, named.step, named.is_over) == ("compute", (2,), 176, False)
    assert named.factor == pytest.approx(1.12, rel=0.02)
    assert named.duration_s == pytest.approx(0.112, rel=0.02)
    assert named.peers_s == pytest.approx(0.1, rel=0.02)
    assert (well.ranks, well.is_over) == ((2,), True) and well.factor < 1.03


def test_samples_that_come_late_on_one_node_are_told_as_that() -> None:
    def said(rank: int, block: int) -> dict[str, Any]:
        return {"data_s": 0.03} if rank < 2 and block >= 20 else {}

    found = judged(said, blocks=36)
    assert [(each.what, each.ranks) for each in found] == [("data", (0,)), ("data", (1,))]


def test_a_stall_of_all_or_one_that_passes_is_not_told() -> None:
    def said(rank: int, block: int) -> dict[str, Any]:
        is_stalled = block in (20, 21, 22, 23, 24, 25) or (rank == 1 and block in (30, 31))
        return {"data_s": 0.5} if is_stalled else {}

    assert judged(said, blocks=36) == []


def test_a_slow_link_is_told_and_not_the_rank_for_which_its_group_waits() -> None:
    """The link of ranks 4 and 5 is slow; in the group of 6 and 7, rank 6 is waited for."""

    def said(rank: int, block: int) -> dict[str, Any]:
        first = rank // 2 * 2
        took_s = 0.04 if first == 4 and block >= 20 else 0.02
        waits_s = 0.1 if rank == 7 and block >= 20 else 0.0
        compute_s = 0.2 if rank == 6 and block >= 20 else 0.1
        exchange = {f"{first}-{first + 1}-2": took_s + waits_s}
        return {"exchange_s": exchange, "compute_s": compute_s}

    slow_rank, slow_link = judged(said, blocks=36)
    assert (slow_rank.what, slow_rank.ranks) == ("compute", (6,))
    assert (slow_link.what, slow_link.ranks, slow_link.step) == ("link", (4, 5), 176)
    assert slow_link.factor == pytest.approx(2.0) and slow_link.duration_s == pytest.approx(0.04)


def test_a_lone_node_with_slower_links_is_told_as_that_since_the_start() -> None:
    def said(rank: int, _block: int) -> dict[str, Any]:
        first = rank // 2 * 2
        return {"exchange_s": {f"{first}-{first + 1}-2": 0.05 if first == 2 else 0.02}}

    (told,) = judged(said, blocks=30)
    assert (told.what, told.ranks, told.is_since_start) == ("link", (2, 3), True)


def test_a_group_that_has_no_like_or_lacks_a_member_is_not_judged() -> None:
    def said(rank: int, block: int) -> dict[str, Any]:
        whole = {"0-7-8": 0.5 if block >= 20 else 0.02}
        return {"exchange_s": whole | ({"0-2-3": 0.1} if rank == 0 else {})}

    assert judged(said, blocks=36) == []


def test_a_rank_that_is_held_up_now_and_then_is_told_by_its_mean_alone() -> None:
    """As by pulses of SIGSTOP: of eight steps one is long, and the median does not show it."""

    def said(rank: int, block: int) -> dict[str, Any]:
        is_held_up = rank == 1 and block < 5 * BLOCKS_OF_MEANS
        return {"compute_s": np.array([1.3] + [0.1] * 7)} if is_held_up else {}

    named, well = judged(said, blocks=72)
    assert (named.ranks, named.is_intermittent, named.is_over) == ((1,), True, False)
    assert named.factor == pytest.approx(2.5, rel=0.02)
    assert named.step == 5 * BLOCKS_OF_MEANS * BLOCK_STEPS
    assert (well.ranks, well.is_intermittent, well.is_over) == ((1,), True, True)


def test_what_is_slow_in_each_step_is_told_once() -> None:
    (found,) = judged(lambda rank, _: {"compute_s": 0.3} if rank == 1 else {}, blocks=45)
    assert (found.ranks, found.is_intermittent, found.is_since_start) == ((1,), False, True)


def test_a_few_milliseconds_are_not_worth_a_word() -> None:
    def said(rank: int, _block: int) -> dict[str, Any]:
        return {"compute_s": 0.004 if rank == 0 else 0.001}

    assert judged(said, blocks=60) == []


def test_only_ranks_of_the_same_stage_are_compared() -> None:
    def said(rank: int, block: int) -> dict[str, Any]:
        is_slow = rank == 3 and block >= 20
        return {"compute_s": (0.3 if rank < 2 else 0.1) * (2 if is_slow else 1)}

    assert [each.ranks for each in judged(said, blocks=36, ranks=4, stage=2)] == [(3,)]
    assert judged(said, blocks=36, ranks=4, stage=1) == []  # nobody is a peer


def test_other_ranks_begin_anew() -> None:
    judge, found = StragglerDetector(4), []
    for block in range(40):
        ranks = (0, 1) if block < 20 else (2, 3)
        told = [
            RankBlock(rank=rank, node="n", block=block,
                      compute_s=[0.4 if rank == 3 else 0.3] * 8, data_s=[0.0] * 8)
            for rank in ranks
        ]  # fmt: skip
        found += judge.evaluate(told)
    assert [(each.ranks, each.is_since_start) for each in found] == [((3,), True)]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [((0, 1, 2), "0-2-3"), ((3, 11, 19), "3-19-3"), ((0, 1, 3), None), ((4,), None)],
)
def test_a_group_is_named_by_its_ranks(ranks: tuple[int, ...], name: str | None) -> None:
    assert group_name(ranks) == name
    assert name is None or ranks_of(name) == ranks
