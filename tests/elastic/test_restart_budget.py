"""When a restart is worth it: not after the same failure twice, nor too often within an hour."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.elastic.hang_watch import Activity, Hang
from shardyard.elastic.restart_budget import (
    Failure,
    RestartBudget,
    earlier_failures,
    last_finished_step,
)
from shardyard.elastic.worker_failures import Loss, LostNode
from shardyard.rundir.jsonl import EventWriter, LineWriter
from shardyard.rundir.layout import RunDir

BUG = Loss(
    rank=1, node="n1", pid=7, exit_code=1, signal=None, cause="IndexError: 7 of 3", step=30,
    durable_step=20,
)  # fmt: skip
KILL = replace(BUG, exit_code=None, signal="SIGKILL", cause="killed by SIGKILL")
HANG = Hang(
    rank=1, node="n1", pid=7, step=31, phase="step", collective="all_reduce",
    doing=Activity.SLEEPING,
    reason="it sleeps or waits in f (a.py:1)", quiet_s=3.6,
)  # fmt: skip
NODE = LostNode(node="n1", node_rank=1, group_rank=1, ranks=(1,), cause="silent")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    clock = Clock()
    monkeypatch.setattr("shardyard.elastic.restart_budget.time.monotonic", lambda: clock.now_s)
    return clock


class Clock:
    now_s = 1000.0


def is_worth(restarts: RestartBudget, loss: Loss | LostNode, *, hangs: Sequence[Hang] = ()) -> bool:
    step = loss.step if isinstance(loss, Loss) else BUG.step
    return restarts.should_restart(loss, finished_step=step, hangs=hangs)


def test_the_same_failure_twice_is_not_worth_a_restart() -> None:
    restarts = RestartBudget(limit=9)
    assert is_worth(restarts, BUG)
    assert is_worth(restarts, KILL)  # something else in between changes nothing
    again = replace(BUG, rank=0, node="n0", pid=8, cause="IndexError: 9 of 3")
    assert not is_worth(restarts, again) and restarts.is_crash_loop


def test_a_checkpoint_of_the_steps_before_is_no_progress() -> None:
    restarts = RestartBudget(limit=9)
    assert is_worth(restarts, BUG) and not is_worth(restarts, replace(BUG, durable_step=30))


@pytest.mark.parametrize("other", [{"step": 31}, {"cause": "KeyError: 7 of 3"}])
def test_another_step_or_cause_is_another_failure(other: dict[str, Any]) -> None:
    restarts = RestartBudget(limit=9)
    assert is_worth(restarts, BUG) and is_worth(restarts, replace(BUG, **other))


@pytest.mark.parametrize("step_between", [29, 30, 31])
def test_a_failure_that_the_run_came_beyond_was_bad_luck(step_between: int) -> None:
    restarts = RestartBudget(limit=9)
    assert is_worth(restarts, BUG) and is_worth(restarts, replace(KILL, step=step_between))
    assert is_worth(restarts, BUG) == (step_between > BUG.step)  # back at it, from an older state


@pytest.mark.parametrize(
    ("doing", "is_own"),
    [
        (Activity.SLEEPING, True),
        (Activity.COMPUTING, True),
        (Activity.WAITING, True),
        (Activity.STOPPED, False),
        (Activity.STORAGE, False),
        (Activity.STARVED, False),
    ],
)
def test_the_same_hang_twice_is_not_worth_a_restart(doing: Activity, is_own: bool) -> None:
    restarts, hang = RestartBudget(limit=9), replace(HANG, doing=doing)
    assert is_worth(restarts, KILL, hangs=[hang])
    again = replace(hang, pid=9, reason="it computes in g", quiet_s=4.0)
    assert is_worth(restarts, KILL, hangs=[again]) != is_own


@pytest.mark.parametrize("other", [{"rank": 2}, {"step": 32}, {"phase": "save"}])
def test_another_rank_step_or_phase_is_another_hang(other: dict[str, Any]) -> None:
    restarts = RestartBudget(limit=9)
    assert is_worth(restarts, KILL, hangs=[HANG])
    assert is_worth(restarts, KILL, hangs=[replace(HANG, **other)])


@pytest.mark.parametrize("loss", [KILL, replace(KILL, signal="SIGTERM"), NODE])
def test_what_comes_from_outside_is_bad_luck_each_time(loss: Loss | LostNode) -> None:
    restarts = RestartBudget(limit=9)
    assert all(is_worth(restarts, loss) for _ in range(3))


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT", "SIGBUS"])
def test_a_crash_in_native_code_is_a_failure_of_its_own(signal: str) -> None:
    restarts = RestartBudget(limit=9)
    crash = replace(KILL, signal=signal)
    assert is_worth(restarts, crash) and not is_worth(restarts, crash)


def test_a_kill_for_want_of_memory_is_a_failure_of_its_own() -> None:
    killed = replace(KILL, is_out_of_memory=True, cause="out of host memory")
    assert (
        Failure.of(killed)
        == Failure.from_event({"kind": "worker_lost", **killed.event()})
        is not None
    )


def test_the_budget_is_of_an_hour(clock: Clock) -> None:
    restarts = RestartBudget(limit=2)
    for _ in range(2):
        assert is_worth(restarts, KILL)
        restarts.record_restart(durable_step=1)
        clock.now_s += 1000.0
    assert not is_worth(restarts, KILL) and not restarts.is_crash_loop
    assert restarts.used() == 2
    clock.now_s += 1601.0  # the first is more than an hour ago
    assert is_worth(restarts, KILL) and restarts.used() == 1


def test_restarts_without_a_new_checkpoint_wait_longer_each_time() -> None:
    restarts = RestartBudget(limit=99)
    assert [restarts.record_restart(durable_step=5) for _ in range(8)] == [
        0,
        1,
        2,
        4,
        8,
        16,
        30,
        30,
    ]
    assert restarts.record_restart(durable_step=6) == 0


def test_failures_of_earlier_starts_count_until_somebody_could_mend_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first = EventWriter(run.events, attempt=0, generation=0)
    first.write("worker_lost", **BUG.event())
    first.write("attempt_ended", exit_code=75)  # of a lost node: the scheduler starts it again
    second = EventWriter(run.events, attempt=1, generation=0)
    second.write("worker_lost", **KILL.event())
    second.write("worker_lost", rank=0, cause="of a version that told no step")
    second.write("worker_hung", **HANG.event(), finished_step=30)
    second.write("worker_hung", rank=0, step=9, reason="of a version that told less")
    found = earlier_failures(run, 2)
    assert found == {Failure("IndexError: # of #", 30), Failure("rank 1 hung in step 31, step", 30)}
    assert not is_worth(RestartBudget(limit=9, earlier=set(found)), BUG)
    assert not is_worth(RestartBudget(limit=9, earlier=found), KILL, hangs=[HANG])
    second.write("attempt_ended", exit_code=1)  # only people go on after it
    assert earlier_failures(run, 2) == set()


@pytest.mark.parametrize("kind", ["checkpoint_durable", "snapshot_restored", "worker_lost"])
@pytest.mark.parametrize("step", [30, 31])
def test_failures_that_the_run_came_beyond_are_forgotten(
    tmp_path: Path, kind: str, step: int
) -> None:
    run = RunDir(tmp_path)
    events = EventWriter(run.events, attempt=0, generation=0)
    events.write("worker_lost", **BUG.event())
    events.write(kind, step=step, signal="SIGKILL")
    assert bool(earlier_failures(run, 1)) == (step == BUG.step)


def test_the_last_finished_step_is_of_the_generation_or_of_what_it_went_on_from(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path)
    assert last_finished_step(run, 0, 0) == 0
    run.checkpoint(20).mkdir(parents=True)
    run.latest.write_text("step-00000020\n")
    lines = LineWriter(run.metrics)
    lines.append({"step": 34, "attempt": 1, "generation": 0})
    lines.append({"step": 34, "eval": {"loss": 1.0}})
    assert last_finished_step(run, 1, 0) == 34
    assert last_finished_step(run, 1, 1) == 20
    EventWriter(run.events, attempt=1, generation=1).write("snapshot_restored", step=30)
    assert last_finished_step(run, 1, 1) == 30
    assert last_finished_step(run, 1, 2) == 20  # it failed before it had read a state
