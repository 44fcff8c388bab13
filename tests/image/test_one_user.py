"""Images, pods and file systems have one user, so that what one writes the others can read."""

import re
from pathlib import Path

import pytest

from shardyard.cluster.fsx import render_root_job, render_stack
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.cluster.terraform import render_terraform
from shardyard.launchers.kubernetes.objects import render_objects
from shardyard.launchers.kubernetes.placement import pod_spec
from tests.launchers.kubernetes.requests import request_for

DOCKERFILES = sorted((Path(__file__).parents[2] / "docker").glob("Dockerfile.*"))
USER = int(re.findall(r"^USER (\d+):\d+$", DOCKERFILES[0].read_text(), re.MULTILINE)[-1])
PLACE = [
    "name=trainers", "region=us-east-1", "zone=us-east-1a", "other_zone=us-east-1b",
    "nodes.instance=g5.12xlarge",
    "vpc={id: vpc-0123456789abcdef0, subnets: {us-east-1a: subnet-0123456789abcdef0, "
    "us-east-1b: subnet-0123456789abcdef1}}",
]  # fmt: skip


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_all_images_end_with_the_same_user(file: Path) -> None:
    assert re.findall(r"^USER (\d+:\d+)$", file.read_text(), re.MULTILINE)[-1] == f"{USER}:{USER}"


@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
def test_pods_have_the_user_of_the_image(target: str) -> None:
    objects = render_objects(request_for(f"launch.kubernetes.target={target}"))
    spec = pod_spec(objects[-1])
    if target == "trainjob":
        (runtime,) = (one for one in objects if one["kind"] == "ClusterTrainingRuntime")
        assert re.findall(r"'runAsUser': (\d+)", str(runtime)) == [str(USER)]
        return
    security = spec["securityContext"]
    assert {security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}


def test_file_systems_belong_to_the_user_of_the_image() -> None:
    fsx = read_cluster_spec([*PLACE, "storage.kind=fsx"])
    script = render_root_job(fsx, "0" * 16)["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"chgrp {USER} " in script[-1]
    efs = read_cluster_spec([*PLACE, "storage.kind=efs"])
    point = render_stack(efs, "0" * 16)["Resources"]["AccessPoint"]["Properties"]
    assert point["PosixUser"] == {"Uid": str(USER), "Gid": str(USER)}
    own = render_terraform(efs)["resource"]["aws_efs_access_point"]["this"]
    assert own["posix_user"] == {"uid": USER, "gid": USER}
