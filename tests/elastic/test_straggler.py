"""A rank that computes longer than its peers is named; a loaded machine, or a pipeline, is not."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardyard.elastic.notes import RankNotes
from shardyard.elastic.straggler import (
    LOOKS,
    MEANS,
    WINDOW_OF_MEANS,
    WINDOW_STEPS,
    Judge,
    Pace,
    Straggler,
    StragglerWatch,
    pace_of,
)
from shardyard.train.hooks import Phase

Seconds = Callable[[int, int], float]
"""(rank, step) -> compute of that step."""


def watched(seconds: Seconds, *, ranks: int = 4, steps: int, stage: int = 4) -> list[Straggler]:
    """What is told of a run, looked at every ten steps."""
    judge, found = Judge(stage), []
    windows = [deque[float](maxlen=WINDOW_STEPS) for _ in range(ranks)]
    computed_s = [0.0] * ranks
    for step in range(1, steps + 1):
        for rank, window in enumerate(windows):
            window.append(seconds(rank, step))
            computed_s[rank] += window[-1]
        if step % 10 == 0 and step >= WINDOW_STEPS:
            paces = [
                pace_of(w, rank=r, node=f"n{r}", step=step, computed_s=computed_s[r])
                for r, w in enumerate(windows)
            ]
            found += judge.look(paces)
    return found


def test_a_slow_rank_is_named_and_named_no_more_when_it_is_well() -> None:
    named, well = watched(lambda rank, step: 0.2 if rank == 2 and step < 100 else 0.1, steps=250)
    assert (named.rank, named.node, named.factor, named.is_over) == (2, "n2", 2.0, False)
    assert not named.is_held_up and not well.is_held_up
    assert named.step == WINDOW_STEPS + 10 * (LOOKS - 1)
    assert (well.rank, well.is_over) == (2, True) and well.factor < 1.25


def test_a_rank_that_is_held_up_now_and_then_is_named_by_the_mean_of_its_steps() -> None:
    """As by pulses of SIGSTOP: of forty steps one is long, and no quartile shows it."""

    def seconds(rank: int, step: int) -> float:
        return 1.52 if rank == 1 and step % 40 == 0 and step < 400 else 0.02

    named, well = watched(seconds, steps=900)
    assert (named.rank, named.is_over, named.is_held_up) == (1, False, True)
    assert named.step == WINDOW_STEPS + MEANS * WINDOW_OF_MEANS
    assert named.factor > 2 and named.peers_s == pytest.approx(0.02)
    assert (well.rank, well.is_over, well.is_held_up) == (1, True, True)


def test_what_is_slow_in_each_step_is_told_once() -> None:
    found = watched(lambda rank, _: 0.3 if rank == 1 else 0.1, steps=900)
    assert [(each.rank, each.is_held_up) for each in found] == [(1, False)]


def test_one_of_two_is_named_by_the_other() -> None:
    (named,) = watched(lambda rank, _: 0.1 * (1 + rank), ranks=2, steps=100)
    assert named.rank == 1


@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_a_loaded_machine_has_no_straggler(factor: float) -> None:
    """Times that scatter up to tenfold, in bursts, and one rank that is somewhat slower."""
    draw = random.Random(7)
    burst = [1.0] * 4

    def seconds(rank: int, _step: int) -> float:
        if draw.random() < 0.1:
            burst[rank] = draw.choice([1.0, 1.0, 2.0, 3.0])
        own = factor if rank == 1 else 1.0
        return 0.05 * own * burst[rank] * draw.lognormvariate(0.0, 0.5)

    assert watched(seconds, steps=10_000) == []


def test_a_slow_rank_is_found_where_times_scatter() -> None:
    draw = random.Random(7)
    found = watched(
        lambda r, _: 0.05 * (3 if r == 1 else 1) * draw.lognormvariate(0, 0.3), steps=900
    )
    assert found[0].rank == 1 and {each.rank for each in found} == {1}


def test_a_few_milliseconds_are_not_worth_a_word() -> None:
    assert watched(lambda rank, _: 0.004 if rank == 0 else 0.001, steps=500) == []


def test_only_ranks_of_the_same_stage_are_compared() -> None:
    def seconds(rank: int, _step: int) -> float:
        return 0.3 if rank < 2 else 0.1  # the first stage has more to do

    assert watched(seconds, steps=200, stage=2) == []
    assert watched(seconds, steps=200, stage=1) == []  # nobody is a peer
    slow = watched(lambda r, s: seconds(r, s) * (2 if r == 3 else 1), steps=200, stage=2)
    assert [each.rank for each in slow] == [3]


def test_a_look_at_steps_that_were_seen_says_nothing_new() -> None:
    judge = Judge(2)
    paces = [
        pace_of([0.1 * (1 + r)] * 20, rank=r, node="n", step=50, computed_s=5.0) for r in range(2)
    ]
    assert not any(judge.look(paces) for _ in range(9))
    assert judge.look([]) == []


def test_agents_tell_each_other_and_one_of_them_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("shardyard.elastic.straggler.time.monotonic", lambda: clock[0])
    board: list[dict[str, object]] = []

    class Board:
        def publish(self, kind: str, entries: list[dict[str, object]]) -> None:
            assert kind == "paces"
            board[:] = entries

        def from_others(self, kind: str) -> list[dict[str, object]]:
            assert kind == "paces"
            return board

    first, second = (
        StragglerWatch(Board(), node=f"n{k}", ranks=[k], ranks_of_stage=2)  # type: ignore[arg-type]
        for k in range(2)
    )
    told: list[Straggler] = []
    for step in range(1, 80):
        clock[0] += 1.0
        blank = NOTE if step > 1 else replace(NOTE, compute_ns=0)  # the first step is not told
        second.look([replace(blank, step=step, compute_ns=2 * blank.compute_ns)], judges=False)
        told += first.look([replace(blank, step=step)], judges=True)
    assert [(each.rank, each.node, each.factor) for each in told] == [(1, "n1", 2.0)]
    assert set(board[0]) == set(Pace.__dataclass_fields__)


NOTE = RankNotes(
    pid=1, step=0, phase=Phase.STEP, collectives_begun=0, collectives_ended=0, step_ns=10**8,
    compute_ns=10**8, computed_ns=0, save_ns=0, moved_ns=0,
)  # fmt: skip
