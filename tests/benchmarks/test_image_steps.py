"""The benchmark of steps on images runs, small; what it measures is no matter here."""

import pytest

from benchmarks.image_steps import Work, measure

SMALL = Work(size=32, classes=2, pictures=16, micro_batch=2, warm_up=2, pairs=2)


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param("trainer", marks=pytest.mark.slow),
        pytest.param("bare", marks=pytest.mark.slow),
    ],
)
def test_steps_on_images_are_measured(beside: str) -> None:
    if beside == "trainer":
        pytest.importorskip("accelerate")
    found = measure(SMALL, beside)
    assert {name: len(steps) for name, steps in found["step_times_s"].items()} == {
        "shardyard": 2, beside: 2,
    }  # fmt: skip
