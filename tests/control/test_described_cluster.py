"""Requests of pods against the recorded description of the cluster."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.cluster.spec import ClusterSpec
from shardyard.control.described_cluster import against_description, against_side_jobs
from shardyard.launchers.base import SideJob
from tests.launchers.kubernetes.requests import request_for

ARN = "launch.kubernetes.context=arn:aws:eks:us-east-1:123456789012:cluster/trainers"
EKSCTL = "launch.kubernetes.context=me@trainers.us-east-1.eksctl.io"


def recorded(folder: Path, **nodes: Any) -> Path:
    """A folder of clusters with one that was described so."""
    given = ClusterSpec.model_validate(
        {"name": "trainers", "region": "us-east-1", "zone": "us-east-1a",
         "other_zone": "us-east-1b", "nodes": {"instance": "p4d.24xlarge", "max": 2, **nodes}}
    )  # fmt: skip
    path = folder / "trainers.us-east-1" / "cluster.json"
    path.parent.mkdir()
    content = {"owner": "0123456789abcdef", "cluster": given.model_dump(mode="json")}
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("overrides", "nodes", "words"),
    [
        (("cluster.instance=p5.48xlarge",), {}, "nodes of p4d.24xlarge, none of p5.48xlarge, so"),
        (("cluster.nodes=3",), {}, "at most 2 nodes of p4d.24xlarge, and 3 are requested. Set clu"),
        ((), {"efa": False}, "its nodes have no EFA (nodes.efa), and each pod requests 4 of vpc."),
    ],
)
@pytest.mark.parametrize("context", [ARN, EKSCTL])
def test_a_training_that_no_described_node_can_hold_is_named_before_it_is_submitted(
    tmp_path: Path, context: str, overrides: tuple[str, ...], nodes: dict[str, Any], words: str
) -> None:
    given = (context, "cluster.instance=p4d.24xlarge", *overrides)
    (why,) = against_description(request_for(*given), recorded(tmp_path, **nodes))
    assert words in why and "clusters" not in why.partition(": ")[2]
    assert why.startswith(f"{tmp_path}/trainers.us-east-1/cluster.json: ")


def test_what_the_described_nodes_can_hold_is_taken(tmp_path: Path) -> None:
    request = request_for(ARN, "cluster.instance=p4d.24xlarge")
    clusters = recorded(tmp_path)
    assert against_description(request, clusters) == against_side_jobs(request, clusters) == []
    elsewhere = request_for("cluster.instance=p5.48xlarge")  # a context of another maker
    assert against_description(elsewhere, clusters) == []
    assert against_description(request_for(ARN), tmp_path / "none") == []


def test_a_side_job_beyond_every_described_node_is_named(tmp_path: Path) -> None:
    """c5.2xlarge has 16,384 MiB in all, and is the only type where no training's nodes stand."""
    clusters = recorded(tmp_path, instance="g5.xlarge")  # 16 GiB, too
    big = request_for(ARN, "cluster.instance=g5.xlarge", "launch.side.memory_gib=16")
    (why,) = against_side_jobs(big, clusters)
    assert "requests 16,384 MiB of c5.2xlarge, which has 16,384 and keeps some" in why
    assert "launch.side.memory_gib=8 launch.side.cpus=2" in why
    side = replace(big, side=SideJob(kind="prepare", arguments={}))
    assert against_description(side, clusters) == [why]
    assert against_side_jobs(request_for(ARN, "cluster.instance=g5.xlarge"), clusters) == []


@pytest.mark.parametrize(("count", "warnings"), [(0, 1), (2, 0)])
def test_nodes_with_accelerators_hold_a_side_job_only_where_some_are_there(
    tmp_path: Path, count: int, warnings: int
) -> None:
    clusters = recorded(tmp_path, count=count)
    big = request_for(ARN, "cluster.instance=p4d.24xlarge", "launch.side.memory_gib=16")
    assert len(against_side_jobs(big, clusters)) == warnings
    side = replace(big, side=SideJob(kind="prepare", arguments={}))
    assert against_description(side, clusters) == []  # one may have been added since


def test_cores_are_compared_too(tmp_path: Path) -> None:
    given = ("model.preset=llama-tiny", "cluster.instance=null", "cluster.device=cpu", ARN)
    request = request_for(*given, "cluster.devices=8")
    (why,) = against_description(request, recorded(tmp_path, instance="g4dn.xlarge"))
    assert "a pod requests 8 CPUs of g4dn.xlarge, which has 4 and keeps some" in why
