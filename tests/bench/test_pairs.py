"""Which node is slow follows from how fast it is with its best partner."""

from itertools import combinations

import pytest

from shardyard.bench.nccl_table import evaluate_pairs, lines
from shardyard.rundir.network import rounds

NAMES = ("a", "b", "c", "d")


def rates(nodes: int, *slow: int, share: float = 0.2) -> dict[tuple[int, int], float]:
    """Bus bandwidths where links of some nodes have a share of the others' rate."""
    return {
        pair: 10.0 * (share if set(pair) & set(slow) else 1.0)
        for pair in combinations(range(nodes), 2)
    }


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 13])
def test_each_pair_meets_once_and_no_node_twice_in_a_round(nodes: int) -> None:
    found = rounds(nodes)
    met = [pair for pairs in found for pair in pairs]
    assert sorted(met) == list(combinations(range(nodes), 2))
    for pairs in found:
        places = [node for pair in pairs for node in pair]
        assert len(places) == len(set(places))
    assert len(found) == nodes - 1 + nodes % 2


@pytest.mark.parametrize("slow", range(4))
def test_a_node_with_a_slow_link_is_named_and_its_partners_are_not(slow: int) -> None:
    verdict = evaluate_pairs(rates(4, slow))
    assert verdict.slow_nodes == (slow,) and verdict.slow_pairs == ()


@pytest.mark.parametrize(("nodes", "slow"), [(4, ()), (8, (2, 5)), (3, (1,)), (5, (0, 4))])
def test_as_many_as_are_slow_are_named(nodes: int, slow: tuple[int, ...]) -> None:
    assert evaluate_pairs(rates(nodes, *slow)).slow_nodes == slow


def test_sound_nodes_differ_without_being_named() -> None:
    given = rates(4)
    for place, pair in enumerate(given):
        given[pair] *= 1 - 0.05 * place
    assert evaluate_pairs(given).slow_nodes == () and evaluate_pairs(given).slow_pairs == ()


def test_a_path_that_is_slow_between_two_sound_nodes_is_named_as_that() -> None:
    given = rates(4) | {(1, 2): 2.0}
    verdict = evaluate_pairs(given)
    assert verdict.slow_nodes == () and verdict.slow_pairs == ((1, 2),)
    assert "# slow between: b and c, each of which is sound with others" in lines(given, NAMES, 8)


def test_of_two_nodes_none_is_named() -> None:
    given = rates(2)
    assert evaluate_pairs(given).slow_nodes == ()
    assert lines(given, NAMES[:2], 8)[-1] == "# of 2 nodes none can be named slow: it takes 3"


def test_the_table_has_a_row_a_node_and_says_who_is_slow() -> None:
    said = lines(rates(4, 2), NAMES, 2**20)
    assert said[-1] == (
        "# slow: c, 2 GB/s with its best partner, where the median of all nodes' best is 10"
    )
    assert [line.split()[1:] for line in said[2:6]] == [
        ["a", "10", "-", "10", "2", "10"],
        ["b", "10", "10", "-", "2", "10"],
        ["c", "2", "2", "2", "-", "2"],
        ["d", "10", "10", "10", "2", "-"],
    ]
    assert lines(rates(4), NAMES, 8)[-1].startswith("# no node is slow")
