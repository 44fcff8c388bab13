"""Both renderings of a cluster say the same values; what Terraform's names resolve inside it.

Where Terraform and its provider are, it validates each rendering too.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.cluster.eksctl import render_cluster, render_nodes
from shardyard.cluster.fsx import render_stack
from shardyard.cluster.spec import ClusterSpec
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.cluster.terraform import OWNER, PROVIDER, render_terraform
from tests.cluster.test_rendered import CASES, PLACE, RESERVATION, VPC

MORE = {
    "spot, with Lustre of another size": (
        "nodes={instance: g6e.48xlarge, capacity: spot, count: 1, max: 3, disk_gib: 900}",
        "storage={kind: fsx, size_gib: 9600, mb_per_s_per_tib: 1000}",
    ),
    "an image of one's own in a block": (
        f"nodes={{instance: p5.48xlarge, capacity: 'block:{RESERVATION}', ami: ami-0123abcd}}",
    ),
}
ALL = {**CASES, **MORE}
Values = dict[str, Any]


def given_of(case: str) -> ClusterSpec:
    return read_cluster_spec([*PLACE, VPC, *ALL[case]])


def terraform_of(case: str) -> Values:
    """As it is read from the file: what is no JSON shows here."""
    found: Values = json.loads(json.dumps(render_terraform(given_of(case))))
    return found


def of_eksctl(given: ClusterSpec) -> Values:
    """What eksctl and CloudFormation are told."""
    cluster, nodes = render_cluster(given, OWNER), render_nodes(given, OWNER)
    (system,) = cluster["managedNodeGroups"]
    (group,) = nodes.get("managedNodeGroups", []) + nodes.get("nodeGroups", [])
    meta = cluster["metadata"]
    private = cluster["vpc"]["subnets"]["private"].values()
    target = group.get("capacityReservation", {}).get("capacityReservationTarget", {})
    return {
        "name": meta["name"], "version": meta["version"], "region": meta["region"],
        "tags": meta["tags"], "oidc": cluster["iam"]["withOIDC"],
        "vpc": cluster["vpc"]["id"], "subnets": {subnet["id"] for subnet in private},
        "addons": {addon["name"] for addon in cluster["addons"]},
        "pod roles": {
            addon["name"] for addon in cluster["addons"]
            if addon.get("useDefaultPodIdentityAssociations")
        },
        "system": _group_of_eksctl(system),
        "accelerators": _group_of_eksctl(group),
        "labels": group["labels"], "node subnets": group["subnets"],
        "efa": given.instance.efa_count if group.get("efaEnabled") else 0,
        "is managed": "managedNodeGroups" in nodes,
        "spot": group.get("spot", False), "image": group.get("ami"),
        "reservation": target.get("capacityReservationID"),
        "market": group.get("instanceMarketOptions", {}).get("marketType"),
        "storage": _storage_of_stack(given),
    }  # fmt: skip


def _group_of_eksctl(group: Values) -> Values:
    return {
        "name": group["name"], "instance": group["instanceType"], "min": group["minSize"],
        "desired": group["desiredCapacity"], "max": group["maxSize"], "disk": group["volumeSize"],
        "encrypted": group["volumeEncrypted"], "tags": group["tags"],
    }  # fmt: skip


def _storage_of_stack(given: ClusterSpec) -> Values | None:
    if given.storage.kind == "none":
        return None
    resources = render_stack(given, OWNER)["Resources"]
    rules = resources["Group"]["Properties"]["SecurityGroupIngress"]
    servers = resources.get("Servers", {}).get("Properties")
    ports = {(rule["FromPort"], rule["ToPort"]) for rule in rules}
    system = resources["FileSystem"]["Properties"]
    lustre, link = system.get("LustreConfiguration", {}), resources.get("Link", {})
    return {
        "ports": ports,
        "servers": servers and (servers["FromPort"], servers["ToPort"]),
        "size": system.get("StorageCapacity"), "disk": system.get("StorageType"),
        "version": system.get("FileSystemTypeVersion"), "encrypted": system.get("Encrypted"),
        "speed": lustre.get("PerUnitStorageThroughput"), "kind": lustre.get("DeploymentType"),
        "packed": lustre.get("DataCompressionType"),
        "link": _link_of_stack(link["Properties"]) if link else None,
    }  # fmt: skip


def _link_of_stack(link: Values) -> Values:
    return {
        "bucket": link["DataRepositoryPath"], "at": link["FileSystemPath"],
        "import": link["BatchImportMetaDataOnCreate"],
        "both ways": [
            link["S3"][key]["Events"] for key in ("AutoImportPolicy", "AutoExportPolicy")
        ],
    }  # fmt: skip


def of_terraform(document: Values) -> Values:
    """The same, read off the other rendering."""
    resources, provider = document["resource"], document["provider"]["aws"]
    cluster = resources["aws_eks_cluster"]["this"]
    template = resources["aws_launch_template"]["accelerators"]
    managed = resources["aws_eks_node_group"].get("accelerators")
    own = resources.get("aws_autoscaling_group", {}).get("accelerators")
    group = managed or own
    interfaces = template.get("network_interfaces", [])
    assert all(one["interface_type"] == "efa" for one in interfaces)
    cards = [(one["network_card_index"], one["device_index"]) for one in interfaces]
    assert cards == [(card, min(card, 1)) for card in range(len(cards))]
    reserved = template.get("capacity_reservation_specification", {})
    return {
        "name": cluster["name"], "version": cluster["version"], "region": provider["region"],
        "tags": provider["default_tags"]["tags"],
        "oidc": "aws_iam_openid_connect_provider" in resources,
        "vpc": _vpc_of(resources), "subnets": set(cluster["vpc_config"]["subnet_ids"]),
        "addons": {addon["addon_name"] for addon in resources["aws_eks_addon"].values()},
        "pod roles": set(resources["aws_eks_pod_identity_association"]),
        "system": _group_of_terraform(resources, "system"),
        "accelerators": _group_of_terraform(resources, "accelerators"),
        "labels": managed["labels"] if managed else _labels(document),
        "node subnets": group.get("subnet_ids") or group.get("vpc_zone_identifier"),
        "efa": len(interfaces),
        "is managed": managed is not None,
        "spot": bool(managed) and managed["capacity_type"] == "SPOT",
        "image": None if "${" in template.get("image_id", "${") else template["image_id"],
        "reservation": reserved.get("capacity_reservation_target", {}).get(
            "capacity_reservation_id"
        ),
        "market": template.get("instance_market_options", {}).get("market_type"),
        "storage": _storage_of_terraform(resources),
    }  # fmt: skip


def _vpc_of(resources: Values) -> str:
    """Of its security groups; without one nothing says it but the subnets."""
    groups = resources.get("aws_security_group", {}).values()
    (vpc,) = {group["vpc_id"] for group in groups} or {"vpc-0123456789abcdef0"}
    return str(vpc)


def _labels(document: Values) -> dict[str, str]:
    """Of the nodes' own words to the kubelet."""
    text = document["locals"]["accelerators_user_data"]
    (labels,) = re.findall(r'--node-labels=([^"]+)"', text)
    return dict(label.split("=") for label in labels.split(","))


