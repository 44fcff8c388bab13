"""Who may reach the pods of a run, by the rules of Kubernetes' network policies."""

from typing import Any

import pytest

from shardyard.launchers.kubernetes.names import POD_LABELS
from shardyard.launchers.kubernetes.objects import render_objects
from tests.launchers.kubernetes.requests import RUN_ID, request_for
from tests.launchers.kubernetes.schemas import check_builtin
from tests.launchers.kubernetes.test_launcher import World, world

__all__ = ["world"]

KINDS = {"jobset": "JobSet", "trainjob": "TrainJob", "pytorchjob": "PyTorchJob"}
METRICS = "observe.prometheus=9400"


def policy_of(*overrides: str) -> dict[str, Any]:
    (found,) = (o for o in render_objects(request_for(*overrides)) if o["kind"] == "NetworkPolicy")
    check_builtin(found)
    return found


def lets_in(policy: dict[str, Any], pod: dict[str, str], *, namespace: str, port: int) -> bool:
    """As kubernetes.io, Network Policies: any rule will do; one without ports is for all."""

    def matches(peer: dict[str, Any]) -> bool:
        spaces = peer.get(
            "namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "default"}}
        )
        is_there = spaces["matchLabels"] == {"kubernetes.io/metadata.name": namespace}
        labels = peer.get("podSelector", {"matchLabels": {}})["matchLabels"]
        return bool(is_there and labels.items() <= pod.items())

    return any(
        any(map(matches, rule["from"])) and ("ports" not in rule or port in _ports(rule))
        for rule in policy["spec"]["ingress"]
    )


def _ports(rule: dict[str, Any]) -> list[int]:
    return [each["port"] for each in rule["ports"]]


@pytest.mark.parametrize("target", KINDS)
def test_only_pods_of_the_same_job_reach_its_ports(target: str) -> None:
    policy = policy_of(f"launch.kubernetes.target={target}")
    label = POD_LABELS[KINDS[target]]
    own, other = {label: RUN_ID}, {label: "another"}
    assert policy["spec"]["podSelector"] == {"matchLabels": own}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert lets_in(policy, own, namespace="default", port=29500)
    for pod, namespace in [(other, "default"), ({}, "default"), (own, "team"), ({}, "monitoring")]:
        assert not lets_in(policy, pod, namespace=namespace, port=29500)
        assert not lets_in(policy, pod, namespace=namespace, port=9400)


def test_prometheus_reads_metrics_and_nothing_else() -> None:
    policy = policy_of(METRICS)
    assert lets_in(policy, {}, namespace="monitoring", port=9400)
    assert not lets_in(policy, {}, namespace="monitoring", port=29500)
    assert not lets_in(policy, {}, namespace="team", port=9400)


def test_the_policy_is_removed_with_its_job(world: World) -> None:
    job = world.submit()
    (name,) = world.server.names("networkpolicies")
    removal = world.launcher.remove(job, world.ledger)
    assert f"NetworkPolicy {name}" in removal.removed
    assert world.server.names("networkpolicies") == []


def test_who_may_not_create_one_is_warned_and_trains(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.server.refusals["POST", "/networkpolicies"] = (403, "forbidden")
    job = world.submit()
    assert world.server.names("jobsets") == [job.name]
    assert "every pod of the cluster can reach its ports. Ask for `create`" in caplog.text
    assert [kind for kind, _ in world.live()] == ["ConfigMap", "JobSet"]
