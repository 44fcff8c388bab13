"""Wrong situations of prices and bills: of a plan, of a run's limit, of a cluster."""

import json

from shardyard.cluster.clients import new_world
from shardyard.cluster.spec_file import read_cluster_spec
from tests.launchers.wrong_anywhere import AnyDesk
from tests.launchers.wrong_situations import Situations

SITUATIONS = Situations("prices and bills")
row = SITUATIONS.row

_PLANNED = ("model.preset=llama-tiny", "run.steps=10", "optim.global_batch=8")
_P5 = ("cluster.instance=p5.48xlarge", "cluster.device=auto", "cluster.devices=auto")
_CLUSTER = (
    "name=trainers", "region=us-east-1", "zone=us-east-1a", "other_zone=us-east-1b",
    "nodes.instance=p4d.24xlarge",
)  # fmt: skip


class PricesDesk(AnyDesk):
    """Somebody whose AWS configuration names neither a region nor credentials."""

    def plan(self, *words: str) -> int:
        """Plan a small model, with what is to be different."""
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"):
            self.environ.delenv(name, raising=False)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            self.environ.setenv(name, "/dev/null")
        self.environ.setenv("AWS_EC2_METADATA_DISABLED", "true")
        return self.shardyard("plan", *_PLANNED, *words, "--layouts", "0")

    def cluster(self, *words: str) -> int:
        """A verb about clusters that were made here."""
        return self.shardyard("cluster", *words, "--dir", str(self.folder / "clusters"))

    def begun(self, **line: object) -> None:
        """A cluster whose ledger has one line, with what somebody changed in it."""
        world = new_world(read_cluster_spec(_CLUSTER), self.folder / "clusters")
        usual = {"t": 1.0, "action": "noted", "launcher": "cluster"}
        named = {"kind": "accelerator node count", "name": "2"}
        content = {key: value for key, value in {**usual, **named, **line}.items() if value}
        world.ledger.path.write_text(json.dumps(content) + "\n")


@row(
    "prices of today of machines that are none of AWS's",
    2,
    says="--prices aws asks what the EC2 type of the recipe costs today, and cluster.instance",
    do="an instance is named with cluster.instance",
)
def _(desk: PricesDesk) -> int:
    return desk.plan("cluster.device=cpu", "--prices", "aws")


@row(
    "prices of today of all instance types",
    2,
    says="--offers, --deadline and --budget compare all types by the dated table",
    do="Leave one of the two out",
)
def _(desk: PricesDesk) -> int:
    return desk.plan(*_P5, "--offers", "--prices", "aws")


@row(
    "prices of today beside a price that is given",
    2,
    says="cluster.usd_per_node_hour=30 says what it costs",
    do="Leave one of the two out",
)
def _(desk: PricesDesk) -> int:
    return desk.plan(*_P5, "cluster.usd_per_node_hour=30", "--prices", "aws")


@row(
    "prices of today of no region",
    2,
    says="neither launch.aws_batch.region nor your AWS configuration names one",
    do="export AWS_REGION=us-east-1",
)
def _(desk: PricesDesk) -> int:
    return desk.plan(*_P5, "--prices", "aws")


@row(
    "prices of today without credentials",
    4,
    says="cannot ask for prices (get_products) in us-east-1: Unable to locate credentials",
    do="aws sso login",
)
def _(desk: PricesDesk) -> int:
    return desk.plan(*_P5, "launch.aws_batch.region=us-east-1", "--prices", "aws")


@row(
    "price of machines that nobody names",
    2,
    says="cluster.usd_per_node_hour=5, and neither cluster.instance nor cluster.file names",
    do="Name them, or leave the price out",
)
def _(desk: PricesDesk) -> int:
    return desk.plan("cluster.device=cpu", "cluster.usd_per_node_hour=5")


@row(
    "price that is none",
    2,
    says="cluster.usd_per_node_hour=0",
    do="null: from the price table",
)
def _(desk: PricesDesk) -> int:
    return desk.plan(*_P5, "cluster.usd_per_node_hour=0")


@row(
    "limit in dollars, and a capacity block whose price no table has",
    2,
    says="launch.max_usd=5, but the price is not known",
    do="AWS showed it when the block was bought: give cluster.usd_per_node_hour",
)
def _(desk: PricesDesk) -> int:
    block = ("cluster.capacity=block:cr-0123456789abcdef0", "cluster.block_ends=2099-01-01T11:30Z")
    # the table has a price of p5 and none of p5.4xlarge, whose price depends on the region
    small = ("cluster.instance=p5.4xlarge", *_P5[1:])
    return desk.launch(*small, *block, "optim.global_batch=16", "launch.max_usd=5")


@row(
    "bill of a cluster for no time",
    2,
    says="Invalid value for '--hours': 0.0 is not in the range x>0",
    do="",
)
def _(desk: PricesDesk) -> int:
    return desk.cluster("create", *_CLUSTER, "--hours", "0")


@row(
    "bill of a cluster whose ledger says no number of nodes",
    1,
    says="says that many accelerator nodes were requested, which is not a number",
    do="Restore the file from a copy",
)
def _(desk: PricesDesk) -> int:
    desk.begun(name="many")
    return desk.cluster("show", "trainers")


@row(
    "bill of a cluster whose ledger does not say when",
    1,
    says="does not say when (t), so its cost is unknown",
    do="restore the file from a copy",
)
def _(desk: PricesDesk) -> int:
    desk.begun(t=None)
    return desk.cluster("show", "trainers")
