"""The measurement of telemetry's cost, short."""

import pytest

from benchmarks.telemetry_cost import MEMORY_BAR_BYTES, measure_alone, measure_steps


@pytest.mark.system
def test_the_process_alone_is_measured() -> None:
    found = measure_alone(3.0, every_s=0.5, call_s=1e-4)
    assert found["lines"] >= 5
    assert 0 < found["core_share"] < 0.5
    assert 5 * 10**6 < found["peak_bytes"] < MEMORY_BAR_BYTES


@pytest.mark.slow
def test_steps_beside_it_are_measured() -> None:
    (pair,) = measure_steps(1, steps=60, every_s=1.0, call_s=1e-4)
    assert pair["with_s"] > 0 and pair["without_s"] > 0
