"""Prices of the day, asked of AWS: on demand, spot, capacity blocks and savings plans.

Each with where and when. What AWS does not say, or says in several ways, is not known; a price of
$0, which AWS's lists have, is none.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from shardyard.errors import ShardyardError
from shardyard.hardware.catalogue import Rate
from shardyard.io.aws import aws_client, aws_session, translate_aws_errors
from shardyard.io.files import parse_json

LISTS_REGION = "us-east-1"
"""Region that serves AWS's price lists and savings plans, for all regions."""
BLOCK_HOURS = 24
"""The shortest capacity block."""
_YEAR_S = 365 * 86400

_NO_REGION = (
    "--prices aws asks what an hour costs in one region, and neither launch.aws_batch.region nor "
    "your AWS configuration names one. Give launch.aws_batch.region, or export "
    "AWS_REGION=us-east-1."
)

Client = Callable[[str, str], Any]
"""Service and region -> a client of it."""


@dataclass(frozen=True, kw_only=True)
class LivePrice:
    """Hourly price of one node, rented in one way."""

    kind: str
    """``on-demand``, ``spot``, ``block``, or a savings plan in words."""
    rate: Rate

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": self.kind, **asdict(self.rate)}


@dataclass(frozen=True, kw_only=True)
class PriceQuery:
    """Request for the price of an instance."""

    instance: str
    region: str
    zone: str | None = None
    """None: the cheapest of the region."""
    nodes: int = 1
    """Number of nodes at once; a block is offered for that many."""
    at: datetime

    @property
    def when(self) -> str:
        """For the source of an answer."""
        return f"asked of AWS {self.at:%Y-%m-%d %H:%M} UTC"


def price_query(
    instance: str, *, region: str | None, zone: str | None = None, nodes: int = 1
) -> PriceQuery:
    """About an instance type now, in this region or that of the user's AWS configuration.

    Raises:
        RequestError: boto3 is missing, or no region is known.
    """
    known = str(aws_session(region, no_region=_NO_REGION).region_name)
    return PriceQuery(
        instance=instance, region=known, zone=zone, nodes=max(nodes, 1), at=datetime.now(UTC)
    )


def client_of_session(service: str, region: str) -> Any:
    """A client with the credentials of the user's AWS configuration."""
    return aws_client(aws_session(region), service)


def ask_prices(query: PriceQuery, client: Client = client_of_session) -> list[LivePrice]:
    """Ask for every kind; one that AWS does not tell has no price and says why.

    Raises:
        ShardyardError: None could be asked: no credentials, no connection.
    """
    prices: list[LivePrice] = []
    errors: list[ShardyardError] = []
    for kind, ask in _ASK.items():
        try:
            prices += ask(query, client)
        except ShardyardError as error:
            errors.append(error)
            prices.append(LivePrice(kind=kind, rate=Rate(usd_per_hour=None, source=str(error))))
    if len(errors) == len(_ASK):
        raise errors[0]
    return prices


def rate_for(prices: Iterable[LivePrice], kind: str) -> Rate:
    """The answer for nodes rented so; a reservation bills as on demand."""
    wanted = "on-demand" if kind == "reservation" else kind
    return next(each.rate for each in prices if each.kind == wanted)


def _answer(client: Client, service: str, region: str, call: str, **params: Any) -> dict[str, Any]:
    with translate_aws_errors(f"ask for prices ({call})", region):
        answer: dict[str, Any] = getattr(client(service, region), call)(**params)
    return answer


