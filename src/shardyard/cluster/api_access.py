"""Access to the API server of a new EKS cluster: which addresses, or only its VPC.

EKS's own default is every address. Source: Amazon EKS User Guide, Cluster API server endpoint.
"""

from ipaddress import IPv4Network
from typing import Any

from shardyard.cluster.spec import ONLY_VPC, ClusterSpec
from shardyard.errors import Problem

_PRIVATE = tuple(
    map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"))
)
"""Addresses of networks behind NAT. Source: RFC 1918, RFC 6598."""
_MOST_RANGES = 40
"""Public endpoint access CIDR ranges of a cluster. Source: Amazon EKS User Guide, quotas."""


def access_errors(access: tuple[str, ...] | None) -> list[Problem]:
    """Find problems of the setting ``access``."""
    if access is None or access == (ONLY_VPC,):
        return []
    if not access:
        text = "=[] lets no address in. Write access=[203.0.113.7/32], or access=[private]."
        return [Problem("access", text)]
    found = [Problem("access", text) for range in access if (text := _range_error(range))]
    if len(access) > _MOST_RANGES:
        text = f"has {len(access)} ranges, and EKS takes {_MOST_RANGES}. Give wider ones."
        found.append(Problem("access", text))
    return found


def _range_error(text: str) -> str:
    if text == ONLY_VPC:
        return f"={text} cannot be combined: write access=[{ONLY_VPC}], or address ranges only."
    try:
        network = IPv4Network(text)
    except ValueError:
        return (
            f"={text} is not a range of IPv4 addresses. Write one address as 203.0.113.7/32, a "
            "network as 203.0.113.0/24."
        )
    if any(network.subnet_of(private) for private in _PRIVATE):
        return (
            f"={text} is a private range, from which EKS is reached inside the VPC anyway. Give "
            f"public addresses, such as that of your NAT, or write access=[{ONLY_VPC}]."
        )
    return ""


def access_warning(spec: ClusterSpec) -> str:
    """Return a warning for the caller before the cluster is made; empty: none."""
    if spec.kind != "eks":
        return ""
    if spec.access is None:
        return (
            "every address of the Internet can reach this cluster's API server (0.0.0.0/0, the "
            "default of EKS); it still asks for credentials. Limit it: access=[203.0.113.7/32] "
            f"with your own address, or access=[{ONLY_VPC}]. access=[0.0.0.0/0] says that you "
            "want it."
        )
    if spec.access == (ONLY_VPC,):
        return (
            f"access=[{ONLY_VPC}]: only machines inside the VPC reach the API server. Run this "
            "command, and later shardyard and kubectl, on one of them."
        )
    return ""


def for_eksctl(spec: ClusterSpec) -> dict[str, Any]:
    """Part of `vpc` in eksctl's file."""
    if spec.access is None:
        return {}
    if spec.access == (ONLY_VPC,):
        return {"clusterEndpoints": {"publicAccess": False, "privateAccess": True}}
    # Nodes would come by their NAT's address, which is not on the list.
    endpoints = {"publicAccess": True, "privateAccess": True}
    return {"clusterEndpoints": endpoints, "publicAccessCIDRs": list(spec.access)}


def for_terraform(spec: ClusterSpec) -> dict[str, Any]:
    """Part of `vpc_config` of an aws_eks_cluster."""
    if spec.access is None:
        return {}
    if spec.access == (ONLY_VPC,):
        return {"endpoint_public_access": False, "endpoint_private_access": True}
    return {
        "endpoint_public_access": True,
        "endpoint_private_access": True,
        "public_access_cidrs": list(spec.access),
    }
