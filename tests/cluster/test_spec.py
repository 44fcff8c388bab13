"""What a cluster may be, and what each wrong one is told."""

from pathlib import Path

import pytest

from shardyard.cluster.prices import hourly_costs
from shardyard.cluster.spec_file import legal_size_gib, read_cluster_spec, settings
from shardyard.config.cluster_choice import chosen_cluster
from shardyard.config.load import load_recipe
from shardyard.errors import RecipeError, RequestError

PLACE = ("name=trainers", "region=us-east-1", "zone=us-east-1a", "other_zone=us-east-1b")


def test_the_recipe_says_what_the_nodes_are(tmp_path: Path) -> None:
    recipe = tmp_path / "train.yaml"
    recipe.write_text("cluster: {nodes: 4, instance: p5.48xlarge}\n")
    given = read_cluster_spec([*PLACE, f"recipe={recipe}"])
    assert (given.nodes.instance, given.nodes.max) == ("p5.48xlarge", 4)


def test_the_recipe_says_how_the_nodes_are_rented(tmp_path: Path) -> None:
    recipe = tmp_path / "train.yaml"
    recipe.write_text("cluster: {instance: p5.48xlarge, capacity: spot}\n")
    assert read_cluster_spec([*PLACE, f"recipe={recipe}"]).capacity.kind == "spot"
    given = read_cluster_spec([*PLACE, f"recipe={recipe}", "nodes.capacity=on-demand"])
    assert given.capacity.kind == "on-demand"


def test_files_and_settings_are_merged_left_to_right(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "name: trainers\nregion: us-east-1\nzone: us-east-1a\nother_zone: us-east-1b\n"
        "nodes: {instance: g5.xlarge, max: 8}\n"
    )
    given = read_cluster_spec([str(file), "nodes.count=2"])
    assert (given.nodes.instance, given.nodes.count, given.nodes.max) == ("g5.xlarge", 2, 8)


WRONG = {
    "nam=x": "nam: unknown setting of a cluster. Did you mean name?",
    "name=Trainers": "cannot be a cluster's name",
    "region=here": "is not an AWS region. Write it as us-east-1",
    "zone=us-west-2a": "is not a zone of us-east-1",
    "other_zone=us-east-1a": "needs subnets in two zones",
    'version="2"': 'is not a version such as "1.34"',
    "vpc.id=mine": "is not a VPC. Write it as vpc-",
    "vpc.id=vpc-0123456789abcdef0": "Give one private subnet of each of us-east-1a, us-east-1b",
    "vpc.subnets={us-east-1a: subnet-01234567}": "are given and vpc.id is not",
    "vpc={id: vpc-01234567, subnets: {us-east-1a: x, us-east-1b: subnet-01234567}}": "=x is not a sub",  # noqa: E501
    "vpc=3": "vpc=3 must have settings inside",
    "system.instance=p5.48xlarge": "is not c5.2xlarge or m5.8xlarge",
    "nodes.instance=p9": "nodes.instance=p9 is not in the catalogue",
    "nodes.instance=null": "is missing, and no recipe says it",
    "nodes.capacity=cheap": (
        "is not a capacity. Use on-demand, spot, reservation:cr-... or block:cr-..."
    ),
    "nodes={instance: g5.xlarge, count: 3, max: 2}": "is more than nodes.max=2",
    "nodes={instance: g5.xlarge, efa: true}": "g5.xlarge has no Elastic Fabric Adapter",
    "nodes={instance: g5.xlarge, ami: mine}": "is not an image",
    "nodes.instance=p3.8xlarge": "nvidia/recommended/image_id --region us-east-1",
    "nodes.instance=dl1.24xlarge": "have no drivers for Gaudi",
    "storage={kind: fsx, size_gib: 3600}": "would make it 4800 and bill that",
    "storage={kind: fsx, size_gib: 3600, mb_per_s_per_tib: 125}": "bill that, $696 a month",
    "storage={kind: fsx, bucket: my-bucket}": "is not a bucket. Write it as s3://my-bucket/prefix",
    "storage={kind: efs, bucket: s3://my-bucket}": "is read only with storage.kind=fsx",
    "storage.claim=My_Claim": "is not a valid name in Kubernetes",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_is_told_with_what_to_do(setting: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_cluster_spec([*PLACE, "nodes.instance=g5.xlarge", setting])
    assert WRONG[setting] in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(RecipeError, match="3 problems"):
        read_cluster_spec(["name=trainers"])


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"none.yaml cannot be read: No such file.*name=trainers"
    ):
        read_cluster_spec([str(tmp_path / "none.yaml")])


def test_a_file_without_settings_is_told(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- trainers\n")
    with pytest.raises(RequestError, match="holds no settings"):
        read_cluster_spec([str(file)])


@pytest.mark.parametrize(
    ("asked", "legal"), [(1, 1200), (1200, 1200), (1201, 2400), (3600, 4800), (4800, 4800)]
)
def test_sizes_of_lustre_are_rounded_as_its_driver_does(asked: int, legal: int) -> None:
    assert legal_size_gib(asked) == legal  # 3600 -> 4800: aws-fsx-csi-driver 1.9


def test_the_price_of_standing_idle_is_its_parts() -> None:
    given = read_cluster_spec(
        [*PLACE, "nodes.instance=p4d.24xlarge", "nodes.count=2", "storage={kind: fsx,"
         " size_gib: 1200, mb_per_s_per_tib: 125}"]
    )  # fmt: skip
    costs = {cost.what: cost.usd_per_hour for cost in hourly_costs(given, nodes=2)}
    assert costs["EKS control plane"] == 0.10
    assert costs["2 x c5.2xlarge"] == pytest.approx(0.68)
    assert costs["2 x p4d.24xlarge, on-demand"] == pytest.approx(43.915284)
    assert costs["FSx for Lustre, 1200 GiB"] == pytest.approx(0.145 * 1200 / 730)


def test_a_price_that_nobody_knows_is_not_guessed() -> None:
    block = "nodes={instance: g6e.48xlarge, capacity: block:cr-0123456789abcdef0}"
    given = read_cluster_spec([*PLACE, block])
    (nodes,) = [cost for cost in hourly_costs(given, nodes=1) if "g6e" in cost.what]
    assert nodes.usd_per_hour is None and "AWS showed it when the block was bought" in nodes.source


@pytest.mark.parametrize("capacity", ["on-demand", "spot", "reservation:cr-0123456789abcdef0"])
def test_clusters_and_plans_have_one_price(capacity: str) -> None:
    given = read_cluster_spec([*PLACE, "nodes.instance=p4d.24xlarge", f"nodes.capacity={capacity}"])
    (nodes,) = [cost for cost in hourly_costs(given, nodes=3) if "p4d" in cost.what]
    asked = ["cluster.nodes=3", "cluster.instance=p4d.24xlarge", f"cluster.capacity={capacity}"]
    planned = chosen_cluster(load_recipe([], asked).cluster)
    assert planned is not None
    assert (nodes.usd_per_hour, nodes.source) == (planned.usd_per_hour, planned.price_source)


def test_each_setting_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verbs" / "cluster.md").read_text()
    for name, setting in settings().items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert setting.sentence in row
