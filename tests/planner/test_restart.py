"""Phases of a restart against published totals and hand arithmetic."""

import math
from typing import Any

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.planner.effective_time import (
    MemoryTier,
    RecoverySettings,
    RestartPhase,
    first_init_s,
    memory_tier,
    replay_phase,
    restart_phases,
)
from shardyard.planner.failure_rates import estimate_mtbf

LEFT_ALONE = RecoverySettings(hang_steps=None, collective_timeout_s=0.0)
"""Nothing hangs."""


def phases(
    nodes: int = 32, recovery: RecoverySettings | None = None, **given: float
) -> dict[str, RestartPhase]:
    options = {"checkpoint_bytes": 0.0, "step_s": 1.0, **given}
    found = restart_phases(
        nodes=nodes, devices=8 * nodes, recovery=recovery or RecoverySettings(), **options
    )
    assert all(phase.reason and phase.source for phase in found)
    return {phase.name: phase for phase in found}


def test_phases_carry_the_names_that_a_run_accounts_for() -> None:
    assert list(phases()) == ["detect", "teardown", "reschedule", "rendezvous", "init", "load"]


@pytest.mark.parametrize(
    ("nodes", "with_a_node_s", "in_place_s"), [(2, 310, 50), (32, 292, 47), (288, 22.5 * 60, 120)]
)
def test_a_crash_costs_the_mean_of_what_hyperpod_measured_with_another_node_and_in_place(
    nodes: int, with_a_node_s: float, in_place_s: float
) -> None:
    found = phases(nodes, LEFT_ALONE)
    silence_s = 0.78 * 3.0  # of a lost node's agent: those measured none
    total_s = sum(phase.seconds for phase in found.values()) - silence_s
    assert total_s == pytest.approx(0.78 * with_a_node_s + 0.22 * in_place_s)
    assert first_init_s(8 * nodes) == pytest.approx(with_a_node_s - 0.6)


@pytest.mark.parametrize(
    ("elastic", "step_s", "hang_s", "words"),
    [
        ({}, 0.1, 3.5, "3.5 s without a move"),
        ({}, 10.0, 80.0, "1 min 20 s without a move"),
        ({"hang_steps": None}, 10.0, 600.0, "elastic.collective_timeout_s, 600 s"),
    ],
)
def test_what_no_process_dies_of_is_found_by_its_ranks_not_moving(
    elastic: dict[str, Any], step_s: float, hang_s: float, words: str
) -> None:
    recovery = RecoverySettings.of(Recipe.model_validate({"elastic": elastic}))
    detect = phases(recovery=recovery, step_s=step_s)["detect"]
    # ByteRobust: 5,948 of 44,184 are silent; 78 % are lost nodes, silent for 3 s
    assert detect.seconds == pytest.approx(0.1 + 0.1346 * hang_s + 0.78 * 3, rel=1e-3)
    assert words in detect.reason


def test_blooms_checkpoint_loads_on_its_nodes_in_the_time_it_was_written() -> None:
    assert phases(48, checkpoint_bytes=2.3e12)["load"].seconds == pytest.approx(40)


def test_where_the_node_stays_a_snapshot_is_loaded_from_memory() -> None:
    kept = phases(48, RecoverySettings(snapshot_every=10), checkpoint_bytes=2.3e12)["load"]
    in_place_s = 2.3e12 / 384 / 10e9
    assert kept.seconds == pytest.approx(0.78 * 40 + 0.22 * in_place_s)
    assert "from memory where the node stays" in kept.reason


def test_parked_processes_shorten_what_is_done_in_place() -> None:
    saved_s = (
        phases()["init"].seconds
        - phases(recovery=RecoverySettings(has_standby=True))["init"].seconds
    )
    assert saved_s == pytest.approx(0.22 * (0.421 - 0.254))


def test_snapshots_are_as_far_apart_as_asked_or_as_loses_the_least_time() -> None:
    given: dict[str, Any] = {"step_s": 2.0, "copy_s": 0.5}
    given["mtbf"] = estimate_mtbf(nodes=1, devices=8, hours_per_node=2_200 / 3600)
    assert memory_tier(RecoverySettings(), **given) is None
    asked = memory_tier(RecoverySettings(snapshot_every=7), **given)
    assert asked is not None and (asked.every, asked.interval_s) == (7, 14.0)
    best = memory_tier(RecoverySettings(snapshot_every="auto"), **given)
    assert (
        best is not None and best.every == 50
    )  # 22 % leave the node; Young: sqrt(2 x 0.5 x 10,000) = 100 s


def test_half_an_interval_is_done_again_and_what_was_not_durable() -> None:
    assert replay_phase(interval_s=600, durable_lag_s=0, memory=None).seconds == 300
    found = replay_phase(interval_s=600, durable_lag_s=45, memory=None)
    assert found.seconds == 345
    assert found.reason == "half of the 10 min between checkpoints and 45 s until a save is durable"


def test_where_the_node_stays_half_of_a_snapshot_s_interval_is_done_again() -> None:
    memory = MemoryTier(every=10, interval_s=20.0, blocking_s=0.5, mtbf_s=1e4, reason="asked")
    found = replay_phase(interval_s=600, durable_lag_s=45, memory=memory)
    assert found.seconds == pytest.approx(0.78 * 345 + 0.22 * 10)
    assert found.reason.endswith(
        "; where the node stays half of the 10 steps between snapshots (asked)"
    )


def test_where_others_go_on_a_lost_node_costs_half_of_a_snapshot_s_interval_too() -> None:
    memory = MemoryTier(every=10, interval_s=20.0, blocking_s=0.5, mtbf_s=1e4, reason="asked")
    found = replay_phase(interval_s=600, durable_lag_s=45, memory=memory, outlives_nodes=True)
    assert found.seconds == 10
    assert found.reason.endswith("of a lost node by its neighbour's copy")


@pytest.mark.parametrize(
    ("nodes", "elastic", "outlives", "longest_s"),
    [
        (2, {"min_nodes": 1, "max_nodes": 4, "snapshot_neighbour": True}, True, 86_400),
        (2, {"min_nodes": 1, "max_nodes": 4, "snapshot_neighbour": False}, False, 86_400),
        (2, {"max_nodes": 4, "snapshot_neighbour": True}, False, 86_400),  # needs both nodes
        (2, {"snapshot_every": 5, "snapshot_neighbour": True}, False, math.inf),
    ],
)
def test_an_elastic_run_counts_on_a_loss_a_day_and_on_neighbours(
    nodes: int, elastic: dict[str, Any], outlives: bool, longest_s: float
) -> None:
    recipe = Recipe.model_validate(
        {"cluster": {"nodes": nodes}, "elastic": {"min_nodes": 2, **elastic}}
    )
    found = RecoverySettings.of(recipe)
    assert (found.outlives_nodes, found.longest_mtbf_s) == (outlives, longest_s)
    assert found.snapshot_every == elastic.get("snapshot_every", "auto")
