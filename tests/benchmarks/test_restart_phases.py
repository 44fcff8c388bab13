"""The benchmark of a restart's phases runs, small; how long they are is no matter here."""

import pytest

from benchmarks.restart_phases import PHASES, measure


@pytest.mark.slow
def test_the_phases_of_a_restart_are_measured() -> None:
    found, failures = measure([""], kills=2, kills_a_start=2, settings=["checkpoint.every=5"])
    assert not failures
    assert [kill["rank"] for kill in found[""]] == [1, 0]
    assert all(set(PHASES) <= set(kill) for kill in found[""])
    assert all(
        kill[phase] >= 0 for kill in found[""] for phase in ("notice", "start", "first step")
    )
