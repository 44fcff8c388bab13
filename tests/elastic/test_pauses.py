"""A rank that is stopped now and then is told once, with its share of the time; others are not."""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import pytest

from shardyard.elastic import pauses
from shardyard.elastic.pauses import PauseDetector, PauseTransition, PauseWatch

EVERY_S = 0.1
PULSES = [True] * 6 + [False] * 3
WELL = [False]


class Looks:
    """Looks at two ranks, of which rank 1 follows a pattern."""

    def __init__(self) -> None:
        self.stops = PauseDetector(2)
        self.now_s = 0.0

    def take(self, pattern: list[bool], for_s: float, *, every_s: float = EVERY_S) -> None:
        for is_stopped in islice(cycle(pattern), round(for_s / every_s)):
            self.now_s += every_s
            self.stops.take(self.now_s, [False, is_stopped])


def test_pulses_are_told_once_and_once_more_when_they_are_over() -> None:
    looks = Looks()
    looks.take(WELL, 30.0)
    assert looks.stops.transitions() == []
    looks.take(PULSES, 4.0)
    assert looks.stops.transitions() == []
    looks.take(PULSES, 2.0)
    ((rank, share, is_over),) = looks.stops.transitions()
    assert (rank, is_over) == (1, False) and 0.6 < share < 0.75, "of the time since they began"
    looks.take(PULSES, 60.0)
    assert looks.stops.transitions() == []
    looks.take(WELL, 15.0)
    assert looks.stops.transitions() == []
    looks.take(WELL, 10.0)
    assert looks.stops.transitions() == [(1, 0.0, True)]
    looks.take(PULSES, 9.0)
    assert [is_over for *_, is_over in looks.stops.transitions()] == [False]


@pytest.mark.parametrize(
    "pattern",
    [
        [True] * 600,  # it hangs
        [False] * 60 + [True] * 30,  # once in a while, as by Ctrl-Z and fg
        [True] + [False] * 9,  # a debugger that looks at it: a tenth of the time
    ],
)
def test_what_is_a_hang_or_rare_or_short_is_not_told(pattern: list[bool]) -> None:
    looks = Looks()
    for _ in range(30):
        looks.take(pattern, 2.0)
        assert looks.stops.transitions() == []


def test_an_agent_that_seldom_gets_to_look_says_nothing() -> None:
    looks = Looks()
    looks.take([True, False], 60.0, every_s=0.5)
    assert looks.stops.transitions() == []


class Board:
    """The notices of a generation."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def publish(self, kind: str, entries: list[dict[str, Any]]) -> None:
        assert kind == "stops"
        self.told = entries

    def from_others(self, kind: str) -> list[dict[str, Any]]:
        assert kind == "stops"
        return self.told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(pauses.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    yield now


def watch(
    looks: Looks, board: Board, *, node: str, first: int
) -> Callable[..., list[PauseTransition]]:
    return PauseWatch(
        looks.stops, board, node=node, ranks=[first, first + 1], step_of=lambda rank: 40 + rank  # type: ignore[arg-type]
    ).poll  # fmt: skip


def test_the_node_that_writes_events_tells_its_own_and_those_of_others_once(
    clock: list[float],
) -> None:
    board, mine, theirs = Board(), Looks(), Looks()
    own, other = watch(mine, board, node="n0", first=0), watch(theirs, board, node="n1", first=2)
    theirs.take(PULSES, 9.0)
    mine.take(WELL, 9.0)
    clock[0] = 1.0
    assert other(writes=False) == [] and board.told == []  # not so soon again
    clock[0] = 4.0
    assert other(writes=False) == []
    (turn,) = own(writes=True)
    assert (turn.rank, turn.node, turn.step, turn.is_over) == (3, "n1", 41, False)
    assert turn.event() == {
        "rank": 3, "node": "n1", "what": "stopped", "step": 41,
        "factor": round(1 / (1 - turn.share), 4), "is_over": False,
        "stopped_share": round(turn.share, 3),
    }  # fmt: skip
    mine.take(PULSES, 9.0)
    clock[0] = 8.0
    assert [turn.rank for turn in own(writes=True)] == [1]
    clock[0] = 12.0
    assert own(writes=True) == []
