"""Who is which rank: against vectors written by hand, and against counting."""

import pytest

from shardyard.config.layout import Layout
from shardyard.planner.ranks import Axis, RankPlacement

# Two stages of two shards of two: written down rank by rank, pp slowest and tp fastest.
#   rank   0  1  2  3  4  5  6  7
#   pp     0  0  0  0  1  1  1  1
#   shard  0  0  1  1  0  0  1  1
#   tp     0  1  0  1  0  1  0  1
EIGHT = RankPlacement(
    layout=Layout(dp_replicate=1, dp_shard=2, tp=2, pp=2, zero=3), devices_per_node=4
)
BY_HAND = {
    "pp": ([0, 0, 0, 0, 1, 1, 1, 1], [[0, 4], [1, 5], [2, 6], [3, 7]]),
    "dp_shard": ([0, 0, 1, 1, 0, 0, 1, 1], [[0, 2], [1, 3], [4, 6], [5, 7]]),
    "tp": ([0, 1, 0, 1, 0, 1, 0, 1], [[0, 1], [2, 3], [4, 5], [6, 7]]),
}

LAYOUTS = [
    Layout(dp_replicate=1, dp_shard=1, zero=3),
    Layout(dp_replicate=2, dp_shard=8, zero=3),
    Layout(dp_replicate=1, dp_shard=4, cp=2, tp=2, zero=3),
    Layout(dp_replicate=2, dp_shard=1, cp=4, zero=1),
    Layout(dp_replicate=1, dp_shard=4, cp=2, ep=4, tp=2, pp=2, zero=3),
    Layout(dp_replicate=3, dp_shard=6, tp=2, zero=2),
    Layout(dp_replicate=2, dp_shard=64, tp=8, zero=3),
]


def test_places_and_groups_are_those_written_by_hand() -> None:
    assert [axis.name for axis in EIGHT.axes] == list(BY_HAND)
    for axis in EIGHT.axes:
        places, groups = BY_HAND[axis.name]
        assert [axis.coordinate(rank) for rank in range(8)] == places
        assert [list(axis.ranks(group)) for group in range(4)] == groups
    assert [(EIGHT.node(rank), EIGHT.device(rank)) for rank in (0, 3, 4, 7)] == [
        (0, 0), (0, 3), (1, 0), (1, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_is_in_one_group_of_each_axis_at_its_place(layout: Layout) -> None:
    ranks = RankPlacement(layout=layout, devices_per_node=8)
    for axis in ranks.axes:
        groups = [list(axis.ranks(group)) for group in range(ranks.count // axis.degree)]
        assert sorted(rank for group in groups for rank in group) == list(range(ranks.count))
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        for number, group in enumerate(groups):
            assert len(group) == axis.degree
            assert [axis.group(rank) for rank in group] == [number] * axis.degree
            assert [axis.coordinate(rank) for rank in group] == list(range(axis.degree))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("devices", [1, 4, 6, 8])
def test_the_nodes_of_an_axis_are_counted(layout: Layout, devices: int) -> None:
    ranks = RankPlacement(layout=layout, devices_per_node=devices)

    def counted(axis: Axis) -> int:
        groups = range(ranks.count // axis.degree)
        return max(len({ranks.node(rank) for rank in axis.ranks(group)}) for group in groups)

    for axis in ranks.axes:
        assert ranks.nodes_of(axis) == counted(axis), axis.name


def test_only_what_is_split_is_an_axis_and_shards_are_named_with_cp() -> None:
    def names(**degrees: int) -> list[str]:
        layout = Layout(**{"dp_replicate": 1, "dp_shard": 1, "zero": 3, **degrees})
        return [axis.name for axis in RankPlacement(layout=layout, devices_per_node=8).axes]

    assert names() == []
    assert names(dp_shard=4) == ["dp_shard"]
    assert names(dp_shard=2, cp=2) == ["dp_shard x cp", "cp"]
    assert names(cp=2) == ["dp_shard x cp", "cp"]
    assert names(dp_shard=4, ep=2) == ["dp_shard", "expert_shard", "ep"]
    assert names(dp_shard=4, ep=4) == ["dp_shard", "ep"]
    assert names(dp_replicate=2, dp_shard=4) == ["dp_replicate", "dp_shard"]


def test_a_last_node_that_is_not_full_has_its_ranks() -> None:
    ranks = RankPlacement(layout=Layout(dp_replicate=1, dp_shard=6, zero=3), devices_per_node=4)
    assert ranks.nodes == 2
    assert [list(ranks.on_node(node)) for node in (0, 1)] == [[0, 1, 2, 3], [4, 5]]


def test_json_has_each_rank_with_its_group_and_place() -> None:
    rows = list(EIGHT.to_json())
    assert len(rows) == 8
    assert rows[6] == {
        "rank": 6,
        "node": 1,
        "device": 2,
        "axes": {
            "pp": {"group": 2, "place": 1},
            "dp_shard": {"group": 2, "place": 1},
            "tp": {"group": 3, "place": 0},
        },
    }