def _group_of_terraform(resources: Values, name: str) -> Values:
    template = resources["aws_launch_template"][name]
    group = resources["aws_eks_node_group"].get(name)
    if group:
        scaling, kinds = group["scaling_config"], group["instance_types"]
        sizes = [scaling[f"{key}_size"] for key in ("min", "desired", "max")]
    else:
        group = resources["aws_autoscaling_group"][name]
        kinds = [template["instance_type"]]
        sizes = [group["min_size"], group["desired_capacity"], group["max_size"]]
    (kind,) = kinds
    ebs = template["block_device_mappings"]["ebs"]
    (tags,) = {json.dumps(one["tags"]) for one in template["tag_specifications"]}
    return {
        "name": name, "instance": kind, "min": sizes[0], "desired": sizes[1], "max": sizes[2],
        "disk": ebs["volume_size"], "encrypted": ebs["encrypted"], "tags": json.loads(tags),
    }  # fmt: skip


def _storage_of_terraform(resources: Values) -> Values | None:
    lustre = resources.get("aws_fsx_lustre_file_system", {}).get("this")
    efs = resources.get("aws_efs_file_system", {}).get("this")
    system = lustre or efs
    if system is None:
        return None
    rules = dict(resources["aws_vpc_security_group_ingress_rule"])
    rules.pop("efa", None)
    servers = rules.pop("servers", None)
    link = resources.get("aws_fsx_data_repository_association", {}).get("this")
    return {
        "ports": {(rule["from_port"], rule["to_port"]) for rule in rules.values()},
        "servers": servers and (servers["from_port"], servers["to_port"]),
        "size": system.get("storage_capacity"), "disk": system.get("storage_type"),
        "version": system.get("file_system_type_version"), "encrypted": system.get("encrypted"),
        "speed": system.get("per_unit_storage_throughput"), "kind": system.get("deployment_type"),
        "packed": system.get("data_compression_type"),
        "link": link and {
            "bucket": link["data_repository_path"], "at": link["file_system_path"],
            "import": link["batch_import_meta_data_on_create"],
            "both ways": [
                link["s3"][key]["events"] for key in ("auto_import_policy", "auto_export_policy")
            ],
        },
    }  # fmt: skip


