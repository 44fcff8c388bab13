"""What an instance costs by the way in which it is rented; what is not known is said."""

import re

import pytest

from shardyard.hardware.catalogue import BLOCK_USD_PER_HOUR, instance, instance_names, rate_of

KINDS = ("on-demand", "spot", "reservation", "block")


@pytest.mark.parametrize("kind", KINDS)
def test_each_price_has_its_date_and_each_missing_one_its_reason(kind: str) -> None:
    for name in instance_names():
        rate = rate_of(instance(name), kind)
        if rate.usd_per_hour is None:
            assert kind == "block" or name in ("p5e.48xlarge", "trn2.48xlarge")
        else:
            assert re.search(r"20\d\d", rate.source), rate
    assert "give cluster.usd_per_node_hour" in rate_of(instance("p5.48xlarge"), "block").source


def test_spot_is_at_most_what_it_is_on_demand_and_says_so() -> None:
    machine = instance("g5.xlarge")
    spot = rate_of(machine, "spot")
    assert spot.usd_per_hour == machine.usd_per_hour
    assert spot.source.startswith("at most: spot has a price of the day")


def test_a_reservation_bills_as_on_demand_also_while_it_is_not_used() -> None:
    machine = instance("p5.48xlarge")
    rate = rate_of(machine, "reservation")
    assert rate.usd_per_hour == machine.usd_per_hour and "used or not" in rate.source


def test_a_block_costs_what_aws_told_at_its_purchase() -> None:
    assert set(BLOCK_USD_PER_HOUR) <= set(instance_names())
    # AWS's increase of January 2026, as the press told it: 34.61 -> 39.80 and 36.18 -> 41.61
    assert BLOCK_USD_PER_HOUR["p5e.48xlarge"] == pytest.approx(34.61 * 1.15, rel=1e-3)
    assert BLOCK_USD_PER_HOUR["p5en.48xlarge"] == pytest.approx(36.18 * 1.15, rel=1e-3)
    assert rate_of(instance("p5e.48xlarge"), "block").usd_per_hour == 39.80


def test_a_way_of_renting_that_nobody_wrote_a_price_for_is_no_other_one() -> None:
    with pytest.raises(ValueError, match="lease"):
        rate_of(instance("g5.xlarge"), "lease")
