"""What a run costs is counted over all attempts, and a run without steps is noticed."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardyard.config.resolved import Resolved
from shardyard.config.schema.launch import Launch
from shardyard.config.schema.recipe import Recipe
from shardyard.control.follow import describe_event
from shardyard.control.resume import check_cost_limit
from shardyard.errors import RequestError
from shardyard.node.budget import AttemptLimits, LimitMonitor, check_not_stopped, has_stopped_itself
from shardyard.node.failover import terms_from_now
from shardyard.rundir.jsonl import LineWriter, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import read_spending, read_state


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def limits(
    run: RunDir, *, attempt: int = 0, usd_per_hour: float | None = 360.0, **launch: object
) -> LimitMonitor:
    """Of an attempt whose node began at 0 and whose workers start at 100 of the clock."""
    recipe = Recipe(launch=Launch.model_validate(launch))
    terms = AttemptLimits.of(recipe, started_s=0.0, session="s", usd_per_hour=usd_per_hour)
    return LimitMonitor(run, attempt, terms, now_s=100.0)


def step(run: RunDir, number: int, seconds: float = 3.0) -> None:
    lines = LineWriter(run.metrics)
    lines.append({"step": number, "loss": 1.0, "step_time_s": seconds, "attempt": 0,
                  "generation": 1})  # fmt: skip
    lines.close()


def events(run: RunDir, kind: str) -> list[dict[str, object]]:
    return [event for event in read_lines(run.events) if event["kind"] == kind]


def test_money_is_counted_from_the_start_of_node_0_over_all_attempts(run: RunDir) -> None:
    first = limits(run)
    first.poll(100.0)  # 100 s at 10 cents a second
    first.poll(159.0)
    assert [event["usd"] for event in events(run, "spent")] == [10.0]  # once a minute
    first.poll(160.0)
    first.count(170.0)
    assert [event["usd"] for event in events(run, "spent")] == [10.0, 16.0, 17.0]
    second = limits(run, attempt=1, usd_per_hour=3600.0)  # on dearer machines
    second.count(200.0)
    spending = read_spending(run)
    assert spending is not None and (spending.usd, spending.usd_per_hour) == (217.0, 3600.0)


def test_a_node_that_stands_in_for_node_0_counts_from_its_last_count_on(run: RunDir) -> None:
    lines = LineWriter(run.events)
    spent = {"kind": "spent", "t": time.time() - 50.0, "attempt": 1, "generation": 0}
    lines.append({**spent, "usd": 5.0, "usd_per_hour": 360.0})
    lines.close()
    resolved = Resolved(recipe=Recipe(), reasons={}, shape=None, data=None, steps=1)  # type: ignore[arg-type]
    for attempt, usd in ((1, 10.0), (2, 5.0)):  # another attempt's nodes were not paid meanwhile
        terms = terms_from_now(run, attempt, resolved, "s")
        held = LimitMonitor(run, attempt, terms, now_s=time.monotonic())
        assert held._usd(time.monotonic()) == pytest.approx(usd, abs=0.2)


def test_a_run_that_reaches_its_limit_is_to_stop_once_and_says_why(run: RunDir) -> None:
    held = limits(run, max_usd=12.0)
    assert not held.poll(119.0)
    assert held.poll(120.0) and not held.poll(121.0)
    (event,) = events(run, "stopping")
    assert event["reason"] == "it has cost $12.00, and launch.max_usd=12"
    assert describe_event(event) == f"stopping: {event['reason']}"
    assert has_stopped_itself(run, 0) and not has_stopped_itself(run, 1)


def test_a_run_without_a_price_is_neither_counted_nor_stopped(run: RunDir) -> None:
    free = limits(run, usd_per_hour=None, max_usd=0.01)
    assert not free.poll(1e6)
    assert events(run, "spent") == []


def test_no_step_is_told_ever_more_seldom_until_one_comes(run: RunDir) -> None:
    watched = limits(run)
    for number in (1, 2, 3):
        step(run, number)
    for now_s in (110.0, 229.0, 230.0, 349.0, 350.0, 470.0):  # 120 s, then 240 s of quiet
        watched.poll(now_s)
    told = events(run, "stalled")
    assert [(event["step"], event["seconds"], event["usual_s"]) for event in told] == [
        (3, 120.0, 3.0), (3, 240.0, 3.0),
    ]  # fmt: skip
    assert told[0]["generation"] == 1
    assert describe_event(told[1]) == "no step for 4 min (usual 3 s)"
    state = read_state(run, is_training_remotely=True)
    assert state.no_step_s == pytest.approx(240, abs=30) and state.usual_step_s == 3.0
    step(run, 4)
    watched.poll(480.0)
    assert describe_event(events(run, "stalled")[-1]) == "steps come again"
    assert read_state(run, is_training_remotely=True).no_step_s is None


def test_slow_steps_and_a_long_start_are_no_stall(run: RunDir) -> None:
    watched = limits(run)
    watched.poll(699.0)  # weights are read: 10 minutes are not over
    step(run, 1, seconds=60.0)
    watched.poll(700.0)
    watched.poll(700.0 + 20 * 60 - 1)
    assert events(run, "stalled") == []
    watched.poll(700.0 + 20 * 60)
    assert len(events(run, "stalled")) == 1


def test_a_run_without_steps_is_to_stop_where_that_is_asked(run: RunDir) -> None:
    step(run, 7)  # of an earlier attempt: not progress of this one
    idle = limits(run, stop_idle_after="10min")
    assert not idle.poll(699.0)
    step(run, 8)
    assert not idle.poll(700.0) and not idle.poll(1299.0)
    assert idle.poll(1300.0)
    (event,) = events(run, "stopping")
    assert event["reason"] == "no step for 10 min, and launch.stop_idle_after=10 min"
    assert read_state(run).stop_reason == event["reason"]


def test_what_has_cost_all_it_may_is_refused_with_what_to_raise(run: RunDir) -> None:
    check_cost_limit(run, Launch(max_usd=1.0))  # nothing has run yet
    limits(run).count(120.0)
    check_cost_limit(run, Launch(max_usd=12.01))
    check_cost_limit(run, Launch())
    with pytest.raises(RequestError) as caught:
        check_cost_limit(run, Launch(max_usd=12.0))
    assert "has cost $12.00, and launch.max_usd=12" in str(caught.value)
    assert "Raise it above $12.00" in str(caught.value)
    assert "launch.max_usd=USD" in str(caught.value)


def test_a_job_that_its_scheduler_starts_again_after_it_stopped_itself_ends(run: RunDir) -> None:
    check_not_stopped(run, "s")
    limits(run, max_usd=1.0).poll(200.0)
    with pytest.raises(RequestError, match=r"stopped itself: it has cost \$20\.00.*resume"):
        check_not_stopped(run, "s")
    check_not_stopped(run, "another job")
    run.events.write_text(json.dumps({"kind": "stopping"}) + "x\n")  # torn by a kill
    check_not_stopped(run, "s")


def test_a_run_drains_before_its_capacity_block_ends(run: RunDir) -> None:
    ends = datetime.fromtimestamp(time.time() + 1800 + 120 + 500, UTC).isoformat()
    cluster = {"capacity": "block:cr-0123456789abcdef0", "block_ends": ends}
    recipe = Recipe.model_validate({"cluster": cluster, "elastic": {"drain_timeout_s": 120.0}})
    now_s = time.monotonic()
    terms = AttemptLimits.of(recipe, started_s=now_s, session="s", usd_per_hour=None)
    held = LimitMonitor(run, 0, terms, now_s=now_s)
    assert not held.poll(now_s + 400)
    assert held.poll(now_s + 600)
    (event,) = events(run, "stopping")
    assert "its capacity block ends (cluster.block_ends)" in str(event["reason"])
