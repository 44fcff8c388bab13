"""A small one measures both pairs."""

import pytest

from benchmarks.wrapped_steps import PAIRS, measure


@pytest.mark.heavy
def test_a_small_one_measures_both_pairs() -> None:
    rows = measure(pairs=4, starts=1)
    assert [row["compared"] for row in rows] == list(PAIRS)
    for row in rows:
        assert 0.2 < row["ratio"] < 5, row
        assert min(row["wrap_first_step_s"], row["torch_first_step_s"]) > row["wrap_step_s"] / 5
