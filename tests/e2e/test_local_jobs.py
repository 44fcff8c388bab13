"""Local jobs: the same losses as `train`, a lost node, a cancel; real processes, nothing left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shardyard.launchers.base import JobState
from shardyard.launchers.ledger import Ledger
from shardyard.launchers.log_markers import rebuild
from shardyard.rundir.jsonl import read_lines, read_steps
from tests.e2e.shardyard import (
    Answer,
    Place,
    assert_time_is_accounted,
    events,
    wait_for,
    wait_for_step,
)
from tests.launchers.local_runs import TWO_NODES, LocalRuns

ENDLESS = ("run.steps=1000000", "checkpoint.every=1000000", "task.eval_every_steps=null")


@pytest.fixture
def runs(place: Place, prepared: Answer) -> Iterator[LocalRuns]:
    assert prepared.code == 0
    runs = LocalRuns(place)
    yield runs
    runs.tidy_up()


def losses(place: Place, run_id: str) -> list[float]:
    return [line["loss"] for line in read_steps(place.run_dir(run_id).metrics)]


def test_two_nodes_compute_what_two_processes_do_and_the_log_holds_all_of_it(
    place: Place, runs: LocalRuns, base: Answer
) -> None:
    assert base.code == 0
    job = runs.launch("pair", *TWO_NODES)
    end = runs.wait(job)
    assert (end.state, end.exit_code, end.reason) == (JobState.SUCCEEDED, 0, "finished"), runs.said(
        job
    )
    assert end.nodes == (("node 0", "ended"), ("node 1", "ended"))
    assert losses(place, "pair") == losses(place, "base")
    (started,) = events(place.run_dir("pair"), "attempt_started")
    assert started["world_size"] == 2
    assert place.state("pair") == "finished"

    run_dir, copy = place.run_dir("pair"), place.run_dir("copy")
    lines = [line.text for line in runs.launcher.logs(job, node=0, follow=False)]
    assert rebuild(lines, copy.path) > 24
    assert list(read_lines(copy.events)) == list(read_lines(run_dir.events))
    assert list(read_lines(copy.metrics)) == list(read_lines(run_dir.metrics))

    again = runs.launch("pair", *TWO_NODES)  # nothing is left to do
    assert runs.wait(again).state is JobState.SUCCEEDED
    assert run_dir.attempts() == [0]
    (word,) = (run_dir.path / "sessions").glob("job-1-*.json")
    end_of_again = {"ended": "pair is finished", "exit_code": 0, "is_over": True}
    assert json.loads(word.read_text()) == end_of_again


def test_a_second_node_0_of_a_run_that_waits_for_its_nodes_writes_nothing(
    place: Place, runs: LocalRuns
) -> None:
    job, run_dir = runs.launch("once", *TWO_NODES), place.run_dir("once")
    wait_for((run_dir.path / "sessions").is_dir)  # node 0 prepares
    os.kill(runs.entry(job, 1), signal.SIGSTOP)  # so node 0 waits, and its agent does not begin
    try:
        Ledger(run_dir.ledger).record(job)
        wait_for(run_dir.resolved(0).is_file)
        options = ("--place", "given", "--node-rank", "0", "--nodes", "2", "--session", "another")
        second = subprocess.run(
            [
                sys.executable, "-m", "shardyard.node", str(run_dir.recipe), "--run-dir",
                str(run_dir.path), *options, "--rendezvous", "127.0.0.1:29998",
            ],
            env=place.environment(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert second.returncode == 2, second.stderr
        assert "run once is being trained already" in second.stderr
        for verb in (("resume", "once"), ("resume", "once", "--on", "local", "--yes")):
            again = place.run(*verb)
            assert again.code == 2 and "Two at once" in again.err, again.err
        assert place.run("train", "tiny.yaml", "run.id=once").code == 2
        assert run_dir.attempts() == [0]
    finally:
        os.kill(runs.entry(job, 1), signal.SIGCONT)
    assert runs.wait(job).state is JobState.SUCCEEDED, runs.said(job)
    assert run_dir.attempts() == [0]


@pytest.mark.slow
def test_a_lost_node_costs_a_session_and_the_run_goes_on(
    place: Place, runs: LocalRuns, base: Answer
) -> None:
    assert base.code == 0
    run_dir = place.run_dir("bereft-node")
    job = runs.launch("bereft-node", *TWO_NODES)
    wait_for(lambda: bool(events(run_dir, "checkpoint_durable")))
    runs.kill_node(job, 1)
    end = runs.wait(job)
    assert (end.state, end.exit_code) == (JobState.SUCCEEDED, 0), runs.said(job)
    assert run_dir.attempts() == [0, 1]
    (loaded,) = [event for event in events(run_dir, "checkpoint_loaded") if event["attempt"] == 1]
    assert loaded["step"] >= 8
    assert losses(place, "bereft-node") == losses(place, "base")
    assert_time_is_accounted(run_dir)


@pytest.mark.slow
def test_a_node_whose_program_alone_is_killed_is_lost_and_an_elastic_run_goes_on(
    place: Place, runs: LocalRuns
) -> None:
    run_dir = place.run_dir("headless")
    job = runs.launch("headless", *TWO_NODES, "elastic.min_nodes=1", *ENDLESS)
    wait_for_step(run_dir, 2)
    runs.kill_program(job, 1)
    wait_for(lambda: bool(events(run_dir, "resized")))
    wait_for_step(run_dir, len(losses(place, "headless")) + 1)
    runs.launcher.cancel(job)
    end = runs.wait(job)
    assert (end.state, end.exit_code) == (JobState.DRAINED, 143), runs.said(job)
    assert end.nodes == (("node 0", "exit code 143"), ("node 1", "killed by SIGKILL"))
    assert [event["world_size"] for event in events(run_dir, "rendezvous")] == [2, 1]
    (lost,) = events(run_dir, "node_lost")
    assert lost["ranks"] in ([0], [1]) and lost["cause"]


def test_the_node_that_serves_the_others_is_lost_and_the_same_attempt_goes_on(
    place: Place, runs: LocalRuns
) -> None:
    run_dir = place.run_dir("beheaded")
    job = runs.launch("beheaded", *TWO_NODES, "elastic.min_nodes=1", *ENDLESS, "checkpoint.every=2")
    wait_for(lambda: bool(events(run_dir, "checkpoint_durable")))
    runs.kill_node(job, 0)
    wait_for(lambda: bool(events(run_dir, "resized")))
    wait_for_step(run_dir, len(losses(place, "beheaded")) + 1)
    runs.launcher.cancel(job)
    end = runs.wait(job)
    assert (end.state, end.exit_code) == (JobState.DRAINED, 143), runs.said(job)
    assert end.nodes == (("node 0", "killed by SIGKILL"), ("node 1", "exit code 143"))
    assert run_dir.attempts() == [0]
    assert [event["world_size"] for event in events(run_dir, "rendezvous")] == [2, 1]
    (lost,), (moved,) = events(run_dir, "node_lost"), events(run_dir, "store_moved")
    assert (lost["node_rank"], moved["node_rank"]) == (0, 1)
    steps = list(read_steps(run_dir.metrics))
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert len({line["samples"] / line["step"] for line in steps}) == 1
    assert run_dir.report_html.is_file()  # node 1 wrote it in node 0's place


@pytest.mark.slow
def test_a_run_of_one_node_whose_program_is_killed_begins_a_new_session(
    place: Place, runs: LocalRuns
) -> None:
    run_dir = place.run_dir("again")
    job = runs.launch("again", "cluster.nodes=1", "cluster.devices=1")
    wait_for(lambda: bool(events(run_dir, "checkpoint_durable")))
    runs.kill_program(job, 0)
    end = runs.wait(job)
    assert (end.state, end.exit_code) == (JobState.SUCCEEDED, 0), runs.said(job)
    assert run_dir.attempts() == [0, 1]
    assert events(run_dir, "checkpoint_loaded")[-1]["step"] >= 8


def test_a_cancel_drains_however_often_it_comes_and_another_job_goes_on(
    place: Place, runs: LocalRuns
) -> None:
    run_dir = place.run_dir("stopped")
    job = runs.launch("stopped", *TWO_NODES, *ENDLESS)
    wait_for_step(run_dir, 2)
    assert runs.launcher.status(job).state is JobState.RUNNING
    runs.launcher.cancel(job)
    runs.launcher.cancel(job)
    end = runs.wait(job)
    runs.launcher.cancel(job)  # nothing left to cancel
    assert (end.state, end.exit_code) == (JobState.DRAINED, 143), runs.said(job)
    done = len(losses(place, "stopped"))
    assert run_dir.latest.read_text().strip() == f"step-{done:08d}"
    assert "is durable" in end.reason and end.reason.endswith("; it was cancelled")

    again = runs.launch("stopped", *TWO_NODES, *ENDLESS, f"run.steps={done + 2}")
    assert again.id != job.id
    assert runs.wait(again).exit_code == 0, runs.said(again)
    assert len(losses(place, "stopped")) == done + 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_node_drains_on_the_signals_of_schedulers(
    place: Place, runs: LocalRuns, number: signal.Signals
) -> None:
    run_id = f"asked-{number.name.lower()}"
    job = runs.launch(run_id, *TWO_NODES, *ENDLESS)
    wait_for_step(place.run_dir(run_id), 1)
    os.kill(runs.entry(job, 1), number)
    end = runs.wait(job)
    assert (end.state, end.exit_code) == (JobState.DRAINED, 143), runs.said(job)
    code = 130 if number is signal.SIGINT else 143
    assert end.nodes == (("node 0", "exit code 143"), ("node 1", f"exit code {code}"))
    assert place.state(run_id) == "drained"


@pytest.mark.slow
def test_a_node_is_added_and_one_is_lost_and_the_run_goes_on(place: Place, runs: LocalRuns) -> None:
    run_dir = place.run_dir("flexible")
    words = ("cluster.nodes=1", "cluster.devices=1", "elastic.max_nodes=2")
    job = runs.launch("flexible", *words, *ENDLESS)
    wait_for_step(run_dir, 1)
    with runs.added_node(job, 1) as node:
        wait_for(lambda: bool(events(run_dir, "resized")))
        before = len(losses(place, "flexible"))
        wait_for_step(run_dir, before + 2)
        runs.kill(node)
    wait_for(lambda: len(events(run_dir, "resized")) == 2)
    wait_for_step(run_dir, len(losses(place, "flexible")) + 1)
    runs.launcher.cancel(job)
    assert runs.wait(job).exit_code == 143, runs.said(job)
    sizes = [event["world_size"] for event in events(run_dir, "rendezvous")]
    assert sizes == [1, 2, 1]
    assert run_dir.attempts() == [0]


@pytest.mark.slow
def test_a_killed_supervisor_lets_the_nodes_drain(place: Place, runs: LocalRuns) -> None:
    run_dir = place.run_dir("orphaned")
    job = runs.launch("orphaned", *TWO_NODES, *ENDLESS)
    wait_for_step(run_dir, 1)
    os.kill(int(job.id.partition("-")[0]), signal.SIGKILL)
    end = runs.wait(job)
    assert end.state is JobState.FAILED and "supervising process was killed" in end.reason
    assert "`shardyard resume" in end.reason
    wait_for(lambda: place.state("orphaned") == "drained")


def test_what_node_0_finds_wrong_is_told_to_the_others(place: Place, runs: LocalRuns) -> None:
    job = runs.launch("wrong", *TWO_NODES, "data.source=/nowhere/at/all")
    end = runs.wait(job)
    assert (end.state, end.exit_code) == (JobState.FAILED, 2), runs.said(job)
    lines = [line.text for line in runs.launcher.logs(job, node=1, follow=False)]
    assert any(line.startswith("node 0: ") and "/nowhere/at/all" in line for line in lines)
    assert place.run_dir("wrong").attempts() == []
