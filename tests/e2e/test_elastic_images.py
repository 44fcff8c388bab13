"""The small twin of S2: a network for images trains on, while a node joins and another is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_steps
from tests.e2e.shardyard import Place, events, wait_for, wait_for_step
from tests.launchers.local_runs import LocalRuns

RECIPE = Path(__file__).parents[2] / "examples" / "sources" / "s2-small.yaml"
BATCH = 16
"""Of each device in a step; the learning rate is for as many."""


@pytest.fixture
def runs(place: Place) -> Iterator[LocalRuns]:
    runs = LocalRuns(place, recipe=str(RECIPE))
    yield runs
    runs.tidy_up()


def test_a_node_joins_and_is_lost_and_batch_and_rate_follow(place: Place, runs: LocalRuns) -> None:
    run_dir = place.run_dir("images")
    job = runs.launch(
        "images", "run.epochs=1000", "elastic.max_nodes=2", "optim.warmup_epochs=0",
        "optim.schedule=constant", "task.eval_every_epochs=null",
        "checkpoint.every=1",
    )  # fmt: skip
    wait_for_step(run_dir, 1)
    with runs.added_node(job, 1) as node:
        wait_for(lambda: bool(events(run_dir, "resized")))
        wait_for_step(run_dir, len(list(read_steps(run_dir.metrics))) + 3)
        runs.kill(node)
    wait_for(lambda: len(events(run_dir, "resized")) == 2)
    wait_for_step(run_dir, len(list(read_steps(run_dir.metrics))) + 1)
    runs.launcher.cancel(job)
    assert runs.wait(job).exit_code == 143, runs.said(job)

    assert [each["world_size"] for each in events(run_dir, "rendezvous")] == [1, 2, 1]
    assert run_dir.attempts() == [0]
    lines = list(read_steps(run_dir.metrics))
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert {line["world_size"] for line in lines} == {1, 2}
    seen = [line["samples"] for line in lines]
    for line, before in zip(lines, [0, *seen[:-1]], strict=True):
        assert line["samples"] - before == BATCH * line["world_size"]
        assert line["lr"] == pytest.approx(0.02 * line["world_size"])


def test_as_shipped_it_goes_on_near_the_step_at_which_a_node_is_lost(
    place: Place, runs: LocalRuns
) -> None:
    run_dir = place.run_dir("shipped")
    two = ("cluster.nodes=2", "elastic.min_nodes=1", "elastic.max_nodes=4")
    job = runs.launch("shipped", *two, "run.epochs=1000")
    wait_for_step(run_dir, 12)
    runs.kill_node(job, 1)
    wait_for(lambda: bool(events(run_dir, "resized")))
    wait_for(lambda: bool(events(run_dir, "snapshot_restored")))
    wait_for_step(run_dir, 13)
    runs.launcher.cancel(job)
    assert runs.wait(job).exit_code == 143, runs.said(job)

    (restored,) = events(run_dir, "snapshot_restored")
    assert restored["step"] >= 10
    assert max(each["step"] for each in events(run_dir, "checkpoint_durable")) >= 10
    steps = [line["step"] for line in read_steps(run_dir.metrics)]
    assert steps == list(range(1, len(steps) + 1))
