"""Prices of the day, from answers that botocore holds against AWS's own models."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any

import boto3.session
import pytest
from botocore.stub import Stubber

from shardyard.cluster.live_prices import LivePrice, PriceQuery, ask_prices, price_query, rate_for
from shardyard.errors import AccessError, RequestError

AT = datetime(2026, 11, 23, 20, 0, tzinfo=UTC)
P5 = PriceQuery(instance="p5.48xlarge", region="us-east-1", nodes=2, at=AT)
CALLS = {
    "on-demand": ("pricing", "get_products"),
    "spot": ("ec2", "describe_spot_price_history"),
    "block": ("ec2", "describe_capacity_block_offerings"),
    "savings plan": ("savingsplans", "describe_savings_plans_offering_rates"),
}


def product(usd: str) -> str:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": usd}}
    return json.dumps({"terms": {"OnDemand": {"A": {"priceDimensions": {"B": dimension}}}}})


def spot(usd: str, zone: str) -> dict[str, Any]:
    return {"InstanceType": "p5.48xlarge", "SpotPrice": usd, "AvailabilityZone": zone}


def offer(fee: str, hours: int = 24, count: int = 2, currency: str = "USD") -> dict[str, Any]:
    return {
        "InstanceCount": count, "CapacityBlockDurationHours": hours, "UpfrontFee": fee,
        "CurrencyCode": currency, "StartDate": AT, "AvailabilityZone": "us-east-1d",
    }  # fmt: skip


def saving(rate: str, years: int) -> dict[str, Any]:
    return {"rate": rate, "savingsPlanOffering": {"durationSeconds": years * 365 * 86400}}


ANSWERS: dict[str, dict[str, Any]] = {
    "on-demand": {"PriceList": [product("55.0400000000")]},
    "spot": {"SpotPriceHistory": [spot("21.50", "us-east-1a"), spot("19.25", "us-east-1d")]},
    "block": {"CapacityBlockOfferings": [offer("1920.00"), offer("1800.00")]},
    "savings plan": {"searchResults": [saving("40.1", 1), saving("27.2", 3)]},
}


@cache
def client(service: str, region: str) -> Any:
    """One for all tests: EC2's model takes a while to read."""
    return boto3.session.Session("x", "x").client(service, region_name=region)


@contextmanager
def answering(answers: dict[str, Any], **sent: dict[str, Any]) -> Iterator[None]:
    """AWS gives these answers, or refuses with a code where one is given.

    Args:
        sent: Parameters that the call of a kind must have.
    """
    services = {service for service, _ in CALLS.values()}
    stubs = {service: Stubber(client(service, "us-east-1")) for service in services}
    for kind, (service, call) in CALLS.items():
        if isinstance(answers[kind], str):
            stubs[service].add_client_error(call, answers[kind], "no")
        else:
            stubs[service].add_response(call, answers[kind], sent.get(kind))
    with ExitStack() as stack:
        for stub in stubs.values():
            stack.enter_context(stub)
        yield


def prices(found: list[LivePrice]) -> dict[str, float | None]:
    return {each.kind: each.rate.usd_per_hour for each in found}


def test_each_way_of_renting_has_its_price_of_today_with_place_and_time() -> None:
    with answering(ANSWERS):
        found = ask_prices(P5, client)
    assert prices(found) == {
        "on-demand": 55.04,
        "spot": 19.25,
        "block": 1800 / 48,
        "savings plan, 1 year": 40.1,
        "savings plan, 3 years": 27.2,
    }
    assert all("asked of AWS 2026-11-23 20:00 UTC" in each.rate.source for each in found)
    assert rate_for(found, "spot").source.startswith("spot in us-east-1d, ")
    assert "the cheapest offer of 2 x p5.48xlarge for 24 h" in rate_for(found, "block").source
    assert rate_for(found, "reservation") == rate_for(found, "on-demand")


def test_spot_is_asked_of_the_zone_where_the_nodes_are() -> None:
    in_zone = PriceQuery(instance="p5.48xlarge", region="us-east-1", zone="us-east-1a", at=AT)
    wanted = {
        "InstanceTypes": ["p5.48xlarge"], "ProductDescriptions": ["Linux/UNIX"], "StartTime": AT,
        "AvailabilityZone": "us-east-1a",
    }  # fmt: skip
    with answering(ANSWERS, spot=wanted):
        assert rate_for(ask_prices(in_zone, client), "spot").usd_per_hour == 19.25


@pytest.mark.parametrize(
    ("kind", "answer", "why"),
    [
        ("on-demand", {"PriceList": [product("0.0000000000")]}, r"AWS says \$0 on demand"),
        ("on-demand", {"PriceList": []}, "AWS says none on demand"),
        ("on-demand", {"PriceList": [product("1"), product("2")]}, r"AWS says \$1, \$2 on demand"),
        ("spot", {"SpotPriceHistory": []}, "AWS names no spot price in us-east-1"),
        ("spot", {"SpotPriceHistory": [spot("0.0", "us-east-1a")]}, "names no spot price"),
        ("block", {"CapacityBlockOfferings": []}, "offers no capacity block of 2 x p5.48xlarge"),
        ("block", {"CapacityBlockOfferings": [offer("9", currency="CNY")]}, "no capacity block"),
        ("block", "UnauthorizedOperation", "lack the right to DescribeCapacityBlockOfferings"),
    ],
)  # fmt: skip
def test_a_price_that_aws_does_not_tell_is_not_known(kind: str, answer: Any, why: str) -> None:
    with answering({**ANSWERS, kind: answer}):
        found = ask_prices(P5, client)
    rate = rate_for(found, kind)
    assert rate.usd_per_hour is None
    assert re.search(why, rate.source), rate.source
    assert len([usd for usd in prices(found).values() if usd]) == 4, "the others are there"


def test_without_any_answer_the_reason_is_raised() -> None:
    refused = answering(dict.fromkeys(ANSWERS, "UnrecognizedClientException"))
    said = r"cannot ask for prices \(get_products\) in us-east-1"
    with refused, pytest.raises(AccessError, match=said):
        ask_prices(P5, client)


def test_a_region_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(RequestError, match=r"--prices aws asks .* export AWS_REGION=us-east-1"):
        price_query("p5.48xlarge", region=None)
    assert price_query("p5.48xlarge", region="eu-west-1", nodes=0).nodes == 1
