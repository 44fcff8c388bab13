"""Parked processes with a real agent: they take over, are replaced, and leave nothing behind."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.elastic.standby import READY_NAME
from shardyard.rundir.layout import RunDir
from tests.elastic.agents import Agents, answer, session_pids, wait_until

TRAINING = "torch,transformers.models.llama.modeling_llama,shardyard.elastic.warm_up"


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as scratch:  # tmp_path is too long for a socket
        started = Agents(RunDir(tmp_path / "run-1"), Path(scratch))
        yield started
        started.end_all()


def parked(session: int) -> set[int]:
    """Processes that are ready to take over."""
    return {pid for pid in session_pids(session) if _name(pid) == READY_NAME}


def workers(agents: Agents, generation: int) -> dict[int, int]:
    """Process of each rank of a generation, once it has begun."""
    wait_until(lambda: len(agents.events("rendezvous")) > generation)
    return {
        each["rank"]: each["pid"] for each in agents.events("rendezvous")[generation]["workers"]
    }


@pytest.mark.system
def test_parked_processes_take_over_and_a_drain_does_not_wait_for_them(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PRELOAD", TRAINING)
    agents.prepare(parked=True, max_restarts=2)
    process = agents.start("step_until_drained")
    wait_until(lambda: len(parked(process.pid)) == 2)
    ready = parked(process.pid)
    assert not ready & set(workers(agents, 0).values())
    os.kill(workers(agents, 0)[1], signal.SIGKILL)
    assert set(workers(agents, 1).values()) == ready

    # others are parked behind them; once one of those is lost, workers are started as usual
    wait_until(lambda: len(parked(process.pid)) == 2 and not parked(process.pid) & ready)
    behind = parked(process.pid)
    os.kill(min(behind), signal.SIGKILL)
    os.kill(workers(agents, 1)[0], signal.SIGKILL)
    assert not set(workers(agents, 2).values()) & (ready | behind)
    assert not behind & set(session_pids(process.pid))

    wait_until(lambda: len(parked(process.pid)) == 2)
    process.terminate()
    assert answer(process)["outcome"] == "drained"
    assert [lost["rank"] for lost in agents.events("worker_lost")] == [1, 0]
    assert "could not warm up" not in (agents.run.attempt(1) / "agent-0.log").read_text()
    wait_until(lambda: not session_pids(process.pid), timeout_s=20.0)
    wait_until(lambda: not list(agents.scratch.glob("shardyard-*")), timeout_s=10.0)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
