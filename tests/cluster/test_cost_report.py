"""The bill of a cluster: predicted before, told of the ledger after, by a clock of its own."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.cluster.clients import World, new_world
from shardyard.cluster.cost_report import Bill, Stage, bill_of, predicted_bill, requested_nodes
from shardyard.cluster.create import LAUNCHER, make, scale
from shardyard.cluster.delete import remove
from shardyard.cluster.orphans import Swept
from shardyard.cluster.spec import ClusterSpec
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.errors import CapacityError, StorageError
from shardyard.hardware.catalogue import Rate
from shardyard.launchers.ledger import Ledger
from tests.cluster.clients import playing_aws
from tests.cluster.stand_in import Account, StandInWorld

HOUR_S = 3600.0
PLACE = ("name=trainers", "region=us-east-1", "zone=us-east-1a", "other_zone=us-east-1b")
DESCRIBED = (
    *PLACE, "nodes.instance=p4d.24xlarge", "storage={kind: fsx, mb_per_s_per_tib: 125}",
)  # fmt: skip
FAST = {"poll_s": 0.0, "limit_s": 0.05}
TAKES_MIN: dict[tuple[str, ...], float] = {
    ("eksctl", "create", "cluster"): 15,
    ("eksctl", "create", "nodegroup"): 6,
    ("eksctl", "scale", "nodegroup"): 8,
    ("eksctl", "delete", "nodegroup"): 9,
    ("eksctl", "delete", "cluster"): 12,
}
"""Minutes that programs take here; such as they are said to take, and no measurement."""


@dataclass
class Clock:
    """Unix seconds that pass when somebody lets them."""

    t: float = 1_795_000_000.0

    def __call__(self) -> float:
        return self.t

    def pass_hours(self, hours: float) -> None:
        self.t += hours * HOUR_S


class ClockedWorld(StandInWorld):
    """A world whose programs take time, and whose ledger reads the same clock."""

    clock: Clock

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger.jsonl", clock=self.clock)

    def run(self, argv: list[str]) -> str:
        self.clock.pass_hours(TAKES_MIN.get(tuple(argv[:3]), 0) / 60)
        return super().run(argv)


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "testing")
    with playing_aws():
        yield


def clocked(folder: Path, *more: str) -> ClockedWorld:
    plain = new_world(read_cluster_spec([*DESCRIBED, *more]), folder)
    world = ClockedWorld(folder=plain.folder, spec=plain.spec, owner=plain.owner)
    offers = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}
    object.__setattr__(world, "account", Account(offers=offers))
    object.__setattr__(world, "clock", Clock())
    return world


def yes(_question: str) -> None:
    return None


def bill_now(world: ClockedWorld) -> Bill:
    return bill_of(world.spec, world.ledger, now=world.clock())


LIVES = {
    "nodes from the first": ("nodes.count=2", [Stage(hours=30, nodes=2)]),
    "nodes for a while": (
        "nodes.count=0",
        [Stage(hours=3, nodes=0), Stage(hours=40, nodes=4), Stage(hours=2, nodes=0)],
    ),
    "more, and fewer": (
        "nodes.count=1",
        [Stage(hours=5, nodes=1), Stage(hours=24, nodes=8), Stage(hours=24, nodes=2)],
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.heavy if "while" in name else pytest.mark.system)
        for name in LIVES
    ],
)
def test_the_bill_predicted_for_a_life_is_within_2_percent_of_the_ledgers(
    tmp_path: Path, name: str
) -> None:
    """A stage begins when its number of nodes is asked for; making and removing takes its time."""
    count, stages = LIVES[name]
    world = clocked(tmp_path, count)
    predicted = predicted_bill(world.spec, stages)
    asked = world.spec.nodes.count
    began = world.clock()
    make(world, **FAST)
    until = began
    for stage in stages:
        if stage.nodes != asked:
            scale(world, stage.nodes, agree=yes, **FAST)
            asked = stage.nodes
        until += stage.hours * HOUR_S
        world.clock.t = max(world.clock.t, until)
    removed = remove(world, agree=yes, agree_to_lose=yes, **FAST)
    assert removed.is_clean, removed
    bill = bill_now(world)
    assert bill.is_whole and predicted.is_whole
    assert predicted.usd == pytest.approx(bill.usd, rel=0.02)
    assert predicted.usd != bill.usd, "the minutes of making and removing are not predicted"
    world.clock.pass_hours(1000)
    assert bill_now(world) == bill, "what is gone costs no more"


def test_each_part_is_paid_from_its_beginning_to_its_end() -> None:
    given = read_cluster_spec([*DESCRIBED, "nodes.count=2"])
    bill = predicted_bill(given, [Stage(hours=10, nodes=2), Stage(hours=5, nodes=0)])
    by_what = {item.what: item for item in bill.items}
    nodes = by_what["p4d.24xlarge, on-demand"]
    assert nodes.hours == 20 and nodes.usd == pytest.approx(20 * 21.957642)
    assert by_what["EKS control plane"].usd == pytest.approx(1.5)
    assert by_what["FSx for Lustre, 1200 GiB"].usd == pytest.approx(15 * 0.145 * 1200 / 730)
    assert bill.usd == pytest.approx(sum(item.usd or 0 for item in bill.items))


def test_what_still_stands_is_paid_until_now(tmp_path: Path) -> None:
    world = clocked(tmp_path, "nodes.count=1")
    make(world, **FAST)
    world.clock.pass_hours(10)
    first = bill_now(world).usd
    world.clock.pass_hours(1)
    an_hour = 0.10 + 0.05 + 2 * 0.34 + 21.957642 + 0.145 * 1200 / 730
    assert bill_now(world).usd - first == pytest.approx(an_hour)


def test_nodes_that_do_not_come_are_on_the_bill_from_when_they_were_asked_for(
    tmp_path: Path,
) -> None:
    """Some of them may stand and cost, so the bill says rather too much than too little."""
    world = clocked(tmp_path)
    make(world, **FAST)
    world.account.lies.add(("eksctl", "scale"))
    with pytest.raises(CapacityError):
        scale(world, 3, agree=yes, **FAST)
    assert requested_nodes(world.spec, world.ledger) == 3
    world.account.lies.clear()
    scale(world, 0, agree=yes, **FAST)
    assert requested_nodes(world.spec, world.ledger) == 0


def test_a_part_that_was_begun_twice_is_paid_from_the_first_time(tmp_path: Path) -> None:
    given, clock = read_cluster_spec(DESCRIBED), Clock()
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=clock)
    for _ in range(2):
        entry = ledger.intend("control plane", "eksctl-trainers-cluster", launcher=LAUNCHER)
        clock.pass_hours(1)
    ledger.confirm(entry, "eksctl-trainers-cluster")
    clock.pass_hours(1)
    ledger.remove(entry)
    clock.pass_hours(5)
    ledger.intend("control plane", "eksctl-trainers-cluster", launcher=LAUNCHER)
    clock.pass_hours(2)
    items = bill_of(given, ledger, now=clock()).items
    assert {item.what: item.hours for item in items} == {"EKS control plane": 5, "NAT gateway": 5}
    assert [entry.kind for entry in ledger.live()] == ["control plane"]


def test_a_price_that_nobody_knows_is_said_beside_the_sum() -> None:
    block = read_cluster_spec(
        [
            *DESCRIBED,
            "nodes.instance=g6e.48xlarge",
            "nodes.count=1",
            "nodes.capacity=block:cr-0123456789abcdef0",
        ]
    )
    bill = predicted_bill(block, [Stage(hours=10, nodes=1)])
    assert bill.words() == f"${bill.usd:,.2f} and what is not known"
    asked = predicted_bill(block, [Stage(hours=10, nodes=1)], rate=Rate(usd_per_hour=5, source=""))
    assert asked.usd == pytest.approx(bill.usd + 50)


def test_a_ledger_that_was_changed_tells_no_bill(tmp_path: Path) -> None:
    given, ledger = read_cluster_spec(DESCRIBED), Ledger(tmp_path / "ledger.jsonl")
    ledger.note("accelerator node count", "many", launcher=LAUNCHER)
    with pytest.raises(StorageError, match="many accelerator nodes were requested, which is not"):
        bill_of(given, ledger, now=0)
    line = json.loads(ledger.path.read_text())
    del line["t"]
    ledger.path.write_text(json.dumps(line) + "\n")
    with pytest.raises(StorageError, match=r"does not say when \(t\), so its cost"):
        bill_of(given, ledger, now=0)


def begun_hours_ago(folder: Path, hours: float) -> World:
    world = new_world(read_cluster_spec([*DESCRIBED, "nodes.count=1"]), folder)
    early = Ledger(world.ledger.path, clock=lambda: time.time() - hours * HOUR_S)
    early.intend("control plane", "eksctl-trainers-cluster", launcher=LAUNCHER)
    group = "eksctl-trainers-nodegroup-accelerators"
    early.intend("accelerators nodes", group, launcher=LAUNCHER)
    return world


def test_show_says_what_was_paid_and_what_the_next_hours_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun_hours_ago(tmp_path, 10)
    words = ["cluster", "show", "trainers", "--dir", str(tmp_path)]
    assert main([*words, "--hours", "100", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["bill"]["usd"] == pytest.approx(10 * (0.10 + 0.05 + 21.957642), rel=1e-3)
    rates = 0.10 + 0.05 + 2 * 0.34 + 21.957642 + 0.145 * 1200 / 730
    assert content["predicted"]["usd"] == pytest.approx(100 * rates)
    assert main(words) == 0
    assert "paid so far, by its ledger: $221." in capsys.readouterr().out


def test_the_closing_table_of_delete_tells_the_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = Swept(orphans=(), failed_queries=())  # moto lacks a call
    monkeypatch.setattr("shardyard.cluster.delete.sweep", lambda _, **__: nothing)
    begun_hours_ago(tmp_path, 10)
    assert main(["cluster", "delete", "trainers", "--dir", str(tmp_path), "--yes"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "paid for hours US dollars EKS control plane 10.0 $1.00" in said
    assert "all of its life, by its ledger $221." in said


def test_a_queue_of_batch_says_where_the_cost_of_its_jobs_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = Swept(orphans=(), failed_queries=())
    monkeypatch.setattr("shardyard.cluster.delete.sweep", lambda _, **__: nothing)
    network = "vpc={id: vpc-0123456789abcdef0, subnets: {us-east-1a: subnet-0123456789abcdef0}}"
    described = ["kind=batch", *PLACE[:3], network, "nodes.instance=p4d.24xlarge"]
    new_world(read_cluster_spec(described), tmp_path)
    assert main(["cluster", "delete", "trainers", "--dir", str(tmp_path), "--yes"]) == 0
    assert "instances that came with jobs in the report of each run" in " ".join(
        capsys.readouterr().out.split()
    )


def test_before_it_is_made_the_bill_is_predicted_with_its_dates(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["cluster", "create", *DESCRIBED, "nodes.count=2", "--hours", "30"]
    assert main([*words, "--dry-run", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    (nodes,) = [cost for cost in content["costs"] if cost["part"] == "accelerators nodes"]
    assert "us-east-1, karpenter.sh price table generated 2026-07-20" in nodes["source"]
    given: ClusterSpec = read_cluster_spec([*DESCRIBED, "nodes.count=2"])
    predicted = predicted_bill(given, [Stage(hours=30, nodes=2)])
    assert content["predicted"] == predicted.to_json()
    assert main([*words, "--dir", str(tmp_path)]) == 2, "there is nobody to ask"
    assert f"in 30 h {predicted.words()}" in " ".join(capsys.readouterr().out.split())
