"""A node 0 that is started again: does it lead, or has another node taken its place?"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.node.failover import has_node0_failed_over
from shardyard.node.handshake import Session
from shardyard.rundir.attempt_files import StoreLocation, write_store_location
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """Node 0 was lost while attempt 1 trained; node 1 serves the store, and has the lease."""
    run = RunDir(tmp_path / "r")
    run.attempt(1).mkdir(parents=True)
    say(run, attempt=1, beat=9, begins=True)
    write_store_location(run, 1, StoreLocation(moves=1, node_rank=1, endpoint="n1:40000"))
    lease = Lease(run.lease)
    yield run
    lease.close()


def say(run: RunDir, **word: object) -> None:
    path = run.session("s")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(word))


def is_led(run: RunDir) -> bool:
    return has_node0_failed_over(run, Session(run, "s"), within_s=0.0)


def test_it_joins_where_another_serves_the_store_and_has_the_lease(run: RunDir) -> None:
    assert is_led(run)


def test_it_leads_a_session_that_has_not_begun_or_has_ended(run: RunDir) -> None:
    say(run, attempt=1, beat=9, begins=False)
    assert not is_led(run)
    say(run, ended="finished", exit_code=0)
    assert not is_led(run)
    run.session("s").unlink()
    assert not is_led(run)


def test_it_leads_where_the_others_have_ended_the_attempt(run: RunDir) -> None:
    events = EventWriter(run.events, attempt=1, generation=0)
    events.write("attempt_ended", exit_code=75)
    events.close()
    assert not is_led(run)


def test_it_leads_where_no_other_node_serves_or_that_one_is_gone_too(run: RunDir) -> None:
    write_store_location(run, 1, StoreLocation(moves=2, node_rank=0, endpoint="n0:40000"))
    assert not is_led(run)  # it came back once, and was lost again
    gone = RunDir(run.path.parent / "gone")
    run.path.rename(gone.path)  # the lease is held for another folder
    gone.lease.unlink()
    assert not is_led(gone)
