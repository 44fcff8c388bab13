"""What a queue of AWS Batch may be, and what each wrong one is told."""

import json
from pathlib import Path

import pytest

from shardyard.cluster.prices import hourly_costs
from shardyard.cluster.spec import MOST_USER_DATA_BYTES
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.errors import RecipeError

PLACE = (
    "kind=batch", "name=trainers", "region=us-east-1", "zone=us-east-1a",
    "vpc={id: vpc-0123456789abcdef0, subnets: {us-east-1a: subnet-0123456789abcdef0}}",
    "nodes.instance=g5.xlarge",
)  # fmt: skip

WRONG = {
    "kind=sagemaker": "kind=sagemaker is not eks or batch",
    "other_zone=us-east-1b": "other_zone: belongs to kind=eks, and this is kind=batch. Leave it",
    'version="1.34"': "version: belongs to kind=eks",
    "system.nodes=2": "system: belongs to kind=eks",
    "nodes.efa=true": "nodes.efa: belongs to kind=eks",
    "storage.claim=shared": "storage.claim: belongs to kind=eks",
    "storage.namespace=default": "storage.namespace: belongs to kind=eks",
    "vpc={id: null}": "vpc.subnets: are given and vpc.id is not. Give both, or neither for a new",
    "vpc.subnets={us-east-1b: subnet-0123456789abcdef0}": "Give one private subnet of each of us-",
    "nodes.capacity=spot": "nodes.capacity=spot: Batch runs no multi-node job on Spot instances",
    "nodes.instance=trn1.32xlarge": "a run on Trainium1 can be planned, not trained yet",
    "nodes.instance=dl1.24xlarge": "have no drivers for Gaudi. Give an image that has them, one of",
    "nodes.user_data=mount /fsx": "nodes.user_data: begins with neither #! nor a line #cloud-con",
    "nodes.stop_s=5": "nodes.stop_s=5 is not a whole number from 30 to 86400",
    "jobs.bucket=my-bucket": "jobs.bucket=my-bucket is not a bucket. Write it as s3://my-bucket",
    "jobs.secrets=['hub token']": "has hub token, which is neither the ARN of a secret nor",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_is_told_with_what_to_do(setting: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_cluster_spec([*PLACE, setting])
    assert WRONG[setting] in str(caught.value)


@pytest.mark.parametrize("setting", ["nodes.stop_s=60", "jobs.bucket=s3://my-data"])
def test_a_setting_of_batch_is_refused_of_an_eks_cluster(setting: str) -> None:
    name = setting.partition("=")[0].partition(".")[0]
    with pytest.raises(
        RecipeError, match=rf"{name}.*: belongs to kind=batch, and this is kind=eks"
    ):
        read_cluster_spec([*PLACE, "kind=eks", "other_zone=us-east-1b", setting])


def test_user_data_above_what_ec2_takes_is_refused() -> None:
    script = json.dumps("#!" + "a" * MOST_USER_DATA_BYTES)
    with pytest.raises(RecipeError, match=r"EC2 takes 14,336 in addition to ours.*from S3"):
        read_cluster_spec([*PLACE, f"nodes.user_data={script}"])


def test_the_recipe_says_what_its_jobs_need(tmp_path: Path) -> None:
    recipe = tmp_path / "train.yaml"
    recipe.write_text("cluster: {nodes: 4, instance: p5.48xlarge}\nsecrets: {HF: 'ssm:hub'}\n")
    given = read_cluster_spec([*PLACE[:-1], f"recipe={recipe}"])
    assert (given.nodes.instance, given.nodes.max, given.nodes.stop_s) == ("p5.48xlarge", 4, 150)
    assert given.jobs.secrets == ("hub",)


def test_a_queue_costs_nothing_while_no_job_waits() -> None:
    assert hourly_costs(read_cluster_spec(PLACE), nodes=0) == []


def test_a_network_that_is_made_for_it_costs_its_nat_gateway() -> None:
    given = read_cluster_spec([word for word in PLACE if not word.startswith("vpc=")])
    (cost,) = hourly_costs(given, nodes=0)
    (cost,) = hourly_costs(given, nodes=0)
    assert (cost.what, cost.part) == ("NAT gateway", "network")
    assert cost.usd_per_hour == pytest.approx(0.05)
