"""What eksctl is given: the cluster without accelerators, and the group of nodes that has them.

Two files, because accelerators bill from the moment they start and are made last. Fields: eksctl's
schema of ``eksctl.io/v1alpha5`` (v0.230).
"""

import json
from typing import Any

from shardyard.cluster.api_access import for_eksctl
from shardyard.cluster.existing_spec import AdoptedCluster
from shardyard.cluster.spec import Description
from shardyard.launchers.kubernetes.policies import RESERVATION

API_VERSION = "eksctl.io/v1alpha5"
NAME_TAG = "shardyard-cluster"
"""Tag of everything that is made: the cluster's name."""
OWNER_TAG = "shardyard-cluster-id"
"""Tag of everything that is made: which making of a cluster of this name it was."""

CNI_CONFIGURATION = json.dumps({"enableNetworkPolicy": "true"})
"""Without it the add-on takes NetworkPolicies and ignores them. Source: Amazon EKS User Guide,
Limit Pod traffic with Kubernetes network policies."""

GROUP = "accelerators"
SYSTEM_GROUP = "system"


def tags_of(given: Description, owner: str) -> dict[str, str]:
    """What tells ours from others'.

    Args:
        owner: Id of this making, of the ledger.
    """
    return {NAME_TAG: given.name, OWNER_TAG: owner}


def render_cluster(given: Description, owner: str) -> dict[str, Any]:
    """The control plane, its network, and the nodes without accelerators."""
    return {
        **_head(given, owner),
        "iam": {"withOIDC": True},
        "addons": _addons(given),
        **_network_of_cluster(given),
        "managedNodeGroups": [
            {
                "name": SYSTEM_GROUP,
                "instanceType": given.system.instance,
                "minSize": given.system.nodes,
                "maxSize": given.system.nodes,
                "desiredCapacity": given.system.nodes,
                "privateNetworking": True,
                "volumeSize": 100,
                "volumeEncrypted": True,
                "tags": tags_of(given, owner),
            }
        ],
    }


def render_nodes(given: Description, owner: str) -> dict[str, Any]:
    """The group of nodes with accelerators, for a cluster that is there.

    A capacity block takes a group of eksctl's own, for EKS manages none before the block begins.
    """
    is_block = given.capacity.kind == "block"
    kind = "nodeGroups" if is_block else "managedNodeGroups"
    return {**_head(given, owner), **_network(given), kind: [_group(given, owner)]}


def _head(given: Description, owner: str) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "ClusterConfig",
        "metadata": {
            "name": given.name,
            "region": given.region,
            "version": given.version,
            "tags": tags_of(given, owner),
        },
    }


def _addons(given: Description) -> list[dict[str, Any]]:
    """EKS's own parts; each that calls AWS has a role with the rights it needs and no others."""
    found: list[dict[str, Any]] = [
        {"name": "eks-pod-identity-agent"},
        {"name": "coredns"},
        {"name": "kube-proxy"},
        {
            "name": "vpc-cni",
            "useDefaultPodIdentityAssociations": True,
            "configurationValues": CNI_CONFIGURATION,
        },
    ]
    if given.storage.kind == "efs":
        found.append({"name": "aws-efs-csi-driver", "useDefaultPodIdentityAssociations": True})
    return found


def _network_of_cluster(given: Description) -> dict[str, Any]:
    found, access = _network(given), for_eksctl(given)
    return {**found, "vpc": {**found.get("vpc", {}), **access}} if access else found


def _network(given: Description) -> dict[str, Any]:
    zones = list(given.zones)
    if given.vpc.id is None:
        return {"availabilityZones": zones}
    private = {zone: {"id": given.vpc.subnets[zone]} for zone in zones}
    vpc: dict[str, Any] = {"id": given.vpc.id, "subnets": {"private": private}}
    if isinstance(given, AdoptedCluster):  # eksctl has no stack to read it from
        vpc["securityGroup"] = given.control_group
    return {"vpc": vpc}


def _group(given: Description, owner: str) -> dict[str, Any]:
    nodes = given.nodes
    found: dict[str, Any] = {
        "name": GROUP,
        "instanceType": nodes.instance,
        "minSize": 0,
        "desiredCapacity": nodes.count,
        "maxSize": nodes.max,
        # One zone: EFA and the file system reach no further.
        "availabilityZones": [given.zone],
        "privateNetworking": True,
        "volumeSize": nodes.disk_gib,
        "volumeEncrypted": True,
        "labels": _labels(given),
        "tags": tags_of(given, owner),
    }
    if given.vpc.id is not None:
        del found["availabilityZones"]
        found["subnets"] = [given.vpc.subnets[given.zone]]
    if given.has_efa:
        found["efaEnabled"] = True
    if nodes.ami is not None:
        found |= {"ami": nodes.ami, "amiFamily": "AmazonLinux2023"}
    return found | _capacity(given)


def _labels(given: Description) -> dict[str, str]:
    """By which the cluster's nodes are found, and pods that want their reservation find them."""
    found = {"shardyard-cluster": given.name}
    reservation = given.capacity.reservation
    return found if reservation is None else {**found, RESERVATION: reservation}


def _capacity(given: Description) -> dict[str, Any]:
    capacity = given.capacity
    match capacity.kind:
        case "on-demand":
            return {}
        case "spot":
            return {"spot": True}
        case "reservation":
            return {"capacityReservation": _reservation(str(capacity.reservation))}
        case "block":
            return {
                "capacityReservation": _reservation(str(capacity.reservation)),
                "instanceMarketOptions": {"marketType": "capacity-block"},
            }
        case kind:
            raise AssertionError(f"capacity {kind!r} is checked before")


def _reservation(id: str) -> dict[str, Any]:
    return {"capacityReservationTarget": {"capacityReservationID": id}}
