"""Who does node 0's other duties where each meeting has a store of its own."""

from pathlib import Path

import pytest

from shardyard.elastic.notices import Node
from shardyard.elastic.succession import Succession
from shardyard.errors import LostNodeError
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease, is_held
from shardyard.rundir.store_place import StorePlace, read_store_place


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempt(1).mkdir(parents=True)
    return run


def node(run: RunDir, rank: int) -> Succession:
    return Succession(run, 1, rank, StorePlace(moves=0, node_rank=0, endpoint="n0:29400"))


def met(*ranks: int) -> list[Node]:
    return [Node(f"n{rank}", rank) for rank in ranks]


def test_the_first_that_is_left_takes_over_and_later_meetings_leave_it_so(run: RunDir) -> None:
    first, second = node(run, 2), node(run, 1)
    assert not first.take_over(met(2, 0, 1))  # node 0 is there
    assert not second.take_over(met(2, 1))
    assert first.take_over(met(2, 1))
    place = read_store_place(run, 1)
    assert place is not None and (place.node_rank, place.moves) == (2, 1)
    assert is_held(run.lease)
    assert not second.take_over(met(1, 2)) and not first.take_over(met(1, 2))


def test_nobody_takes_over_from_one_that_holds_the_lease(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.elastic.succession._WITHIN_S", 0.0)
    lease = Lease(run.lease)
    with pytest.raises(LostNodeError, match=r"node 0 does not meet the others, and .* is held st"):
        node(run, 1).take_over(met(1))
    lease.close()
    assert read_store_place(run, 1) is None
