"""A collapsed router is found, named once, and comes with the likely fix."""

import pytest

from shardyard.train.errors import RouterWatch


def test_three_steps_in_a_row_near_the_largest_load_are_told_once() -> None:
    watch = RouterWatch(
        experts=8, experts_per_token=2, router_aux_loss=0.0
    )  # the largest load is 4
    loads = [4.0, 4.0, 2.0, 3.8, 4.0, 3.9, 4.0, 4.0]
    told = {step: watch.after_step(step, load) for step, load in enumerate(loads, 1)}
    ((step, reason),) = [(step, text) for step, text in told.items() if text]
    assert step == 6
    assert "since step 4 one expert of a block gets 98% of all tokens" in reason
    assert "expert_load 3.90; 1 is even, 4.00 the most for 8 experts" in reason
    assert "model.router_aux_loss=0.01 in place of 0." in reason


@pytest.mark.parametrize(
    ("experts", "visits", "load"), [(8, 2, 3.0), (8, 2, None), (0, 0, 4.0), (8, 8, 1.0)]
)
def test_an_uneven_load_is_no_collapse(experts: int, visits: int, load: float | None) -> None:
    watch = RouterWatch(experts=experts, experts_per_token=visits, router_aux_loss=0.1)
    assert not any(watch.after_step(step, load) for step in range(9))
