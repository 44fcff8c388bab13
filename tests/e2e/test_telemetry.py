"""Telemetry of real runs: written beside the steps, ended with the agent however that ends."""

import os
import signal
from pathlib import Path

from shardyard.rundir.lease import is_locked
from shardyard.rundir.telemetry import latest_sample, read_telemetry
from tests.e2e.shardyard import Answer, Place, events, processes_left, wait_for, wait_for_step

OFTEN = "observe.telemetry_every_s=0.5"


def test_each_rank_and_the_node_are_written_until_the_agent_is_killed(
    place: Place, base: Answer
) -> None:
    assert base.code == 0
    run_dir = place.run_dir("sampled")
    file = run_dir.telemetry_of(0)
    with place.start("train", "tiny.yaml", "run.id=sampled", "run.steps=1000000", OFTEN) as running:
        wait_for_step(run_dir, 5)
        wait_for(
            lambda: any(None not in s.ranks.get("step_s", (None,)) for s in read_telemetry(file))
        )
        newest = latest_sample(file)
        assert newest is not None and len(newest.ranks["step"]) == 2
        assert newest.numbers["cpu_busy_cores"] and newest.head.names == ()
        agent = _agent_of(events(run_dir, "attempt_started")[0]["workers"][0]["pid"])
        os.kill(agent, signal.SIGKILL)
        running.wait()
    assert not is_locked(run_dir.lease)
    wait_for(lambda: not processes_left())


def test_none_is_written_where_none_is_asked_for_and_the_report_says_so(
    place: Place, base: Answer
) -> None:
    assert base.code == 0
    answer = place.run(
        "train", "tiny.yaml", "run.id=unwatched", "run.steps=3", "observe.telemetry_every_s=null"
    )
    assert answer.code == 0, answer.err
    run_dir = place.run_dir("unwatched")
    assert not run_dir.telemetry.exists()
    assert "no node wrote telemetry" in run_dir.report_markdown.read_text()


def _agent_of(worker: int) -> int:
    """The process that started the fork server of a worker."""

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    return parent(parent(worker))
