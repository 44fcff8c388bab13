"""The share that trained under kills, measured and simulated, from lines made by hand."""

from typing import Any

import pytest

from benchmarks.killed_run import Kill, measure
from shardyard.errors import ShardyardError

STEP_S, EVERY = 1.0, 4


def line(step: int, generation: int) -> dict[str, Any]:
    return {"step": step, "generation": generation, "step_time_s": STEP_S}


def event(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "kind": kind, **fields}


def test_steps_that_stand_between_the_first_kill_and_the_last_are_counted() -> None:
    # three lives of 12 s: 2 s restart, 10 steps, of which 8 are saved and 2 done again
    kills = [Kill(t=12.0 * n, generation=n, rank=0) for n in range(4)]
    lines = [line(8 * (g - 1) + n, g) for g in (1, 2, 3, 4) for n in range(1, 11)]
    events = [event(12.0 * n + 3.0, "first_step") for n in range(4)]
    events += [event(1.0, "checkpoint_started", blocked_s=0.0)]
    events += [event(1.0, "checkpoint_durable", seconds=0.5)]
    found = measure(events, lines, kills, every=EVERY, seed=0, mtbf_s=12.0)
    assert (found.wall_s, found.productive_s, found.restart_s) == (36.0, 24.0, 2.0)
    assert found.measured == found.simulated == pytest.approx(24 / 36)
    assert (found.step_s, found.lag_s) == (1.0, 0.5)


def test_too_few_kills_are_no_measurement() -> None:
    kills = [Kill(t=1.0, generation=0, rank=0)]
    with pytest.raises(ShardyardError, match=r"1 kills are too few .*Use a longer --for"):
        measure([event(2.0, "first_step")], [], kills, every=EVERY, seed=0, mtbf_s=20.0)
