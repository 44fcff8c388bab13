"""Instances and reference systems become clusters, with what joins their devices."""

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import accelerator_by_name, instance, instance_names
from shardyard.hardware.cluster import cluster_of, default_cluster, with_efa
from shardyard.planner.collectives import BETWEEN_SHARE


def test_a_device_gets_its_share_of_the_network_of_its_node() -> None:
    cluster = cluster_of(instance("p4d.24xlarge"), nodes=2)
    assert (cluster.devices, cluster.inside.name, cluster.between.name) == (
        16,
        "NVLink 3",
        "4 x EFA",
    )
    assert cluster.between.bytes_per_s == 400e9 / 8 / 8  # Gb/s of the node, bits, devices
    assert cluster.usd_per_hour == pytest.approx(2 * 21.957642)


def test_half_a_cube_mesh_has_fewer_links() -> None:
    # DGX-1: of the 6 links of a V100, 4 go to the 3 others of its half.
    assert cluster_of(instance("p3.8xlarge"), 1).inside.bytes_per_s == 100e9
    assert cluster_of(instance("p3.16xlarge"), 1).inside.bytes_per_s == 150e9


def test_a_network_without_efa_is_tcp() -> None:
    p3 = cluster_of(instance("p3.8xlarge"), nodes=4)
    assert p3.between.name == "TCP"
    assert p3.between.bytes_per_s == 10e9 / 8 / 4
    assert p3.between.latency_s > cluster_of(instance("p5en.48xlarge"), 4).between.latency_s


@pytest.mark.parametrize("name", instance_names())
def test_every_instance_makes_a_cluster(name: str) -> None:
    cluster = cluster_of(instance(name), nodes=2)
    assert 0 < cluster.between.bytes_per_s < cluster.inside.bytes_per_s


def test_without_a_price_the_cluster_has_none() -> None:
    assert cluster_of(instance("p5e.48xlarge"), nodes=2).usd_per_hour is None


def test_an_accelerator_alone_gets_its_vendors_network() -> None:
    cluster = default_cluster(accelerator_by_name("H100 SXM"), devices_per_node=8, nodes=4)
    assert (cluster.devices, cluster.name) == (32, "8 x H100 SXM")
    assert cluster.between.bytes_per_s == 50e9
    assert "DGX H100" in cluster.between.source
    assert (cluster.usd_per_hour, cluster.host_memory_bytes) == (None, None)


def test_one_node_needs_no_network() -> None:
    cluster = default_cluster(accelerator_by_name("RTX 4090"), devices_per_node=2, nodes=1)
    assert (cluster.inside.name, cluster.between.name) == ("PCIe 4", "none")


def test_nodes_without_a_known_network_are_refused() -> None:
    with pytest.raises(RequestError, match=r"2 nodes of RTX 4090: .*no network.*cluster\.file"):
        default_cluster(accelerator_by_name("RTX 4090"), devices_per_node=2, nodes=2)


def test_devices_without_a_known_link_are_refused() -> None:
    with pytest.raises(RequestError, match=r"8 x MI250X in a node.*inside_gb_per_s"):
        default_cluster(accelerator_by_name("MI250X"), devices_per_node=8, nodes=1)
    alone = default_cluster(accelerator_by_name("MI250X"), devices_per_node=1, nodes=1)
    assert alone.inside.name == "none"


def test_fewer_interfaces_are_a_share_of_the_network_and_none_are_sockets() -> None:
    p4d = instance("p4d.24xlarge")
    cluster = cluster_of(p4d, nodes=2)
    one = with_efa(cluster, p4d, 1).between
    assert one.bytes_per_s == cluster.between.bytes_per_s / 4
    assert (one.name, one.latency_s) == ("1 x EFA", cluster.between.latency_s)
    none = with_efa(cluster, p4d, 0).between
    # what was measured is what collectives reach, nine tenths of the link: 2.38 GB/s of a node
    assert none.bytes_per_s * 8 * BETWEEN_SHARE == pytest.approx(2.38e9)
    assert none.latency_s > one.latency_s
