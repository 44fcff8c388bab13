"""What agents tell each other, through a store in this process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # built in C++

from shardyard.elastic.notices import Node, Notices

NAMES = [Node("a", 1), Node("b", 0)]


@pytest.mark.parametrize("proposals", [(0, 3), (3, 0), (2, 2)])
def test_a_generation_is_never_numbered_as_an_earlier_one(proposals: tuple[int, int]) -> None:
    """Also where the node that becomes the first has only just come, and would begin with 0."""
    store = HashStore()
    nodes = [Notices(store, group_rank=rank, num_nodes=2) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        agreed = list(pool.map(Notices.agree_on_generation, nodes, proposals, NAMES))
    assert agreed == [max(proposals)] * 2
    assert [node.nodes for node in nodes] == [NAMES] * 2


def test_nodes_that_say_nothing_are_known_by_name() -> None:
    store = HashStore()
    first, second = (Notices(store, group_rank=rank, num_nodes=2) for rank in range(2))
    assert first.silent("losses") == [1]
    second.publish("losses", [])
    assert first.silent("losses") == []
