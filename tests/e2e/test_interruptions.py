"""Signals, kills and second thoughts while a run trains: nothing is lost, nothing is left."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_steps
from tests.e2e.shardyard import (
    Answer,
    Place,
    Running,
    assert_time_is_accounted,
    events,
    processes_left,
    wait_for,
    wait_for_end,
    wait_for_step,
)

ENDLESS = "run.steps=1000000"


def losses(place: Place, run_id: str) -> list[float]:
    return [line["loss"] for line in read_steps(place.run_dir(run_id).metrics)]


def test_ctrl_c_then_other_processes_and_another_strategy(place: Place, base: Answer) -> None:
    assert base.code == 0
    with place.start("train", "tiny.yaml", "run.id=changing") as running:
        wait_for_step(place.run_dir("changing"), 1)
        running.send(signal.SIGINT)
        stopped = running.wait()
    assert stopped.code == 130
    assert "finishing the step and saving; press Ctrl-C again to stop at once" in stopped.err
    saved = place.run_dir("changing").latest.read_text().strip()
    assert stopped.err.splitlines()[-1] == (
        f"drained; {saved} is durable. `shardyard resume changing` continues from there."
    )
    done = losses(place, "changing")
    assert saved == f"step-{len(done):08d}" and len(done) < 24
    assert place.state("changing") == "drained"

    resumed = place.run(
        "resume", "changing", "cluster.devices=3", "parallel.strategy=NO_SHARD", "--json"
    )
    assert resumed.code == 0, resumed.err
    assert (resumed.json["state"], resumed.json["world_size"]) == ("finished", 3)
    assert f"continuing from step {len(done)}" in resumed.err
    assert losses(place, "changing") == pytest.approx(losses(place, "base"), abs=1e-4)


def test_a_killed_rank_costs_a_restart_and_nothing_else(place: Place, base: Answer) -> None:
    assert base.code == 0
    run_dir = place.run_dir("bereft")
    with place.start("train", "tiny.yaml", "run.id=bereft") as running:
        wait_for(lambda: bool(events(run_dir, "checkpoint_durable")))
        os.kill(events(run_dir, "attempt_started")[0]["workers"][1]["pid"], signal.SIGKILL)
        finished = running.wait()
    assert finished.code == 0, finished.err
    assert "lost rank 1" in finished.err and "killed by SIGKILL" in finished.err
    assert "restarted with 2 processes" in finished.err
    # the same layout computes the same bits
    assert losses(place, "bereft") == losses(place, "base")
    assert_time_is_accounted(run_dir)


def test_a_killed_rank_goes_on_from_memory_without_a_checkpoint(place: Place, base: Answer) -> None:
    assert base.code == 0
    run_dir = place.run_dir("kept")
    words = "run.id=kept", "checkpoint.every=1000", "elastic.snapshot_every=3"
    with place.start("train", "tiny.yaml", *words) as running:
        wait_for_step(run_dir, 8)
        os.kill(events(run_dir, "attempt_started")[0]["workers"][1]["pid"], signal.SIGKILL)
        finished = running.wait()
    assert finished.code == 0, finished.err
    (restored,) = events(run_dir, "snapshot_restored")
    assert restored["source"] == "agent" and not events(run_dir, "checkpoint_loaded")
    begun = max(line["step"] for line in read_steps(run_dir.metrics) if not line["generation"])
    assert begun - restored["step"] <= 3 + 1
    assert f"continuing from step {restored['step']}, whose state was in memory" in finished.err
    assert losses(place, "kept") == losses(place, "base")


def test_a_run_that_trains_is_looked_at_but_not_touched(place: Place, prepared: Answer) -> None:
    assert prepared.code == 0
    run_dir = place.run_dir("long")
    words = "run.id=long", ENDLESS, "cluster.devices=1", "checkpoint.every=1000000"
    with place.start("train", "tiny.yaml", "task.eval_every_steps=null", *words) as running:
        wait_for_step(run_dir, 1)
        second = place.run("resume", "long")
        assert (second.code, second.out) == (2, "")
        assert "run long is being trained already" in second.err and "resume again" in second.err
        assert place.run("train", "tiny.yaml", "run.id=long").code == 2
        assert place.state("long") == "running"
        report = place.run("report", "long")
        assert report.code == 0 and report.err.startswith("Running: ")
        export = place.run("export", "long", "--to", "nowhere")
        assert export.code == 2 and "has no checkpoint yet" in export.err
        assert not (place.folder / "nowhere").exists()

        running.send(signal.SIGTERM)
        stopped = running.wait()
    assert stopped.code == 143
    assert "draining after SIGTERM" in stopped.err
    assert "is durable. `shardyard resume long` continues from there." in stopped.err
    assert place.state("long") == "drained"
    shutil.rmtree(run_dir.path)


@pytest.mark.slow
def test_a_killed_command_line_drains_and_a_killed_agent_loses_no_checkpoint(
    place: Place, prepared: Answer
) -> None:
    assert prepared.code == 0
    words = "run.id=endless", ENDLESS, "cluster.devices=1", "checkpoint.every=1000000"
    run_dir = place.run_dir("endless")
    with place.start("train", "tiny.yaml", "task.eval_every_steps=null", *words) as running:
        wait_for_step(run_dir, 1)
        running.process.kill()
        running.process.wait()
        wait_for_end(run_dir)
    ended = events(run_dir, "attempt_ended")[-1]
    assert (ended["outcome"], ended["exit_code"]) == ("drained", 143)
    saved = run_dir.latest.read_text()
    assert saved.strip() == f"step-{len(losses(place, 'endless')):08d}"

    with place.start("resume", "endless", "--json") as running:
        wait_for_step(run_dir, len(losses(place, "endless")) + 1)
        os.kill(_agent(running), signal.SIGKILL)
        answer = running.wait()
    assert (answer.code, answer.json["outcome"]) == (1, "failed")
    assert "ended with SIGKILL and gave no answer" in answer.err
    step = int(saved.strip().removeprefix("step-"))
    assert f"`shardyard resume endless` continues from the checkpoint of step {step}." in answer.err
    assert (place.state("endless"), run_dir.latest.read_text()) == ("lost", saved)
    assert_time_is_accounted(run_dir)
    shutil.rmtree(run_dir.path)


def _agent(running: Running) -> int:
    """The one child of a command line that trains."""
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    (pid,) = children.read_text().split()
    return int(pid)


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_leaves_a_run_that_begins_again(
    place: Place, prepared: Answer
) -> None:
    assert prepared.code == 0
    run_dir = place.run_dir("early")
    with place.start("train", "tiny.yaml", "run.id=early", "run.steps=1") as running:
        wait_for(lambda: run_dir.lease.is_file())
        running.send(signal.SIGINT)
        stopped = running.wait()
    assert stopped.code == 130
    last = stopped.err.splitlines()[-1]
    assert last == "interrupted" or last.endswith(
        "`shardyard resume early` begins again at step 0."
    )
    there = place.run("resume", "early", "--dry-run")
    assert there.out == "early has no checkpoint yet: it would begin at step 0 of 1\n"


@pytest.mark.slow
@pytest.mark.skipif(os.getloadavg()[0] > 1, reason="measures time, and others use this machine")
def test_a_drain_leaves_within_five_seconds_report_and_all(place: Place, prepared: Answer) -> None:
    assert prepared.code == 0
    run_dir = place.run_dir("hasty")
    with place.start("train", "tiny.yaml", "run.id=hasty", ENDLESS) as running:
        wait_for_step(run_dir, 1)
        asked_s = time.monotonic()
        running.send(signal.SIGTERM)
        wait_for_end(run_dir)
        assert not run_dir.report_html.exists()  # the lease is free before it is begun
        assert running.wait().code == 143
        wait_for(lambda: not processes_left())
        assert time.monotonic() - asked_s < 5.0
    assert run_dir.report_html.is_file()
