"""Agents as processes that meet in a real etcd: kills of it, of node 0, and many runs in a row."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.rundir.attempt_files import read_store_location
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked
from tests.debian_packages import need
from tests.elastic.agents import Agents, answer, session_pids, wait_until
from tests.elastic.etcd_server import EtcdServer, running


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    need("etcd-server", "etcd-client")
    with running(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as scratch:  # tmp_path is too long for a socket
        started = Agents(RunDir(tmp_path / "run-1"), Path(scratch))
        yield started
        started.end_all()


def two_nodes(agents: Agents, etcd: EtcdServer, body: str) -> list[subprocess.Popen[str]]:
    """Of one process each; the run goes on with one."""
    agents.prepare(devices=1, nodes=2, min_nodes=1, rendezvous=etcd.setting, keep_alive_s=3)
    nodes = [agents.start(body, "--node-rank", str(rank), "--store-moves") for rank in range(2)]
    agents.wait_for_training()
    return nodes


@pytest.mark.system
def test_node_0_is_lost_and_nobody_watches_over_the_others(
    agents: Agents, etcd: EtcdServer
) -> None:
    node_0, node_1 = two_nodes(agents, etcd, "train_two_generations")
    for pid in session_pids(node_0.pid):
        os.kill(pid, signal.SIGKILL)
    assert answer(node_1)["outcome"] == "finished"
    (lost,) = agents.events("node_lost")
    assert lost["node_rank"] == 0
    assert [event["world_size"] for event in agents.events("rendezvous")] == [2, 1]
    assert [event["node_rank"] for event in agents.events("store_moved")] == [1]
    place = read_store_location(agents.run, 1)
    assert place is not None and place.node_rank == 1
    assert not is_locked(agents.run.lease)
    # what node 0 left goes with its lease, and what both wrote when the last one ended
    wait_until(lambda: etcd.left() == [])


@pytest.mark.system
def test_a_loss_while_etcd_is_away_waits_for_it(agents: Agents, etcd: EtcdServer) -> None:
    nodes = two_nodes(agents, etcd, "train_two_generations")
    etcd.kill()
    log = agents.run.attempt(1) / "agent-0.log"
    wait_until(lambda: "does not answer" in log.read_text())
    assert all(node.poll() is None for node in nodes)  # training goes on
    worker = agents.events("attempt_started")[0]["workers"][1]["pid"]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: len(agents.events("worker_lost")) == 1)
    etcd.start()
    assert [answer(node)["outcome"] for node in nodes] == ["finished", "finished"]
    assert [event["world_size"] for event in agents.events("rendezvous")] == [2, 2]
    wait_until(lambda: etcd.left() == [])


@pytest.mark.slow
def test_twenty_attempts_in_a_row_of_one_run_meet_on_the_same_server(
    agents: Agents, etcd: EtcdServer
) -> None:
    for attempt in range(1, 21):
        agents.prepare(attempt=attempt, devices=1, nodes=2, rendezvous=etcd.setting)
        options = ["--attempt", str(attempt), "--node-rank"]
        nodes = [agents.start("finish", *options, str(rank)) for rank in range(2)]
        assert [answer(node)["outcome"] for node in nodes] == ["finished", "finished"]
    assert etcd.left() == []
