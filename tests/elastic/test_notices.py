"""What agents tell each other, through a store in this process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # built in C++

from shardyard.elastic.agent_messages import AgentMessages, Node

NAMES = [Node("a", 1), Node("b", 0)]


def agree(*proposals: tuple[int, int]) -> tuple[list[int], list[AgentMessages]]:
    """What two nodes agree on that propose a generation, each with the ranks of the last one."""
    store = HashStore()
    nodes = [AgentMessages(store, group_rank=rank, num_nodes=2) for rank in range(2)]

    def propose(node: AgentMessages, me: Node, proposal: tuple[int, int]) -> int:
        held = {"by": me.name}
        return node.agree_on_generation(
            proposal[0], me, world_size=proposal[1], failure_history=held
        )

    with ThreadPoolExecutor() as pool:
        return list(pool.map(propose, nodes, NAMES, proposals)), nodes


@pytest.mark.parametrize("proposals", [(0, 3), (3, 0), (2, 2)])
def test_a_generation_is_never_numbered_as_an_earlier_one(proposals: tuple[int, int]) -> None:
    """Also where the node that becomes the first has only just come, and would begin with 0."""
    agreed, nodes = agree((proposals[0], 0), (proposals[1], 0))
    assert agreed == [max(proposals)] * 2
    assert [node.nodes for node in nodes] == [NAMES] * 2
    assert [node.failure_histories for node in nodes] == [[{"by": "a"}, {"by": "b"}]] * 2


@pytest.mark.parametrize(
    ("proposals", "world_size", "told"),
    [
        (((0, 0), (0, 0)), 2, None),
        (((3, 2), (3, 2)), 2, None),
        (((3, 3), (3, 3)), 2, ([], 3)),
        (((0, 0), (3, 1)), 2, (["a"], 1)),  # also where the one that came is the first now
        (((3, 2), (2, 4)), 2, (["b"], 2)),  # came back after it was left out, or in another's place
    ],
)
def test_all_nodes_know_who_came_and_how_many_ranks_there_were(
    proposals: tuple[tuple[int, int], ...], world_size: int, told: tuple[list[str], int] | None
) -> None:
    _, nodes = agree(*proposals)
    for node in nodes:
        resize = node.resize_event(world_size)
        assert told == (None if resize is None else (resize["joined"], resize["world_size_before"]))


def test_nodes_that_say_nothing_are_known_by_name() -> None:
    store = HashStore()
    first, second = (AgentMessages(store, group_rank=rank, num_nodes=2) for rank in range(2))
    assert first.silent("losses") == [1]
    second.publish("losses", [])
    assert first.silent("losses") == []
