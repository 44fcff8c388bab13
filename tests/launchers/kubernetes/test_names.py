"""Names: made from run ids, and refused before anything is rendered."""

import json
import re

import pytest

from shardyard.errors import RequestError
from shardyard.launchers.kubernetes.names import check_namespaced, job_name
from shardyard.launchers.kubernetes.objects import render_objects
from tests.launchers.kubernetes.requests import request_for
from tests.launchers.kubernetes.schemas import pod_of


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("demo-20260102-030405-a1b2", "demo-20260102-030405-a1b2"),
        ("My_Run.v2", "my-run-v2"),
        ("7b", "r-7b"),
        ("a-.", "a"),
    ],
)
def test_a_run_id_becomes_a_dns_label(run_id: str, name: str) -> None:
    assert job_name(run_id, 1, target="jobset", nodes=2) == name


# Of JobSet: a pod is <jobset>-<job>-<index>-<pod index>-<5 random>, at most 63 characters:
# 63 - len("-node-0-1") - len("-abcde") = 48; with 1,000 nodes the index has two digits more.
# A worker of a PyTorchJob is <job>-worker-<index>: 63 - len("-worker-1") = 54.
@pytest.mark.parametrize(
    ("target", "nodes", "longest"),
    [("jobset", 2, 48), ("jobset", 1000, 46), ("trainjob", 2, 48), ("pytorchjob", 2, 54)],
)
def test_the_longest_name_passes_and_one_more_is_refused_with_that_length(
    target: str, nodes: int, longest: int
) -> None:
    assert job_name("a" * longest, 1, target=target, nodes=nodes) == "a" * longest
    words = rf"of {nodes} nodes.*64 characters.*at most {longest} characters.*run.name by 1"
    with pytest.raises(RequestError, match=words):
        job_name("a" * (longest + 1), 1, target=target, nodes=nodes)


def test_a_later_submission_has_a_suffix_that_counts() -> None:
    assert job_name("demo", 2, target="jobset", nodes=2) == "demo-s2"
    with pytest.raises(RequestError, match="at most 45 characters"):
        job_name("a" * 46, 2, target="jobset", nodes=2)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("launch.kubernetes.namespace=My_Team", "launch.kubernetes.namespace='My_Team'"),
        ("launch.kubernetes.queue=a/b", "launch.kubernetes.queue='a/b'"),
        ("launch.volumes=[{path: /runs, claim: A}]", "launch.volumes[0].claim='A'"),
    ],
)
def test_a_name_that_no_object_can_have_is_refused(override: str, path: str) -> None:
    with pytest.raises(RequestError, match=re.escape(path) + ".*as kubectl shows it"):
        check_namespaced(request_for(override).recipe)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a b", "c"),
        ("", "c"),
        ("a", "c d"),
        ("a", "-c"),
        ("a/b/c", "d"),
        ("A/b", "c"),
        ("a", 64 * "c"),
    ],
)
def test_a_label_that_no_node_can_have_is_refused(name: str, value: str) -> None:
    selector = json.dumps({name: value})
    with pytest.raises(RequestError, match=r"launch.kubernetes.node_selector has .*kubectl get"):
        render_objects(request_for(f"launch.kubernetes.node_selector={selector}"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("pool", "train"), ("a", ""), ("node.kubernetes.io/instance-type", "p5.4x"), ("A_b", "1")],
)
def test_labels_of_nodes_pass(name: str, value: str) -> None:
    selector = json.dumps({name: value})
    pod = pod_of(render_objects(request_for(f"launch.kubernetes.node_selector={selector}")))
    assert pod["spec"]["nodeSelector"][name] == value
