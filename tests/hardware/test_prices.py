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
    assert "give cluster.usd_per_node_hour" in rate_of(instance("trn1.32xlarge"), "block").source


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
    # A second public log of AWS's page, of 2026-06-19, and the increase of 20 % of July 2026
    before = {"p5e": 39.799, "p5en": 45.768, "p6-b200": 82.368, "p6-b300": 93.60}
    for family, usd in before.items():
        assert BLOCK_USD_PER_HOUR[f"{family}.48xlarge"] == pytest.approx(1.2 * usd, rel=1e-3)
    # by the accelerator, in the table of 2026-09-19
    each = {"p4d.24xlarge": 1.475, "p4de.24xlarge": 2.214, "p5.48xlarge": 5.191}
    for name, usd in each.items():
        assert BLOCK_USD_PER_HOUR[name] == pytest.approx(8 * usd, abs=0.005)
    rate = rate_of(instance("p5e.48xlarge"), "block")
    assert rate.usd_per_hour == 47.76 and "2026-09-19" in rate.source


def test_a_way_of_renting_that_nobody_wrote_a_price_for_is_no_other_one() -> None:
    with pytest.raises(ValueError, match="lease"):
        rate_of(instance("g5.xlarge"), "lease")
