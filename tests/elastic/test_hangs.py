"""A rank that hangs and does not die: noticed, blamed and ended, with real processes."""

import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.errors import LostNodeError
from shardyard.rundir.layout import RunDir
from tests.elastic.agents import Agents, answer, session_pids, wait_until


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as scratch:  # tmp_path is too long for a socket
        started = Agents(RunDir(tmp_path / "run-1"), Path(scratch))
        yield started
        started.end_all()


REASONS = {
    "stop_on_rank_1": r"its process is stopped, as by SIGSTOP; ",
    "sleep_on_rank_1": r"it sleeps or waits in <lambda> \(.*bodies.py:\d+\), in no collective; ",
    "hold_the_gil_on_rank_1": r"it sleeps or waits in _wait_with_the_gil .*, in no collective; ",
}
WAITS = "1 other rank waits for it in all_reduce"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("sleep_on_rank_1", marks=pytest.mark.heavy),
        pytest.param("stop_on_rank_1", marks=pytest.mark.system),
        pytest.param("hold_the_gil_on_rank_1", marks=pytest.mark.system),
    ],
)
def test_the_rank_that_hangs_is_blamed_ended_and_the_group_restarts(
    agents: Agents, how: str
) -> None:
    agents.prepare(hang_min_s=1.0)
    process = agents.start(how)
    assert answer(process)["outcome"] == "finished"
    (hung,) = agents.events("worker_hung")
    assert (hung["rank"], hung["node"]) == (1, socket.gethostname())
    assert hung["pid"] == agents.events("attempt_started")[0]["workers"][1]["pid"]
    assert (hung["step"], hung["phase"], hung["collective"]) == (12, "step", "all_reduce")
    assert re.fullmatch(REASONS[how] + WAITS, hung["reason"]), hung["reason"]
    assert hung["seconds"] >= 1.0
    assert not agents.events("worker_lost")  # its peer's broken connection is no news
    assert [event["generation"] for event in agents.events("rendezvous")] == [0, 1]
    log = agents.run.log(1, 0).read_text()
    assert "shardyard: no rank of " in log and "Current thread" in log
    wait_until(lambda: not session_pids(process.pid), timeout_s=20.0)


def start_nodes(agents: Agents, body: str) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        agents.start(body, "--rendezvous", endpoint, "--node-rank", str(rank)) for rank in range(2)
    ]


@pytest.mark.system
def test_a_rank_that_hangs_on_another_node_is_blamed_by_all(agents: Agents) -> None:
    agents.prepare(devices=1, nodes=2, hang_min_s=1.0)
    nodes = start_nodes(agents, "sleep_on_rank_1")
    assert [answer(node)["outcome"] for node in nodes] == ["finished", "finished"]
    (hung,) = agents.events("worker_hung")
    assert (hung["rank"], hung["step"], hung["collective"]) == (1, 12, "all_reduce")
    assert hung["reason"].endswith(WAITS)
    assert not agents.events("worker_lost") and not agents.events("node_lost")


@pytest.mark.system
@pytest.mark.parametrize("cut", [0, 1])
def test_where_an_agent_does_not_answer_the_other_ends_its_own_ranks(
    agents: Agents, cut: int
) -> None:
    """As where the network is cut: nothing is closed, and nothing comes."""
    agents.prepare(devices=1, nodes=2, hang_min_s=1.0, max_restarts=0)
    nodes = start_nodes(agents, "step_for_ever")
    agents.wait_for_training()
    for pid in session_pids(nodes[cut].pid):
        os.kill(pid, signal.SIGSTOP)
    end = answer(nodes[1 - cut])
    assert (end["outcome"], end["exit_code"]) == ("failed", LostNodeError.exit_code)
    assert "`shardyard resume" in end["message"]
    # node 0 holds the run still: the other is cut off from it, and does not speak for the run
    assert [lost["node_rank"] for lost in agents.events("node_lost")] == [1] * cut
    wait_until(lambda: not session_pids(nodes[1 - cut].pid), timeout_s=20.0)
