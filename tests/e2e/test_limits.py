"""A launched run that reaches a limit stops by itself, saved, and says why; nobody watches."""

import os
import signal
from collections.abc import Iterator

import pytest

from shardyard.launchers.base import JobState
from shardyard.rundir.state import read_spending
from tests.e2e.shardyard import Answer, Place, events, wait_for_step
from tests.launchers.local_runs import LocalRuns

ENDLESS = ("run.steps=1000000", "checkpoint.every=1000000", "task.eval_every_steps=null")
RENTED = ("cluster.instance=p5.48xlarge", "cluster.device=cpu", "cluster.devices=2")


@pytest.fixture
def runs(place: Place, prepared: Answer) -> Iterator[LocalRuns]:
    assert prepared.code == 0
    runs = LocalRuns(place)
    yield runs
    runs.tidy_up()


@pytest.mark.slow
@pytest.mark.usefixtures("runs")  # tidied up after
def test_a_run_stops_when_it_has_cost_what_it_may_and_goes_on_when_it_may_cost_more(
    place: Place,
) -> None:
    run_dir = place.run_dir("dear")
    words = ("launch", "tiny.yaml", "--on", "local", "--yes", "run.id=dear", *RENTED, *ENDLESS)
    done = place.run(*words, "--max-usd", "1", "--force", "--follow")
    assert done.code == 143, done.err
    (stopping,) = events(run_dir, "stopping")
    assert stopping["reason"].startswith("it has cost $1.")
    assert "launch.max_usd=1" in stopping["reason"] and stopping["reason"] in done.err + done.out
    assert place.state("dear") == "drained"
    (step,) = run_dir.checkpoint_steps()

    spending = read_spending(run_dir)
    assert spending is not None and spending.usd >= 1.0
    shown = place.run("status", "dear")
    assert f"drained: {stopping['reason']}" in shown.out
    assert f"spent ${spending.usd:.2f} of launch.max_usd=1" in " ".join(shown.out.split())

    refused = place.run("resume", "dear", "--yes", "--force")
    assert refused.code == 2
    assert "Raise it above" in refused.err and "shardyard resume dear" in refused.err
    more = f"launch.max_usd={spending.usd + 100}"
    assert place.run("resume", "dear", more, f"run.steps={step + 2}", "--yes").code == 0
    assert place.run("watch", "dear").code == 0
    assert len(events(run_dir, "stopping")) == 1
    after = read_spending(run_dir)
    assert after is not None and after.usd > spending.usd


@pytest.mark.slow
def test_a_run_that_makes_no_step_any_more_is_stopped_where_that_is_asked(
    place: Place, runs: LocalRuns
) -> None:
    run_dir = place.run_dir("idle")
    idle = (
        "launch.stop_idle_after=1.5min",
        "elastic.drain_timeout_s=3",
        # A hang that is detected restarts the workers, and the run makes steps again.
        "elastic.hang_steps=null",
    )
    job = runs.launch("idle", *ENDLESS, *idle)
    wait_for_step(run_dir, 2)
    (started,) = events(run_dir, "attempt_started")
    os.kill(started["workers"][1]["pid"], signal.SIGSTOP)  # the other one waits for it
    end = runs.wait(job)
    assert (end.state, end.exit_code) == (JobState.DRAINED, 143), runs.said(job)
    (stopping,) = events(run_dir, "stopping")
    assert "launch.stop_idle_after=1 min 30 s" in stopping["reason"]
