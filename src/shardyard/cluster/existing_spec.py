"""Cluster that existed before: what it is, and what is added to it.

The list of additions is settled once, before anything is made, and kept. A killed call continues
by it, as a cluster to which half was added lacks only the other half.
"""

from typing import Annotated

from pydantic import Field

from shardyard.cluster.spec import ClusterSpec


class AdoptedCluster(ClusterSpec):
    """A description whose network and version are those of the cluster."""

    arn: str
    """ARN of the cluster: region, account and name."""
    control_group: str
    """Security group of its control plane."""
    node_group: str
    """Security group that EKS made for control plane and nodes."""
    adds: Annotated[tuple[str, ...], Field(strict=False)]
    """Kinds of the parts that are added, in the order in which they are made."""
    asked: ClusterSpec
    """Description as the user wrote it."""
