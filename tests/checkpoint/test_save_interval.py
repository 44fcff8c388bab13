"""When a snapshot or a checkpoint is due: as asked, or by its cost and how often the run fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardyard.checkpoint.save_interval import Interval
from shardyard.config.formulas import best_every
from shardyard.rundir.jsonl import LOSSES, LOST_WITH_MEMORY, LOST_WITHOUT_MEMORY, EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.train.intervals import Kind, first_every, measured_mtbf_s

DAY_S = 86_400.0


def _due(interval: Interval, steps: range) -> list[int]:
    """Steps of these at which one is due, and taken."""
    found = []
    for step in steps:
        if interval.is_due(step):
            interval.taken(step)
            found.append(step)
    return found


def test_a_number_is_kept_to() -> None:
    assert _due(Interval(3, first_step=4), range(5, 13)) == [6, 9, 12]


def test_one_that_was_put_off_is_still_due_and_the_next_comes_at_its_own_step() -> None:
    interval = Interval(3)
    assert interval.is_due(3) and interval.is_due(4)  # could not be taken
    interval.taken(4)
    assert _due(interval, range(5, 10)) == [6, 9]


@pytest.mark.parametrize(("every", "newest", "was_due"), [
    (10, 20, False), (10, 19, True), ("auto", 20, False), ("auto", 18, True),
])  # fmt: skip
def test_one_that_a_loss_cut_off_is_known_from_the_newest(
    every: Any, newest: int, was_due: bool
) -> None:
    interval = Interval(every, first_every=10)
    assert interval.was_due(28, latest=newest) == was_due


def test_the_best_is_daly_s_and_no_closer_than_one_comes_to_count() -> None:
    given = {"step_s": 0.1, "blocked_s": 0.02, "mtbf_s": DAY_S}
    # Young: sqrt(2 x 0.02 s x 86,400 s) = 58.8 s
    assert best_every(**given, counts_s=0.05) == pytest.approx(588, abs=1)
    assert best_every(**given, counts_s=100.0) == 1000
    assert best_every(step_s=10.0, blocked_s=1e-4, counts_s=0.0, mtbf_s=60.0) == 1


def _every_after(group: dist.ProcessGroup, costs_s: list[float], told: list[Any]) -> list[int]:
    """Steps between two after each of them, each of which cost so much."""
    interval = Interval(
        "auto", first_every=10, mtbf_s=DAY_S, group=group, report=lambda **told_: told.append(told_)
    )
    found: list[int] = []
    for step in range(1, 10**6):
        if not interval.is_due(step):
            continue
        interval._steps_s.clear()
        interval._steps_s.append(0.1)
        for costs in (interval.blocked_s, interval.counts_s):
            costs.clear()
            costs.append(costs_s[len(found)])
        interval.taken(step)
        interval.learn(step)
        found.append(interval.every)
        if len(found) == len(costs_s):
            return found
    raise AssertionError


def test_it_moves_with_what_is_measured_at_the_first_second_fourth_and_eighth(
    alone: dist.ProcessGroup,
) -> None:
    told: list[Any] = []
    # the cost doubles: the interval grows by 1.41 only, which is not enough to move it; then by 2
    costs_s = [0.02, 0.02, 0.04, 0.04, 0.08, 0.08, 0.08, 0.08]
    found = _every_after(alone, costs_s, told)
    assert found[:7] == [588] * 7
    assert found[7] == pytest.approx(2 * 588, rel=0.01)
    assert [each["every"] for each in told] == [588, found[7]]
    assert told[0]["blocked_s"] == told[0]["counts_s"] == 0.02 and told[0]["mtbf_s"] == DAY_S


def test_before_a_step_was_timed_nothing_is_learned() -> None:
    interval = Interval("auto", first_every=10, mtbf_s=DAY_S)
    interval.learn(1)  # of a save that was made up before the first step
    assert interval.every == 10


def test_auto_counts_from_the_newest_one() -> None:
    interval = Interval("auto", first_every=10, mtbf_s=DAY_S)
    interval.taken(7)
    assert not interval.is_due(16) and interval.is_due(17)


def test_auto_begins_with_what_the_run_came_to_or_with_few_steps(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert first_every("snapshot_interval", run_dir) == 10
    assert first_every("checkpoint_interval", run_dir) == 10
    events = EventWriter(run_dir.events, attempt=0, generation=0)
    for every in (90, 120):
        events.write("checkpoint_interval", step=5, every=every)
    assert first_every("checkpoint_interval", run_dir) == 120
    assert first_every("snapshot_interval", run_dir) == 10


def _failing(run_dir: RunDir) -> None:
    """Trained for 2,000 s and lost a process three times, a node once."""
    events = [
        {"t": 100.0, "kind": "attempt_started", "attempt": 0, "generation": 0},
        {"t": 600.0, "kind": "worker_lost", "attempt": 0, "generation": 0},
        {"t": 600.1, "kind": "worker_lost", "attempt": 0, "generation": 0},  # the same failure
        {"t": 1100.0, "kind": "node_lost", "attempt": 0, "generation": 1},
        {"t": 90_000.0, "kind": "attempt_started", "attempt": 1, "generation": 0},
        {"t": 91_000.0, "kind": "worker_hung", "attempt": 1, "generation": 0},
    ]
    run_dir.events.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize(
    ("kind", "losses", "expected_s", "failures"),
    [
        ("checkpoint_interval", LOSSES, 4000, 3),
        ("checkpoint_interval", LOST_WITH_MEMORY, 4000, 1),  # snapshots outlive the others
        ("snapshot_interval", LOST_WITHOUT_MEMORY, 9000, 2),
    ],
)
def test_failures_that_the_run_has_met_correct_what_its_plan_expects(
    tmp_path: Path, kind: Kind, losses: tuple[str, ...], expected_s: float, failures: int
) -> None:
    run_dir = RunDir(tmp_path)
    assert measured_mtbf_s(kind, run_dir, 0, losses) == DAY_S  # no plan that says anything
    run_dir.plan(0).parent.mkdir(parents=True)
    outlook = {"checkpoint_mtbf_s": 4000.0, "snapshot_mtbf_s": 9000.0}
    run_dir.plan(0).write_text(json.dumps({"failures": outlook}))
    assert measured_mtbf_s(kind, run_dir, 0, losses) == expected_s
    _failing(run_dir)
    assert measured_mtbf_s(kind, run_dir, 0, losses) == (expected_s + 2000) / (1 + failures)
