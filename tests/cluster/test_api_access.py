"""Who reaches the API server of a cluster, and the add-on that enforces network policies."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from shardyard.cli.cluster import command
from shardyard.cluster.eksctl import render_cluster
from shardyard.cluster.spec import ClusterSpec
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.cluster.terraform import render_terraform
from shardyard.errors import RecipeError

ANYONE = [
    "name=trainers", "region=us-east-1", "zone=us-east-1a", "other_zone=us-east-1b",
    "nodes.instance=g5.12xlarge",
]  # fmt: skip
NETWORK = (
    "vpc={id: vpc-0123456789abcdef0, subnets: {us-east-1a: subnet-0123456789abcdef0, "
    "us-east-1b: subnet-0123456789abcdef1}}"
)


def given(*words: str) -> ClusterSpec:
    return read_cluster_spec([*ANYONE, *words])


@pytest.mark.parametrize("network", [[], [NETWORK]])
@pytest.mark.parametrize(
    ("word", "endpoints", "ranges"),
    [
        ("access=[203.0.113.7/32, 198.51.0.0/16]", (True, True),
         ["203.0.113.7/32", "198.51.0.0/16"]),
        ("access=[private]", (False, True), None),
        ("access=[0.0.0.0/0]", (True, True), ["0.0.0.0/0"]),
    ],
)  # fmt: skip
def test_eksctl_and_terraform_are_given_the_access_list(
    network: list[str], word: str, endpoints: tuple[bool, bool], ranges: list[str] | None
) -> None:
    rendered = render_cluster(given(*network, word), "0" * 16)
    _valid_for_eksctl(rendered)
    vpc = rendered["vpc"]
    assert vpc["clusterEndpoints"] == dict(
        zip(("publicAccess", "privateAccess"), endpoints, strict=True)
    )
    assert vpc.get("publicAccessCIDRs") == ranges
    assert ("id" in vpc) == bool(network)
    if network:
        config = render_terraform(given(*network, word))["resource"]["aws_eks_cluster"]["this"]
        access = config["vpc_config"]
        public, private = access["endpoint_public_access"], access["endpoint_private_access"]
        assert (public, private) == endpoints and access.get("public_access_cidrs") == ranges


def _valid_for_eksctl(rendered: dict[str, Any]) -> None:
    """By eksctl's own schema, where SHARDYARD_CRDS names a folder with it."""
    if folder := os.environ.get("SHARDYARD_CRDS"):
        from jsonschema import Draft7Validator

        schema = json.loads((Path(folder) / "eksctl.schema.json").read_text())
        assert [error.message for error in Draft7Validator(schema).iter_errors(rendered)] == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("access=[203.0.113.7/8]", "=203.0.113.7/8 is not a range of IPv4 addresses"),
        ("access=[office]", "=office is not a range of IPv4 addresses"),
        ("access=[10.0.0.0/8]", "=10.0.0.0/8 is a private range, from which EKS is reached"),
        ("access=[private, 198.51.0.0/16]", "=private cannot be combined"),
        ("access=[]", "=[] lets no address in. Write access=[203.0.113.7/32]"),
    ],
)
def test_an_access_list_that_cannot_be_is_named(word: str, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        given(word)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "every address of the Internet can reach this cluster's API server (0.0.0.0/0"),
        (["access=[private]"], "only machines inside the VPC reach the API server. Run this"),
        (["access=[203.0.113.7/32]"], None),
        (["access=[0.0.0.0/0]"], None),
    ],
)
def test_create_says_who_reaches_the_api_server(
    words: list[str], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    done = CliRunner().invoke(command, ["create", *ANYONE, *words, "--dry-run"])
    assert done.exit_code == 0, done.output
    spoken = done.output + caplog.text
    assert said in spoken if said else "API server" not in spoken


def test_the_network_plug_in_is_told_to_enforce_policies() -> None:
    (addon,) = (
        one for one in render_cluster(given(), "0" * 16)["addons"] if one["name"] == "vpc-cni"
    )
    assert json.loads(addon["configurationValues"]) == {"enableNetworkPolicy": "true"}
    resources = render_terraform(given(NETWORK))["resource"]
    own = resources["aws_eks_addon"]["vpc-cni"]["configuration_values"]
    assert own == addon["configurationValues"]


def test_terraform_gives_the_claim_and_the_root_of_fsx_to_pods() -> None:
    words = [NETWORK, "storage={kind: fsx, bucket: s3://data/imagenet}"]
    text = render_terraform(given(*words))["output"]["claim"]["value"]
    volume, claim, job = yaml.safe_load_all(text)
    assert [one["kind"] for one in (volume, claim, job)] == [
        "PersistentVolume", "PersistentVolumeClaim", "Job"
    ]  # fmt: skip
    csi = volume["spec"]["csi"]
    assert csi["volumeHandle"] == "${aws_fsx_lustre_file_system.this.id}"
    assert csi["volumeAttributes"]["mountname"] == "${aws_fsx_lustre_file_system.this.mount_name}"
    assert "chgrp" in " ".join(job["spec"]["template"]["spec"]["containers"][0]["command"])
    (efs, _) = yaml.safe_load_all(
        render_terraform(given(NETWORK, "storage.kind=efs"))["output"]["claim"]["value"]
    )
    handle = "${aws_efs_file_system.this.id}::${aws_efs_access_point.this.id}"
    assert efs["spec"]["csi"]["volumeHandle"] == handle
