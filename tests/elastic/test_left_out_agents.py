"""A node that is left out, with real agents: the others go on, and it ends when they have."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.layout import RunDir
from tests.elastic.agents import Agents, answer, session_pids, wait_until


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as scratch:  # tmp_path is too long for a socket
        started = Agents(RunDir(tmp_path / "run-1"), Path(scratch))
        yield started
        started.end_all()


def start(agents: Agents, *bodies: str) -> list[subprocess.Popen[str]]:
    """An agent for each body, by the rank of its node."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["--store-moves", "--rendezvous", endpoint, "--node-rank"]
    return [agents.start(body, *words, str(rank)) for rank, body in enumerate(bodies)]


def prepare(agents: Agents) -> None:
    """Two nodes of which one is enough; one that a loaded machine holds up is waited for."""
    agents.prepare(
        devices=1, nodes=2, min_nodes=1, max_nodes=2, max_restarts=9, join_interval_s=0
    )  # fmt: skip


def wait_for_alone(agents: Agents) -> None:
    """Until one node is left out and the other trains without it."""

    def is_alone() -> bool:
        left = agents.events("node_left_out")
        sizes = [
            event["world_size"]
            for event in agents.events("rendezvous")
            if left and event["generation"] > left[0]["generation"]
        ]
        return sizes == [1]

    wait_until(is_alone)


@pytest.mark.system
@pytest.mark.parametrize("bad", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_whose_ranks_die_at_each_start_is_left_out_and_the_others_finish(
    agents: Agents, bad: int
) -> None:
    """Also the one that serves the store: it serves on."""
    prepare(agents)
    bodies = ["finish_alone", "finish_alone"]
    bodies[bad] = "abort_at_once"
    nodes = start(agents, *bodies)
    answers = [answer(node) for node in nodes]
    assert [(each["outcome"], each["exit_code"]) for each in answers] == [("finished", 0)] * 2
    words = "the others ended without this node, which was left out: finished"
    assert [each["message"] == words for each in answers] == [bad == 0, bad == 1]
    (left,) = agents.events("node_left_out")
    assert (left["node"], left["node_rank"]) == (socket.gethostname(), bad)
    assert left["nodes_left"] == 1
    assert left["cause"].startswith("3 losses in a row within an hour began on it, the last one: ")
    assert agents.events("rendezvous")[-1]["world_size"] == 1
    assert [event["exit_code"] for event in agents.events("attempt_ended")] == [0]


@pytest.mark.system
def test_the_node_of_a_slow_rank_leaves_with_its_last_step_saved_and_two_go_on(
    agents: Agents,
) -> None:
    settings: dict[str, Any] = {
        "min_nodes": 2,
        "max_nodes": 3,
        "leave_out_for": ("xid", "slow_rank"),
    }
    agents.prepare(devices=1, nodes=3, **settings)
    bodies = ("step_until_one_leaves", "step_until_one_leaves", "straggle_until_one_leaves")
    nodes = start(agents, *bodies)
    assert [answer(node)["outcome"] for node in nodes] == ["finished"] * 3
    slow, (left,) = agents.events("straggler")[0], agents.events("node_left_out")
    assert (slow["what"], slow["is_since_start"], slow["node"]) == (
        "compute", True, socket.gethostname()
    )  # fmt: skip
    assert (left["node_rank"], left["nodes_left"], left["verdict"]) == (2, 2, "slow_rank")
    assert left["rule"] == "elastic.leave_out_for=[xid, slow_rank]"
    assert left["cause"].startswith(f"rank {slow['rank']} is a straggler, ")
    assert [event["world_size"] for event in agents.events("rendezvous")] == [3, 2]
    assert not agents.events("worker_lost")


@pytest.mark.slow
def test_a_straggler_without_whose_node_too_few_are_left_stays_and_the_event_says_so(
    agents: Agents,
) -> None:
    settings: dict[str, Any] = {"min_nodes": 2, "max_nodes": 3, "leave_out_for": ("slow_rank",)}
    agents.prepare(devices=1, nodes=2, **settings)
    nodes = start(agents, "step_until_one_leaves", "straggle_until_one_leaves")
    wait_until(lambda: bool(agents.events("straggler")))
    nodes[0].terminate()
    assert [answer(node)["outcome"] for node in nodes] == ["drained", "drained"]
    (slow,) = agents.events("straggler")
    assert slow["stays"] == "elastic.min_nodes=2 needs all 2 nodes"
    assert not agents.events("node_left_out")


@pytest.mark.slow
def test_where_all_nodes_are_needed_the_last_words_name_the_one_that_would_have_been_left_out(
    agents: Agents,
) -> None:
    agents.prepare(devices=1, nodes=2, max_restarts=3)
    ends = [answer(node) for node in start(agents, "finish_alone", "abort_at_once")]
    words = (
        "another restart would end the same way; the last 2 losses began on node 1 "
        f"({socket.gethostname()}), which would have been left out, but elastic.min_nodes=2 needs "
        "all 2 nodes"
    )
    assert [end["exit_code"] for end in ends] == [1, 1]
    assert any(words in end["message"] for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 1])
def test_a_left_out_node_that_is_asked_to_stop_ends_alone_or_when_the_others_need_it_no_more(
    agents: Agents, bad: int
) -> None:
    prepare(agents)
    bodies = ["train_until_drained", "train_until_drained"]
    bodies[bad] = "abort_at_once"
    nodes = start(agents, *bodies)
    wait_for_alone(agents)
    nodes[bad].terminate()
    if bad == 1:
        end = answer(nodes[1])
        assert (end["exit_code"], end["outcome"]) == (143, "drained")
        assert end["message"].endswith("the others continue without it")
        assert nodes[0].poll() is None
    nodes[1 - bad].terminate()
    assert answer(nodes[1 - bad])["exit_code"] == 143
    if bad == 0:
        assert answer(nodes[0])["exit_code"] == 143
    assert len(agents.events("attempt_ended")) == 1


@pytest.mark.slow
def test_a_left_out_node_that_serves_the_store_and_is_lost_is_named_and_another_serves_it(
    agents: Agents,
) -> None:
    prepare(agents)
    nodes = start(agents, "abort_at_once", "train_until_drained")
    wait_for_alone(agents)
    before = len(agents.events("rendezvous"))
    for pid in session_pids(nodes[0].pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(agents.events("rendezvous")) > before)
    nodes[1].terminate()
    assert answer(nodes[1])["exit_code"] == 143
    lost = agents.events("node_lost")[-1]
    assert (lost["node_rank"], lost["ranks"]) == (0, [])
    assert [event["node_rank"] for event in agents.events("store_moved")] == [1]
