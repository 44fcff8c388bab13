"""When a snapshot is due: as asked, or by what it costs and how often the run fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardyard.checkpoint.snapshot_interval import FIRST_EVERY, Interval, best_every
from shardyard.rundir.layout import RunDir
from shardyard.train.mtbf import measured_mtbf_s

DAY_S = 86_400.0


def test_a_number_is_kept_to() -> None:
    interval = Interval(3, first_step=4)
    assert [step for step in range(5, 13) if interval.is_due(step)] == [6, 9, 12]


def test_the_best_is_daly_s_and_no_closer_than_a_slot_is_sealed() -> None:
    given = {"step_s": 0.1, "blocked_s": 0.02, "mtbf_s": DAY_S}
    # Young: sqrt(2 x 0.02 s x 86,400 s) = 58.8 s
    assert best_every(**given, sealed_s=0.05) == pytest.approx(588, abs=1)
    assert best_every(**given, sealed_s=100.0) == 1000
    assert best_every(step_s=10.0, blocked_s=1e-4, sealed_s=0.0, mtbf_s=60.0) == 1


def _every_after(group: dist.ProcessGroup, costs_s: list[float], told: list[Any]) -> list[int]:
    """Steps between snapshots after each of them, each of which cost so much."""
    interval = Interval(
        "auto", mtbf_s=DAY_S, group=group, report=lambda *_, **fields: told.append(fields)
    )
    found: list[int] = []
    for step in range(1, 10**6):
        if not interval.is_due(step):
            continue
        interval._steps_s.clear()
        interval._steps_s.append(0.1)
        blocked_s = costs_s[len(found)]
        interval.taken(step, blocked_s=[blocked_s], sealed_s=[blocked_s])
        found.append(interval.every)
        if len(found) == len(costs_s):
            return found
    raise AssertionError


def test_it_moves_with_what_is_measured_at_the_second_fourth_and_eighth(
    alone: dist.ProcessGroup,
) -> None:
    told: list[Any] = []
    # the cost doubles: the interval grows by 1.41 only, which is not enough to move it; then by 2
    costs_s = [0.02, 0.02, 0.04, 0.04, 0.08, 0.08, 0.08, 0.08]
    found = _every_after(alone, costs_s, told)
    assert found[:1] == [FIRST_EVERY]
    assert found[1:7] == [588] * 6
    assert found[7] == pytest.approx(2 * 588, rel=0.01)
    assert [each["every"] for each in told] == [588, found[7]]
    assert told[0]["blocked_s"] == 0.02 and told[0]["mtbf_s"] == DAY_S


def test_a_save_is_a_snapshot_too() -> None:
    interval = Interval("auto", mtbf_s=DAY_S)
    interval.saved(7)
    assert not interval.is_due(7 + FIRST_EVERY - 1) and interval.is_due(7 + FIRST_EVERY)


def test_failures_that_the_run_has_met_correct_what_its_plan_expects(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert measured_mtbf_s(run_dir, 0) == DAY_S  # no plan that says anything
    plan = run_dir.plan(0)
    plan.parent.mkdir(parents=True)
    plan.write_text(json.dumps({"failures": {"mtbf": {"seconds": 4000.0}}}))
    assert measured_mtbf_s(run_dir, 0) == 4000.0
    events = [
        {"t": 100.0, "kind": "attempt_started", "attempt": 0, "generation": 0},
        {"t": 600.0, "kind": "worker_lost", "attempt": 0, "generation": 0},
        {"t": 600.1, "kind": "worker_lost", "attempt": 0, "generation": 0},  # the same failure
        {"t": 1100.0, "kind": "node_lost", "attempt": 0, "generation": 1},
        {"t": 90_000.0, "kind": "attempt_started", "attempt": 1, "generation": 0},
        {"t": 91_000.0, "kind": "worker_lost", "attempt": 1, "generation": 0},
    ]
    run_dir.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert measured_mtbf_s(run_dir, 0) == (4000 + 1000 + 1000) / (1 + 3)