@pytest.mark.parametrize("case", ALL)
def test_both_renderings_say_the_same_values(case: str) -> None:
    assert of_terraform(terraform_of(case)) == of_eksctl(given_of(case))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("aws_eks_cluster.this.version", "1.33"),
        ("aws_eks_node_group.accelerators.scaling_config.max_size", 63),
        ("aws_launch_template.accelerators.block_device_mappings.ebs.volume_size", 100),
        ("aws_fsx_lustre_file_system.this.storage_capacity", 7200),
        ("aws_fsx_data_repository_association.this.data_repository_path", "s3://another"),
    ],
)
def test_a_value_that_differs_is_seen(path: str, value: object) -> None:
    document = terraform_of("p4de-reservation")
    *folders, last = path.split(".")
    at = document["resource"]
    for folder in folders:
        at = at[folder]
    assert at[last] != value
    at[last] = value
    assert of_terraform(document) != of_eksctl(given_of("p4de-reservation"))


def texts(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for inner in value.values():
                yield from texts(inner)
        case list():
            for inner in value:
                yield from texts(inner)
        case str():
            yield value


def references(document: Values) -> Iterator[tuple[str, ...]]:
    """What expressions and depends_on name, each as (kind, name)."""
    for text in texts({key: document[key] for key in document if key != "terraform"}):
        for expression in re.findall(r"\$\{([^}]*)\}", text):
            yield from re.findall(r"\b(aws_\w+|local)\.([\w-]+)", expression)
    for named in document["resource"].values():
        for arguments in named.values():
            for one in arguments.get("depends_on", []):
                yield tuple(one.split("."))


def unresolved(document: Values) -> list[tuple[str, ...]]:
    """Names that nothing in the document has."""
    known = {("local", name) for name in document.get("locals", {})}
    for section in ("resource", "data"):
        known |= {(kind, name) for kind, named in document[section].items() for name in named}
    return [one for one in references(document) if one not in known]


@pytest.mark.parametrize("case", ALL)
def test_each_name_is_of_something_in_the_document(case: str) -> None:
    document = terraform_of(case)
    found = list(references(document))
    assert len(found) > 20
    assert unresolved(document) == []


def test_a_name_of_nothing_is_seen() -> None:
    document = terraform_of("p5-32-efa")
    del document["resource"]["aws_security_group"]["efa"]
    assert ("aws_security_group", "efa") in unresolved(document)


COMMON = frozenset({"depends_on", "tags"})
ARGUMENTS: dict[str, tuple[str, str]] = {
    "aws_autoscaling_group": (
        "max_size min_size", "name desired_capacity vpc_zone_identifier launch_template tag"
    ),
    "aws_efs_file_system": ("", "encrypted"),
    "aws_efs_mount_target": ("file_system_id subnet_id", "security_groups"),
    "aws_efs_access_point": ("file_system_id", "posix_user root_directory tags"),
    "aws_eks_access_entry": ("cluster_name principal_arn", "type"),
    "aws_eks_addon": (
        "addon_name cluster_name",
        "resolve_conflicts_on_create configuration_values",
    ),
    "aws_eks_cluster": ("name role_arn vpc_config", "version access_config"),
    "aws_eks_node_group": (
        "cluster_name node_role_arn scaling_config subnet_ids",
        "ami_type capacity_type instance_types labels launch_template node_group_name",
    ),
    "aws_eks_pod_identity_association": ("cluster_name namespace role_arn service_account", ""),
    "aws_fsx_data_repository_association": (
        "data_repository_path file_system_id file_system_path",
        "batch_import_meta_data_on_create s3",
    ),
    "aws_fsx_lustre_file_system": (
        "subnet_ids",
        "data_compression_type deployment_type file_system_type_version storage_type"
        " per_unit_storage_throughput security_group_ids storage_capacity",
    ),
    "aws_iam_instance_profile": ("", "role"),
    "aws_iam_openid_connect_provider": ("url client_id_list", ""),
    "aws_iam_role": ("assume_role_policy", ""),
    "aws_iam_role_policy_attachment": ("policy_arn role", ""),
    "aws_launch_template": (
        "",
        "block_device_mappings capacity_reservation_specification iam_instance_profile image_id"
        " instance_market_options instance_type metadata_options network_interfaces placement"
        " tag_specifications user_data vpc_security_group_ids",
    ),
    "aws_placement_group": ("name strategy", ""),
    "aws_security_group": ("", "name_prefix description vpc_id"),
    "aws_vpc_security_group_egress_rule": (
        "ip_protocol security_group_id", "cidr_ipv4 referenced_security_group_id",
    ),
    "aws_vpc_security_group_ingress_rule": (
        "ip_protocol security_group_id", "from_port to_port referenced_security_group_id",
    ),
}  # fmt: skip
"""Resource -> the arguments it needs, and others it takes, of those that we give: the documents of
the provider (website/docs/r of hashicorp/terraform-provider-aws)."""


@pytest.mark.parametrize("case", ALL)
def test_each_resource_has_the_arguments_it_needs_and_no_unknown_one(case: str) -> None:
    for kind, named in terraform_of(case)["resource"].items():
        needed, optional = (set(words.split()) for words in ARGUMENTS[kind])
        for name, arguments in named.items():
            assert needed <= arguments.keys(), (kind, name)
            assert arguments.keys() <= needed | optional | COMMON, (kind, name)


def test_roles_have_no_more_rights_than_they_need() -> None:
    """AWS's own policies, which follow what its programs call; none of them lets all be done."""
    attached = terraform_of("p5-32-efa")["resource"]["aws_iam_role_policy_attachment"].values()
    partition = r"arn:\$\{data\.aws_partition\.here\.partition\}:iam::aws:policy/(service-role/)?"
    policies = {re.sub(partition, "", one["policy_arn"]) for one in attached}
    assert policies == {
        "AmazonEKSClusterPolicy", "AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy",
        "AmazonEC2ContainerRegistryPullOnly", "AmazonEFSCSIDriverPolicy",
    }  # fmt: skip
    by_role = {one["role"] for one in attached if "CNI" in one["policy_arn"]}
    assert by_role == {"${aws_iam_role.vpc-cni.name}"}, "of the pod that needs it, not of nodes"


def test_nodes_with_efa_lie_together_unless_they_are_reserved() -> None:
    rented = read_cluster_spec([*PLACE, VPC, "nodes.instance=p5.48xlarge"])
    template = render_terraform(rented)["resource"]["aws_launch_template"]["accelerators"]
    assert template["placement"] == {"group_name": "${aws_placement_group.accelerators.name}"}
    for case in ("p4de-reservation", "p5-32-efa", "g5"):
        assert "aws_placement_group" not in terraform_of(case)["resource"]


def test_the_provider_is_pinned() -> None:
    (aws,) = terraform_of("g5")["terraform"]["required_providers"].values()
    assert aws == {"source": "hashicorp/aws", "version": PROVIDER}
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROVIDER)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster", "create", *PLACE, VPC, *CASES["p4de-reservation"], "--dry-run"]
    assert main([*words, "--terraform"]) == 0
    assert json.loads(capsys.readouterr().out) == terraform_of("p4de-reservation")


@pytest.fixture(scope="module")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Terraform's provider for AWS."""
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    folder = tmp_path_factory.mktemp("terraform")
    (folder / "main.tf.json").write_text(json.dumps(render_terraform(given_of(next(iter(ALL))))))
    made = subprocess.run(
        ["terraform", "init", "-backend=false", "-input=false", "-no-color"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if made.returncode:
        why = next((line for line in made.stderr.splitlines() if "Error" in line), "it failed")
        pytest.skip(f"terraform init: {why}")
    return folder


@pytest.mark.system
@pytest.mark.parametrize("case", ALL)
def test_terraform_validates_each_rendering(case: str, terraform: Path) -> None:
    (terraform / "main.tf.json").write_text(json.dumps(render_terraform(given_of(case))))
    said = subprocess.run(
        ["terraform", "validate", "-no-color"],
        cwd=terraform, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
