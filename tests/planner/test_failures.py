"""Checkpoint intervals against published values, and the whole outlook against itself."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from shardyard.config.formulas import daly_interval_s, young_interval_s
from shardyard.errors import RequestError
from shardyard.planner.effective_time import RecoverySettings, SaveCost
from shardyard.planner.failure_rates import estimate_mtbf
from shardyard.planner.failures import FailureForecast, _spares, failure_plan

LLAMA_3_MTBF_S = 54 * 86_400 / 419


def outlook(
    *, saving: dict[str, float] | None = None, recovery: dict[str, Any] | None = None, **given: Any
) -> FailureForecast:
    cost = {"blocking_s": 5.0, "write_s": 60.0, "bytes": 1e12, **(saving or {})}
    options: dict[str, Any] = {
        "nodes": 128,
        "devices": 1024,
        "step_s": 10.0,
        "steps": 200_000,
    }
    return failure_plan(
        **{**options, **given},
        saving=SaveCost(**cost),
        recovery=RecoverySettings(**(recovery or {})),
    )


@pytest.mark.parametrize(
    ("mtbf_min", "daly_min", "young_min"), [(1440, 116.69, 120), (360, 56.71, 60), (15, 9.14, 12.2)]
)
def test_intervals_are_those_of_dalys_figures(
    mtbf_min: float, daly_min: float, young_min: float
) -> None:
    given = {"blocking_s": 300.0, "mtbf_s": mtbf_min * 60}
    assert daly_interval_s(**given) / 60 == pytest.approx(daly_min, abs=0.005)
    assert young_interval_s(**given) / 60 == pytest.approx(young_min, abs=0.05)


@pytest.mark.parametrize(
    ("blocking_s", "interval_s", "waste"),
    [(2.5, 234, 0.021), (10, 465, 0.042), (60, 1116, 0.104), (300, 2389, 0.23)],
)
def test_at_llama_3s_rate_the_interval_wastes_what_was_worked_out(
    blocking_s: float, interval_s: float, waste: float
) -> None:
    found = daly_interval_s(blocking_s=blocking_s, mtbf_s=LLAMA_3_MTBF_S)
    assert found == pytest.approx(interval_s, abs=1)
    wasted = blocking_s / found + found / (2 * LLAMA_3_MTBF_S)
    assert wasted == pytest.approx(waste, abs=0.005)


def test_bloom_would_have_saved_every_1_9_hours() -> None:
    assert young_interval_s(blocking_s=40, mtbf_s=7 * 86_400) == pytest.approx(6956, abs=1)


def test_a_save_longer_than_twice_the_mtbf_is_made_once_per_mtbf() -> None:
    assert daly_interval_s(blocking_s=200, mtbf_s=100) == 100


def test_the_interval_is_in_whole_steps() -> None:
    # 128 nodes: 7.9 h; Daly for 5 s: sqrt(2 x 5 x 28,440) x 1.0031 - 5 = 530 s
    found = outlook()
    assert (found.interval_steps, found.interval_s) == (53, 530)
    assert found.interval_reason == "Daly: every 8 min 50 s of training"


def test_a_save_becomes_durable_before_the_next_begins() -> None:
    found = outlook(saving={"blocking_s": 0.1, "write_s": 601})
    assert found.interval_steps == 61
    assert found.interval_reason.startswith("a save takes 10 min 1 s to become durable before")
    assert outlook(saving={"blocking_s": 0, "write_s": 0}).interval_steps == 1


def test_a_short_run_saves_once_at_its_end() -> None:
    found = outlook(steps=20)
    assert found.interval_steps == 20
    assert found.interval_reason.startswith("one at the end")
    assert found.checkpoint_blocked_s == pytest.approx(5)


def test_the_recipes_interval_is_judged_beside_the_best() -> None:
    best, often = outlook(), outlook(recovery={"checkpoint_every": 10})
    assert (often.interval_steps, often.best_interval_steps) == (10, 53)
    assert often.interval_reason.startswith("checkpoint.every=10; best: 53 (Daly")
    assert often.ettr < best.ettr


def test_the_best_interval_beats_its_neighbours() -> None:
    ettr = {k: outlook(recovery={"checkpoint_every": k}).ettr for k in (20, 40, 53, 70, 150)}
    assert max(ettr, key=lambda k: ettr[k]) == 53


@pytest.mark.parametrize(("nodes", "method"), [(16, "formula"), (2048, "simulation")])
def test_wall_time_is_the_sum_of_where_it_goes(nodes: int, method: str) -> None:
    found = outlook(nodes=nodes, devices=8 * nodes)
    assert found.method == method
    waste = found.checkpoint_blocked_s, found.lost_work_s, found.restart_s
    parts = found.init_s, found.productive_s, *waste
    assert sum(parts) == pytest.approx(found.wall_s, rel=1e-12)
    assert found.productive_s == 200_000 * 10
    assert found.wall_s * found.ettr == pytest.approx(found.productive_s)


def test_failures_times_their_cost_is_the_time_they_take() -> None:
    found = outlook(nodes=16, devices=128)
    training_s = found.wall_s - found.init_s
    assert found.expected_failures == pytest.approx(training_s / found.mtbf.seconds)
    restarting_s = found.expected_failures * found.restart_s_per_failure
    assert found.restart_s == pytest.approx(restarting_s)
    assert found.lost_work_s == pytest.approx(found.expected_failures * found.replay.seconds)


def test_more_nodes_mean_more_failures_spares_and_lost_time() -> None:
    found = [outlook(nodes=n, devices=8 * n) for n in (1, 4, 16, 64, 256, 1024, 4096)]
    assert [o.ettr for o in found] == sorted((o.ettr for o in found), reverse=True)
    assert [o.expected_failures for o in found] == sorted(o.expected_failures for o in found)
    assert [o.spare_nodes for o in found] == sorted(o.spare_nodes for o in found)


def test_spares_are_those_worked_out_by_hand() -> None:
    """54 days of a failure every 3.09 h, of which 78 % take a node away for a day.

    So 6.06 nodes are out on average, and 327 failures happen. Each of them waits for a node with a
    probability of at most 1.57e-4 (5 % over all). Poisson: 3.7e-4 for 16, 1.3e-4 for 17.
    """
    spares, reason = _spares(
        estimate_mtbf(nodes=1, devices=8, hours_per_node=3.09), wall_s=54 * 86_400
    )
    assert spares == 17
    assert reason.startswith("78% of failures take a node away for 24 h")


def test_llama_3s_effective_time_is_about_what_it_published() -> None:
    # published: more than 90 %; that asks for at most 18.6 min per failure, everything included
    found = outlook(nodes=2048, devices=16_384)
    assert 17 * 60 < found.restart_s_per_failure + found.replay.seconds < 24 * 60
    assert 0.86 < found.ettr < 0.9


def test_snapshots_are_for_lost_processes_and_checkpoints_beside_them_for_lost_nodes() -> None:
    bare, kept = outlook(), outlook(recovery={"snapshot_every": "auto"})
    assert bare.snapshot_interval_steps is None and bare.checkpoint_mtbf_s == bare.mtbf.seconds
    # 22 % of failures leave the node; Daly's interval grows with the root of the time between
    assert kept.snapshot_interval_steps is not None
    assert kept.snapshot_mtbf_s == pytest.approx(bare.mtbf.seconds / 0.22)
    assert kept.snapshot_interval_steps == pytest.approx(bare.interval_steps * 0.22**-0.5, abs=1)
    assert kept.checkpoint_mtbf_s == pytest.approx(bare.mtbf.seconds / 0.78)
    assert kept.interval_steps == pytest.approx(bare.interval_steps * 0.78**-0.5, abs=1)
    # blocked for both kinds of copies, which cost as much, at their own intervals
    per_step = 5.0 / kept.interval_steps + 5.0 / kept.snapshot_interval_steps
    assert kept.checkpoint_blocked_s == pytest.approx(200_000 * per_step, rel=0.01)
    assert kept.lost_work_s == pytest.approx(kept.expected_failures * kept.replay.seconds)


def test_quick_snapshots_save_time_where_processes_fail_often() -> None:
    costs = {"nodes": 1, "devices": 8, "step_s": 1.0, "mtbf_hours_per_node": 24.0}
    often = {"checkpoint_every": 2000}
    bare = outlook(saving={"blocking_s": 0.2}, recovery=often, **costs)
    kept = outlook(saving={"blocking_s": 0.2}, recovery={**often, "snapshot_every": 50}, **costs)
    assert kept.ettr > bare.ettr and kept.lost_work_s < bare.lost_work_s


def test_a_known_mtbf_changes_the_whole_outlook() -> None:
    found = outlook(mtbf_hours_per_node=128 * 1000)
    assert found.mtbf.seconds == 1000 * 3600
    assert found.expected_failures < 1


def test_an_outlook_survives_json() -> None:
    found = outlook()
    content = json.loads(json.dumps(asdict(found)))
    assert FailureForecast.from_json(content) == found
    for name in ("snapshot_interval_steps", "snapshot_mtbf_s", "checkpoint_mtbf_s"):
        del content[name]  # an older plan
    assert FailureForecast.from_json(content).checkpoint_mtbf_s is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"nodes": -1},
        {"devices": 0},
        {"step_s": 0.0},
        {"mtbf_hours_per_node": 0.0},
        {"checkpoint_blocking_s": -1.0},
        {"checkpoint_write_s": float("nan")},
        {"checkpoint_bytes": -1.0},
        {"checkpoint_every": 0},
        {"collective_timeout_s": -1.0},
    ],
)
def test_a_wrong_number_is_refused_by_name(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    short = name.removeprefix("checkpoint_")
    with pytest.raises(RequestError) as refused:
        if name in ("checkpoint_every", "collective_timeout_s"):
            outlook(recovery=wrong)
        elif short != name:
            outlook(saving={short: value})
        else:
            outlook(**wrong)
    assert str(refused.value).startswith(f"failures: {name}={value} is out of range.")
    assert "needs a finite number" in str(refused.value)
    assert str(refused.value).endswith(f" there. Correct {name}.")


def test_intervals_grow_no_further_than_for_a_loss_a_day_where_nodes_come_and_go() -> None:
    kept = outlook(
        nodes=1, devices=8,
        recovery={"snapshot_every": "auto", "outlives_nodes": True, "longest_mtbf_s": 86_400.0},
    )  # fmt: skip
    assert kept.snapshot_mtbf_s == kept.checkpoint_mtbf_s == 86_400
    assert kept.interval_reason.endswith("; elastic: a loss a day is assumed")
    assert kept.mtbf.seconds == outlook(nodes=1, devices=8).mtbf.seconds > 86_400
