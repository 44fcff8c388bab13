"""Who does node 0's other duties where each meeting has a store of its own."""

from pathlib import Path

import pytest

from shardyard.elastic.agent_messages import Node
from shardyard.elastic.rendezvous.store_failover import StoreFailover
from shardyard.errors import LostNodeError
from shardyard.rundir.attempt_files import StoreLocation, read_store_location
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease, is_locked


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempt(1).mkdir(parents=True)
    return run


def node(run: RunDir, rank: int) -> StoreFailover:
    return StoreFailover(run, 1, rank, StoreLocation(moves=0, node_rank=0, endpoint="n0:29400"))


def met(*ranks: int) -> list[Node]:
    return [Node(f"n{rank}", rank) for rank in ranks]


def test_the_first_that_is_left_takes_over_and_later_meetings_leave_it_so(run: RunDir) -> None:
    first, second = node(run, 2), node(run, 1)
    assert not first.take_over(met(2, 0, 1))  # node 0 is there
    assert not second.take_over(met(2, 1))
    assert first.take_over(met(2, 1))
    place = read_store_location(run, 1)
    assert place is not None and (place.node_rank, place.moves) == (2, 1)
    assert is_locked(run.lease)
    assert not second.take_over(met(1, 2)) and not first.take_over(met(1, 2))


@pytest.mark.parametrize(("own", "host"), [(None, "127.0.0.1"), ("localhost", "localhost")])
def test_the_next_store_is_announced_by_the_name_that_a_launcher_knows(
    run: RunDir, own: str | None, host: str
) -> None:
    """Without one, the address from which this node reaches where the lost store was."""
    first = StoreLocation(moves=0, node_rank=0, endpoint="127.0.0.1:1")
    store = StoreFailover(run, 1, 1, first, own).find(turn=0, is_over=lambda: False)
    place = read_store_location(run, 1)
    assert store is not None and place is not None
    assert (place.node_rank, place.moves, place.endpoint) == (1, 1, f"{host}:{store.port}")


def test_nobody_takes_over_from_one_that_holds_the_lease(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.elastic.rendezvous.store_failover._WITHIN_S", 0.0)
    lease = Lease(run.lease)
    with pytest.raises(
        LostNodeError, match=r"node 0 does not reach the others, and .* is still held"
    ):
        node(run, 1).take_over(met(1))
    lease.close()
    assert read_store_location(run, 1) is None


def test_a_node_that_was_left_out_does_what_it_did_until_it_is_gone(run: RunDir) -> None:
    lease = Lease(run.lease)
    assert not node(run, 1).take_over(met(1, 2), met(0))
    lease.close()
    assert node(run, 1).take_over(met(1, 2), met(0))


def test_who_holds_the_run_speaks_for_it_and_who_is_cut_off_from_it_does_not(run: RunDir) -> None:
    lease = Lease(run.lease)  # node 0's, as its process takes it
    assert node(run, 0).is_lease_available() and not node(run, 1).is_lease_available()
    lease.close()
    assert node(run, 1).is_lease_available()
    after = node(run, 1)
    assert (
        after.take_over(met(1))
        and after.is_lease_available()
        and not node(run, 2).is_lease_available()
    )
