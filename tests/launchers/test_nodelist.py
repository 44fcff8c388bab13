"""Lists of hosts as `scontrol show hostnames` writes them out."""

import pytest

from shardyard.errors import RequestError
from shardyard.launchers.slurm.node_rank import host_of, hosts_in

# Answers of `scontrol show hostnames LIST` of slurm-client 22.05.
ANSWERS = [
    ("node1", ["node1"]),
    ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
    ("node[01-03]", ["node01", "node02", "node03"]),
    ("node[08-11]", ["node08", "node09", "node10", "node11"]),
    ("a,b1,c[1-2]", ["a", "b1", "c1", "c2"]),
    ("gpu-[1,3],cpu-x[09-10]", ["gpu-1", "gpu-3", "cpu-x09", "cpu-x10"]),
    ("rack[0-1]node[1-2]", ["rack0node1", "rack0node2", "rack1node1", "rack1node2"]),
    ("p5-dy-p5-48xlarge-[1-2]", ["p5-dy-p5-48xlarge-1", "p5-dy-p5-48xlarge-2"]),
]


@pytest.mark.parametrize(("nodelist", "hosts"), ANSWERS)
def test_a_list_is_written_out(nodelist: str, hosts: list[str]) -> None:
    assert hosts_in(nodelist) == hosts
    assert [host_of(nodelist, rank) for rank in range(len(hosts))] == hosts
    with pytest.raises(RequestError, match="Node K of a job is host K"):
        host_of(nodelist, len(hosts))


@pytest.mark.parametrize(
    "nodelist",
    ["", ",", "a,,b", "n[", "n[]", "n[1-", "n[2-1]", "n[1-x]", "n]1", "n[1[2]]", "n[1-999999999]"],
)
def test_what_is_no_list_is_shown(nodelist: str) -> None:
    with pytest.raises(RequestError) as caught:
        hosts_in(nodelist)
    assert repr(nodelist) in str(caught.value)
    assert "scontrol show hostnames" in str(caught.value)


def test_the_first_host_of_a_huge_list_costs_nothing() -> None:
    assert host_of("a[1-90000]b[1-90000]", 0) == "a1b1"
