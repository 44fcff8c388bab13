"""Two hosts, each with a network, a host name and an /etc/hosts of its own, meet and compute."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.drill.network import INTERFACE, DrillNetwork, network_of, no_network_reason
from shardyard.rundir.layout import RunDir
from tests.elastic.agents import Agents, answer
from tests.mounts import needs_root

pytestmark = [needs_root, pytest.mark.system]

OWN_LINE = {
    "its address": "10.219.0.{number} host{node}",
    "Debian's": "127.0.1.1 host{node}",
    "an address of yesterday": "10.219.0.77 host{node}",
    "none": "",
}
"""What /etc/hosts of a host says of the host itself; the other one is in it by its address."""


@pytest.fixture(scope="module")
def network() -> Iterator[DrillNetwork]:
    if why := no_network_reason():
        pytest.skip(why)
    with network_of(2) as made:
        yield made


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as scratch:  # tmp_path is too long for a socket
        started = Agents(RunDir(tmp_path / "run-1"), Path(scratch))
        yield started
        started.end_all()


@pytest.mark.parametrize("own_line", OWN_LINE)
def test_hosts_meet_whatever_their_own_name_leads_to(
    agents: Agents, tmp_path: Path, network: DrillNetwork, own_line: str
) -> None:
    agents.prepare(devices=1, nodes=2)
    nodes = []
    for node, enter in enumerate(network.hosts.enter):
        lines = ["127.0.0.1 localhost", f"10.219.0.{2 - node} host{1 - node}"]
        lines.append(OWN_LINE[own_line].format(node=node, number=node + 1))
        hosts = tmp_path / f"hosts-{node}"
        hosts.write_text("\n".join(lines) + "\n")
        become = f"hostname host{node} && mount --bind '{hosts}' /etc/hosts && exec \"$@\""
        program = [*enter, "unshare", "-u", "-m", "sh", "-c", become, "sh"]
        options = ("--rendezvous", "host0:29400", "--node-rank", str(node))
        nodes.append(agents.start("tell_network", *options, on=program))
    assert [answer(node)["exit_code"] for node in nodes] == [0, 0]
    own_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    told = f"GLOO_SOCKET_IFNAME={INTERFACE} NCCL_SOCKET_IFNAME=={INTERFACE} {own_store}\n"
    logs = [agents.run.log(1, rank).read_text() for rank in range(2)]
    assert [log.endswith(told) for log in logs] == [True, True]  # c10d may miss a name before it
    assert not agents.events("worker_lost") and not agents.events("node_lost")
