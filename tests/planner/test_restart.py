"""Phases of a restart against published totals and hand arithmetic."""

import pytest

from shardyard.planner.restart import Phase, replay_phase, restart_phases


def phases(nodes: int = 32, **given: float) -> dict[str, Phase]:
    options = {"checkpoint_bytes": 0.0, "collective_timeout_s": 600.0, **given}
    found = restart_phases(nodes=nodes, devices=8 * nodes, **options)
    assert all(phase.reason and phase.source for phase in found)
    return {phase.name: phase for phase in found}


def test_phases_carry_the_names_that_a_run_accounts_for() -> None:
    assert list(phases()) == ["detect", "teardown", "reschedule", "rendezvous", "init", "load"]


@pytest.mark.parametrize(("nodes", "seconds"), [(2, 310), (32, 292), (288, 22.5 * 60)])
def test_a_crash_costs_what_hyperpod_measured_for_a_plain_restart(
    nodes: int, seconds: float
) -> None:
    found = phases(nodes, collective_timeout_s=0)  # a crash is not found by a timeout
    assert sum(phase.seconds for phase in found.values()) == pytest.approx(seconds)


def test_detection_waits_for_the_timeout_in_the_share_of_silent_failures() -> None:
    # ByteRobust: 5,948 of 44,184
    detect = phases(collective_timeout_s=600)["detect"].seconds
    assert detect == pytest.approx(0.1 + 0.1346 * 600, rel=1e-3)


def test_blooms_checkpoint_loads_on_its_nodes_in_the_time_it_was_written() -> None:
    assert phases(48, checkpoint_bytes=2.3e12)["load"].seconds == pytest.approx(40)


def test_half_an_interval_is_done_again_and_what_was_not_durable() -> None:
    assert replay_phase(interval_s=600, durable_lag_s=0).seconds == 300
    found = replay_phase(interval_s=600, durable_lag_s=45)
    assert found.seconds == 345
    assert found.reason == "half of the 10 min between checkpoints and 45 s until a save is durable"
