"""A larger batch needs more samples: the source system's own pair of runs."""

import math

import pytest

from shardyard.errors import RequestError
from shardyard.planner.instance_search import samples_factor


def test_at_the_critical_batch_twice_the_fewest_samples_are_needed() -> None:
    assert samples_factor(98_304, critical_batch=98_304) == 2
    assert samples_factor(1, critical_batch=1e12) == pytest.approx(1)


def test_bert_on_twice_the_nodes_converges_in_fifteen_to_sixteen_hours() -> None:
    """AWS and Habana: 24,576 sequences a step took 25 h, 49,152 took 15-16 h at 1.94 x the rate."""
    few, many = (samples_factor(batch, critical_batch=98_304) for batch in (24_576, 49_152))
    assert many / few == pytest.approx(1.2)
    assert 25 / 1.94 < 13, "by its rate alone it would have taken less"
    assert 15 < 25 / 1.94 * many / few < 16


@pytest.mark.parametrize("critical_batch", [0, -1, math.nan, math.inf])
def test_a_critical_batch_that_is_no_number_of_samples_is_refused(critical_batch: float) -> None:
    with pytest.raises(
        RequestError, match=r"is not a number of samples.*Give one above 0, or leave"
    ):
        samples_factor(1024, critical_batch=critical_batch)
