"""`shardyard plan --prices aws`: the plan counts with what AWS says today."""

import json

import pytest

from shardyard.cli import main
from shardyard.cluster.live_prices import LivePrice
from shardyard.hardware.catalogue import Rate

WORDS = (
    "plan", "model.preset=llama-tiny", "run.steps=1000", "optim.global_batch=32",
    "cluster.instance=p5.48xlarge", "cluster.nodes=2", "launch.aws_batch.region=us-east-1",
    "--layouts", "0", "--prices", "aws",
)  # fmt: skip


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        LivePrice(kind="on-demand", rate=Rate(usd_per_hour=60.0, source="on demand today")),
        LivePrice(kind="spot", rate=Rate(usd_per_hour=20.0, source="spot in us-east-1d today")),
        LivePrice(kind="block", rate=Rate(usd_per_hour=None, source="AWS offers none today")),
    ]
    monkeypatch.setattr("shardyard.control.plan.ask_prices", lambda _: found)


def price(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    assert main([*WORDS, *more, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)["price"]
    return found


def test_all_nodes_are_counted_at_the_price_of_how_they_are_rented(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert price(capsys) == {"usd_per_hour": 120.0, "source": "on demand today"}
    spot = {"usd_per_hour": 40.0, "source": "spot in us-east-1d today"}
    assert price(capsys, "cluster.capacity=spot") == spot
    block = ("cluster.capacity=block:cr-0123456789abcdef0", "cluster.block_ends=2099-01-01T11:30Z")
    assert price(capsys, *block) == {"usd_per_hour": None, "source": "AWS offers none today"}


def test_each_way_of_renting_is_shown_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "$120.00 an hour" in said
    assert "a node, rented an hour on-demand $60.00 on demand today spot $20.00 spot in" in said
    assert "block - AWS offers none today" in said
