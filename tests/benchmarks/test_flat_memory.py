"""The measurement of memory over the steps of a task, of few steps."""

from pathlib import Path

import pytest

from benchmarks.flat_memory import TASKS, growth, is_flat, measure

MB = 10**6


def test_a_run_that_grows_is_told_from_one_that_settles() -> None:
    settles = [300 * MB, 340 * MB, *[340 * MB + n % 2 for n in range(8)]]
    leaks = [300 * MB, 340 * MB, *[340 * MB + n * MB for n in range(1, 9)]]
    assert growth(settles) == 1 and is_flat(settles)
    assert growth(leaks) == 8 * MB and not is_flat(leaks)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=pytest.mark.heavy if task == "LoRA" else pytest.mark.slow)
        for task in TASKS
    ],
)
def test_every_task_is_looked_at_ten_times(task: str, tmp_path: Path) -> None:
    held = measure(task, tmp_path, steps=20)
    assert len(held) == 10
    assert all(50 * MB < each < 4000 * MB for each in held)
