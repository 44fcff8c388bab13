"""Seconds of collectives against measurements others published, and against arithmetic by hand."""

from collections.abc import Callable
from random import Random

import pytest

from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import NVLINK_3, NVLINK_4, Link, network, pcie
from shardyard.planner.collectives import (
    BETWEEN_SHARE,
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    deduplicated_dispatch_s,
    inside_bytes_per_s,
    reduce_scatter_s,
    send_s,
)

GIB = 2**30
Collective = Callable[[float, Group, ClusterHardware], float]
COLLECTIVES: list[Collective] = [all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s]


def cluster(inside: Link, between: Link, *, nodes: int = 64) -> ClusterHardware:
    return ClusterHardware(
        name="test", accelerator=instance("p5.48xlarge").accelerator, devices_per_node=8,
        nodes=nodes, inside=inside, between=between, host_memory_bytes=None,
        local_disk_bytes=None, usd_per_node_hour=None, price_source="",
    )  # fmt: skip


H100 = cluster(NVLINK_4, network("400 Gb/s InfiniBand", gbps=400, source="DGX H100"))
A100 = cluster(NVLINK_3, network("4 x 200 Gb/s InfiniBand", gbps=100, source="4 for 8"))
NODE = Group(size=8, per_node=8)


def bus_gbs(nbytes: float, group: Group, where: ClusterHardware) -> float:
    """nccl-tests, doc/PERFORMANCE.md: 2 (n - 1) / n of size over time."""
    return 2 * (group.size - 1) / group.size * nbytes / all_reduce_s(nbytes, group, where) / 1e9


