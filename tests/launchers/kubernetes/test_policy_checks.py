"""Doctor reports whether a cluster enforces network policies."""

from typing import Any

import pytest

from tests.launchers.kubernetes.test_checks import Cluster, cluster

__all__ = ["cluster"]

AGENT = "aws-eks-nodeagent"
"""Container of aws-node that enforces policies, with the arguments of the chart of AWS."""


def add(cluster: Cluster, name: str, *args: str) -> None:
    spec: dict[str, Any] = {
        "template": {"spec": {"containers": [{"name": AGENT, "image": "i", "args": [*args]}]}}
    }
    cluster.server.add(f"/apis/apps/v1/namespaces/kube-system/daemonsets/{name}", spec=spec)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("aws-node", ["--enable-ipv6=false", "--enable-network-policy=true"], "vpc-cni enforces"),
        ("cilium", [], "Cilium enforces them"),
    ],
)
def test_the_plug_in_that_enforces_policies_is_named(
    cluster: Cluster, name: str, args: list[str], said: str
) -> None:
    add(cluster, "kube-proxy")
    add(cluster, name, *args)
    (found,) = [one for one in cluster.findings() if one.name == "network policies"]
    assert found.verdict == "ok" and said in found.what


@pytest.mark.parametrize(
    ("name", "args", "what", "mend"),
    [
        ("aws-node", ["--enable-network-policy=false"], "vpc-cni ignores them",
         """--configuration-values '{"enableNetworkPolicy": "true"}'"""),
        ("kube-flannel-ds", [], "no network plug-in is known here", "Ask the cluster's"),
    ],
)  # fmt: skip
def test_a_cluster_that_ignores_policies_is_a_warning(
    cluster: Cluster, name: str, args: list[str], what: str, mend: str
) -> None:
    add(cluster, name, *args)
    found = cluster.only_trouble()
    assert found.verdict == "warning" and what in found.what and mend in found.mend


def test_who_may_not_list_daemonsets_reads_that_it_is_unknown(cluster: Cluster) -> None:
    cluster.server.refusals["GET", "/apis/apps/v1/daemonsets"] = (403, "forbidden")
    (found,) = [one for one in cluster.findings() if one.name == "network policies"]
    assert found.verdict == "ok" and "you may not list daemonsets" in found.what
