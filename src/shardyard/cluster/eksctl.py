"""Input of eksctl: the cluster without accelerators, and the group of nodes that has them.

Two files, because accelerators bill from the moment they start and are made last. Fields: eksctl's
schema of ``eksctl.io/v1alpha5`` (v0.230).
"""

import json
from typing import Any

from shardyard.cluster.api_access import for_eksctl
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec
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


def tags_of(spec: ClusterSpec, owner: str) -> dict[str, str]:
    """Return the tags that mark a resource as ours.

    Args:
        owner: Id of this creation, from the ledger.
    """
    return {NAME_TAG: spec.name, OWNER_TAG: owner}


def render_cluster(spec: ClusterSpec, owner: str) -> dict[str, Any]:
    """The control plane, its network, and the nodes without accelerators."""
    return {
        **_head(spec, owner),
        "iam": {"withOIDC": True},
        "addons": _addons(spec),
        **_network_of_cluster(spec),
        "managedNodeGroups": [
            {
                "name": SYSTEM_GROUP,
                "instanceType": spec.system.instance,
                "minSize": spec.system.nodes,
                "maxSize": spec.system.nodes,
                "desiredCapacity": spec.system.nodes,
                "privateNetworking": True,
                "volumeSize": 100,
                "volumeEncrypted": True,
                "tags": tags_of(spec, owner),
            }
        ],
    }


def render_nodes(spec: ClusterSpec, owner: str) -> dict[str, Any]:
    """The group of nodes with accelerators, for a cluster that is there.

    A capacity block takes a group of eksctl's own, for EKS manages none before the block begins.
    """
    is_block = spec.capacity.kind == "block"
    kind = "nodeGroups" if is_block else "managedNodeGroups"
    return {**_head(spec, owner), **_network(spec), kind: [_group(spec, owner)]}


def _head(spec: ClusterSpec, owner: str) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "ClusterConfig",
        "metadata": {
            "name": spec.name,
            "region": spec.region,
            "version": spec.version,
            "tags": tags_of(spec, owner),
        },
    }


def _addons(spec: ClusterSpec) -> list[dict[str, Any]]:
    """EKS's own parts; each that calls AWS has a role with the rights it needs and no others."""
    addons: list[dict[str, Any]] = [
        {"name": "eks-pod-identity-agent"},
        {"name": "coredns"},
        {"name": "kube-proxy"},
        {
            "name": "vpc-cni",
            "useDefaultPodIdentityAssociations": True,
            "configurationValues": CNI_CONFIGURATION,
        },
    ]
    if spec.storage.kind == "efs":
        addons.append({"name": "aws-efs-csi-driver", "useDefaultPodIdentityAssociations": True})
    return addons


def _network_of_cluster(spec: ClusterSpec) -> dict[str, Any]:
    found, access = _network(spec), for_eksctl(spec)
    return {**found, "vpc": {**found.get("vpc", {}), **access}} if access else found


def _network(spec: ClusterSpec) -> dict[str, Any]:
    zones = list(spec.zones)
    if spec.vpc.id is None:
        return {"availabilityZones": zones}
    private = {zone: {"id": spec.vpc.subnets[zone]} for zone in zones}
    vpc: dict[str, Any] = {"id": spec.vpc.id, "subnets": {"private": private}}
    if isinstance(spec, AdoptedCluster):  # eksctl has no stack to read it from
        vpc["securityGroup"] = spec.control_group
    return {"vpc": vpc}


def _group(spec: ClusterSpec, owner: str) -> dict[str, Any]:
    nodes = spec.nodes
    fields: dict[str, Any] = {
        "name": GROUP,
        "instanceType": nodes.instance,
        "minSize": 0,
        "desiredCapacity": nodes.count,
        "maxSize": nodes.max,
        # One zone: EFA and the file system reach no further.
        "availabilityZones": [spec.zone],
        "privateNetworking": True,
        "volumeSize": nodes.disk_gib,
        "volumeEncrypted": True,
        "labels": _labels(spec),
        "tags": tags_of(spec, owner),
    }
    if spec.vpc.id is not None:
        del fields["availabilityZones"]
        fields["subnets"] = [spec.vpc.subnets[spec.zone]]
    if spec.has_efa:
        fields["efaEnabled"] = True
    if nodes.ami is not None:
        fields |= {"ami": nodes.ami, "amiFamily": "AmazonLinux2023"}
    return fields | _capacity(spec)


def _labels(spec: ClusterSpec) -> dict[str, str]:
    """By which the cluster's nodes are found, and pods that want their reservation find them."""
    found = {"shardyard-cluster": spec.name}
    reservation = spec.capacity.reservation
    return found if reservation is None else {**found, RESERVATION: reservation}


def _capacity(spec: ClusterSpec) -> dict[str, Any]:
    capacity = spec.capacity
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