@pytest.mark.parametrize(
    ("nbytes", "group", "where", "measured_gbs", "within"),
    [
        # NVIDIA/nccl issue 527: 8 x A100, 1 GiB
        (GIB, NODE, A100, 230.8, 0.05),
        # NVIDIA/nccl issue 1455: rings of 2 and 8 x H100, 2 to 4 GiB: 365 to 370
        (4 * GIB, NODE, H100, 367, 0.05),
        (4 * GIB, Group(size=2, per_node=2), H100, 367, 0.05),
        # nccl-tests issue 119: 3 x 8 A100, 4 x 200 Gb/s a node, up to 128 MiB: "about 96"
        (GIB // 8, Group(size=24, per_node=8), A100, 96, 0.1),
        # nccl-tests issue 290: 400 Gb/s give 46 to 48 GB/s a card; alone in its node
        (4 * GIB, Group(size=2, per_node=1), H100, 47, 0.05),
    ],
)
def test_bus_bandwidth_is_near_what_others_measured(
    nbytes: int, group: Group, where: ClusterHardware, measured_gbs: float, within: float
) -> None:
    assert bus_gbs(nbytes, group, where) == pytest.approx(measured_gbs, rel=within)


@pytest.mark.parametrize(
    ("nodes", "measured_s", "within"),
    [
        (2, 47e-6, 0.1),  # NVIDIA/nccl issue 1244: 2 x 8 H20, 400 Gb/s InfiniBand, 4 B to 512 B
        (16, 62e-6, 0.5),  # NVIDIA/nccl issue 1469: 16 x 8 H100, 8 B
    ],
)
def test_what_a_tiny_all_reduce_takes(nodes: int, measured_s: float, within: float) -> None:
    group = Group(size=8 * nodes, per_node=8)
    assert all_reduce_s(8, group, H100) == pytest.approx(measured_s, rel=within)


def test_pcie_reaches_less_of_its_rate_than_nvlink() -> None:
    # NVIDIA/nccl issue 1639: 8 x RTX 5090, 28 GB/s of 63
    where = cluster(pcie(5), H100.between)
    assert bus_gbs(4 * GIB, NODE, where) == pytest.approx(28, rel=0.05)


def test_two_ranks_by_hand() -> None:
    # 100 GB/s, of which a ring reaches 80; latency 28.4 us: start 8.4, two hops of 10, of which
    # half count. An all-reduce of two sends half of 80 MB twice: 1 ms; a gather sends it once
    link = Link(name="made up", bytes_per_s=100e9, latency_s=28.4e-6, source="-")
    where = cluster(link, link)
    pair = Group(size=2, per_node=2)
    assert all_reduce_s(80e6, pair, where) == pytest.approx(8.4e-6 + 2 * 5e-6 + 1e-3)
    assert all_gather_s(80e6, pair, where) == pytest.approx(8.4e-6 + 5e-6 + 0.5e-3)
    assert reduce_scatter_s(80e6, pair, where) == all_gather_s(80e6, pair, where)
    assert all_to_all_s(80e6, pair, where) == pytest.approx(8.4e-6 + 5e-6 + 0.5e-3)
    assert send_s(80e6, leaves_node=False, cluster=where) == pytest.approx(8.4e-6 + 5e-6 + 1e-3)


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    both = all_gather_s(GIB, NODE, H100) + reduce_scatter_s(GIB, NODE, H100)
    assert all_reduce_s(GIB, NODE, H100) == pytest.approx(both, rel=0.01)


def test_many_nodes_take_the_tree_for_small_sums_and_the_ring_for_large_ones() -> None:
    group = Group(size=512, per_node=8)
    ring_s = all_gather_s(2**20, group, H100) + reduce_scatter_s(2**20, group, H100)
    assert all_reduce_s(2**20, group, H100) < ring_s / 5
    ring_s = all_gather_s(16 * GIB, group, H100) + reduce_scatter_s(16 * GIB, group, H100)
    assert all_reduce_s(16 * GIB, group, H100) == pytest.approx(ring_s, rel=0.001)


def test_a_group_with_one_rank_a_node_has_one_share_of_the_network() -> None:
    spread, whole = Group(size=8, per_node=1), Group(size=64, per_node=8)
    one = all_gather_s(GIB, spread, A100) * spread.size / (spread.size - 1)
    eight = all_gather_s(GIB, whole, A100) * whole.size / (whole.size - 1)
    assert one / eight == pytest.approx(8, rel=0.05)


def test_an_all_to_all_leaves_the_node_over_one_card() -> None:
    # S. Jeaugey in nccl-tests issue 267: alltoall cannot add up cards; 48 of 64 parts leave
    group = Group(size=64, per_node=8)
    assert all_to_all_s(GIB, group, H100) == pytest.approx(56 / 64 * GIB / (0.9 * 50e9), rel=0.01)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_and_nothing_to_send_take_no_time(collective: Collective) -> None:
    assert collective(GIB, Group(size=1, per_node=1), H100) == 0
    assert collective(0, NODE, H100) == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_bytes_never_take_less_time(collective: Collective) -> None:
    for group in (NODE, Group(size=16, per_node=8), Group(size=1024, per_node=8)):
        times_s = [collective(2**power, group, H100) for power in range(3, 36)]
        assert times_s == sorted(times_s)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_ranks_never_take_less_time(collective: Collective) -> None:
    for nbytes in (2**10, 2**24, 2**32):
        sizes = (2, 4, 8, 16, 32, 64, 128, 1024, 16384)
        times_s = [
            collective(nbytes, Group(size=size, per_node=min(size, 8)), A100) for size in sizes
        ]
        assert times_s == sorted(times_s)


def test_leaving_the_node_takes_longer() -> None:
    inside_s = send_s(GIB, leaves_node=False, cluster=H100)
    assert send_s(GIB, leaves_node=True, cluster=H100) > 7 * inside_s
    assert send_s(0, leaves_node=True, cluster=H100) == 0


def _copies(visits: int, ranks: int, per_node: int, draws: int = 20_000) -> tuple[float, float]:
    """Copies of a token to other ranks of other nodes and of a rank's own, by drawing experts."""
    random, between, inside = Random(0), 0, 0
    for _ in range(draws):
        chosen = {random.randrange(ranks) for _ in range(visits)}
        nodes = {rank // per_node for rank in chosen}
        between += len(nodes - {0})
        # One copy a node comes over the network; it is handed on to the other ranks there.
        inside += len(chosen - {0}) - len(nodes - {0})
    return between / draws, inside / draws


@pytest.mark.parametrize(("visits", "ranks"), [(8, 16), (8, 64), (1, 16), (4, 8)])
def test_a_token_is_sent_once_to_each_node_of_its_experts(visits: int, ranks: int) -> None:
    nbytes, where = 4 * GIB, H100
    between, inside = _copies(visits, ranks, 8)
    slower = max(
        between * nbytes / (BETWEEN_SHARE * where.between.bytes_per_s),
        inside * nbytes / inside_bytes_per_s(where.inside),
    )
    group = Group(size=ranks, per_node=8)
    assert deduplicated_dispatch_s(nbytes, visits, group, where) == pytest.approx(slower, rel=0.03)


def test_one_expert_a_token_is_sent_as_by_an_all_to_all() -> None:
    group = Group(size=16, per_node=8)
    plain = all_to_all_s(4 * GIB, group, H100)
    assert deduplicated_dispatch_s(4 * GIB, 1, group, H100) == pytest.approx(plain, rel=0.1)
