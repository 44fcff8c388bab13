"""What is done about a service that fails, whichever it is."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardyard.errors import AccessError, LostError, ShardyardError
from shardyard.rundir.layout import RunDir
from shardyard.trackers import run_feed
from shardyard.trackers.run_feed import Uploader, read_attempt_metadata
from shardyard.trackers.service import AttemptEnd, AttemptMetadata, MetricsRow
from tests.trackers.runs import begin, lose_and_drain, new_run


class Place:
    """A service in memory: what it took, and what it does next."""

    address = "there"

    def __init__(self, *, keeps_count: bool = True) -> None:
        self.keeps_count = keeps_count
        self.rows: list[MetricsRow] = []
        self.end: AttemptEnd | None = None
        self.opened = 0
        self.fails: list[ShardyardError | None] = []
        """One for each call from now on."""

    def open(self, metadata: AttemptMetadata) -> int:
        assert metadata.run.path.is_dir()
        self.opened += 1
        self._call()
        return self.rows[-1].number if self.rows else 0

    def send(self, rows: Sequence[MetricsRow]) -> None:
        self._call()
        self.rows += rows

    def close(self, end: AttemptEnd) -> None:
        self._call()
        self.end = end

    def _call(self) -> None:
        if self.fails and (error := self.fails.pop(0)):
            raise error


class Told:
    """One service, and what was told of it."""

    def __init__(self, run: RunDir, place: Place) -> None:
        self.problems: list[str] = []
        self.addresses: list[str] = []
        self.to = Uploader(
            place,
            read_attempt_metadata(run, 0),
            on_problem=self.problems.append,
            address=self.addresses.append,
        )


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_feed, "_AGAIN_S", 0.0)
    monkeypatch.setattr(run_feed, "_AT_END_AGAIN_S", 0.01)


DOWN = LostError("it was not reached.")


def test_all_lines_come_once_and_in_order(tmp_path: Path) -> None:
    writer, place = new_run(tmp_path), Place()
    told = Told(begin(writer), place)
    told.to.poll()
    told.to.poll()
    lose_and_drain(writer)
    assert told.to.end(until_s=time.monotonic() + 1.0)
    assert [row.number for row in place.rows] == list(range(1, 13)) and place.opened == 1
    assert place.end is not None and place.end.outcome == "drained"
    assert told.addresses == ["there"] and told.problems == []


def test_a_failure_is_told_once_until_it_is_over(tmp_path: Path) -> None:
    run, place = begin(new_run(tmp_path)), Place()
    told = Told(run, place)
    place.fails = [DOWN, DOWN, None, DOWN]
    for _ in range(3):
        told.to.poll()
    assert told.problems == ["it was not reached."] and told.to.unsent == 4
    told.to.poll()
    assert told.to.unsent == 0 and told.to.problem == ""
    place.fails = [LostError("slow.")]
    with run.metrics.open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n')
    told.to.poll()
    assert told.problems == ["it was not reached.", "slow."] and told.to.unsent == 1


def test_a_send_that_failed_goes_on_where_the_service_says(tmp_path: Path) -> None:
    """It may have taken a part of it before."""
    writer, place = new_run(tmp_path), Place()
    told = Told(begin(writer), place)
    told.to.poll()
    run = lose_and_drain(writer)
    place.rows += Told(run, Place()).to._lines.read(after=4)[:3]
    place.fails = [DOWN]
    told.to.poll()
    told.to.poll()
    assert [row.number for row in place.rows] == list(range(1, 13)) and place.opened == 2


def test_between_tries_it_waits_longer_and_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_feed, "_AGAIN_S", 5.0)
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    place = Place()
    told = Told(begin(new_run(tmp_path)), place)
    place.fails = [DOWN] * 100
    tried_s = []
    while now_s[0] < 1000.0:
        before = place.opened
        told.to.poll()
        tried_s += [now_s[0]] * (place.opened - before)
        now_s[0] += 1.0
    assert tried_s == [0, 5, 15, 35, 75, 155, 315, 615, 915]


def test_the_end_of_a_run_is_tried_again_for_a_while(tmp_path: Path) -> None:
    place = Place()
    told = Told(begin(new_run(tmp_path)), place)
    place.fails = [DOWN, None, DOWN]
    assert told.to.end(until_s=time.monotonic() + 5.0) and place.end is not None
    assert [row.number for row in place.rows] == [1, 2, 3, 4]


def test_and_not_for_longer(tmp_path: Path) -> None:
    place = Place()
    told = Told(begin(new_run(tmp_path)), place)
    place.fails = [DOWN] * 1000
    assert not told.to.end(until_s=time.monotonic() + 0.1)
    assert told.to.unsent == 4 and told.to.problem == "it was not reached." and place.opened > 2


def test_nor_where_the_key_is_wrong(tmp_path: Path) -> None:
    place = Place()
    told = Told(begin(new_run(tmp_path)), place)
    place.fails = [AccessError("no.")] * 2
    assert not told.to.end(until_s=time.monotonic() + 60.0)
    assert place.opened == 1 and told.to.unsent == 4


def test_of_a_service_that_counts_nothing_it_is_not_known_what_it_has(tmp_path: Path) -> None:
    place = Place(keeps_count=False)
    told = Told(begin(new_run(tmp_path)), place)
    place.fails = [DOWN]
    told.to.poll()
    assert told.to.unsent == 4, "it was never spoken to"
    told.to.poll()
    assert told.to.unsent is None
    place.fails = [DOWN, DOWN, DOWN, DOWN]
    assert not told.to.end(until_s=time.monotonic() + 0.02)
    assert told.to.unsent is None


def test_a_server_that_is_down_for_days_is_tried_again_and_again(tmp_path: Path) -> None:
    writer, place = new_run(tmp_path), Place()
    told = Told(begin(writer), place)
    place.fails = [DOWN] * 1100
    for _ in range(1100):
        told.to.poll()
    assert place.opened == 1100 and told.problems == [str(DOWN)]
    place.fails = [DOWN] * 10**6
    assert not told.to.end(until_s=time.monotonic() + 0.1)
    assert told.to.problem == str(DOWN) and told.to.unsent