def _on_demand(query: PriceQuery, client: Client) -> Iterator[LivePrice]:
    wanted = {
        "instanceType": query.instance,
        "regionCode": query.region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    filters = [{"Type": "TERM_MATCH", "Field": key, "Value": wanted[key]} for key in wanted]
    answer = _answer(
        client, "pricing", LISTS_REGION, "get_products",
        ServiceCode="AmazonEC2", Filters=filters,
    )  # fmt: skip
    prices = {
        float(dimension["pricePerUnit"]["USD"])
        for product in answer["PriceList"]
        for term in parse_json(product)["terms"].get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
    }
    where = f"on demand in {query.region}, {query.when}"
    yield LivePrice(kind="on-demand", rate=_one_of(prices, where))


def _one_of(prices: set[float], where: str) -> Rate:
    """The price, where AWS says one and it is above 0."""
    if len(prices) == 1 and min(prices) > 0:
        return Rate(usd_per_hour=min(prices), source=where)
    said = ", ".join(f"${usd:g}" for usd in sorted(prices)) or "none"
    return Rate(usd_per_hour=None, source=f"AWS says {said} {where}")


def _spot(query: PriceQuery, client: Client) -> Iterator[LivePrice]:
    params = {} if query.zone is None else {"AvailabilityZone": query.zone}
    answer = _answer(
        client, "ec2", query.region, "describe_spot_price_history",
        InstanceTypes=[query.instance], ProductDescriptions=["Linux/UNIX"], StartTime=query.at,
        **params,
    )  # fmt: skip
    offers = [
        (usd, str(line["AvailabilityZone"]))
        for line in answer["SpotPriceHistory"]
        if (usd := float(line["SpotPrice"])) > 0
    ]
    if not offers:
        why = f"AWS names no spot price in {query.zone or query.region}, {query.when}"
        yield LivePrice(kind="spot", rate=Rate(usd_per_hour=None, source=why))
        return
    usd, zone = min(offers)
    source = f"spot in {zone}, {query.when}; it changes"
    yield LivePrice(kind="spot", rate=Rate(usd_per_hour=usd, source=source))


def _block(query: PriceQuery, client: Client) -> Iterator[LivePrice]:
    answer = _answer(
        client, "ec2", query.region, "describe_capacity_block_offerings",
        InstanceType=query.instance, InstanceCount=query.nodes, CapacityDurationHours=BLOCK_HOURS,
    )  # fmt: skip
    offers = [
        (fee / (offer["InstanceCount"] * offer["CapacityBlockDurationHours"]), offer)
        for offer in answer["CapacityBlockOfferings"]
        if offer.get("CurrencyCode", "USD") == "USD" and (fee := float(offer["UpfrontFee"])) > 0
    ]
    size = f"{query.nodes} x {query.instance} for {BLOCK_HOURS} h in {query.region}"
    if not offers:
        why = f"AWS offers no capacity block of {size}, {query.when}"
        yield LivePrice(kind="block", rate=Rate(usd_per_hour=None, source=why))
        return
    usd, offer = min(offers, key=lambda each: each[0])
    begins = f"from {offer['StartDate']:%Y-%m-%d %H:%M} in {offer['AvailabilityZone']}"
    source = f"capacity block, the cheapest offer of {size}, {begins}, {query.when}"
    yield LivePrice(kind="block", rate=Rate(usd_per_hour=usd, source=source))


def _savings(query: PriceQuery, client: Client) -> Iterator[LivePrice]:
    wanted = {
        "region": query.region,
        "instanceType": query.instance,
        "productDescription": "Linux/UNIX",
        "tenancy": "shared",
    }
    answer = _answer(
        client, "savingsplans", LISTS_REGION, "describe_savings_plans_offering_rates",
        savingsPlanTypes=["EC2Instance"], savingsPlanPaymentOptions=["No Upfront"],
        products=["EC2"], serviceCodes=["AmazonEC2"],
        filters=[{"name": name, "values": [wanted[name]]} for name in wanted],
    )  # fmt: skip
    for years in (1, 3):
        prices = {
            float(row["rate"])
            for row in answer["searchResults"]
            if row["savingsPlanOffering"]["durationSeconds"] == years * _YEAR_S
        }
        kind = f"savings plan, {years} year{'s' * (years > 1)}"
        where = f"EC2 savings plan, no upfront payment, in {query.region}, {query.when}"
        yield LivePrice(kind=kind, rate=_one_of(prices, where))


_ASK: dict[str, Callable[[PriceQuery, Client], Iterator[LivePrice]]] = {
    "on-demand": _on_demand,
    "spot": _spot,
    "block": _block,
    "savings plan": _savings,
}
