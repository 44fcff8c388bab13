"""`shardyard profile` of a run that trains: its table, its traces, and a kill in the middle."""

import gzip
import json
import os
import signal

from shardyard.rundir.profiles import take_request
from tests.e2e.shardyard import Answer, Place, events, wait_for, wait_for_step


def test_a_run_that_trains_is_profiled_and_goes_on_also_after_a_kill_in_the_middle(
    place: Place, base: Answer
) -> None:
    assert base.code == 0
    run_dir = place.run_dir("seen")
    with place.start("train", "tiny.yaml", "run.id=seen", "run.steps=1000000") as running:
        wait_for_step(run_dir, 5)
        answer = place.run("profile", "seen", "--steps", "2", "--json")
        assert answer.code == 0, answer.err
        told = answer.json
        assert told["ranks"] == [0, 1]
        assert told["steps"] == 2
        for rank in (0, 1):
            with gzip.open(run_dir.profile(told["step"]) / f"rank-{rank}.json.gz") as trace:
                assert json.load(trace)["traceEvents"]

        assert place.run("profile", "seen", "--steps", "20", "--detach").code == 0
        wait_for(lambda: any(each.suffix == ".tmp" for each in run_dir.profiles.iterdir()))
        os.kill(events(run_dir, "rendezvous")[-1]["workers"][1]["pid"], signal.SIGKILL)
        wait_for(lambda: bool(events(run_dir, "profile_abandoned")))
        newest = events(run_dir, "first_step")[-1]["step"]
        wait_for_step(run_dir, newest + 2)
        running.send(signal.SIGTERM)
        assert running.wait().code == 143
    reason = events(run_dir, "profile_abandoned")[0]["reason"]
    assert reason == "processes were lost in the middle of it; its part was removed"
    assert take_request(run_dir) is None
    assert list(run_dir.profiles.iterdir()) == [run_dir.profile(told["step"])]
    assert events(run_dir, "worker_hung") == []
    assert "## Where a step's time went" in run_dir.report_markdown.read_text()
    refused = place.run("profile", "seen")
    assert refused.code == 2
    assert "does not train now (drained)" in refused.err
